"""Custom rewards for the shop: short episodes, and calls with the words of the request."""

from agentrl_train.reward import length_penalty, reward
from agentrl_train.types import Trajectory


@reward
def short(trajectory: Trajectory) -> float:
    """Return 0 up to 3 turns, falling to -1 at 8."""
    return length_penalty(len(trajectory.turns), free=3, limit=8)


@reward
def named(trajectory: Trajectory, colour: str, kind: str) -> float:
    """Return the share of the requested colour and kind that the calls of the first turn contain."""
    calls = [] if not trajectory.turns else trajectory.turns[0].message.tool_calls or []
    arguments = " ".join(call.function.arguments for call in calls)
    return sum(word in arguments for word in (colour, kind)) / 2
