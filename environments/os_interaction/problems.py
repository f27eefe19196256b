"""The common form of a problem: the preparation of the machine, and the data for grading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Script = tuple[str, str]
"""Language ("bash" or "python") and code."""
COMMANDS = {"bash": ["/bin/bash"], "python": ["/usr/bin/env", "python3"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A request, its machine, and its grading by exactly one of the last four fields."""

    question: str
    files: dict[str, str] = field(default_factory=dict)
    """Path -> content, written before ``init``."""
    init: Sequence[Script] = ()
    start: str | None = None
    """Bash code that starts background processes."""
    gold: Script | None = None
    """Code that fulfils the request, or prints the answer."""
    official: bool = False
    """Whether the agent is root, as in AgentBench's containers."""

    answer: str | None = None
    """The answer, as text or a number."""
    pattern: str | None = None
    """A regular expression that the answer matches."""
    outputs: list[tuple[str, str]] | None = None
    """Bash code -> its right output, on a clean machine with the agent's files."""
    checks: list[Script | None] | None = None
    """Programs that succeed if the answer is right. Their arguments are the answer and the outputs of the
    previous programs. None stands for a program that prints the output of ``gold`` from before the agent's
    start."""
