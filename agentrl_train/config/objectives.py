"""Sections of what is learnt beside the environment's reward: own rewards, replay and distillation."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from agentrl_train.config.algorithm import one_of
from agentrl_train.config.section import Count, CountOrOff, Fraction, NonNegative, Positive, Section


def _function(value: str) -> str:
    if ":" not in value:
        raise ValueError(f"{value!r} is no function such as 'mine.py:function' or 'module:function'")
    return value


class RewardSection(Section):
    """Rewards of one's own, beside the environment's or in its place."""

    functions: tuple[Annotated[str, AfterValidator(_function)], ...] = ()
    """Functions of a trajectory, as ``file.py:function`` or ``module:function``; each gives a score of its
    name, or several. Left out, the reward is the environment's."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the scores by name, 1 for the others; ``environment`` is the environment's own reward."""
    fade_steps: dict[str, Count] = Field(default_factory=dict)
    """Steps over which the weight of a score falls to 0, along half a cosine."""
    combine: Annotated[str, one_of("weighted", "lowest", "highest", "standardized", "adaptive")] = "weighted"
    """Reward of an episode from its weighted scores: their sum, the lowest, the highest, the sum of those
    standardized in the group, or one that leans towards what is satisfied least ("adaptive")."""
    timeout_s: Positive = 300.0
    """Deadline of all functions for one episode; an episode without a score is left out."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        names = [one.rpartition(":")[2] for one in self.functions]
        if double := next((name for name in names if names.count(name) > 1), None):
            return [f"functions has two of the name {double!r}, and scores are kept by name: rename one"]
        known = {"environment", *names}
        return [
            f"{key} names {name!r}, which is no score: the scores are {', '.join(sorted(known))}"
            for key in ("weights", "fade_steps")
            for name in getattr(self, key)
            if name.partition(".")[0] not in known
        ]


class ReplaySection(Section):
    """Self-imitation: a second loss on earlier episodes that did well (SPEAR)."""

    weight: NonNegative = 0.0
    """Weight of the loss of replayed episodes; 0 is off."""
    warmup_steps: CountOrOff = 200
    """Steps over which the weight rises from 0, along half a cosine."""
    size: Count = 2048
    """Episodes in the buffer; the oldest leave it."""
    episodes: Count = 64
    """Episodes replayed in a step, at most, drawn at random; each of them once."""
    max_age: Count = 10
    """Steps after which an episode leaves the buffer."""
    quantile: Fraction = 0.5
    """Baseline of a replayed episode: this quantile of the mean rewards of its task's recent groups."""
    history: Count = 10_240
    """Number of those groups."""


class DistillSection(Section):
    """On-policy distillation: frozen teachers score the tokens that the policy samples."""

    weight: NonNegative = 0.0
    """Weight of the teacher's log-probability less the policy's, as the advantage of a token; 0 is off."""
    teachers: dict[str, str] = Field(default_factory=dict)
    """Teacher of each task: a model folder, or the name of a model on the hub; "*" is that of all others."""
    keep_rewards: bool = False
    """Add to the advantages of the rewards, instead of replacing them."""

    def problems(self) -> list[str]:
        """Return violated constraints between the fields of this section, one sentence each."""
        if bool(self.weight) == bool(self.teachers):
            return []
        lacking = "teachers, such as {'*' = 'models/teacher'}" if self.weight else "a weight above 0"
        return [f"distillation needs weight and teachers, or none of them: give {lacking}"]

    def teacher_of(self, task: str) -> str | None:
        """Return the teacher of a task, None if it has none."""
        return self.teachers.get(task, self.teachers.get("*"))
