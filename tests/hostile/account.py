"""Counts the attacks of a run and their findings."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

COUNTS = ("breaches", "neighbours_lost", "answers_read", "uncaught", "hung")
"""Outcomes that no attack must achieve.

- breaches: a forbidden action was permitted, or something was executed, forged or held.
- neighbours_lost: an honest episode ended wrongly, or one of its calls was not answered in time.
- answers_read: an agent received a solution, a seed, or data of another session.
- uncaught: an ``internal_error``, a traceback in a log, or a server that exited.
- hung: a request was neither answered nor refused.
"""
SHOWN = 5
"""Maximum number of printed findings per count and attack."""


class Account:
    """Counts attacks and findings. Prints each finding on standard error in one line with the run's seed.

    Args:
        seed: seed of the run.
        quiet: print nothing.
    """

    def __init__(self, seed: int, *, quiet: bool = False) -> None:
        self.seed = seed
        self.attacks: Counter[str] = Counter()
        self.neighbours_played = 0
        self.skipped: dict[str, str] = {}
        self.findings: Counter[tuple[str, str]] = Counter()
        """Number of findings by kind and count."""
        self.sentences: list[str] = []
        """The findings that were printed."""
        self._shown: Counter[tuple[str, str, str]] = Counter()
        self._begin = time.monotonic()
        self._quiet = quiet

    def find(self, count: str, what: str, kind: str, attack: str) -> None:
        """Add a finding to one of ``COUNTS``."""
        assert count in COUNTS
        self.findings[kind, count] += 1
        shown = (count, kind, attack)
        self._shown[shown] += 1
        if self._shown[shown] <= SHOWN:
            again = f"python -m tests.hostile --seed {self.seed} --only {kind}"
            sentence = f"{count}: {kind}, {attack}: {' '.join(what.split())[:400]} ({again})"
            self.sentences.append(sentence)
            self.say(f"! {sentence}")

    def skip(self, name: str, reason: str) -> None:
        """Record that a kind or an attack was skipped."""
        self.skipped.setdefault(name, " ".join(reason.split())[:200])
        self.say(f"- skipped {name}: {self.skipped[name]}")

    def say(self, line: str) -> None:
        """Print a line of progress."""
        if not self._quiet:
            print(f"[{self.seconds:5.0f} s] {line}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._begin

    @property
    def failed(self) -> bool:
        """True if an attack succeeded or no honest client played."""
        return any(self.findings.values()) or self.neighbours_played == 0

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        totals = {count: self._total(count) for count in COUNTS}
        return {
            "seed": self.seed,
            "seconds": round(self.seconds),
            "attacks": self.attacks.total(),
            **totals,
            "neighbours_played": self.neighbours_played,
            "skipped": self.skipped,
            "by_kind": {kind: self._of_kind(kind) for kind in self._kinds()},
            "findings": self.sentences,
        }

    def _kinds(self) -> list[str]:
        return list(dict.fromkeys((*self.attacks, *(kind for kind, _ in self.findings))))

    def _of_kind(self, kind: str) -> dict[str, int]:
        counts = {count: self.findings[kind, count] for count in COUNTS if self.findings[kind, count]}
        return {"attacks": self.attacks[kind], **counts}

    def _total(self, count: str) -> int:
        return sum(number for (_, which), number in self.findings.items() if which == count)
