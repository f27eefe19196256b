"""Interface of the critics' strategies, and the rows of tokens that they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from agentrl_train.advantage import Shaped, Values
from agentrl_train.batch import sequences
from agentrl_train.critics.networks import Critic
from agentrl_train.storage.checkpoint import Part
from agentrl_train.types import FloatArray, TokenSequence, Trajectory, TrajectoryGroup

T = TypeVar("T")
Shape = Callable[[TrajectoryGroup], Shaped]
"""Subtracts the penalties from the rewards of a group."""
Select = Callable[[Sequence[Values]], "list[Values | None]"]
"""Normalizes the advantages of the tokens of each trajectory. None for trajectories not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRows:
    """The trajectories of some groups with their rewards, and their rows in the same order."""

    groups: Sequence[TrajectoryGroup]
    shaped: Sequence[Shaped]
    """Rewards of each group minus the penalties."""
    rows: Sequence[TokenSequence]
    """One row for each segment with sampled tokens."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories of all groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def owners(self) -> list[int]:
        """Return the index of the trajectory of each row."""
        return [row.rollout for row in self.rows if row.rollout is not None]

    @property
    def rewards(self) -> list[Values]:
        """Return the rewards of the turns of each trajectory."""
        return [rewards for shaped in self.shaped for rewards in shaped.rewards]

    def by_group(self, values: Sequence[T]) -> list[list[T]]:
        """Divide a list with an entry for each trajectory by groups."""
        entries = iter(values)
        return [[next(entries) for _ in group.trajectories] for group in self.groups]

    def by_trajectory(self, values: Sequence[Values]) -> list[Values]:
        """Join the entries for sampled tokens of each row into entries of each trajectory."""
        parts: list[list[Values]] = [[] for _ in self.trajectories]
        for i, part in zip(self.owners, values, strict=True):
            parts[i].append(part)
        return [np.concatenate(part or [np.zeros(0)]) for part in parts]

    def by_row(self, values: Sequence[Values]) -> list[Values]:
        """Split the entries for sampled tokens of each trajectory into entries of each row."""
        rest, parts = list(values), []
        for i, row in zip(self.owners, self.rows, strict=True):
            part, rest[i] = np.split(rest[i], [int(row.loss_mask.sum())])
            parts.append(part)
        return parts

    def with_advantages(self, advantages: Sequence[Values | None]) -> list[TokenSequence]:
        """Return the rows with these advantages of tokens. Trajectories with None are omitted."""
        values = self.by_row([np.zeros(0) if one is None else one for one in advantages])
        return [
            replace(row, advantages=spread(value, row))
            for row, value, i in zip(self.rows, values, self.owners, strict=True)
            if advantages[i] is not None
        ]


class Fit(Protocol):
    """Updates the critic with rows, with equal weights for all tokens, and returns metrics."""

    def __call__(
        self, rows: Sequence[TokenSequence], passes: Iterable[int], *, minibatches: int | None = None
    ) -> dict[str, float]:
        """Learn the rows once in each of the passes with these numbers. Raises ``BadUpdate``."""
        ...


class Strategy(ABC):
    """A method of credit by a critic: advantages from its estimates, and its training targets."""

    critic: Critic

    @abstractmethod
    def rows(self, played: EpisodeRows, select: Select) -> list[TokenSequence]:
        """Return the rows to train the policy on, with advantages of tokens.

        Keeps the estimates of the critic for ``learn``.
        """

    @abstractmethod
    def learn(self, fit: Fit, *, step: int) -> dict[str, float]:
        """Update the critic with the episodes of the last call of ``rows``, and return metrics."""

    def parts(self) -> list[Part]:
        """Return copies of the state, for the critic's folder of a checkpoint."""
        return [self.critic.snapshot()]

    def load(self, folder: Path) -> None:
        """Restore the state that ``parts`` wrote."""
        self.critic.load(folder)


def episode_rows(groups: Sequence[TrajectoryGroup], shape: Shape) -> EpisodeRows:
    """Return the rows of all trajectories of some groups, without advantages."""
    rows = sequences(groups, [[0.0] * len(group.trajectories) for group in groups])
    return EpisodeRows(groups=groups, shaped=[shape(group) for group in groups], rows=rows)


def sampled(values: Sequence[FloatArray], rows: Sequence[TokenSequence]) -> list[Values]:
    """Return the entries of the sampled tokens of each row."""
    return [one[row.loss_mask > 0].astype(np.float64) for one, row in zip(values, rows, strict=True)]


def spread(values: Values, row: TokenSequence) -> FloatArray:
    """Return a row's array with these entries at its sampled tokens, and 0 elsewhere."""
    entries = np.zeros(len(row), np.float32)
    entries[row.loss_mask > 0] = values
    return entries
