"""Credit by twin critics of turns (ArCHer): advantages, replayed episodes, and the critics' update."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl_train.advantage import TRUNCATED, Shaped, Values, rewards_to_go
from agentrl_train.algorithm import shaping_function
from agentrl_train.batch import pack
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import Archer
from agentrl_train.critics.archer import twin_advantages, twin_targets
from agentrl_train.critics.critic_trainer import all_rows, reported, rows_of_trajectories, trained_rows
from agentrl_train.critics.estimation import selection_function
from agentrl_train.critics.gae import turn_numbers, turn_order
from agentrl_train.critics.networks import TwinCritic
from agentrl_train.errors import ConfigError
from agentrl_train.storage.checkpoint import Part
from agentrl_train.storage.journal import decode_group, encode_group, frame, read_records
from agentrl_train.types import FloatArray, TokenSequence, Trajectory, TrajectoryGroup

REPLAY = "replay.bin"
"""File of the groups of earlier steps in the folder of the critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A ``Part``: the groups that turns are learned from again."""

    groups: Sequence[TrajectoryGroup]

    def write(self, folder: Path) -> None:
        """Write the file of the groups."""
        (folder / REPLAY).write_bytes(b"".join(frame(encode_group(group)) for group in self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The trajectories with tokens of some groups, and their rows with marked turns."""

    trajectories: Sequence[tuple[Trajectory, Values]]
    """Each with the rewards of its turns, less the penalties."""
    rows: Sequence[TokenSequence]
    owned: Sequence[Sequence[int]]
    """Numbers of the rows of each trajectory."""

    def by_turn(self, values: Sequence[FloatArray]) -> list[tuple[Values, Values]]:
        """Return V and Q of the turns of each trajectory, [U, 2] each, from the twin values of the rows."""
        marked = [
            one[row.loss_mask > 0].astype(np.float64) for one, row in zip(values, self.rows, strict=True)
        ]
        found = []
        for (trajectory, _), own in zip(self.trajectories, self.owned, strict=True):
            order = turn_order(trajectory)
            both = np.zeros((2, len(order), 2))
            both[:, order] = (
                np.concatenate([marked[number] for number in own]).reshape(-1, 2, 2).swapaxes(0, 1)
            )
            found.append((both[0], both[1]))
        return found

    def with_targets(self, targets: Sequence[tuple[Values, Values]]) -> list[TokenSequence]:
        """Return the rows with what V and Q of the turns of each trajectory are to become, [U, 2] each."""
        rows = list(self.rows)
        for (trajectory, _), own, (values, actions) in zip(
            self.trajectories, self.owned, targets, strict=True
        ):
            order = turn_order(trajectory)
            marks = np.stack([values[order], actions[order]], axis=1).reshape(-1, 2)
            for number in own:
                here, row = int(rows[number].loss_mask.sum()), rows[number]
                first, second = np.zeros((2, len(row)), np.float32)
                first[row.loss_mask > 0], second[row.loss_mask > 0] = marks[:here].T
                rows[number], marks = replace(row, logprobs=first, advantages=second), marks[here:]
        return rows


class TurnCriticTrainer:
    """Gives turns their advantages by twin critics, and trains these on new and on replayed episodes."""

    def __init__(
        self,
        critic: TwinCritic,
        *,
        settings: Archer,
        algorithm: AlgorithmSection,
        train: TrainSection,
        max_context: int,
        seed: int = 0,
    ) -> None:
        self._critic = critic
        self._settings = settings
        self._gamma = settings.gamma
        self._select = selection_function(algorithm)
        self._train = train
        self._seed = seed
        self._shaped = shaping_function(algorithm, max_context=max_context)
        self._replay: deque[TrajectoryGroup] = deque(maxlen=settings.replay)
        self._groups: Sequence[TrajectoryGroup] = ()
        self._fresh = Marked(trajectories=(), rows=(), owned=())
        self._values: list[tuple[Values, Values]] = []

    def alone(self, step: int) -> bool:
        """Return whether only the critics learn in a step, counted from 1."""
        return step <= self._settings.warmup_steps

    def rows(self, groups: Sequence[TrajectoryGroup]) -> list[TokenSequence]:
        """Return the rows of the trajectories that are trained on, each turn with its advantage.

        Raises:
            ConfigError: a turn has no tokens, or follows the one before it without tokens between them.
        """
        self._groups, self._fresh = groups, self._marked(groups)
        self._values = self._fresh.by_turn(self._critic.values(self._fresh.rows))
        by_turn = iter([twin_advantages(*pair) for pair in self._values])
        found = [
            [
                next(by_turn)[turn_numbers(one)] if one.num_sampled_tokens else np.zeros(0)
                for one in group.trajectories
            ]
            for group in groups
        ]
        advantages = self._select(groups, [self._shaped(group) for group in groups], found)
        rows = all_rows(groups)
        return trained_rows(rows, advantages, rows_of_trajectories(groups, rows))

    def learn(self, *, step: int) -> dict[str, float]:
        """Learn from the episodes of the last ``rows`` and, with replay, as many groups of earlier steps.

        V is learned from the former alone, whose actions are those of the policy; Q from both.
        ``explained_variance`` is that of the discounted rewards to go by V before the update.

        Raises:
            BadUpdate: an update was rejected.
        """
        train, fresh = self._train, self._fresh
        if not fresh.rows:
            return {}
        found: dict[str, float] = {}
        for number in range(self._settings.passes):
            draw = np.random.default_rng((self._seed, step, number))
            size = min(len(self._groups), len(self._replay))
            again = self._marked(
                [self._replay[i] for i in draw.choice(len(self._replay), size, replace=False)]
            )
            rows = self._targets(fresh, on_policy=True) + self._targets(again, on_policy=False)
            batches = pack(
                rows,
                aggregation="token_mean",
                max_tokens=train.micro_batch_tokens,
                num_minibatches=train.minibatches,
                seed=self._seed + step * self._settings.passes + number,
                packed=self._critic.packs_rows,
                shared=self._critic.shares_prefixes,
            )
            found = self._critic.step(batches)
        self._replay.extend(self._groups)
        returns = np.concatenate([rewards_to_go(rewards, self._gamma) for _, rewards in fresh.trajectories])
        values = np.concatenate([before.min(-1) for before, _ in self._values])
        return reported(found, values, returns)

    def parts(self) -> list[Part]:
        """Return copies of the state of the critics and of the replayed episodes, for a checkpoint."""
        return [self._critic.snapshot(), Replayed(groups=tuple(self._replay))]

    def load(self, folder: Path) -> None:
        """Restore what ``parts`` wrote."""
        self._critic.load(folder)
        self._replay.extend(decode_group(record) for record in read_records((folder / REPLAY).read_bytes()))

    def _targets(self, marked: Marked, *, on_policy: bool) -> list[TokenSequence]:
        """Return rows with their targets, without those of V for the actions of an older policy."""
        found = []
        pairs = marked.by_turn(self._critic.target_values(marked.rows)) if marked.rows else []
        for (trajectory, rewards), (values, actions) in zip(marked.trajectories, pairs, strict=True):
            last = values[-1] if trajectory.end in TRUNCATED else 0.0
            of_states, of_actions = twin_targets(rewards, values, actions, gamma=self._gamma, bootstrap=last)
            found.append((of_states if on_policy else np.full_like(of_states, np.nan), of_actions))
        return marked.with_targets(found)

    def _marked(self, groups: Sequence[TrajectoryGroup]) -> Marked:
        rows = all_rows(groups)
        shaped: list[Shaped] = [self._shaped(group) for group in groups]
        owned = [own for per_group in rows_of_trajectories(groups, rows) for own in per_group if own]
        played = [
            (one, rewards)
            for group, own in zip(groups, shaped, strict=True)
            for one, rewards in zip(group.trajectories, own.rewards, strict=True)
            if one.num_sampled_tokens
        ]
        for (one, _), own in zip(played, owned, strict=True):
            if sum(int(turn_row(rows[number]).loss_mask.sum()) for number in own) != 2 * len(one.turns):
                raise ConfigError(
                    "credit 'archer' needs tokens in each turn, and tokens of the environment between turns: "
                    "use another credit for this task"
                )
        return Marked(trajectories=played, rows=[turn_row(row) for row in rows], owned=owned)


def turn_row(row: TokenSequence) -> TokenSequence:
    """Return a row, with one token more, that is marked where turns begin and at the tokens after them."""
    mask = np.append(row.loss_mask, np.float32(0.0))
    marks = (np.diff(mask, prepend=np.float32(0.0)) != 0).astype(np.float32)
    return replace(
        row,
        token_ids=np.append(row.token_ids, row.token_ids[-1]),
        loss_mask=marks,
        logprobs=np.zeros_like(marks),
        versions=np.where(marks > 0, 0, -1),
        advantages=np.zeros_like(marks),
    )
