"""Custom rewards: pieces, a judge, and their combination with the environment's reward.

A reward is a synchronous or asynchronous function of a trajectory that a run lists in ``[reward]``::

    from agentrl_train.reward import answer, repetition, reward

    @reward
    def varied(trajectory):
        return 1.0 - repetition(answer(trajectory).split())

Its value is a score with the name of the function. The scores of an episode, and the environment's own reward
as ``environment``, are kept by name. ``reward.combine`` combines them into the reward for training.
"""

from agentrl_train.reward.judge import Judge, close_judges
from agentrl_train.reward.pieces import (
    answer,
    length_penalty,
    matches,
    most_repeated,
    number,
    repetition,
    repetitive,
    rubric,
    similarity,
    squared_error,
    tool_use,
    valid_calls,
    void,
)
from agentrl_train.reward.scoring import Rewards, reward

__all__ = [
    "Judge",
    "Rewards",
    "answer",
    "close_judges",
    "length_penalty",
    "matches",
    "most_repeated",
    "number",
    "repetition",
    "repetitive",
    "reward",
    "rubric",
    "similarity",
    "squared_error",
    "tool_use",
    "valid_calls",
    "void",
]
