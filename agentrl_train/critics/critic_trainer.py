"""Credit by a critic: values of rows before an update, advantages from them, and the critic's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from agentrl_train.advantage import Values
from agentrl_train.batch import pack, sequences
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import CriticCredit
from agentrl_train.critics.estimation import estimation_function
from agentrl_train.critics.gae import explained_variance
from agentrl_train.critics.networks import ValueCritic
from agentrl_train.storage.checkpoint import Part
from agentrl_train.types import FloatArray, TokenSequence, TrajectoryGroup

REPORTED = {
    "loss": "critic_loss",
    "grad_norm": "critic_grad_norm",
    "clip_fraction": "critic_clip_fraction",
    "loss_tokens": "critic_tokens",
    "seconds": "critic_seconds",
}
"""Metrics of the critic's updates, and their names among those of a step."""


class ByCritic(Protocol):
    """Seam: advantages by a critic, which learns from the same episodes."""

    def alone(self, step: int) -> bool:
        """Return whether only the critic learns in a step, counted from 1."""
        ...

    def rows(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the rows of the trajectories that are trained on, with their advantages."""
        ...

    def learn(self, *, step: int) -> dict[str, float]:
        """Update the critic with the last ``rows``; return metrics. Raises ``BadUpdate``."""
        ...

    def parts(self) -> list[Part]:
        """Return copies of the state, to be written into a folder of a checkpoint."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``parts`` wrote."""
        ...


class CriticTrainer:
    """Gives tokens their advantages by a critic, and trains the critic on the same episodes."""

    def __init__(
        self,
        critic: ValueCritic,
        *,
        settings: CriticCredit,
        algorithm: AlgorithmSection,
        train: TrainSection,
        max_context: int,
        seed: int = 0,
    ) -> None:
        self._critic = critic
        self._settings = settings
        self._train = train
        self._seed = seed
        self._estimate = estimation_function(algorithm, max_context=max_context)
        self._targets: list[TokenSequence] = []

    def alone(self, step: int) -> bool:
        """Return whether only the critic learns in a step, counted from 1."""
        return step <= self._settings.warmup_steps

    def rows(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the rows of the trajectories that are trained on, each token with its own advantage.

        The values are kept for ``learn``, as are the returns that they are to become.
        """
        rows = all_rows(groups)
        values = self._critic.values(rows)
        tokens = [sampled(one, row) for one, row in zip(values, rows, strict=True)]
        owned = rows_of_trajectories(groups, rows)
        of_trajectories = [
            [np.concatenate([np.zeros(0), *(tokens[number] for number in own)]) for own in per_group]
            for per_group in owned
        ]
        advantages, returns = self._estimate(groups, of_trajectories)
        self._targets = [
            replace(row, logprobs=value, advantages=spread(target, row))
            for row, value, target in zip(rows, values, of_rows(returns, owned, rows), strict=True)
            if target is not None
        ]
        return trained_rows(rows, advantages, owned)

    def parts(self) -> list[Part]:
        """Return a copy of the state of the critic, for a checkpoint."""
        return [self._critic.snapshot()]

    def load(self, folder: Path) -> None:
        """Restore what ``parts`` wrote."""
        self._critic.load(folder)

    def learn(self, *, step: int) -> dict[str, float]:
        """Fit the values to the returns of the last ``rows``; return metrics.

        ``explained_variance`` is that of the returns by the values before the update.

        Raises:
            BadUpdate: an update was rejected.
        """
        train, rows = self._train, self._targets
        if not rows:
            return {}
        batches = [
            batch
            for number in range(self._settings.passes)
            for batch in pack(
                rows,
                aggregation="token_mean",
                max_tokens=train.micro_batch_tokens,
                num_minibatches=train.minibatches,
                seed=self._seed + step * self._settings.passes + number,
                packed=self._critic.packs_rows,
                shared=self._critic.shares_prefixes,
            )
        ]
        found = self._critic.step(batches)
        values, returns = (
            np.concatenate([getattr(row, name)[row.loss_mask > 0] for row in rows]).astype(np.float64)
            for name in ("logprobs", "advantages")
        )
        return reported(found, values, returns)


def reported(found: Mapping[str, float], values: Values, returns: Values) -> dict[str, float]:
    """Return the metrics of a critic's updates, and how its values before them fitted the returns."""
    return {
        **{REPORTED[name]: value for name, value in found.items() if name in REPORTED},
        "explained_variance": explained_variance(values, returns),
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
    }


def all_rows(groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
    """Return the rows of all trajectories, without advantages."""
    return sequences(groups, [[0.0] * len(group.trajectories) for group in groups])


def trained_rows(
    rows: Sequence[TokenSequence],
    advantages: Sequence[Sequence[Values | None]],
    owned: Sequence[Sequence[Sequence[int]]],
) -> list[TokenSequence]:
    """Return the rows of the trajectories that are trained on, each token with its advantage."""
    return [
        replace(row, advantages=spread(values, row))
        for row, values in zip(rows, of_rows(advantages, owned, rows), strict=True)
        if values is not None
    ]


def rows_of_trajectories(
    groups: Sequence[TrajectoryGroup], rows: Sequence[TokenSequence]
) -> list[list[list[int]]]:
    """Return the numbers of the rows of each trajectory of each group, which have its sampled tokens."""
    counts = iter([int(row.loss_mask.sum()) for row in rows])
    number = 0
    found: list[list[list[int]]] = []
    for group in groups:
        found.append([])
        for one in group.trajectories:
            own, missing = [], one.num_sampled_tokens
            while missing > 0:
                missing -= next(counts)
                own.append(number)
                number += 1
            found[-1].append(own)
    return found


def of_rows(
    values: Sequence[Sequence[Values | None]],
    owned: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[TokenSequence],
) -> list[Values | None]:
    """Return the values of the sampled tokens of each row from those of its trajectory, None as there."""
    found: list[Values | None] = [None] * len(rows)
    for of_group, own_group in zip(values, owned, strict=True):
        for value, own in zip(of_group, own_group, strict=True):
            if value is not None and own:
                ends = np.cumsum([int(rows[number].loss_mask.sum()) for number in own])
                for number, part in zip(own, np.split(value, ends[:-1]), strict=True):
                    found[number] = part
    return found


def sampled(values: FloatArray, row: TokenSequence) -> Values:
    """Return the entries of the sampled tokens of a row."""
    return values[row.loss_mask > 0].astype(np.float64)


def spread(values: Values, row: TokenSequence) -> FloatArray:
    """Return entries of the sampled tokens at their places in the row, 0 elsewhere."""
    found = np.zeros(len(row), np.float32)
    found[row.loss_mask > 0] = values
    return found
