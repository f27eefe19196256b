"""``[algorithm]`` and ``[reward]`` -> functions: each choice is a function with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_train import advantage, loss, reward
from agentrl_train.advantage import Values
from agentrl_train.config import AlgorithmSection, RewardSection
from agentrl_train.loss import Objective
from agentrl_train.reward import combining
from agentrl_train.types import Trajectory, TrajectoryGroup

Advantages = Callable[[Sequence[TrajectoryGroup]], "list[list[Values | None]]"]
Functions = Mapping[str, Callable[..., Any]]

CREDITS: Functions = {
    "trajectory": advantage.by_trajectory,
    "turn": advantage.by_turn,
    "state": advantage.by_state,
}
BASELINES: Functions = {
    "mean": advantage.mean,
    "leave_one_out": advantage.leave_one_out,
    "length_weighted": advantage.length_weighted,
    "greedy": advantage.greedy,
    "batch_mean": advantage.batch_mean,
    "none": advantage.none,
}
SCALES: Functions = {
    "std": advantage.std,
    "batch_std": advantage.batch_std,
    "mean": advantage.mean_return,
    "none": advantage.unscaled,
}
EXCLUSIONS: Functions = {
    "truncated": advantage.truncated,
    "void": reward.void,
    "repetitive": reward.repetitive,
}
ANCHORS: Functions = {"behaviour": loss.behaviour, "old": loss.old, "interpolated": loss.interpolated}
RATIOS: Functions = {
    "token": loss.token_ratio,
    "turn": loss.turn_ratio,
    "sequence": loss.sequence_ratio,
    "sequence_token": loss.sequence_token_ratio,
    "geometric": loss.geometric_ratio,
}
REGIONS: Functions = {
    "none": loss.unbounded,
    "clip": loss.clip,
    "cap": loss.cap,
    "band": loss.band,
    "soft": loss.soft,
    "divergence": loss.divergence,
}
CORRECTIONS: Functions = {"truncate": loss.importance_weights, "mask": loss.importance_weights}
COMBINATIONS: Functions = {
    "weighted": combining.weighted,
    "lowest": combining.lowest,
    "highest": combining.highest,
    "standardized": combining.standardized,
    "adaptive": combining.adaptive,
}


def advantage_function(algorithm: AlgorithmSection, *, max_context: int) -> Advantages:
    """Return the function from groups to advantages; raises ``ConfigError`` for a function without a file."""
    return partial(
        advantage.advantages,
        credit=algorithm.credit.among(CREDITS),
        baseline=algorithm.baseline.among(BASELINES),
        scale=algorithm.scale.among(SCALES),
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation.name,
        keep_groups=algorithm.keep_groups,
        leave_out=exclusions(algorithm),
        **penalties(algorithm, max_context=max_context),
    )


def exclusions(algorithm: AlgorithmSection) -> list[Callable[[Trajectory], bool]]:
    """Return the functions that are true for the episodes to omit from the loss."""
    return [one.among(EXCLUSIONS) for one in algorithm.leave_out]


def signal_function(algorithm: AlgorithmSection, *, max_context: int) -> Callable[[TrajectoryGroup], bool]:
    """Return the function that tells whether the returns of a group differ, penalties included."""
    shaped = shaping_function(algorithm, max_context=max_context)

    def differs(group: TrajectoryGroup) -> bool:
        rewards = shaped(group)
        return advantage.differ(rewards.returns, rewards.largest)

    return differs


def shaping_function(
    algorithm: AlgorithmSection, *, max_context: int
) -> Callable[[TrajectoryGroup], advantage.Shaped]:
    """Return the function from a group to its rewards less the penalties."""
    return partial(advantage.shaped_rewards, **penalties(algorithm, max_context=max_context))


def penalties(algorithm: AlgorithmSection, *, max_context: int) -> dict[str, Any]:
    """Return the arguments of the penalties that shape rewards."""
    chosen = algorithm.penalties
    long = chosen.overlong
    return {
        "invalid_call_penalty": chosen.invalid_call,
        "truncation_penalty": chosen.truncation,
        "incomplete": None if chosen.incomplete is False else chosen.incomplete,
        "overlong": (max_context, long.buffer, long.most) if long else None,
    }


def objective_function(algorithm: AlgorithmSection) -> Objective:
    """Return the loss; raises ``ConfigError`` for a function without a file."""
    return partial(
        loss.policy_loss,
        anchor=algorithm.anchor.among(ANCHORS),
        ratio=algorithm.ratio.among(RATIOS),
        region=algorithm.region.among(REGIONS),
        correction=algorithm.correction.among(CORRECTIONS) if algorithm.corrects else None,
    )


def reward_functions(section: RewardSection) -> reward.Rewards | None:
    """Return the rewards of a run, None if they are the environment's alone; raises ``ConfigError``."""
    if not section.functions:
        return None
    return reward.Rewards(
        {one.title: one.called for one in section.functions},
        weights=section.weights,
        combine=section.combine.among(COMBINATIONS),
        fade_steps=section.fade_steps,
        timeout_s=section.timeout_s,
    )
