"""The common form of a problem: what prepares the machine, and what decides whether it was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Script = tuple[str, str]
"""Language ("bash" or "python") and code."""
COMMANDS = {"bash": ["/bin/bash"], "python": ["/usr/bin/env", "python3"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A request, the machine it is about, and its grading by exactly one of the last four fields."""

    question: str
    files: dict[str, str] = field(default_factory=dict)
    """Path -> content, written before ``init``."""
    init: Sequence[Script] = ()
    start: str | None = None
    """Bash code that starts processes, which go on running."""
    gold: Script | None = None
    """Code that does what is asked for, or whose output is the answer."""
    official: bool = False
    """Whether the agent plays root, as in AgentBench's containers."""

    answer: str | None = None
    """The answer, as text or a number."""
    pattern: str | None = None
    """A regular expression that the answer matches."""
    outputs: list[tuple[str, str]] | None = None
    """Bash code -> its right output, on a clean machine with the agent's files."""
    checks: list[Script | None] | None = None
    """Programs that succeed with the answer, and with what the ones before printed, as arguments. None prints
    what ``gold`` printed before the agent began."""
