"""The account of a run: the attacks, and what they achieved."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

COUNTS = ("breaches", "neighbours_lost", "answers_read", "uncaught", "hung")
"""What no attack may achieve.

- breaches: something was permitted, executed, forged or held that must not be;
- neighbours_lost: an honest episode did not end as it should, or a call of it was not answered in time;
- answers_read: an agent received a solution, a seed, or something of another session;
- uncaught: an ``internal_error``, a traceback in a log, a server that ended;
- hung: a request was neither answered nor refused.
"""
SHOWN = 5
"""Findings of one sort and attack that are printed."""


class Account:
    """Counts attacks and findings; prints each finding on standard error as one line that names its run.

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
        """Count a finding of one of ``COUNTS``, during an attack of a kind."""
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
        """Record that a kind or an attack did not run."""
        self.skipped.setdefault(name, " ".join(reason.split())[:200])
        self.say(f"- skipped {name}: {self.skipped[name]}")

    def say(self, line: str) -> None:
        """Print a line of progress."""
        if not self._quiet:
            print(f"[{self.seconds:5.0f} s] {line}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    @property
    def failed(self) -> bool:
        """True if an attack achieved anything, or there was nobody to be harmed."""
        return any(self.findings.values()) or self.neighbours_played == 0

    def report(self) -> dict[str, Any]:
        """Return the account as plain values."""
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
