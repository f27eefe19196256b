"""``[algorithm]`` and ``[reward]`` -> functions: each choice is a function, found by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentrl_train import advantage, loss, reward
from agentrl_train.advantage import Values
from agentrl_train.config import AlgorithmSection, RewardSection
from agentrl_train.config.functions import function, imported
from agentrl_train.loss import Objective
from agentrl_train.reward import combining
from agentrl_train.types import TrajectoryGroup

Advantages = Callable[[Sequence[TrajectoryGroup]], "list[list[Values | None]]"]


def advantage_function(algorithm: AlgorithmSection, *, max_context: int) -> Advantages:
    """Return the function from groups to advantages; raises ``ConfigError`` for a function without a file."""
    credits: dict[str, Any] = {
        "trajectory": advantage.by_trajectory,
        "turn": partial(advantage.by_turn, gamma=algorithm.gamma),
        "state": partial(advantage.by_state, gamma=algorithm.gamma, weight=algorithm.state_weight),
    }
    scales: dict[str, Any] = {"none": advantage.unscaled, "mean": advantage.mean_return}
    return partial(
        advantage.advantages,
        credit=credits.get(algorithm.credit) or imported(algorithm.credit),
        baseline=function(advantage, algorithm.baseline),
        scale=scales.get(algorithm.scale) or function(advantage, algorithm.scale),
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation,
        keep_groups=algorithm.keep_groups,
        mask_truncated=algorithm.mask_truncated,
        leave_out=[function(reward, name) for name in algorithm.leave_out],
        **penalties(algorithm, max_context=max_context),
    )


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
    buffer = algorithm.overlong_buffer
    return {
        "invalid_call_penalty": algorithm.invalid_call_penalty,
        "truncation_penalty": algorithm.truncation_penalty,
        "overlong": (max_context, buffer, algorithm.overlong_penalty) if buffer else None,
    }


def objective_function(algorithm: AlgorithmSection) -> Objective:
    """Return the loss; raises ``ConfigError`` for a function without a file."""
    low, high = algorithm.clip_low, algorithm.clip_high
    regions: dict[str, Any] = {
        "none": loss.unbounded,
        "clip": partial(loss.clip, low=low, high=high, dual=algorithm.dual_clip or None),
        "cap": partial(loss.cap, low=low, high=high),
        "band": partial(loss.band, low=low, high=high),
        "soft": partial(loss.soft, positive=algorithm.soft_positive, negative=algorithm.soft_negative),
        "divergence": partial(loss.divergence, low=algorithm.divergence_low, high=algorithm.divergence_high),
    }
    ratios: dict[str, Any] = {
        "token": loss.token_ratio,
        "turn": loss.turn_ratio,
        "sequence": loss.sequence_ratio,
        "sequence_token": loss.sequence_token_ratio,
        "geometric": partial(loss.geometric_ratio, low=low, high=high),
    }
    correction = partial(
        loss.importance_weights,
        cap=algorithm.importance_cap or None,
        floor=algorithm.importance_floor if algorithm.correction == "mask" else None,
        level=algorithm.correction_level,
    )
    return partial(
        loss.policy_loss,
        anchor=function(loss, algorithm.anchor),
        ratio=ratios.get(algorithm.ratio) or imported(algorithm.ratio),
        region=regions.get(algorithm.region) or imported(algorithm.region),
        correction=correction if algorithm.corrects else None,
    )


def reward_functions(section: RewardSection) -> reward.Rewards | None:
    """Return the rewards of a run, None if they are the environment's alone; raises ``ConfigError``."""
    if not section.functions:
        return None
    return reward.Rewards(
        {target.rpartition(":")[2]: imported(target) for target in section.functions},
        weights=section.weights,
        combine=function(combining, section.combine),
        fade_steps=section.fade_steps,
        timeout_s=section.timeout_s,
    )
