"""The episodes of a run: an index of episodes on disk, which grows as the trainer writes them.

Episodes come from two places. ``trajectories/`` has some of each step and evaluation, with their tokens and
advantages. The journal has every group from the moment it finishes until no checkpoint needs it, so that
episodes appear before they are trained on. An episode in both is taken from ``trajectories/``.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_train.report.curves import number
from agentrl_train.storage.journal import HEADER, decode_group, located_records
from agentrl_train.telemetry.metrics import readable
from agentrl_train.telemetry.tokens import SUFFIX, read_tokens, token_record

BUDGET_S = 0.4
"""Longest time of one refresh. The next refreshes read the rest, newest files first."""
PAGE = 20
"""Number of episodes on one page of the list."""
_FILE = re.compile(r"((step)_(\d{1,12})|(held_out)_.+)\.jsonl(\.gz)?")
_SEGMENT = re.compile(r"step_\d{1,12}-\d{1,9}\.bin")
Key = tuple[str, int, int]
"""File below the run folder, line or position in it, sibling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The data of an episode in the list."""

    key: Key
    task: str
    split: str
    sample: str
    reward: float | None
    success: bool
    end: str
    turns: int
    seconds: float | None
    group: int | None
    sibling: int | None
    step: int | None
    """Step that trained on it, or after which it was evaluated. None before either has happened."""
    held_out: bool

    @property
    def failed(self) -> bool:
        """Return True if infrastructure failed, so that the reward has no meaning."""
        return self.end.startswith("failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selection and order of the list."""

    task: str = ""
    kind: str = ""
    """"trained", "waiting" or "held-out". Empty selects all."""
    outcome: str = ""
    """"success", "no success" or "failed". Empty selects all."""
    lowest: float = -math.inf
    highest: float = math.inf
    first_step: float = -math.inf
    last_step: float = math.inf
    order: str = "newest"
    """"newest", "lowest" or "highest" (reward)."""

    def takes(self, one: Entry) -> bool:
        """Return True if an episode belongs to the selection."""
        if self.task and one.task != self.task:
            return False
        if self.kind and self.kind != _kind(one):
            return False
        if self.outcome and self.outcome != _outcome(one):
            return False
        bounded = self.lowest > -math.inf or self.highest < math.inf
        if bounded and (one.failed or one.reward is None or not self.lowest <= one.reward <= self.highest):
            return False
        if self.first_step > -math.inf or self.last_step < math.inf:
            return one.step is not None and self.first_step <= one.step <= self.last_step
        return True


def _kind(one: Entry) -> str:
    return "held-out" if one.held_out else "waiting" if one.step is None else "trained"


def _outcome(one: Entry) -> str:
    return "failed" if one.failed else "success" if one.success else "no success"


class EpisodeIndex:
    """The episodes of a run folder, newest first."""

    def __init__(self, folder: Path) -> None:
        self.pending = 0
        """Files that have not been read yet."""
        self.waiting = 0
        """Finished groups that are not trained yet."""
        self.tasks: list[str] = []
        """The tasks of all episodes."""
        self._folder = folder
        self._stamps: dict[str, tuple[int, int]] = {}
        self._recorded: dict[str, list[Entry]] = {}
        self._segments: dict[str, int] = {}
        """File of the journal -> position after the last complete record."""
        self._finished: dict[str, list[Entry]] = {}
        self._sorted: list[Entry] = []
        self._trained: Mapping[int, int] = {}
        self._steps = 0

    def refresh(self, *, trained: Mapping[int, int], steps: int) -> None:
        """Read new and changed files.

        Args:
            trained: group -> step that trained on it.
            steps: the last trained step. Files of later steps are left over from before a resume.
        """
        deadline = time.monotonic() + BUDGET_S
        changed = self._read_recorded(deadline) | self._read_journal(deadline)
        if changed or (trained, steps) != (self._trained, self._steps):
            self._trained, self._steps = trained, steps
            self._sorted = self._newest_first()
            self.tasks = sorted({one.task for one in self._sorted})

    def select(self, chosen: Filter) -> list[Entry]:
        """Return the episodes of a selection in its order."""
        whole = replace(chosen, order="newest") == Filter()
        found = self._sorted if whole else [one for one in self._sorted if chosen.takes(one)]
        if chosen.order != "newest":
            sign = -1.0 if chosen.order == "highest" else 1.0
            found = [one for one in found if one.reward is not None and not one.failed]
            found.sort(key=lambda one: sign * (one.reward or 0.0))
        return found

    def load(self, key: Key) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
        """Return an episode as in ``trajectories/`` and its tokens, or None if it no longer exists."""
        name, position, sibling = key
        try:
            if _SEGMENT.fullmatch(name):
                return _from_journal(self._folder / "journal" / name, position, sibling)
            if not _FILE.fullmatch(name):
                return None
            path = self._folder / "trajectories" / name
            episode = json.loads(_lines(path)[position])
        except (OSError, EOFError, ValueError, IndexError):
            return None
        tokens = read_tokens(path.with_name(name.partition(".")[0] + SUFFIX), position)
        return (episode, tokens) if isinstance(episode, dict) else None

    def _read_recorded(self, deadline: float) -> bool:
        present: dict[str, tuple[int, int]] = {}
        for entry in _scan(self._folder / "trajectories"):
            if _FILE.fullmatch(entry.name):
                facts = entry.stat()
                present[entry.name] = facts.st_mtime_ns, facts.st_size
        gone = self._stamps.keys() - present.keys()
        for name in gone:
            del self._stamps[name], self._recorded[name]
        todo = [name for name, stamp in present.items() if self._stamps.get(name) != stamp]
        todo.sort(key=lambda name: present[name])
        changed = bool(gone or todo)
        while todo and time.monotonic() < deadline:
            name = todo.pop()
            try:
                lines = _lines(self._folder / "trajectories" / name)
            except (OSError, EOFError):
                continue
            self._recorded[name] = list(_entries(name, lines))
            self._stamps[name] = present[name]
        self.pending = len(todo)
        return changed

    def _read_journal(self, deadline: float) -> bool:
        present = {one.name: one for one in _scan(self._folder / "journal") if _SEGMENT.fullmatch(one.name)}
        gone = self._segments.keys() - present.keys()
        for name in gone:
            del self._segments[name], self._finished[name]
        changed = bool(gone)
        for name, entry in present.items():
            start = self._segments.setdefault(name, 0)
            known = self._finished.setdefault(name, [])
            if entry.stat().st_size <= start:
                continue
            for position, payload in _records(Path(entry.path), start):
                if time.monotonic() > deadline:
                    self.pending += 1
                    break
                self._segments[name] = position + HEADER.size + len(payload)
                changed = True
                try:
                    group = decode_group(payload)
                except (KeyError, TypeError, ValueError):
                    continue  # a run of another version wrote it
                for number_, one in enumerate(group.trajectories):
                    known.append(_entry((name, position, number_), readable(one, group), step=None))
        return changed

    def _newest_first(self) -> list[Entry]:
        """Return waiting groups first, then steps from the last to the first."""
        by_step: dict[float, list[Entry]] = {}
        recorded: dict[int, str] = {}
        for name, entries in self._recorded.items():
            step = _step_of(name)
            if step is None:
                for one in entries:
                    by_step.setdefault(one.step or 0, []).append(one)
            elif step <= self._steps and step not in recorded:
                recorded[step] = name
                by_step.setdefault(step, []).extend(entries)
        for entries in self._finished.values():
            known: dict[int, set[tuple[int | None, int | None]]] = {}
            for one in entries:
                step = None if one.group is None else self._trained.get(one.group)
                if step in recorded:
                    if step not in known:
                        known[step] = {(a.group, a.sibling) for a in self._recorded[recorded[step]]}
                    if (one.group, one.sibling) in known[step]:
                        continue
                by_step.setdefault(math.inf if step is None else step, []).append(replace(one, step=step))
        self.waiting = len({one.group for one in by_step.get(math.inf, ())})
        return [one for step in sorted(by_step, reverse=True) for one in sorted(by_step[step], key=_age)]


def _age(one: Entry) -> tuple[int, int]:
    """Return the sort key of the episodes of one step: evaluations first, then the newest group."""
    return 0 if one.held_out else 1, -(one.group or 0)


def _step_of(name: str) -> int | None:
    """Return the step in the name of a file in ``trajectories/``, or None for an evaluation."""
    match = _FILE.fullmatch(name)
    return int(match[3]) if match is not None and match[2] else None


def _entries(name: str, lines: Sequence[bytes]) -> Iterator[Entry]:
    step = _step_of(name)
    for number_, line in enumerate(lines):
        try:
            episode = json.loads(line)
        except ValueError:
            continue  # the line is still being written
        if isinstance(episode, dict):
            yield _entry(
                (name, number_, 0), episode, step=_evaluation_step(name, episode) if step is None else step
            )


def _evaluation_step(name: str, episode: Mapping[str, Any]) -> int:
    """Return the step of an evaluation, which is the policy version that played it."""
    versions = [one["turn"].get("versions") for one in episode.get("messages") or () if _is_turn(one)]
    newest = [version[-1] for version in versions if isinstance(version, list) and version]
    return int(max((one for one in newest if number(one) is not None), default=0))


def _entry(key: Key, episode: Mapping[str, Any], *, step: int | None) -> Entry:
    return Entry(
        key=key,
        task=sys.intern(str(episode.get("task"))),
        split=sys.intern(str(episode.get("split"))),
        sample=str(episode.get("index")),
        reward=number(episode.get("reward")),
        success=bool(episode.get("success")),
        end=sys.intern(str(episode.get("end"))),
        turns=sum(_is_turn(one) for one in episode.get("messages") or ()),
        seconds=number(episode.get("seconds")),
        group=_whole(episode.get("group_id")),
        sibling=_whole(episode.get("sibling")),
        step=step,
        held_out=key[0].startswith("held_out"),
    )


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("turn"), dict)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted((one for one in found if one.is_file()), key=lambda one: one.name)
    except OSError:
        return []


def _lines(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).split(b"\n")


def _records(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield position and payload of the complete records of a journal from a position on."""
    with open(path, "rb") as file:
        file.seek(start)
        content = file.read()
    for position, payload in located_records(content):
        yield start + position, payload


def _from_journal(
    path: Path, position: int, sibling: int
) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    for at, payload in _records(path, position):
        group = decode_group(payload)
        if at != position or not 0 <= sibling < len(group.trajectories):
            return None
        one = group.trajectories[sibling]
        return readable(one, group), token_record(one)
    return None
