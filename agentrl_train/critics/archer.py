"""ArCHer (arXiv 2402.19446): twin critics of turns, by temporal differences with target networks.

A turn is an action, and its tokens share its advantage. ``values`` are V(s) of the states before U turns, and
``actions`` are Q(s, a) of the turns, [U, 2] each, with a column for each twin. A row is marked at the first
token of a turn and at the first token after it. The critic reads V before the former and Q before the latter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentrl_train.advantage import TRUNCATED, Values, rewards_to_go
from agentrl_train.config.credit import Archer
from agentrl_train.critics.gae import fit_metrics, turn_numbers, turn_order
from agentrl_train.critics.networks import TwinCritic
from agentrl_train.critics.strategy import (
    EpisodeRows,
    Fit,
    Select,
    Shape,
    Strategy,
    episode_rows,
    sampled,
    spread,
)
from agentrl_train.errors import ConfigError
from agentrl_train.storage.checkpoint import Part
from agentrl_train.storage.journal import decode_group, encode_group, frame, read_records
from agentrl_train.types import FloatArray, TokenSequence, TrajectoryGroup

REPLAY = "replay.bin"
"""File of the groups of earlier steps in the folder of the critic."""


def twin_targets(
    rewards: Values, values: Values, actions: Values, *, gamma: float, bootstrap: Values | float = 0.0
) -> tuple[Values, Values]:
    """Return the targets of V and Q, [U, 2] each, from the values of the target networks.

    ``V(s_u) -> Q'(s_u, a_u)`` for an action of the policy, and ``Q(s_u, a_u) -> r_u + gamma V'(s_(u+1))``.

    Args:
        rewards: rewards of the turns, [U].
        values: V' of the target networks.
        actions: Q' of the target networks.
        gamma: discount of a turn.
        bootstrap: V' of the state after the last turn; 0 if the episode terminated.
    """
    after = np.concatenate([values[1:], np.broadcast_to(bootstrap, (min(1, len(values)), 2))])
    return actions.copy(), rewards[:, None] + gamma * after


def twin_advantages(values: Values, actions: Values) -> Values:
    """Return ``min(Q1, Q2) - min(V1, V2)`` of each turn, [U]."""
    found: Values = actions.min(-1) - values.min(-1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A ``Part``: the groups of earlier steps."""

    groups: Sequence[TrajectoryGroup]

    def write(self, folder: Path) -> None:
        """Write the file of the groups."""
        (folder / REPLAY).write_bytes(b"".join(frame(encode_group(group)) for group in self.groups))


class TwinStrategy(Strategy):
    """Learns the values of states from new episodes, and the values of turns also from replayed ones."""

    critic: TwinCritic

    def __init__(self, critic: TwinCritic, *, settings: Archer, shape: Shape, seed: int) -> None:
        self.critic = critic
        self._passes = settings.passes
        self._gamma = settings.gamma
        self._shape = shape
        self._seed = seed
        self._replay: deque[TrajectoryGroup] = deque(maxlen=settings.replay)
        self._fresh = EpisodeRows(groups=(), shaped=(), rows=())
        self._values: list[tuple[Values, Values]] = []

    def rows(self, played: EpisodeRows, select: Select) -> list[TokenSequence]:
        """Return rows in which all tokens of a turn have its advantage.

        Raises:
            ConfigError: a turn has no tokens, or follows the turn before it without tokens between them.
        """
        self._fresh = marked(played)
        self._values = by_turn(self._fresh, self.critic.values(self._fresh.rows))
        advantages = [
            twin_advantages(*pair)[turn_numbers(trajectory)]
            for trajectory, pair in zip(played.trajectories, self._values, strict=True)
        ]
        return played.with_advantages(select(advantages))

    def learn(self, fit: Fit, *, step: int) -> dict[str, float]:
        """Learn from the new episodes and, with replay, from the same number of groups of earlier steps.

        V is learned only from the new episodes, because the policy chose their actions.
        ``explained_variance`` compares V before the update with the discounted rewards to go.
        """
        fresh, metrics = self._fresh, dict[str, float]()
        for number in range(self._passes):
            draw = np.random.default_rng((self._seed, step, number))
            size = min(len(fresh.groups), len(self._replay))
            chosen = draw.choice(len(self._replay), size, replace=False)
            again = marked(episode_rows([self._replay[i] for i in chosen], self._shape))
            rows = self.targets(fresh, on_policy=True) + self.targets(again, on_policy=False)
            metrics = fit(rows, [number])
        self._replay.extend(fresh.groups)
        values = [before.min(-1) for before, _ in self._values]
        returns = [
            rewards_to_go(rewards, self._gamma)[: len(value)]
            for rewards, value in zip(fresh.rewards, values, strict=True)
        ]
        return metrics | fit_metrics(np.concatenate(values), np.concatenate(returns))

    def parts(self) -> list[Part]:
        """Return copies of the state of the critic and of the replayed groups, for a checkpoint."""
        return [*super().parts(), Replayed(groups=tuple(self._replay))]

    def load(self, folder: Path) -> None:
        """Restore the state that ``parts`` wrote."""
        super().load(folder)
        self._replay.extend(decode_group(record) for record in read_records((folder / REPLAY).read_bytes()))

    def targets(self, played: EpisodeRows, *, on_policy: bool) -> list[TokenSequence]:
        """Return marked rows with the targets of both twins. V has none for an older policy's actions."""
        if not played.rows:
            return []
        marks = []
        pairs = by_turn(played, self.critic.target_values(played.rows))
        for trajectory, rewards, (values, actions) in zip(
            played.trajectories, played.rewards, pairs, strict=True
        ):
            last = values[-1:] if trajectory.end in TRUNCATED else 0.0
            of_states, of_actions = twin_targets(
                rewards[: len(values)], values, actions, gamma=self._gamma, bootstrap=last
            )
            if not on_policy:
                of_states = np.full_like(of_states, np.nan)
            order = turn_order(trajectory)[: len(values)]
            marks.append(np.stack([of_states[order], of_actions[order]], axis=1).reshape(-1, 2))
        return [
            replace(row, logprobs=spread(targets[:, 0], row), advantages=spread(targets[:, 1], row))
            for row, targets in zip(played.rows, played.by_row(marks), strict=True)
        ]


def by_turn(played: EpisodeRows, values: Sequence[FloatArray]) -> list[tuple[Values, Values]]:
    """Return V and Q of the turns of each trajectory from the twin values of marked rows.

    A trajectory without tokens has no values.
    """
    pairs, by_trajectory = [], played.by_trajectory(sampled(values, played.rows))
    for trajectory, marks in zip(played.trajectories, by_trajectory, strict=True):
        if len(marks) not in (0, 2 * len(trajectory.turns)):
            raise ConfigError(
                "credit 'archer' needs tokens in each turn, and tokens of the environment between turns: "
                "use another credit for this task"
            )
        order = turn_order(trajectory)[: len(marks) // 2]
        both = np.zeros((2, len(order), 2))
        both[:, order] = marks.reshape(-1, 2, 2).swapaxes(0, 1)
        pairs.append((both[0], both[1]))
    return pairs


def marked(played: EpisodeRows) -> EpisodeRows:
    """Return the trajectories with marked rows."""
    return replace(played, rows=[turn_row(row) for row in played.rows])


def turn_row(row: TokenSequence) -> TokenSequence:
    """Return a row with one more token, marked at the first token of each turn and the first one after it."""
    mask = np.append(row.loss_mask, np.float32(0.0))
    marks = (np.diff(mask, prepend=np.float32(0.0)) != 0).astype(np.float32)
    return replace(
        row,
        token_ids=np.append(row.token_ids, row.token_ids[-1]),
        loss_mask=marks,
        logprobs=np.zeros_like(marks),
        versions=np.where(marks > 0, 0, -1),
        advantages=np.zeros_like(marks),
        allowed=None,
        allowed_sets=None,
    )
