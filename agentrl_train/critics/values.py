"""Critics of states: generalized advantages of tokens or turns from the values of tokens (PPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from agentrl_train.config.credit import GaeCredit
from agentrl_train.critics.gae import Estimator, bi_level_gae, estimate, fit_metrics, token_gae, turn_gae
from agentrl_train.critics.networks import ValueCritic
from agentrl_train.critics.strategy import EpisodeRows, Fit, Select, Strategy, sampled, spread
from agentrl_train.types import TokenSequence

ESTIMATORS: Mapping[str, Estimator] = {
    "gae_token": token_gae,
    "gae_turn": turn_gae,
    "gae_bi_level": bi_level_gae,
}


class ValueStrategy(Strategy):
    """Learns the value of the state before each token, from the advantage of the token plus its value."""

    critic: ValueCritic

    def __init__(self, critic: ValueCritic, *, settings: GaeCredit) -> None:
        self.critic = critic
        self._estimate = partial(estimate, settings.among(ESTIMATORS))
        self._passes = settings.passes
        self._targets: Sequence[TokenSequence] = ()

    def rows(self, played: EpisodeRows, select: Select) -> list[TokenSequence]:
        """Return rows in which every token has its own advantage.

        The returns that the critic learns are not normalized. They include trajectories that the policy is
        not trained on.
        """
        before = self.critic.values(played.rows)
        values = played.by_trajectory(sampled(before, played.rows))
        advantages = list(map(self._estimate, played.trajectories, played.rewards, values))
        returns = played.by_row(list(map(np.add, advantages, values)))
        self._targets = [
            replace(row, logprobs=value, advantages=spread(target, row))
            for row, value, target in zip(played.rows, before, returns, strict=True)
        ]
        return played.with_advantages(select(advantages))

    def learn(self, fit: Fit, *, step: int) -> dict[str, float]:
        """Fit the values to the returns. Metrics compare the values before the update with the returns."""
        rows = self._targets
        values = np.concatenate(sampled([row.logprobs for row in rows], rows))
        returns = np.concatenate(sampled([row.advantages for row in rows], rows))
        return fit(rows, range(self._passes)) | fit_metrics(values, returns)
