"""Self-imitation: episodes of a run that did well are trained on once more (SPEAR, arXiv 2509.22601).

A buffer is never changed: each method returns a new one. In each step, in this order::

    with_returns   the mean returns of the step's groups join a history, first in, first out
    draw           a few earlier episodes leave it, with the advantage R - quantile(history of the task)
    with_episodes  the step's episodes with a positive advantage join it

The advantage is computed again, because the baseline of an episode is out of date once the policy is better.
An episode with an advantage below 0 leaves the buffer untrained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from agentrl_train.advantage import Values
from agentrl_train.storage.journal import decode_group, encode_group, frame, read_records
from agentrl_train.types import Batch, TrajectoryGroup

REPLAY = "replay.bin"
"""File of the buffer in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An episode in the buffer."""

    group: TrajectoryGroup
    """Its group, reduced to this episode."""
    earned: float
    """Its return, penalties included."""
    step: int
    """Step that first trained on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A ``Part`` of a checkpoint: the buffer, oldest episodes first, and the history of mean returns."""

    episodes: tuple[Kept, ...] = ()
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Task -> mean returns of its groups, oldest first."""

    def with_returns(
        self, groups: Sequence[TrajectoryGroup], returns: Sequence[Values], *, length: int
    ) -> Replay:
        """Return the buffer with the mean returns of groups added to its history of ``length`` per task."""
        history = dict(self.history)
        for group, earned in zip(groups, returns, strict=True):
            history[group.task] = (*history.get(group.task, ()), float(earned.mean()))[-length:]
        return replace(self, history=history)

    def baselines(self, quantile: float = 0.5) -> dict[str, float]:
        """Return the baseline of each task: a quantile of its history."""
        return {task: float(np.quantile(means, quantile)) for task, means in self.history.items()}

    def draw(
        self, *, step: int, count: int, max_age: int, quantile: float, seed: Sequence[int]
    ) -> tuple[list[tuple[TrajectoryGroup, float]], Replay]:
        """Return episodes to train on with their advantages, and the buffer without them.

        Args:
            step: number of the step.
            count: episodes to draw, at most.
            max_age: steps after which an episode leaves the buffer.
            quantile: quantile of the history that is the baseline.
            seed: seed of the draw.
        """
        baselines = self.baselines(quantile)
        recent = [one for one in self.episodes if step - one.step <= max_age]
        worth = [(one.earned - baselines[one.group.task], one) for one in recent]
        good = [(value, one) for value, one in worth if value >= 0.0]
        chosen = set(np.random.default_rng(seed).permutation(len(good))[:count].tolist())
        found = [(one.group, value) for i, (value, one) in enumerate(good) if i in chosen]
        rest = tuple(one for i, (_, one) in enumerate(good) if i not in chosen)
        return found, replace(self, episodes=rest)

    def with_episodes(
        self,
        groups: Sequence[TrajectoryGroup],
        returns: Sequence[Values],
        advantages: Sequence[Sequence[Values | None]],
        *,
        step: int,
        size: int,
    ) -> Replay:
        """Return the buffer with the episodes whose mean advantage is positive, cut to ``size``."""
        new = [
            Kept(group=replace(group, trajectories=(one,), greedy=None), earned=float(total), step=step)
            for group, earned, values in zip(groups, returns, advantages, strict=True)
            for one, total, value in zip(group.trajectories, earned, values, strict=True)
            if value is not None and one.num_sampled_tokens and float(value.mean()) > 0.0
        ]
        return replace(self, episodes=(*self.episodes, *new)[-size:])

    def write(self, folder: Path) -> None:
        """Write the buffer into a checkpoint, unless it was never used."""
        if not self.history:
            return
        head = {"history": dict(self.history), "episodes": [[one.earned, one.step] for one in self.episodes]}
        records = [json.dumps(head).encode(), *(encode_group(one.group) for one in self.episodes)]
        (folder / REPLAY).write_bytes(b"".join(frame(record) for record in records))


def read_replay(folder: Path) -> Replay:
    """Return the replay buffer of a checkpoint, or an empty one if the checkpoint has none."""
    path = folder / REPLAY
    if not path.exists():
        return Replay()
    head, *records = read_records(path.read_bytes())
    state = json.loads(head)
    episodes = [
        Kept(group=decode_group(record), earned=earned, step=step)
        for record, (earned, step) in zip(records, state["episodes"], strict=True)
    ]
    history = {task: tuple(means) for task, means in state["history"].items()}
    return Replay(episodes=tuple(episodes), history=history)


def join(batches: Sequence[Batch], others: Sequence[Batch], *, weight: float) -> list[Batch]:
    """Return the batches with the micro-batches of ``others`` added, their loss multiplied by ``weight``."""
    found = []
    for one, other in zip_longest(batches, others):
        parts = [part for part in (one, other) if part is not None]
        weighed = [] if other is None else other.micro_batches
        lowered = [replace(micro, weights=micro.weights * weight) for micro in weighed]
        found.append(
            Batch(
                micro_batches=[*([] if one is None else one.micro_batches), *lowered],
                num_sequences=sum(part.num_sequences for part in parts),
                num_loss_tokens=sum(part.num_loss_tokens for part in parts),
                num_tokens=sum(part.num_tokens for part in parts),
                num_slots=sum(part.num_slots for part in parts),
            )
        )
    return found
