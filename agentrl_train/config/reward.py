"""The section ``[reward]``: custom rewards, in addition to the environment's reward or instead of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl_train.config.functions import Choice, Function, Own, OwnFunction
from agentrl_train.config.section import Count, Positive, Section


class Combination(Function):
    """Sum of the weighted scores, the lowest, the highest, or a sum of standardized scores."""

    name: Literal["weighted", "lowest", "highest", "standardized", "adaptive"]


class RewardSection(Section):
    """Custom rewards, in addition to the environment's reward or instead of it."""

    functions: tuple[OwnFunction, ...] = ()
    """Functions of a trajectory, as ``file.py:function`` or ``module:function``. Each function returns a
    score, which gets the name of the function, or several named scores. By default, the reward is the
    environment's."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the scores by name, by default 1. ``environment`` is the environment's own reward."""
    fade_steps: dict[str, Count] = Field(default_factory=dict)
    """Number of steps in which the weight of a score falls to 0, along half a cosine."""
    combine: Annotated[Combination | Own, Choice("weighted")] = Combination(name="weighted")
    """How the weighted scores become the reward of an episode: their sum, the lowest, the highest, the sum of
    scores standardized in the group, or a mean that favours the least satisfied scores ("adaptive")."""
    timeout_s: Positive = 300.0
    """Deadline of all functions for one episode. An episode without a score is omitted."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        names = [one.title for one in self.functions]
        if double := next((name for name in names if names.count(name) > 1), None):
            return [f"two functions have the name {double!r}, and scores are kept by name: rename one"]
        if "environment" in names:
            return ["a function has the name 'environment', the score of the environment itself: rename it"]
        known = {"environment", *names}
        return [
            f"{key} names {name!r}, which is not a score: the scores are {', '.join(sorted(known))}"
            for key in ("weights", "fade_steps")
            for name in getattr(self, key)
            if name.partition(".")[0] not in known
        ]
