"""The results of a fuzzing run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

KEPT = 10


@dataclass(slots=True)
class Account:
    """Counts requests, answers by status, and failures: 5xx, hangs and schema violations."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    server_errors: int = 0
    hangs: int = 0
    unlike_document: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """The number of requests sent."""
        return self.sent.total()

    def note_status(self, status: int, what: object) -> None:
        """Count an answer by its status."""
        self.answers[status] += 1
        if status >= 500:
            self.server_errors += 1
            self.keep(f"{status}: {what!r}")

    def note_hang(self, what: object) -> None:
        """Count a request that was not answered."""
        self.hangs += 1
        self.keep(f"hang: {what!r}")

    def note_violation(self, what: object) -> None:
        """Count an answer that violates the OpenAPI document."""
        self.unlike_document += 1
        self.keep(f"violates the document: {what}")

    def keep(self, example: str) -> None:
        """Keep the first few failures as examples."""
        if len(self.examples) < KEPT:
            self.examples.append(example[:1500])

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "requests": self.requests,
            "sent": dict(sorted(self.sent.items())),
            "answers": {str(status): n for status, n in sorted(self.answers.items())},
            "server_errors": self.server_errors,
            "hangs": self.hangs,
            "unlike_document": self.unlike_document,
            "examples": self.examples,
        }
