"""Token limits and imitation that suit a task and a model. docs/how-to/real-models.md explains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TURN_MARGIN, EPISODE_MARGIN = 1.5, 2.0
"""Factor of a policy's limits over the longest turn and the longest episode of the experts."""
MANY_VALID_CALLS = 0.8
"""Above this share of turns with a valid call, few updates of imitation are enough."""
IMITATION_STEPS, FEW_IMITATION_STEPS = 30, 10
FASTER = 1.5
"""bfloat16 is used on a CPU if it is faster than float32 by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Token limits of episodes."""

    max_new_tokens: int
    max_context: int


def limits_of(
    longest_turns: Sequence[int], longest_episodes: Sequence[int], *, max_context: int, opening: float = 0.0
) -> Limits:
    """Return limits with a margin over the expert's turns, within the context of the model.

    Args:
        longest_turns: tokens of the longest turn of each expert; empty without an expert.
        longest_episodes: tokens of the longest episode of each expert.
        max_context: longest context of the model.
        opening: tokens of the longest opening of the tasks.
    """
    turn = _multiple(TURN_MARGIN * max(longest_turns), 16) if longest_turns else 256
    episode = EPISODE_MARGIN * max(longest_episodes) if longest_episodes else 0.0
    without_expert = 0.0 if longest_episodes else 2048.0
    context = _multiple(max(episode, opening + 4 * turn, without_expert), 64)
    return Limits(max_new_tokens=turn, max_context=min(context, max_context))


def _multiple(value: float, of: int) -> int:
    """Return the smallest multiple of a number that is not below a value."""
    return of * -int(-value // of)
