"""Results of the conformance checks, as a table, as JSON and as text."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from rich.text import Text

from agentrl_env.errors import DefinitionError


class Verdict(StrEnum):
    """The verdict of a check."""

    PASS = "pass"
    WARN = "warn"
    """The task is allowed to do this, but should be reviewed."""
    FAIL = "fail"
    SKIP = "skip"
    """The check does not apply. The evidence contains the reason."""


_STYLES = {
    Verdict.PASS: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "dim",
}


class CheckOutcome(BaseModel):
    """A verdict and a sentence of evidence for it."""

    model_config = ConfigDict(frozen=True)

    verdict: Verdict
    evidence: str


class CheckResult(CheckOutcome):
    """The outcome of one check. ``question`` is the first line of the check's docstring."""

    name: str
    question: str
    seconds: float


class Report(BaseModel):
    """The results for one task."""

    model_config = ConfigDict(frozen=True)

    task: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """True if no check failed. Warnings and skips do not count."""
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
        """Return a summary line, such as ``guess: 11 passed, 1 failed, 1 skipped``."""
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

    def _repr_html_(self) -> str:
        return str(self.table()._repr_mimebundle_((), ())["text/html"])

    def text(self) -> str:
        """Return the summary and the failures as plain text, for an assertion message."""
        lines = [f"  {result.name}: {result.evidence}" for result in self.failures]
        return "\n".join([self.summary(), *lines])


def _outcome(verdict: Verdict, evidence: str) -> CheckOutcome:
    return CheckOutcome(verdict=verdict, evidence=evidence)


passed, warned, failed, skipped = (partial(_outcome, verdict) for verdict in Verdict)
"""Functions that return an outcome with their verdict for a sentence of evidence."""


def readable(value: Any) -> str:
    """Return a value as JSON with sorted keys. Raises DefinitionError if it is not JSON."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"{shorten(repr(value))} cannot be sent as JSON: {error}") from None


def shorten(text: str, length: int = 120) -> str:
    """Return at most ``length`` characters of a text."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def same_reason(reason: str) -> str:
    """Return the part of a reason that failures of one cause share: no quotations and no numbers.

    Line numbers, as in ``environment.py:31``, are kept.
    """
    return re.sub(r"'[^']*'|\"[^\"]*\"|(?<![:\d])\d+", "", reason)
