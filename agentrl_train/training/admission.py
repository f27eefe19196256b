"""Admission control: the task mixture, and a windowed FIFO bound on staleness.

Pure bookkeeping without clocks or tasks; the loop calls it from one thread::

            admit()                finish(id)              take()             trained()
    Mixer ----------> in flight ----------------> finished --------> training ---------> trained
                          | drop(id): frees the slot; the next admit() returns the replacement

A step trains P groups. S is the allowed staleness and W the look-ahead. Groups are ranked in the order of
admission, not counting dropped groups. At step t (t steps are trained):

- a group of rank r can start if ``r < (t + 1 + S) P``: it occupies a slot from admission until it is trained;
- the trainer takes any P finished groups of rank ``r < (t + 1) P + W - 1``, oldest first;
- a group of rank ``r < (t + 1 - C) P``, ``C = ceil((W - 1) / P)``, is due: the trainer waits for it.

A group is therefore trained at most ``S + C`` steps after its admission. No group is discarded for its age,
and the trainer waits for long episodes, so that lengths are not biased. At most P groups are due at a time,
and all of them are in flight, so training cannot deadlock. ``S = 0`` is synchronous, ``W = 1`` strict FIFO.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from agentrl_train.config import AlgorithmSection, RolloutSection
from agentrl_train.config.sections import RunSection
from agentrl_train.errors import ConfigError
from agentrl_train.placement.environments import Served
from agentrl_train.storage.checkpoint import Checkpoint
from agentrl_train.types import IntArray, TaskSource, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedGroup:
    """An admitted group and its sample."""

    group_id: int
    """Number of the draw, unique in a run; it determines the sample."""
    task: str
    split: str
    index: int
    seed: int
    admitted_version: int


MAX_PERMUTED = 10_000_000
"""Splits above this size are drawn with replacement, because their permutation would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sample drawn from the mixture."""

    task: str
    split: str
    index: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New levels and weights of all tasks, which apply from one draw on."""

    draw: int
    """Number of the first draw that it applies to."""
    levels: Mapping[str, int]
    weights: Mapping[str, float]


class Mixer:
    """An endless, deterministic sequence of samples, weighted by task.

    Tasks alternate by smooth weighted round robin, so the share of each task is accurate to about one draw at
    any time. A finite split is traversed in a new seeded permutation in each epoch, and an unlimited split in
    the order 0, 1, 2...

    Shares are counted in groups. With ``by_tokens``, ``count`` and ``rebalance`` change them to shares of the
    trained tokens: a task whose groups have twice the tokens is drawn half as often.

    Args:
        sources: the tasks.
        seed: seed of the permutations and of the episodes.
        harder: task -> its harder levels. Their weights are not used.
        changes: earlier changes of levels and weights in this run, in order.
        by_tokens: let ``rebalance`` change the shares.
    """

    def __init__(
        self,
        sources: Sequence[TaskSource],
        *,
        seed: int,
        harder: Mapping[str, Sequence[TaskSource]] = MappingProxyType({}),
        changes: Sequence[Change] = (),
        by_tokens: bool = False,
    ) -> None:
        if not sources:
            raise ValueError("there is no task to draw from; give at least one.")
        if len({source.task for source in sources}) != len(sources):
            raise ValueError("a task is listed twice; give each task one weight.")
        for source in (*sources, *(one for levels in harder.values() for one in levels)):
            if not (source.weight > 0.0 and math.isfinite(source.weight)):
                raise ValueError(f"task {source.task!r} has weight {source.weight}; use one above 0.")
            if source.num_samples is not None and source.num_samples < 1:
                raise ValueError(f"split {source.split!r} of task {source.task!r} has no samples.")
        self._sources = {source.task: (source, *harder.get(source.task, ())) for source in sources}
        """Task -> its levels."""
        self.fixed_weights: Mapping[str, float] = {source.task: source.weight for source in sources}
        """Weight of each task before any change."""
        self._weights, self._levels = dict(self.fixed_weights), dict.fromkeys(self._sources, 0)
        self._changes = list(changes)
        self._planned = list(changes)
        self._seed = seed
        self._by_tokens = by_tokens
        self._credit = {source.task: 0.0 for source in sources}
        self._drawn = {self._name(task, one): 0 for task, levels in self._sources.items() for one in levels}
        """Number of draws by task, or by task and split for a harder level."""
        self._cost = {source.task: 1.0 for source in sources}
        """Tokens per group of a task, relative to the mean over tasks."""
        self._next_cost: tuple[int, dict[str, float]] | None = None
        self._counted: dict[str, tuple[float, int]] = {}
        self._order: dict[tuple[str, str, int], IntArray] = {}

    @property
    def num_drawn(self) -> int:
        """Number of draws so far."""
        return sum(self._drawn.values())

    @property
    def levels(self) -> Mapping[str, int]:
        """Level of each task, from 0."""
        return self._levels

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each task."""
        return self._weights

    @property
    def has_planned(self) -> bool:
        """Return True if changes are waiting to be applied."""
        return bool(self._planned)

    def split(self, task: str) -> str:
        """Return the split that a task is drawn from."""
        return self._sources[task][self._levels[task]].split

    def has_sample(self, group: AdmittedGroup) -> bool:
        """Return True if a split of the group's task has its sample."""
        return any(
            one.split == group.split and (one.num_samples is None or group.index < one.num_samples)
            for one in self._sources.get(group.task, ())
        )

    def plan(self, change: Change) -> None:
        """Schedule a change, which applies from its first draw on."""
        self._changes.append(change)
        self._planned.append(change)
        self._apply_planned()

    def draw(self) -> Draw:
        """Return the next sample."""
        if self._next_cost is not None and self.num_drawn >= self._next_cost[0]:
            (_, self._cost), self._next_cost = self._next_cost, None
        self._apply_planned()
        rates = {task: weight / self._cost[task] for task, weight in self._weights.items()}
        for task, rate in rates.items():
            self._credit[task] += rate
        task = max(self._credit, key=lambda name: self._credit[name])
        self._credit[task] -= sum(rates.values())
        source = self._sources[task][self._levels[task]]
        name = self._name(task, source)
        position = self._drawn[name]
        self._drawn[name] += 1
        return self._sample(source, position)

    def _name(self, task: str, source: TaskSource) -> str:
        """Return the key of a level in ``_drawn``."""
        return task if source is self._sources[task][0] else f"{task}/{source.split}"

    def _apply_planned(self) -> None:
        while self._planned and self._planned[0].draw <= self.num_drawn:
            self._set(self._planned.pop(0))

    def _set(self, change: Change) -> None:
        for task, levels in self._sources.items():
            self._levels[task] = min(change.levels.get(task, 0), len(levels) - 1)
            self._weights[task] = change.weights.get(task, self.fixed_weights[task])

    def count(self, task: str, tokens: int) -> None:
        """Count the trained tokens of a group."""
        total, groups = self._counted.get(task, (0.0, 0))
        self._counted[task] = (total + tokens, groups + 1)

    def rebalance(self, *, after: int) -> None:
        """Schedule the token counts since the last call to apply after ``after`` more draws.

        Does nothing while earlier counts are scheduled.

        A resumed run repeats draws from the last saved state, so this state must be on disk before those
        draws are made.
        """
        if not self._by_tokens or self._next_cost is not None or not self._counted:
            return
        means = {task: tokens / groups for task, (tokens, groups) in self._counted.items() if tokens}
        mean = sum(means.values()) / max(1, len(means))
        cost = {task: means[task] / mean if task in means else self._cost[task] for task in self._sources}
        self._next_cost = self.num_drawn + after, cost
        self._counted = {}

    def _sample(self, source: TaskSource, position: int) -> Draw:
        index = position
        if (size := source.num_samples) is not None:
            epoch, offset = divmod(position, size)
            if size <= MAX_PERMUTED:
                index = int(self._permutation(source, epoch, size)[offset])
            else:
                seed = sample_seed(self._seed, source.task, source.split, "index", position)
                index = int(np.random.default_rng(seed).integers(size))
        return Draw(
            task=source.task,
            split=source.split,
            index=index,
            seed=sample_seed(self._seed, source.task, source.split, position),
        )

    def _permutation(self, source: TaskSource, epoch: int, size: int) -> IntArray:
        key = (source.task, source.split, epoch)
        if key not in self._order:
            seed = sample_seed(self._seed, source.task, source.split, "order", epoch)
            self._order = {k: v for k, v in self._order.items() if k[0] != source.task}
            self._order[key] = np.random.default_rng(seed).permutation(size)
        return self._order[key]

    def state(self) -> dict[str, Any]:
        """Return the state of the sequence as JSON values."""
        return {
            "credit": dict(self._credit),
            "drawn": dict(self._drawn),
            "cost": dict(self._cost),
            "next_cost": self._next_cost,
            "counted": dict(self._counted),
            "levels": dict(self._levels),
            "weights": None if self._weights == self.fixed_weights else dict(self._weights),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state()``; tasks added since then start at their beginning."""
        for task in self._sources:
            self._credit[task] = float(state["credit"].get(task, 0.0))
            self._cost[task] = float(state["cost"].get(task, 1.0))
        self._drawn = {name: int(state["drawn"].get(name, 0)) for name in self._drawn}
        levels, weights = state.get("levels") or {}, state.get("weights") or {}
        self._set(Change(draw=0, levels=levels, weights=weights))
        self._planned = [change for change in self._changes if change.draw >= self.num_drawn]
        self._counted = {task: (float(tokens), int(n)) for task, (tokens, n) in state["counted"].items()}
        self._next_cost = None
        if state["next_cost"] is not None and state["next_cost"][1].keys() == self._sources.keys():
            self._next_cost = int(state["next_cost"][0]), dict(state["next_cost"][1])


def sample_seed(*parts: object) -> int:
    """Return a 48-bit seed that depends only on ``parts`` and is exact as a JSON number."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


class WorkWindow:
    """Admits groups and releases them to the trainer within the staleness bound.

    Args:
        mixer: source of samples.
        groups_per_step: P.
        max_staleness: S.
        window: W; capped at ``S P + 1``.
        total_steps: stop admitting once enough groups for this many steps are admitted; None is unlimited.
    """

    def __init__(
        self,
        mixer: Mixer,
        *,
        groups_per_step: int,
        max_staleness: int,
        window: int = 1,
        total_steps: int | None = None,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or window < 1:
            raise ValueError("groups_per_step and window must be at least 1, max_staleness 0.")
        self.mixer = mixer
        self._per_step = groups_per_step
        self._max_staleness = max_staleness
        self._look_ahead = min(window, max_staleness * groups_per_step + 1) - 1
        self._slack = math.ceil(self._look_ahead / groups_per_step)
        self._total_steps = total_steps
        self._steps = 0
        self._next_id = 0
        self._behind = 0
        self._trained_ahead: set[int] = set()
        self._waiting: dict[int, AdmittedGroup] = {}
        self._in_flight: dict[int, AdmittedGroup] = {}
        self._finished: set[int] = set()
        self._training: tuple[int, ...] = ()
        self._dropped = 0

    @property
    def in_flight(self) -> tuple[AdmittedGroup, ...]:
        """Admitted groups that are not finished."""
        return tuple(self._in_flight.values())

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return self._steps

    @property
    def dropped(self) -> int:
        """Number of dropped groups."""
        return self._dropped

    @property
    def finished(self) -> tuple[int, ...]:
        """Ids of the groups that are finished and not trained, including those in training."""
        return tuple(sorted(self._finished))

    @property
    def complete(self) -> bool:
        """Return True if all ``total_steps`` are trained."""
        return self._total_steps is not None and self._steps >= self._total_steps

    def admit(self, policy_version: int) -> AdmittedGroup | None:
        """Return the next group to start, or None while no slot is free."""
        group_id = min(self._waiting, default=self._next_id)
        if self._rank(group_id) >= self._admission_limit():
            return None
        group = self._draw() if group_id == self._next_id else self._waiting.pop(group_id)
        group = replace(group, admitted_version=policy_version)
        self._in_flight[group_id] = group
        return group

    def finish(self, group_id: int) -> None:
        """Mark a group as finished; raises ``KeyError`` if it is not in flight."""
        del self._in_flight[group_id]
        self._finished.add(group_id)

    def drop(self, group_id: int) -> None:
        """Drop a group whose episodes failed; the next ``admit`` replaces it with another sample.

        Raises ``KeyError`` if it is not in flight.
        """
        del self._in_flight[group_id]
        self._dropped += 1
        self._compact()

    def take(self) -> tuple[int, ...] | None:
        """Return the P groups to train on now, oldest first, or None if the trainer has to wait.

        They keep their slots until ``trained``. Raises ``RuntimeError`` while a batch is in training.
        """
        if self._training:
            raise RuntimeError("a batch is in training; call trained() before the next take().")
        ranks = self._ranks()
        due = (self._steps + 1 - self._slack) * self._per_step
        last = (self._steps + 1) * self._per_step + self._look_ahead
        pending = self._in_flight.keys() | self._waiting.keys()
        if any(ranks[group_id] < due for group_id in pending):
            return None
        ready = [group_id for group_id in sorted(self._finished) if ranks[group_id] < last]
        if len(ready) < self._per_step:
            return None
        self._training = tuple(ready[: self._per_step])
        return self._training

    def trained(self) -> None:
        """Mark the groups last taken as trained and free their slots."""
        if not self._training:
            raise RuntimeError("no batch is in training; call take() first.")
        self._finished.difference_update(self._training)
        self._trained_ahead.update(self._training)
        self._training = ()
        self._steps += 1
        self._compact()

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values; a batch in training counts as not trained."""
        unfinished = [*self._waiting.values(), *self._in_flight.values()]
        return {
            "per_step": self._per_step,
            "steps": self._steps,
            "next_id": self._next_id,
            "behind": self._behind,
            "trained_ahead": sorted(self._trained_ahead),
            "unfinished": [asdict(group) for group in unfinished],
            "finished": sorted(self._finished),
            "dropped": self._dropped,
            "mixer": self.mixer.state(),
        }

    def restore(self, state: Mapping[str, Any] | None, finished: Collection[int] = ()) -> None:
        """Restore ``state()``, or start from the beginning if it is None.

        ``finished`` are the ids of all groups whose trajectories were saved, also after ``state()`` was
        taken. Those that ``state()`` does not count as trained are finished again (``self.finished``). All
        other started groups are admitted again, with their old id and sample, before new samples. Groups
        dropped since ``state()`` are also retried, and groups of samples that the run no longer has are
        dropped. Only the groups after them can then exceed the staleness bound, by one step for every P
        retried groups.

        Raises ``ValueError`` if a finished group is missing or ``groups_per_step`` changed.
        """
        if state is not None:
            if state["per_step"] != self._per_step:
                raise ValueError(
                    f"the run started with {state['per_step']} groups per step, not {self._per_step}: "
                    "restore rollout.groups_per_step."
                )
            self._steps = int(state["steps"])
            self._next_id = int(state["next_id"])
            self._behind = int(state["behind"])
            self._dropped = int(state["dropped"])
            self._trained_ahead = set(state["trained_ahead"])
            names = {one.name for one in fields(AdmittedGroup)}  # older runs saved more
            unfinished = [AdmittedGroup(**{name: one[name] for name in names}) for one in state["unfinished"]]
            self._waiting = {one.group_id: one for one in unfinished if self.mixer.has_sample(one)}
            self._dropped += len(unfinished) - len(self._waiting)
            self.mixer.restore(state["mixer"])
        saved = set(finished)
        known = self._waiting.keys() | set(state["finished"] if state is not None else ())
        while self._next_id <= max(saved, default=-1):
            group = self._draw()
            self._waiting[group.group_id] = group
            known.add(group.group_id)
        self._finished = saved & known
        if lost := known - self._finished - self._waiting.keys():
            raise ValueError(f"groups {sorted(lost)} were finished, but their episodes are missing.")
        for group_id in self._finished:
            self._waiting.pop(group_id, None)

    def _draw(self) -> AdmittedGroup:
        draw = self.mixer.draw()
        group_id = self._next_id
        self._next_id += 1
        return AdmittedGroup(
            group_id=group_id,
            task=draw.task,
            split=draw.split,
            index=draw.index,
            seed=draw.seed,
            admitted_version=-1,
        )

    def _admission_limit(self) -> int:
        limit = (self._steps + 1 + self._max_staleness) * self._per_step
        if self._total_steps is None:
            return limit
        return min(limit, self._total_steps * self._per_step)

    def _untrained_groups(self) -> set[int]:
        return self._waiting.keys() | self._in_flight.keys() | self._finished

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each group in the order of admission, without dropped ones."""
        ids = sorted(self._trained_ahead | self._untrained_groups())
        return {group_id: self._behind + rank for rank, group_id in enumerate(ids)}

    def _rank(self, group_id: int) -> int:
        """Return the rank of a group, or of the next group to draw."""
        return self._behind + sum(one < group_id for one in self._trained_ahead | self._untrained_groups())

    def _compact(self) -> None:
        """Replace the leading trained groups by a count."""
        head = min(self._untrained_groups(), default=self._next_id)
        past = {group_id for group_id in self._trained_ahead if group_id < head}
        self._trained_ahead -= past
        self._behind += len(past)


def make_window(
    run: RunSection,
    rollout: RolloutSection,
    *,
    algorithm: AlgorithmSection,
    served: Served,
    changes: Sequence[Change],
    checkpoint: Checkpoint | None,
    saved: Mapping[int, TrajectoryGroup],
) -> WorkWindow:
    """Return the work window, restored from checkpoint and journal if the run is resumed.

    ``saved`` are the groups that were finished before, by number.

    Raises:
        ConfigError: the configuration does not fit the run that is resumed.
    """
    distill = algorithm.distill
    sub_agent, tasks = rollout.sub_agent, {source.task for source in served.sources}
    named = {
        "rollout.max_turns": rollout.max_turns.keys(),
        "rollout.sub_agent.tasks": sub_agent.tasks if sub_agent else (),
        "algorithm.distill.teachers": distill.teachers.keys() - {"*"},
    }
    for key, names in named.items():
        if unknown := set(names) - tasks:
            raise ConfigError(f"{key} names {sorted(unknown)[0]!r}, which is not a task of this run")
    untaught = [one.task for one in served.sources if distill.teacher_of(one.task) is None]
    if distill.weight and untaught:
        raise ConfigError(
            f"algorithm.distill.teachers has no teacher for {untaught[0]!r}: add one, or a teacher for '*'"
        )
    if algorithm.baseline.name == "greedy" and any(group.greedy is None for group in saved.values()):
        raise ConfigError(
            "the run cannot be resumed: algorithm.baseline = 'greedy' needs a greedy episode in every group, "
            "but the run has finished groups without one that are not trained yet: restore algorithm.baseline"
        )
    window = WorkWindow(
        Mixer(
            served.sources,
            seed=run.seed,
            harder=served.harder,
            by_tokens=rollout.balance == "tokens",
            changes=changes,
        ),
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        window=rollout.window,
        total_steps=run.steps,
    )
    try:
        window.restore(checkpoint.loop["window"] if checkpoint else None, finished=saved.keys())
    except ValueError as error:
        raise ConfigError(f"the run cannot be resumed: {error}") from error
    return window
