"""The section ``[reward]``: rewards of one's own, alongside the environment's or in its place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl_train.config.functions import Choice, Function, Own, OwnFunction
from agentrl_train.config.section import Count, Positive, Section


class Combination(Function):
    """Sum of the weighted scores, the lowest, the highest, or a sum of standardized scores."""

    name: Literal["weighted", "lowest", "highest", "standardized", "adaptive"]


class RewardSection(Section):
    """Rewards of one's own, alongside the environment's or in its place."""

    functions: tuple[OwnFunction, ...] = ()
    """Functions of a trajectory, as ``file.py:function`` or ``module:function``; each gives a score of its
    name, or several. Left out, the reward is the environment's."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the scores by name, 1 for the others; ``environment`` is the environment's own reward."""
    fade_steps: dict[str, Count] = Field(default_factory=dict)
    """Steps over which the weight of a score falls to 0, along half a cosine."""
    combine: Annotated[Combination | Own, Choice("weighted")] = Combination(name="weighted")
    """Reward of an episode from its weighted scores: their sum, the lowest, the highest, the sum of those
    standardized in the group, or one that leans towards what is satisfied least ("adaptive")."""
    timeout_s: Positive = 300.0
    """Deadline of all functions for one episode; an episode without a score is omitted."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        names = [one.title for one in self.functions]
        if double := next((name for name in names if names.count(name) > 1), None):
            return [f"functions has two of the name {double!r}, and scores are kept by name: rename one"]
        known = {"environment", *names}
        return [
            f"{key} names {name!r}, which is no score: the scores are {', '.join(sorted(known))}"
            for key in ("weights", "fade_steps")
            for name in getattr(self, key)
            if name.partition(".")[0] not in known
        ]
