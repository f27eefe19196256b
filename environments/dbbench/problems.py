"""The common form of a problem: tables, a question, and the data for grading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Value = str | int | float | bytes | None
Rows = list[tuple[Any, ...]]
Contents = dict[str, Rows]
"""Table -> its rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table to create: its name, columns as (name, type), and rows."""

    name: str
    columns: list[tuple[str, str]]
    rows: Rows

    def __str__(self) -> str:
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns)
        return f"Table {self.name}: {columns}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question with its tables. A write is graded by the tables' content, other questions by the answer."""

    question: str
    tables: list[Table]
    writes: bool
    evidence: str = ""
    """A fact that the question needs."""
    notes: str = ""
    """The text about the tables in AgentBench's file."""
    gold: str | None = None
    """SQL that answers the question or makes the change."""
    label: list[Value] | None = None
    """The right answers. None means the answers of ``gold``."""
    table_hash: str | None = None
    """AgentBench's hash of the table after the change."""
    ordered: bool = False
    """Whether the order of the answers counts."""
    as_set: bool = False
    """Whether repeated answers count once, as in AgentBench."""
