"""``[algorithm]`` -> the functions of advantages that need the values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agentrl_train import advantage, reward
from agentrl_train.advantage import Values
from agentrl_train.algorithm import penalties
from agentrl_train.config import AlgorithmSection
from agentrl_train.config.functions import function
from agentrl_train.critics import gae
from agentrl_train.types import TrajectoryGroup

Estimation = Callable[
    [Sequence[TrajectoryGroup], Sequence[Sequence[Values]]],
    "tuple[list[list[Values | None]], list[list[Values]]]",
]


Selection = Callable[
    [Sequence[TrajectoryGroup], Sequence[advantage.Shaped], Sequence[Sequence[Values]]],
    "list[list[Values | None]]",
]


def estimation_function(algorithm: AlgorithmSection, *, max_context: int) -> Estimation:
    """Return the function from groups and values to the advantages and returns of tokens."""
    gamma, token_gamma, lam = algorithm.gamma, algorithm.token_gamma, algorithm.gae_lambda
    estimators: dict[str, Any] = {
        "gae_token": partial(gae.token_gae, token_gamma=token_gamma, lam=lam),
        "gae_turn": partial(gae.turn_gae, gamma=gamma, lam=lam),
        "gae_bi_level": partial(gae.bi_level_gae, gamma=gamma, token_gamma=token_gamma, lam=lam),
    }
    return partial(
        gae.advantages_and_returns,
        estimator=estimators[algorithm.credit],
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation,
        keep_groups=algorithm.keep_groups,
        mask_truncated=algorithm.mask_truncated,
        leave_out=[function(reward, name) for name in algorithm.leave_out],
        **penalties(algorithm, max_context=max_context),
    )


def selection_function(algorithm: AlgorithmSection) -> Selection:
    """Return the function that normalizes advantages of tokens and leaves trajectories out."""
    return partial(
        gae.selected,
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation,
        keep_groups=algorithm.keep_groups,
        mask_truncated=algorithm.mask_truncated,
        leave_out=[function(reward, name) for name in algorithm.leave_out],
    )
