"""``[algorithm]`` -> the functions of advantages that need the values of a critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from agentrl_train import advantage
from agentrl_train.advantage import Values
from agentrl_train.algorithm import Functions, exclusions, penalties
from agentrl_train.config import AlgorithmSection
from agentrl_train.critics import gae
from agentrl_train.types import TrajectoryGroup

Estimation = Callable[
    [Sequence[TrajectoryGroup], Sequence[Sequence[Values]]],
    "tuple[list[list[Values | None]], list[list[Values]]]",
]

ESTIMATORS: Functions = {
    "gae_token": gae.token_gae,
    "gae_turn": gae.turn_gae,
    "gae_bi_level": gae.bi_level_gae,
}

Selection = Callable[
    [Sequence[TrajectoryGroup], Sequence[advantage.Shaped], Sequence[Sequence[Values]]],
    "list[list[Values | None]]",
]


def estimation_function(algorithm: AlgorithmSection, *, max_context: int) -> Estimation:
    """Return the function from groups and values to the advantages and returns of tokens."""
    return partial(
        gae.advantages_and_returns,
        estimator=algorithm.credit.among(ESTIMATORS),
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation.name,
        keep_groups=algorithm.keep_groups,
        leave_out=exclusions(algorithm),
        **penalties(algorithm, max_context=max_context),
    )


def selection_function(algorithm: AlgorithmSection) -> Selection:
    """Return the function that normalizes advantages of tokens and leaves trajectories out."""
    return partial(
        gae.selected,
        normalization=algorithm.normalization,
        aggregation=algorithm.aggregation.name,
        keep_groups=algorithm.keep_groups,
        leave_out=exclusions(algorithm),
    )
