"""Pieces of rewards: pure functions of a trajectory, a text or tokens, to be composed in Python."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from agentrl_train.advantage import overlong_penalty
from agentrl_train.types import Trajectory

NUMBER = re.compile(r"[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
EMBEDDED = 65_536
"""Number of texts with a cached embedding in ``similarity``."""


def answer(trajectory: Trajectory) -> str:
    """Return the text of the last message of the policy, or "" without one."""
    if not trajectory.turns:
        return ""
    content = trajectory.turns[-1].message.content
    return content if isinstance(content, str) else ""


def rubric(
    trajectory: Trajectory, checks: Mapping[str, tuple[float, Callable[[Trajectory], float]]]
) -> float:
    """Return the weighted mean of checks: 1 if all pass, 0 if none passes.

    Args:
        trajectory: the episode.
        checks: name -> weight above 0, and a function that returns a share from 0 to 1, or a bool.

    Raises:
        ValueError: there is no check, a weight is not above 0, or a check returned an invalid value.
    """
    if not checks or any(weight <= 0.0 for weight, _ in checks.values()):
        raise ValueError("a rubric needs at least one check, and weights above 0.")
    total = 0.0
    for name, (weight, check) in checks.items():
        share = float(check(trajectory))
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"check {name!r} of a rubric returned {share}; it must be from 0 to 1.")
        total += weight * share
    return total / sum(weight for weight, _ in checks.values())


def matches(text: str, pattern: str) -> float:
    """Return 1 if a regular expression matches the whole text, else 0.

    Space around the text is ignored, and ``.`` also matches newlines.
    """
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


def valid_calls(trajectory: Trajectory) -> float:
    """Return the share of turns without an invalid tool call; 1 for an episode without turns."""
    turns = trajectory.turns
    return sum(turn.invalid_calls == 0 for turn in turns) / len(turns) if turns else 1.0


def tool_use(trajectory: Trajectory) -> float:
    """Return ``min(1, 0.1 n)`` for n turns with a tool call (SPEAR, arXiv 2509.22601).

    It rewards exploration with tools, so fade it out (``reward.fade_steps``).
    """
    return min(1.0, 0.1 * sum(bool(turn.message.tool_calls) for turn in trajectory.turns))


def similarity(
    embed: Callable[[str], ArrayLike], *, power: float = 1.0, floor: float = 0.0
) -> Callable[[str, str], float]:
    """Return a function of two texts: ``max(0, cos(embed(a), embed(b))) ** power`` (PGSRM, arXiv 2512.06920).

    Embeddings can be misled, so combine it with a check that cannot be misled.

    Args:
        embed: text -> vector. Called once for each text, while its embedding is cached.
        power: values above 1 sharpen the differences near 1.
        floor: cosines below it count as 0.
    """

    @lru_cache(maxsize=EMBEDDED)
    def direction(text: str) -> np.ndarray:
        vector = np.asarray(embed(text), dtype=np.float64)
        if not np.isfinite(vector).all():
            raise ValueError("embed returned a vector with entries that are not finite.")
        return vector / max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)

    def similar(text: str, reference: str) -> float:
        cosine = min(1.0, float(direction(text) @ direction(reference)))
        return cosine**power if cosine > 0.0 and cosine >= floor else 0.0

    return similar


def number(text: str) -> float | None:
    """Return the last number in a text, such as -1,234.5 or 2e-3, or None without one."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def squared_error(text: str, target: float, *, missing: float) -> float:
    """Return ``-(number - target)^2`` for the last number of a text (GenRe^2, arXiv 2512.06533).

    Args:
        text: the answer.
        target: the right number.
        missing: value of a text without a number. It should be below the values of poor answers.
    """
    value = number(text)
    return missing if value is None else -((value - target) ** 2)


def length_penalty(tokens: int, *, free: int, limit: int) -> float:
    """Return 0 up to ``free`` tokens, then a value that falls linearly to -1 at ``limit`` and stays there.

    Raises:
        ValueError: ``free`` is not below ``limit``.
    """
    if not 0 <= free < limit:
        raise ValueError(f"free ({free}) must be at least 0 and below limit ({limit}).")
    return -overlong_penalty(tokens, limit, limit - free, 1.0)


def repetition(units: Sequence[Hashable], size: int = 4) -> float:
    """Return the share of the n-grams of ``size`` words or tokens that repeat an earlier one, in [0, 1)."""
    grams = _grams(units, size)
    return 1.0 - len(grams) / grams.total() if grams else 0.0


def most_repeated(units: Sequence[Hashable], size: int = 20) -> int:
    """Return how often the most frequent n-gram of ``size`` words or tokens occurs."""
    return max(_grams(units, size).values(), default=0)


def void(trajectory: Trajectory) -> bool:
    """Return True if a turn has neither text nor a call (after SimpleTIR, arXiv 2509.02479)."""
    return any(not (turn.message.content or turn.message.tool_calls) for turn in trajectory.turns)


def repetitive(trajectory: Trajectory, *, size: int = 20, times: int = 10) -> bool:
    """Return True if an n-gram occurs too often in a turn (SPEAR: 20 tokens, 10 times)."""
    return any(most_repeated(turn.completion.token_ids, size) >= times for turn in trajectory.turns)


def _grams(units: Sequence[Hashable], size: int) -> Counter[tuple[Hashable, ...]]:
    if size < 1:
        raise ValueError(f"the size of an n-gram is {size}; it must be at least 1.")
    return Counter(tuple(units[i : i + size]) for i in range(len(units) - size + 1))
