"""SWEET-RL (arXiv 2503.15478): a critic of turns with privileged information, trained on preferences.

The critic is a language model. The advantage of a turn is the mean over its tokens of the log-ratio of the
critic, which sees the information, to a reference, which does not. The critic learns to order sibling
trajectories by their returns. With ``pairs`` it ranks completions of a turn, and the policy learns
from pairs of these completions by DPO.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentrl_train.advantage import RESOLUTION, Values
from agentrl_train.batch import completions
from agentrl_train.config.credit import Sweet
from agentrl_train.critics.gae import turn_numbers
from agentrl_train.critics.networks import PrivilegedCritic
from agentrl_train.critics.strategy import EpisodeRows, Fit, Select, Strategy, sampled, spread
from agentrl_train.errors import ConfigError
from agentrl_train.types import FloatArray, TokenSequence, Trajectory

PREFIX = "In light of what is known about this task:\n"
"""Text before the privileged information."""
UPDATE_METRICS = ("critic_grad_norm", "critic_tokens", "critic_seconds")
"""Reported metrics of an update. Its loss is omitted: only the gradient of the loss has a meaning."""


def turn_means(log_ratios: Values, turns: NDArray[np.int64], *, count: int) -> Values:
    """Return the mean log-ratio of the tokens of each of ``count`` turns, or 0 for turns without tokens.

    ``turns`` are the numbers of the tokens' turns, [n]. A long turn weighs as much as a short one.
    """
    sums = np.bincount(turns, weights=log_ratios, minlength=count)
    means: Values = sums / np.maximum(1, np.bincount(turns, minlength=count))
    return means


def drawn_pairs(advantages: Values, *, count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Return pairs of a better and a worse completion of a turn, drawn from the halves of their ranking.

    Args:
        advantages: advantages of the completions, [n]. Equal ones keep their order.
        count: number of pairs. There are no pairs for fewer than two completions.
        generator: draws the pairs, with replacement.
    """
    order = np.argsort(-advantages, kind="stable")
    if not (half := len(order) // 2):
        return []
    draws = generator.integers(half, size=(count, 2))
    return [(int(order[better]), int(order[-1 - worse])) for better, worse in draws]


def preference_loss(scores: Values, returns: Values, *, beta: float) -> tuple[float, Values, int]:
    """Return the loss of Bradley-Terry over the pairs of some trajectories, its gradient, and their number.

    ``-log sigmoid(beta (S_i - S_j))``, summed over the pairs where i has the larger return, with S the sum of
    the advantages of a trajectory's turns.

    Args:
        scores: S of each trajectory of a group, [N].
        returns: their returns, [N]. Returns that differ only by rounding do not form a pair.
        beta: steepness.
    """
    differences = returns[:, None] - returns[None, :]
    better = differences > RESOLUTION * np.abs(returns).max(initial=0.0)
    margins = beta * (scores[:, None] - scores[None, :])
    losses = np.where(better, np.logaddexp(0.0, -margins), 0.0)
    slopes = np.where(better, -beta / (1.0 + np.exp(np.minimum(margins, 500.0))), 0.0)
    return float(losses.sum()), slopes.sum(1) - slopes.sum(0), int(better.sum())


def dpo(
    scores: Values,
    pairs: Sequence[tuple[int, int]],
    *,
    sizes: NDArray[np.int64],
    beta: float,
    likelihood: float,
) -> tuple[float, Values]:
    """Return the mean loss of pairs, and its gradient by the log-probability of a token of each completion.

    The loss of a pair is ``-log sigmoid(beta (S_better - S_worse))``, DPO (arXiv 2305.18290), minus the mean
    log-probability of the better completion's tokens times ``likelihood``. The latter is only in the
    gradient.

    Args:
        scores: sums over the tokens of the log-ratio of the policy to the reference, [n].
        pairs: numbers of the better and the worse completion.
        sizes: tokens of each completion, [n].
        beta: steepness.
        likelihood: weight of the log-likelihood.
    """
    total, gradient = 0.0, np.zeros(len(scores))
    for better, worse in pairs:
        loss, slopes, _ = preference_loss(scores[[better, worse]], np.array([1.0, 0.0]), beta=beta)
        total += loss
        gradient[[better, worse]] += slopes
        gradient[better] -= likelihood / sizes[better]
    return total / max(1, len(pairs)), gradient / max(1, len(pairs))


class PreferenceStrategy(Strategy):
    """Learns from pairs of sibling trajectories, with the privileged information before their rows."""

    critic: PrivilegedCritic

    def __init__(
        self,
        critic: PrivilegedCritic,
        *,
        settings: Sweet,
        encode: Callable[[str], Sequence[int]],
        seed: int,
    ) -> None:
        self.critic = critic
        self._settings = settings
        self._encode = lru_cache(encode)
        self._seed = seed
        self._shown = EpisodeRows(groups=(), shaped=(), rows=())
        """The episodes of the last ``rows``, with the privileged information."""
        self._reference: Sequence[Values] = ()
        """Log-probabilities of their sampled tokens under the reference, which does not see the
        information."""
        self._metrics: dict[str, float] = {}
        """Metrics of the pairs of completions."""

    def rows(self, played: EpisodeRows, select: Select) -> list[TokenSequence]:
        """Return rows in which all tokens of a turn have its advantage.

        With ``pairs`` the rows are the completions of the pairs instead, with the policy gradient of DPO.

        Raises:
            ConfigError: a sample has no privileged information.
        """
        self._shown = self.with_information(played)
        self._reference = sampled(self.critic.reference_logprobs(played.rows), played.rows)
        if self._settings.pairs:
            return self._compare(played, select)
        means = self._turn_means(self.critic.logprobs(self._shown.rows))
        advantages = [mean[turn_numbers(one)] for mean, one in zip(means, played.trajectories, strict=True)]
        return played.with_advantages(select(advantages))

    def learn(self, fit: Fit, *, step: int) -> dict[str, float]:
        """Update the critic with the pairs of siblings that have different returns.

        ``preference_accuracy`` is the share of pairs that the critic orders by their returns before the
        first update.
        """
        metrics: dict[str, float] = {}
        for number in range(self._settings.passes):
            rows, preferences = self.preferences()
            if not preferences["preference_pairs"]:
                return self._metrics | preferences
            done = fit(rows, [number], minibatches=1)
            metrics = {name: done[name] for name in UPDATE_METRICS} | preferences | metrics
        return self._metrics | metrics

    def preferences(self) -> tuple[list[TokenSequence], dict[str, float]]:
        """Return rows with the policy gradient of the preference loss, and metrics of the pairs.

        The gradient of the loss by the log-probability of a token is the gradient by the score of its
        trajectory, divided by the tokens of its turn. The advantage of the token is its negative.
        """
        shown = self._shown
        logprobs = self.critic.logprobs(shown.rows)
        means = shown.by_group(self._turn_means(logprobs))
        total, pairs, right = 0.0, 0, 0
        slopes: list[Values] = []
        for group, shaped, turns in zip(shown.groups, shown.shaped, means, strict=True):
            returns, scores = shaped.returns, np.array([mean.sum() for mean in turns])
            loss, gradient, count = preference_loss(scores, returns, beta=self._settings.beta)
            better = returns[:, None] > returns[None, :]
            right += int((better & (scores[:, None] > scores[None, :])).sum())
            total, pairs = total + loss, pairs + count
            for trajectory, slope in zip(group.trajectories, gradient, strict=True):
                numbers = turn_numbers(trajectory)
                slopes.append(-slope / np.bincount(numbers)[numbers])
        tokens = sum(int(row.loss_mask.sum()) for row in shown.rows)
        scale = tokens / max(1, pairs)  # undoes the mean over tokens
        rows = [
            replace(row, logprobs=before, advantages=spread(value * scale, row))
            for row, before, value in zip(shown.rows, logprobs, shown.by_row(slopes), strict=True)
        ]
        return rows, {
            "preference_loss": total / max(1, pairs),
            "preference_accuracy": right / max(1, pairs),
            "preference_pairs": float(pairs),
        }

    def _compare(self, played: EpisodeRows, select: Select) -> list[TokenSequence]:
        """Return the completions in the pairs of all turns, with the policy gradient of DPO.

        With the aggregation ``token_mean`` it is the gradient of the mean over pairs, with the
        log-probabilities of the sampler.
        """
        settings, groups = self._settings, played.groups
        kept = played.by_group(select([np.zeros(one.num_sampled_tokens) for one in played.trajectories]))
        turns = [
            (trajectory, rows)
            for group, values in zip(groups, kept, strict=True)
            for trajectory, value in zip(group.trajectories, values, strict=True)
            if value is not None
            for rows in completions(trajectory, group)
        ]
        plain = [row for _, rows in turns for row in rows]
        shown = [self._behind(trajectory, row) for trajectory, rows in turns for row in rows]
        reference = sampled(self.critic.reference_logprobs(plain), plain)
        ratios = differences(sampled(self.critic.logprobs(shown), shown), reference)
        advantages = np.array([ratio.mean() for ratio in ratios])
        behaviour = sampled([row.logprobs for row in plain], plain)
        scores = np.array([ratio.sum() for ratio in differences(behaviour, reference)])
        generator = np.random.default_rng((self._seed, *(group.group_id for group in groups)))
        pairs, end = [], 0
        for _, rows in turns:
            start, end = end, end + len(rows)
            drawn = drawn_pairs(advantages[start:end], count=settings.pairs, generator=generator)
            pairs += [(start + better, start + worse) for better, worse in drawn]
        pairs = [(i, j) for i, j in pairs if not np.array_equal(plain[i].token_ids, plain[j].token_ids)]
        sizes = np.array([len(ratio) for ratio in ratios])
        loss, slopes = dpo(scores, pairs, sizes=sizes, beta=settings.beta, likelihood=settings.likelihood)
        self._metrics = {"dpo_pairs": float(len(pairs)), "dpo_loss": loss}
        chosen = np.flatnonzero(slopes)
        by_token = -slopes * sizes[chosen].sum()  # undoes the mean over tokens
        return [replace(plain[i], advantages=plain[i].loss_mask * np.float32(by_token[i])) for i in chosen]

    def _turn_means(self, logprobs: Sequence[FloatArray]) -> list[Values]:
        """Return the advantages of the turns of each trajectory from the log-probabilities of its rows."""
        shown = self._shown
        ratios = shown.by_trajectory(differences(sampled(logprobs, shown.rows), self._reference))
        return [
            turn_means(ratio, turn_numbers(trajectory), count=len(trajectory.turns))
            for ratio, trajectory in zip(ratios, shown.trajectories, strict=True)
        ]

    def with_information(self, played: EpisodeRows) -> EpisodeRows:
        """Return the trajectories with the privileged information before their rows."""
        trajectories = played.trajectories
        rows = [self._behind(trajectories[i], row) for i, row in zip(played.owners, played.rows, strict=True)]
        return replace(played, rows=rows)

    def _behind(self, trajectory: Trajectory, row: TokenSequence) -> TokenSequence:
        """Return a row after the privileged information of its trajectory, which was not sampled."""
        ids = np.array(self._encode(privileged_text(trajectory)), np.int64)
        zeros = np.zeros(len(ids), np.float32)
        return replace(
            row,
            token_ids=np.append(ids, row.token_ids),
            loss_mask=np.append(zeros, row.loss_mask),
            logprobs=np.append(zeros, row.logprobs),
            versions=np.append(np.full(len(ids), -1), row.versions),
            advantages=np.append(zeros, row.advantages),
            allowed=None if row.allowed is None else np.append(np.zeros(len(ids), np.int64), row.allowed),
        )


def privileged_text(trajectory: Trajectory) -> str:
    """Return the text to show to the critic. Raises ``ConfigError`` if the sample has none."""
    held = trajectory.privileged
    if not isinstance(held, Mapping) or not held:
        raise ConfigError(
            f"credit 'sweet' shows data['privileged'] of a sample to its critic, but samples of task "
            f"{trajectory.sample.task!r} have no such data: use another credit for this task"
        )
    texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in held.items()}
    return PREFIX + "".join(f"{name}: {text}\n" for name, text in texts.items())


def differences(left: Sequence[Values], right: Sequence[Values]) -> list[Values]:
    """Return the differences of arrays that have the same lengths."""
    return [a - b for a, b in zip(left, right, strict=True)]
