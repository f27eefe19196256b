"""Compares the outcomes that clients saw with the ledgers of the servers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

REPORTED = frozenset(
    {
        "SessionLost",
        "UnknownSession",
        "SessionEnded",
        "SessionExpired",
        "CallTimeout",
        "ServerUnreachable",
        "StateUnavailable",
        "HungUp",
    }
)
"""Outcomes that leave open if the step was applied. ``HungUp`` means that the client disconnected."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One step as seen by its client.

    ``outcome`` is ``answered`` or the name of the error. ``text`` is the answer of the environment.
    """

    nonce: str
    session_id: str
    seq: int
    outcome: str = "HungUp"
    text: str = ""
    seconds: float = 0.0
    after_loss: bool = False
    """True if the session had already been reported lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a ledger."""

    at: float
    pid: int
    what: str
    key: str
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Account:
    """Counts of a run. ``notes`` has one sentence for each finding."""

    steps: int = 0
    applied_twice: int = 0
    lost_silently: int = 0
    leaked: int = 0
    reported: Counter[str] = field(default_factory=Counter)
    revived: int = 0
    """Steps that a session answered correctly after it had been reported lost."""
    moved: int = 0
    """Sessions that continued in another environment."""
    undone: int = 0
    """Steps that a lost server applied after its last checkpoint, repeated elsewhere or reported lost."""
    notes: list[str] = field(default_factory=list)


def read_ledgers(folder: Path) -> list[Line]:
    """Return the lines of all ledgers, ordered by time."""
    lines: list[Line] = []
    for path in folder.glob("*.ledger"):
        for text in path.read_text().splitlines():
            at, what, key, *words = text.split(" ")
            lines.append(Line(at=float(at), pid=int(path.stem), what=what, key=key, words=tuple(words)))
    return sorted(lines, key=lambda line: line.at)


def settle(steps: Sequence[Step], lines: Sequence[Line], *, resumed: bool = False) -> Account:
    """Compare the outcomes of steps with the ledgers.

    Args:
        steps: Steps as seen by their clients.
        lines: Lines of all ledgers.
        resumed: True if sessions of lost servers continue on another server after their last answer. Steps
            that the lost server applied later count as undone.
    """
    account = Account()
    happened: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line.what == "step":
            count, nonce = line.words
            happened[nonce].append(f"{line.key} {count} {nonce}")
    lives = _lives(steps, lines) if resumed else {}
    known: set[str] = set()
    for step in steps:
        known.add(step.nonce)
        texts = happened.get(step.nonce, [])
        if step.session_id in lives:
            all_texts, life = texts, lives[step.session_id]
            texts = [text for text in all_texts if _counts(text, life)]
            account.undone += len(all_texts) - len(texts)
        if step.outcome == "answered":
            account.steps += 1
            account.revived += step.after_loss
        else:
            account.reported[step.outcome] += 1
        if len(texts) > 1:
            account.applied_twice += 1
            account.notes.append(f"applied twice: {step.nonce} in {step.session_id}: {texts}")
        elif (wrong := _wrong(step, texts)) is not None:
            account.lost_silently += 1
            account.notes.append(f"{wrong}: {step} ledger={texts}")
    keys: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        if step.outcome == "answered":
            keys[step.session_id].add(step.text.split(" ")[0])
    account.moved = sum(len(its) > 1 for its in keys.values())
    for nonce in happened.keys() - known:
        account.lost_silently += 1
        account.notes.append(f"an unrequested step: {nonce}")
    return account


def _lives(steps: Sequence[Step], lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Return the last count of each environment, by session id and environment key."""
    before = {line.key: (line.words[0], int(line.words[1])) for line in lines if line.what == "restore"}
    last: dict[str, Step] = {}
    for step in steps:
        known = last.get(step.session_id)
        if step.outcome == "answered" and (known is None or step.seq > known.seq):
            last[step.session_id] = step
    lives: dict[str, dict[str, float]] = {}
    for session_id, step in last.items():
        key, count = step.text.split(" ")[0], float("inf")
        life = lives[session_id] = {key: count}
        while key in before:
            key, count = before[key]
            life[key] = count
    return lives


def _counts(text: str, life: dict[str, float]) -> bool:
    """Return True if a step belongs to the history of a session."""
    key, count, _ = text.split(" ")
    return int(count) <= life.get(key, 0)


def _wrong(step: Step, texts: Sequence[str]) -> str | None:
    """Return the error of a step that was applied at most once, or None."""
    if step.outcome != "answered":
        if texts and step.outcome not in REPORTED:
            return "applied, although its client was told that it was not"
        if step.outcome == "SeqConflict":
            return "the session has lost a step"
        return None
    if not texts:
        return "answered, but never applied"
    if step.text != texts[0]:
        return "the answer of another step"
    if step.text.split(" ")[1] != str(step.seq):
        return "the turn of the session differs from that of its client"
    return None


def left_open(lines: Sequence[Line], killed: frozenset[int]) -> list[Line]:
    """Return the openings of sessions that were never closed, except sessions of killed processes."""
    closed = {line.key for line in lines if line.what == "close"}
    return [
        line
        for line in lines
        if line.what in ("open", "restore") and line.key not in closed and line.pid not in killed
    ]


def opened_twice(lines: Sequence[Line], killed: frozenset[int], patience_s: float) -> list[str]:
    """Return the names of openings that created two sessions that both continued.

    A server that was declared lost can hold one of them for ``patience_s`` seconds, until it is notified. If
    the server was paused while it opened the session, its session is the later of the two.
    """
    closed = {line.key: line.at for line in lines if line.what == "close"}
    made: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "open" and line.words[0] != "-":
            made[line.words[0]].append(line)

    def continued(opening: Line, until: float) -> bool:
        return opening.pid not in killed and closed.get(opening.key, float("inf")) > until

    return [
        name
        for name, openings in made.items()
        for pair in pairwise(openings)
        if all(continued(one, pair[1].at + patience_s) for one in pair)
    ]
