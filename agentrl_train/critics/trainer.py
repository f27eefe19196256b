"""Training of a critic with any strategy: advantages for the policy, then the critic's update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from agentrl_train.advantage import Values, normalize_and_mask
from agentrl_train.algorithm import exclusions, shaping_function
from agentrl_train.batch import pack
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import Archer, CriticCredit, GaeCredit, Sweet
from agentrl_train.critics.archer import TwinStrategy
from agentrl_train.critics.gae import units_of_tokens
from agentrl_train.critics.networks import Critic, PrivilegedCritic, TwinCritic, ValueCritic
from agentrl_train.critics.strategy import EpisodeRows, Shape, Strategy, episode_rows
from agentrl_train.critics.sweet import PreferenceStrategy
from agentrl_train.critics.values import ValueStrategy
from agentrl_train.storage.checkpoint import Part
from agentrl_train.types import TokenSequence, TrajectoryGroup

REPORTED = {
    "loss": "critic_loss",
    "grad_norm": "critic_grad_norm",
    "clip_fraction": "critic_clip_fraction",
    "loss_tokens": "critic_tokens",
    "seconds": "critic_seconds",
}
"""Metrics of the critic's updates, and their names in the metrics of a step."""


class CriticTrainer:
    """Computes advantages by a critic, and trains the critic on the same episodes."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        settings: CriticCredit,
        algorithm: AlgorithmSection,
        train: TrainSection,
        shape: Shape,
        seed: int = 0,
    ) -> None:
        self.strategy = strategy
        self._settings = settings
        self._train = train
        self._shape = shape
        self._seed = seed
        self._normalize = partial(
            normalize_and_mask,
            units=units_of_tokens,
            normalization=algorithm.normalization,
            aggregation=algorithm.aggregation.name,
            keep_groups=algorithm.keep_groups,
            leave_out=exclusions(algorithm),
        )
        self._has_rows = False

    def alone(self, step: int) -> bool:
        """Return True if only the critic learns in a step, counted from 1."""
        return step <= self._settings.warmup_steps

    def rows(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the rows to train the policy on, with advantages of tokens.

        Raises:
            ConfigError: the strategy does not support the episodes of a task.
        """
        played = episode_rows(groups, self._shape)
        self._has_rows = bool(played.rows)
        return self.strategy.rows(played, partial(self._select, played))

    def learn(self, *, step: int) -> dict[str, float]:
        """Update the critic with the episodes of the last call of ``rows``, and return metrics.

        Raises:
            BadUpdate: an update was rejected.
        """
        return self.strategy.learn(partial(self._fit, step), step=step) if self._has_rows else {}

    def parts(self) -> list[Part]:
        """Return copies of the state, for the critic's folder of a checkpoint."""
        return self.strategy.parts()

    def load(self, folder: Path) -> None:
        """Restore the state that ``parts`` wrote."""
        self.strategy.load(folder)

    def _select(self, played: EpisodeRows, advantages: Sequence[Values]) -> list[Values | None]:
        by_group = self._normalize(played.groups, played.shaped, played.by_group(advantages))
        return list(chain.from_iterable(by_group))

    def _fit(
        self,
        step: int,
        rows: Sequence[TokenSequence],
        passes: Iterable[int],
        *,
        minibatches: int | None = None,
    ) -> dict[str, float]:
        critic = self.strategy.critic
        batches = [
            batch
            for number in passes
            for batch in pack(
                rows,
                aggregation="token_mean",
                max_tokens=self._train.micro_batch_tokens,
                num_minibatches=minibatches or self._train.minibatches,
                seed=self._seed + step * self._settings.passes + number,
                packed=critic.packs_rows,
                shared=critic.shares_prefixes,
            )
        ]
        return {REPORTED[name]: value for name, value in critic.step(batches).items() if name in REPORTED}


def critic_trainer(
    critic: Critic | None,
    *,
    settings: CriticCredit | None,
    algorithm: AlgorithmSection,
    train: TrainSection,
    max_context: int,
    encode: Callable[[str], Sequence[int]],
    seed: int = 0,
) -> CriticTrainer | None:
    """Return the trainer of a critic with the strategy for its kind, or None without a critic.

    Args:
        critic: the model to train.
        settings: credit by the critic.
        algorithm: normalization and penalties.
        train: sizes of batches.
        max_context: maximum number of tokens of an episode.
        encode: tokenizes privileged information.
        seed: seed of the run.
    """
    if critic is None or settings is None:
        return None
    shape = shaping_function(algorithm, max_context=max_context)
    strategy: Strategy
    if isinstance(critic, TwinCritic):
        assert isinstance(settings, Archer)
        strategy = TwinStrategy(critic, settings=settings, shape=shape, seed=seed)
    elif isinstance(critic, PrivilegedCritic):
        assert isinstance(settings, Sweet)
        strategy = PreferenceStrategy(critic, settings=settings, encode=encode, seed=seed)
    else:
        assert isinstance(critic, ValueCritic)
        assert isinstance(settings, GaeCredit)
        strategy = ValueStrategy(critic, settings=settings)
    return CriticTrainer(
        strategy, settings=settings, algorithm=algorithm, train=train, shape=shape, seed=seed
    )
