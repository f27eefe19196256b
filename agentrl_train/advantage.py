"""Step 5 of 9: ``TrajectoryGroup`` -> advantages, one number per trajectory.

Pure functions, float64 inside. In order: shaped returns, group baseline, group scale, task
normalization::

    reward 1, 0, 0, 1  ->  return 1, -0.2, 0, 1  ->  centred  ->  / group std  ->  / task std
                           (one invalid call)        by group     if wanted        with the weights
                                                                                   of the loss

Every token that the policy sampled in a trajectory gets the trajectory's advantage (``batch.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agentrl_train.types import EpisodeEnd, Trajectory, TrajectoryGroup

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]
Values = NDArray[np.float64]

RESOLUTION = 1e-9
"""Differences below this share of the values are treated as rounding."""

TRUNCATED = (EpisodeEnd.TRUNCATED_TURNS, EpisodeEnd.TRUNCATED_TIME, EpisodeEnd.TRUNCATED_LENGTH)


def advantages(
    groups: Sequence[TrajectoryGroup],
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    task_normalization: bool = True,
    invalid_call_penalty: float = 0.0,
    truncation_penalty: float = 0.0,
    aggregation: str = "token_mean",
) -> list[list[float]]:
    """Return the advantage of each trajectory of each group, in the order given.

    ``baseline`` and ``scale`` work inside a group; ``mean`` with ``std`` is GRPO (arXiv
    2402.03300). ``task_normalization`` then brings every task of the batch to one scale, for the
    ``aggregation`` of the loss (``normalize_task``). Without it, ``mean`` with ``none`` is Dr. GRPO
    (2503.20783) and ``leave_one_out`` with ``none`` RLOO (2402.14740). Raises ``ValueError`` for a
    failed trajectory, a reward that is not finite, or an unknown option.
    """
    _check_option("baseline", baseline, Baseline)
    _check_option("scale", scale, Scale)
    values = [
        group_advantages(
            shaped_returns(
                group,
                invalid_call_penalty=invalid_call_penalty,
                truncation_penalty=truncation_penalty,
            ),
            baseline=baseline,
            scale=scale,
        )
        for group in groups
    ]
    if task_normalization:
        tokens = [np.array([one.num_sampled_tokens for one in group.trajectories]) for group in groups]
        for task in {group.task for group in groups}:
            members = [i for i, group in enumerate(groups) if group.task == task]
            scaled = normalize_task(
                [values[i] for i in members], [tokens[i] for i in members], aggregation=aggregation
            )
            for i, value in zip(members, scaled, strict=True):
                values[i] = value
    return [value.tolist() for value in values]


def shaped_returns(
    group: TrajectoryGroup, *, invalid_call_penalty: float = 0.0, truncation_penalty: float = 0.0
) -> Values:
    """Return the reward of each trajectory less its penalties, [N].

    ``invalid_call_penalty`` is subtracted once if any call was invalid, ``truncation_penalty`` once
    if a limit ended the episode. Raises ``ValueError`` for a failed trajectory: its reward is
    meaningless.
    """
    return np.array(
        [
            _reward(trajectory, group)
            - invalid_call_penalty * (trajectory.invalid_calls > 0)
            - truncation_penalty * (trajectory.end in TRUNCATED)
            for trajectory in group.trajectories
        ],
        dtype=np.float64,
    )


def group_advantages(returns: Values, *, baseline: Baseline = "mean", scale: Scale = "std") -> Values:
    """Return the advantages [N] of one group's returns [N]; exactly 0 if the group has no signal.

    With a group baseline, a group of one and a group of equal returns have no signal.
    """
    centred = returns - group_baseline(returns, baseline)
    if not _signal(centred, returns):
        return np.zeros_like(returns)
    return centred / group_scale(returns, scale)


def group_baseline(returns: Values, kind: Baseline) -> Values:
    """Return the baseline of each trajectory, [N]: the group mean, the mean of the others, or 0.

    ``leave_one_out`` is the mean of the *other* N - 1 returns, so the advantage is N / (N - 1)
    times that of ``mean``. A group of one is compared with itself.
    """
    if kind == "none" or returns.size == 0:
        return np.zeros_like(returns)
    if kind == "mean" or returns.size == 1:
        return np.full_like(returns, returns.mean())
    others: Values = (returns.sum() - returns) / (returns.size - 1)
    return others


def group_scale(returns: Values, kind: Scale) -> float:
    """Return the divisor of a group's advantages: the unbiased std of its returns.

    It is 1 without scaling and for returns without spread.
    """
    if kind == "none" or returns.size < 2 or not _signal(returns - returns.mean(), returns):
        return 1.0
    return float(returns.std(ddof=1))


def normalize_task(
    values: Sequence[Values], tokens: Sequence[NDArray[np.int64]], *, aggregation: str = "token_mean"
) -> list[Values]:
    """Return one task's advantages with mean 0 and std 1 under the weights that the loss gives them.

    ``values[g]`` and ``tokens[g]`` are [N] for group g: the advantages, and the number of tokens that each
    trajectory sampled. With weights of another ``aggregation`` than the loss's (``batch.token_weights``), the
    weighted sum of the advantages would not be 0, and the loss would push all actions up or down.

    Where tokens have equal weight, this is AgentRL's task advantage normalization (arXiv 2510.04206, equation
    1; unbiased std), with two differences: a group without signal stays 0 and out of the statistics, and a
    task with fewer than 2 tokens (or sequences) or without spread is unchanged.
    """
    live = [bool(np.any(value)) for value in values]
    if not any(live):
        return list(values)
    value = np.concatenate([v for v, on in zip(values, live, strict=True) if on])
    counts = [_counts(n, aggregation) for n, on in zip(tokens, live, strict=True) if on]
    if (number := sum(float(one.sum()) for one in counts)) < 2:
        return list(values)
    if aggregation == "group_mean":
        counts = [one / max(1.0, one.sum()) for one in counts]
    weight = np.concatenate(counts)
    weight /= weight.sum()
    mean = float((weight * value).sum())
    std = float(np.sqrt((weight * (value - mean) ** 2).sum() * number / (number - 1)))
    if std <= RESOLUTION * float(np.abs(value).max()):
        return list(values)
    return [(v - mean) / std if on else v for v, on in zip(values, live, strict=True)]


def _counts(tokens: NDArray[np.int64], aggregation: str) -> Values:
    """Return how many of the units that weigh the same within a group each trajectory has."""
    return (tokens > 0 if aggregation == "sequence_mean" else tokens).astype(np.float64)


def _reward(trajectory: Trajectory, group: TrajectoryGroup) -> float:
    where = f"group {group.group_id} of task {group.task!r}"
    if trajectory.end.failed:
        raise ValueError(
            f"{where} contains a failed trajectory ({trajectory.end.value}); drop it before training."
        )
    if not np.isfinite(trajectory.reward):
        raise ValueError(f"{where} contains a reward of {trajectory.reward}; rewards must be finite numbers.")
    return trajectory.reward


def _signal(centred: Values, returns: Values) -> bool:
    return bool(np.any(np.abs(centred) > RESOLUTION * np.abs(returns).max(initial=0.0)))


def _check_option(name: str, value: str, options: object) -> None:
    if value not in get_args(options):
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(get_args(options))}.")
