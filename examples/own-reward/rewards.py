"""Rewards of one's own for the shop: short episodes, and calls that name what was asked for."""

from agentrl_train.reward import length_penalty, reward
from agentrl_train.types import Trajectory


@reward
def short(trajectory: Trajectory) -> float:
    """Return 0 up to 3 turns, falling to -1 at 8."""
    return length_penalty(len(trajectory.turns), free=3, limit=8)


@reward
def named(trajectory: Trajectory, colour: str, kind: str) -> float:
    """Return the share of the sample's words that the calls of the first turn name."""
    calls = [] if not trajectory.turns else trajectory.turns[0].message.tool_calls or []
    arguments = " ".join(call.function.arguments for call in calls)
    return sum(word in arguments for word in (colour, kind)) / 2
