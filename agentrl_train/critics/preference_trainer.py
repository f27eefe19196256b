"""Credit by a critic with privileged information (SWEET-RL): advantages of turns, and its preferences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl_train.advantage import Values
from agentrl_train.algorithm import shaping_function
from agentrl_train.batch import completions, pack
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import Sweet
from agentrl_train.critics.critic_trainer import (
    REPORTED,
    all_rows,
    of_rows,
    rows_of_trajectories,
    sampled,
    spread,
    trained_rows,
)
from agentrl_train.critics.estimation import selection_function
from agentrl_train.critics.gae import turn_numbers
from agentrl_train.critics.networks import PrivilegedCritic
from agentrl_train.critics.sweet import dpo, drawn_pairs, preference_loss, turn_means
from agentrl_train.errors import ConfigError
from agentrl_train.storage.checkpoint import Part
from agentrl_train.types import FloatArray, TokenSequence, Trajectory, TrajectoryGroup

PREFIX = "In light of what is known about this task:\n"
"""Text in front of the privileged information."""


class PreferenceTrainer:
    """Gives turns their advantages by a privileged critic, and trains it on pairs of sibling trajectories."""

    def __init__(
        self,
        critic: PrivilegedCritic,
        *,
        encode: Callable[[str], Sequence[int]],
        settings: Sweet,
        algorithm: AlgorithmSection,
        train: TrainSection,
        max_context: int,
        seed: int = 0,
    ) -> None:
        self._critic = critic
        self._encode = encode
        self._settings = settings
        self._train = train
        self._seed = seed
        self._shaped = shaping_function(algorithm, max_context=max_context)
        self._select = selection_function(algorithm)
        self._groups: Sequence[TrajectoryGroup] = ()
        self._plain: Sequence[TokenSequence] = ()
        self._shown: Sequence[TokenSequence] = ()
        self._reference: Sequence[FloatArray] = ()
        self._facts: dict[str, float] = {}
        """Metrics of the pairs of the last ``rows``."""

    def alone(self, step: int) -> bool:
        """Return whether only the critic learns in a step, counted from 1."""
        return step <= self._settings.warmup_steps

    def rows(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the rows of the trajectories that are trained on, each turn with its advantage.

        With ``pairs`` they are the completions of its pairs instead, whose policy gradient is that of
        DPO.

        Raises:
            ConfigError: a sample has no privileged information.
        """
        plain, shown = self._both(groups)
        reference = self._critic.reference_logprobs(plain)
        self._groups, self._plain, self._shown, self._reference = groups, plain, shown, reference
        if self._settings.pairs:
            return self._compared(groups)
        ratios = _ratios(self._critic.logprobs(shown), reference, shown, plain)
        means = self._turn_means(groups, plain, ratios)
        found = [
            [by_turn[turn_numbers(one)] for one, by_turn in zip(group.trajectories, own, strict=True)]
            for group, own in zip(groups, means, strict=True)
        ]
        advantages = self._select(groups, [self._shaped(group) for group in groups], found)
        return trained_rows(plain, advantages, rows_of_trajectories(groups, plain))

    def learn(self, *, step: int) -> dict[str, float]:
        """Update the critic with the pairs of siblings whose returns differ; return metrics.

        ``preference_accuracy`` is the share of pairs that the critic orders as their returns do, before the
        update.

        Raises:
            BadUpdate: an update was rejected.
        """
        if not self._plain:
            return {}
        found: dict[str, float] = {}
        for number in range(self._settings.passes):
            rows, facts = self._preferences(self._groups, self._plain, self._shown, self._reference)
            if not facts["preference_pairs"]:
                return self._facts | facts
            batches = pack(
                rows,
                aggregation="token_mean",
                max_tokens=self._train.micro_batch_tokens,
                seed=self._seed + step * self._settings.passes + number,
                packed=self._critic.packs_rows,
                shared=self._critic.shares_prefixes,
            )
            done = self._critic.step(batches)
            own = {REPORTED[name]: done[name] for name in ("grad_norm", "loss_tokens", "seconds")}
            found = own | facts | found  # the facts before the first update
        return self._facts | found

    def parts(self) -> list[Part]:
        """Return a copy of the state of the critic, for a checkpoint."""
        return [self._critic.snapshot()]

    def load(self, folder: Path) -> None:
        """Restore what ``parts`` wrote."""
        self._critic.load(folder)

    def _preferences(
        self,
        groups: Sequence[TrajectoryGroup],
        plain: Sequence[TokenSequence],
        shown: Sequence[TokenSequence],
        reference: Sequence[FloatArray],
    ) -> tuple[list[TokenSequence], dict[str, float]]:
        """Return rows whose policy gradient is that of the preferences' loss, and what the critic prefers.

        The gradient of the loss by the log-probability of a token is that by the score of its trajectory,
        divided by the tokens of its turn; its negative is the advantage of the token.
        """
        logprobs = self._critic.logprobs(shown)
        means = self._turn_means(groups, plain, _ratios(logprobs, reference, shown, plain))
        total, pairs, right = 0.0, 0, 0
        slopes: list[list[Values | None]] = []
        for group, own in zip(groups, means, strict=True):
            returns, scores = self._shaped(group).returns, np.array([one.sum() for one in own])
            loss, gradient, count = preference_loss(scores, returns, beta=self._settings.beta)
            better = returns[:, None] > returns[None, :]
            right += int((better & (scores[:, None] > scores[None, :])).sum())
            total, pairs = total + loss, pairs + count
            slopes.append([])
            for one, slope in zip(group.trajectories, gradient, strict=True):
                turns = turn_numbers(one)
                slopes[-1].append(-slope / np.bincount(turns)[turns] if len(turns) else np.zeros(0))
        found = of_rows(slopes, rows_of_trajectories(groups, plain), shown)
        scale = sum(int(row.loss_mask.sum()) for row in shown) / max(1, pairs)  # undoes the mean over tokens
        rows = [
            replace(row, logprobs=before, advantages=spread(value * scale, row))
            for row, before, value in zip(shown, logprobs, found, strict=True)
            if value is not None
        ]
        return rows, {
            "preference_loss": total / max(1, pairs),
            "preference_accuracy": right / max(1, pairs),
            "preference_pairs": float(pairs),
        }

    def _compared(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the completions in the pairs of all turns, whose policy gradient is that of DPO.

        Aggregated by ``token_mean`` it is that of the mean over pairs, with the sampler's log-probabilities.
        """
        settings = self._settings
        kept = self._select(groups, [self._shaped(group) for group in groups], _zeros(groups))
        turns = [
            (privileged_text(one), rows)
            for group, values in zip(groups, kept, strict=True)
            for one, value in zip(group.trajectories, values, strict=True)
            if value is not None
            for rows in completions(one, group)
        ]
        plain = [row for _, rows in turns for row in rows]
        ids = {text: np.array(self._encode(text), np.int64) for text, _ in turns}
        shown = [_behind(ids[text], row) for text, rows in turns for row in rows]
        reference = self._critic.reference_logprobs(plain)
        ratios = _ratios(self._critic.logprobs(shown), reference, shown, plain)
        advantages = np.array([one.mean() for one in ratios])
        behaviour = zip(plain, reference, strict=True)
        scores = np.array([(sampled(row.logprobs, row) - sampled(old, row)).sum() for row, old in behaviour])
        generator = np.random.default_rng((self._seed, *(group.group_id for group in groups)))
        pairs, end = [], 0
        for _, rows in turns:
            begin, end = end, end + len(rows)
            drawn = drawn_pairs(advantages[begin:end], count=settings.pairs, generator=generator)
            pairs += [(begin + better, begin + worse) for better, worse in drawn]
        pairs = [(i, j) for i, j in pairs if not np.array_equal(plain[i].token_ids, plain[j].token_ids)]
        sizes = np.array([len(one) for one in ratios])
        loss, slopes = dpo(scores, pairs, sizes=sizes, beta=settings.beta, likelihood=settings.likelihood)
        self._facts = {"dpo_pairs": float(len(pairs)), "dpo_loss": loss}
        chosen = np.flatnonzero(slopes)
        by_token = -slopes * sizes[chosen].sum()  # undoes the mean over tokens
        return [
            replace(plain[number], advantages=plain[number].loss_mask * np.float32(by_token[number]))
            for number in chosen
        ]

    def _both(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """Return the rows of all trajectories, without and with the privileged information in front."""
        plain = all_rows(groups)
        shown = list(plain)
        of_groups = rows_of_trajectories(groups, plain)
        for group, own in zip(groups, of_groups, strict=True):
            for one, numbers in zip(group.trajectories, own, strict=True):
                ids = np.array(self._encode(privileged_text(one)), np.int64) if numbers else None
                for number in numbers:
                    shown[number] = _behind(ids, plain[number]) if ids is not None else plain[number]
        return plain, shown

    def _turn_means(
        self, groups: Sequence[TrajectoryGroup], plain: Sequence[TokenSequence], ratios: Sequence[Values]
    ) -> list[list[Values]]:
        """Return the advantages of the turns of each trajectory of each group."""
        return [
            [
                turn_means(
                    np.concatenate([np.zeros(0), *(ratios[number] for number in numbers)]),
                    turn_numbers(one),
                    count=len(one.turns),
                )
                for one, numbers in zip(group.trajectories, own, strict=True)
            ]
            for group, own in zip(groups, rows_of_trajectories(groups, plain), strict=True)
        ]


def _zeros(groups: Sequence[TrajectoryGroup]) -> list[list[Values]]:
    """Return a zero for each token sampled in each trajectory of each group."""
    return [[np.zeros(one.num_sampled_tokens) for one in group.trajectories] for group in groups]


def privileged_text(trajectory: Trajectory) -> str:
    """Return what the critic is shown of a sample; raises ``ConfigError`` if it has nothing to show."""
    held = trajectory.privileged
    if not isinstance(held, Mapping) or not held:
        raise ConfigError(
            f"credit 'sweet' shows its critic what a sample holds as data['privileged'], and samples of task "
            f"{trajectory.sample.task!r} hold nothing there: use another credit for this task"
        )
    texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in held.items()}
    return PREFIX + "".join(f"{name}: {text}\n" for name, text in texts.items())


def _behind(ids: np.ndarray, row: TokenSequence) -> TokenSequence:
    """Return a row with tokens in front that were not sampled."""
    zeros = np.zeros(len(ids), np.float32)
    return replace(
        row,
        token_ids=np.append(ids, row.token_ids),
        loss_mask=np.append(zeros, row.loss_mask),
        logprobs=np.append(zeros, row.logprobs),
        versions=np.append(np.full(len(ids), -1), row.versions),
        advantages=np.append(zeros, row.advantages),
    )


def _ratios(
    logprobs: Sequence[FloatArray],
    reference: Sequence[FloatArray],
    shown: Sequence[TokenSequence],
    plain: Sequence[TokenSequence],
) -> list[Values]:
    """Return the log-ratios of the sampled tokens of each row."""
    return [
        sampled(ours, with_) - sampled(theirs, without)
        for ours, theirs, with_, without in zip(logprobs, reference, shown, plain, strict=True)
    ]
