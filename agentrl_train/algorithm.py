"""``[algorithm]`` and ``[reward]`` -> functions: each choice is a function with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import torch

from agentrl_env.errors import AUTHOR_ERRORS
from agentrl_train import advantage, loss, reward
from agentrl_train.advantage import Values
from agentrl_train.config import AlgorithmSection, RewardSection
from agentrl_train.config.functions import Function, Own, described
from agentrl_train.errors import ConfigError, ran_out_of_memory
from agentrl_train.loss import Objective
from agentrl_train.reward import combining
from agentrl_train.reward.scoring import MAX_SCORE
from agentrl_train.types import Trajectory, TrajectoryGroup

Advantages = Callable[[Sequence[TrajectoryGroup]], "list[list[Values | None]]"]
Functions = Mapping[str, Callable[..., Any]]
QUOTED = 100
"""Maximum number of quoted characters of a wrong value."""


def _number_or_row(value: Any, siblings: advantage.Siblings) -> bool:
    return np.shape(value) in ((), siblings.returns.shape) and bool(np.isfinite(value).all())


def _positive(value: Any, siblings: advantage.Siblings) -> bool:
    return np.shape(value) == () and 0.0 < float(value) < np.inf


def _comparisons(value: Any, group: TrajectoryGroup, shaped: advantage.Shaped) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(one, advantage.Comparison)
        and np.shape(one.returns) == (len(one.trajectories),)
        and bool(np.isfinite(one.returns).all())
        and len(one.turns) == len(one.trajectories)
        and all(
            0 <= number < len(shaped.rewards)
            and (isinstance(turn, slice) or 0 <= turn < len(shaped.rewards[number]))
            for number, turn in zip(one.trajectories, one.turns, strict=True)
        )
        for one in value
    )


def _true_or_false(value: Any, trajectory: Trajectory) -> bool:
    return np.shape(value) == () and value in (0, 1)  # a text would always be true, and None never


def _of_tokens(value: Any, *arguments: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == arguments[-1].logprobs.shape


def _losses(value: Any, *arguments: Any) -> bool:
    parts = isinstance(value, tuple) and len(value) == 2 and all(_of_tokens(one, *arguments) for one in value)
    return parts and value[1].dtype == torch.bool


def _rewards(value: Any, scores: Mapping[str, Values], weights: Any) -> bool:
    number = len(next(iter(scores.values())))
    return np.shape(value) == (number,) and bool((np.abs(value) <= MAX_SCORE).all())


RETURNS: Mapping[str, tuple[str, Callable[..., bool]]] = {
    "algorithm.credit": (
        "a list of Comparison, each with a finite return and existing turns for each of its trajectories",
        _comparisons,
    ),
    "algorithm.baseline": ("a finite number, or one for each return", _number_or_row),
    "algorithm.scale": ("a number above 0", _positive),
    "algorithm.leave_out": ("true or false", _true_or_false),
    "algorithm.anchor": ("a tensor with a log-probability for each token", _of_tokens),
    "algorithm.ratio": ("a tensor with a ratio for each token", _of_tokens),
    "algorithm.region": (
        "(losses, bounded), a float and a boolean tensor with a value for each token",
        _losses,
    ),
    "algorithm.correction": ("a tensor with a weight for each token", _of_tokens),
    "reward.combine": (f"a finite number for each episode, at most {MAX_SCORE:g}", _rewards),
}
"""Key -> what its function must return, and the check of a value with the arguments of the function."""


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
        credit=checked("algorithm.credit", algorithm.credit, CREDITS),
        baseline=checked("algorithm.baseline", algorithm.baseline, BASELINES),
        scale=checked("algorithm.scale", algorithm.scale, SCALES),
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation.name,
        keep_groups=algorithm.keep_groups,
        leave_out=exclusions(algorithm),
        **penalties(algorithm, max_context=max_context),
    )


def exclusions(algorithm: AlgorithmSection) -> list[Callable[[Trajectory], bool]]:
    """Return the functions that are true for the episodes to omit from the loss."""
    return [checked("algorithm.leave_out", one, EXCLUSIONS) for one in algorithm.leave_out]


def checked(key: str, choice: Function, functions: Functions) -> Callable[..., Any]:
    """Return the function of a key. User functions raise ``ConfigError`` on errors and on invalid results."""
    function = choice.among(functions)
    if not isinstance(choice, Own) or choice.spelled.startswith("agentrl_train."):
        return function
    name, (expected, fits) = f"{key} = {choice.spelled!r}", RETURNS[key]

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except AUTHOR_ERRORS as error:
            if ran_out_of_memory(error):
                raise
            raise ConfigError(f"{name} failed: {described(error, function)}") from error
        try:
            valid = fits(value, *arguments)
        except (TypeError, ValueError):
            valid = False
        if valid:
            return value
        shape = f" of shape {list(np.shape(value))}" if isinstance(value, np.ndarray | torch.Tensor) else ""
        raise ConfigError(
            f"{name} must return {expected}; it returned {type(value).__name__}{shape}: {str(value)[:QUOTED]}"
        )

    return call


def signal_function(algorithm: AlgorithmSection, *, max_context: int) -> Callable[[TrajectoryGroup], bool]:
    """Return the function that is true if the returns of a group differ, penalties included."""
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
        anchor=checked("algorithm.anchor", algorithm.anchor, ANCHORS),
        ratio=checked("algorithm.ratio", algorithm.ratio, RATIOS),
        region=checked("algorithm.region", algorithm.region, REGIONS),
        correction=checked("algorithm.correction", algorithm.correction, CORRECTIONS)
        if algorithm.corrects
        else None,
    )


def reward_functions(section: RewardSection) -> reward.Rewards | None:
    """Return the rewards of a run, or None for only the environment's. Raises ``ConfigError``."""
    if not section.functions:
        return None
    return reward.Rewards(
        {one.title: one.called for one in section.functions},
        weights=section.weights,
        combine=checked("reward.combine", section.combine, COMBINATIONS),
        fade_steps=section.fade_steps,
        timeout_s=section.timeout_s,
    )
