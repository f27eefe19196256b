"""What the conformance kit found: one result a check, as a table, as JSON, as an exit code."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from rich.text import Text


class Verdict(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    """Allowed, and worth a look."""
    FAIL = "fail"
    SKIP = "skip"
    """It does not apply here; the evidence says why."""


_STYLES = {
    Verdict.PASS: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "dim",
}


class Outcome(BaseModel):
    """A verdict and the sentence that shows it."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    evidence: str


class CheckResult(Outcome):
    """One check's outcome; ``question`` is what it asked."""

    name: str
    question: str
    seconds: float


class Report(BaseModel):
    """All results on one task."""

    model_config = ConfigDict(frozen=True)

    task: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings and skips are no failures."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.verdict is Verdict.FAIL)

    def __getitem__(self, name: str) -> CheckResult:
        """Return the result of the check ``name``. Raises KeyError."""
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(name)

    def summary(self) -> str:
        """Return one line, such as ``guess: 11 passed, 1 failed, 1 skipped``."""
        words = {"pass": "passed", "warn": "with warnings", "fail": "failed", "skip": "skipped"}
        counts = {verdict: sum(result.verdict is verdict for result in self.results) for verdict in Verdict}
        parts = [f"{count} {words[verdict]}" for verdict, count in counts.items() if count]
        return f"{self.task}: {', '.join(parts)}"

    def table(self) -> Table:
        """Return the results as a table for a terminal."""
        table = Table(title=f"Task {self.task}", title_justify="left", title_style="bold")
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("evidence", overflow="fold")
        for result in self.results:
            verdict = Text(str(result.verdict), style=_STYLES[result.verdict])
            table.add_row(result.name, verdict, Text(result.evidence))
        return table

    def text(self) -> str:
        """Return the failures as plain lines, for an assertion message."""
        lines = [f"  {result.name}: {result.evidence}" for result in self.failures]
        return "\n".join([self.summary(), *lines])


def passed(evidence: str) -> Outcome:
    """Return a pass."""
    return Outcome(verdict=Verdict.PASS, evidence=evidence)


def warned(evidence: str) -> Outcome:
    """Return a warning."""
    return Outcome(verdict=Verdict.WARN, evidence=evidence)


def failed(evidence: str) -> Outcome:
    """Return a failure."""
    return Outcome(verdict=Verdict.FAIL, evidence=evidence)


def skipped(evidence: str) -> Outcome:
    """Return a skip."""
    return Outcome(verdict=Verdict.SKIP, evidence=evidence)
