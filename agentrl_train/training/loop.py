"""The loop: concurrent generation and training with bounded staleness.

::

    admit -> play (many groups at a time) -> finished -> take -> advantages -> pack -> learn -> publish
      ^                                                                                            |
      +----------------------- slots of trained groups, next version ------------------------------+

| part     | consumes          | waits for                          | is unblocked by                 |
|----------|-------------------|------------------------------------|---------------------------------|
| `admit`  | samples           | a free slot of the work window     | a step trained, a group dropped |
| `_play`  | an admitted group | the actor: environments and engine | its own deadlines               |
| `steps`  | P finished groups | a full step's worth in the window  | a group finished                |

With ``max_staleness = 0`` the window admits a step's groups only after the step before is trained, and the
loop is synchronous. Every wait has a deadline. A stall ends the run with an error that lists every slot.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_train.actor import Actor
from agentrl_train.errors import (
    EngineBroken,
    EnvironmentUnavailable,
    RewardUnavailable,
    Stalled,
    TrainError,
)
from agentrl_train.storage.journal import Journal
from agentrl_train.training.admission import AdmittedGroup, WorkWindow
from agentrl_train.types import UNTRACED, Episode, EpisodeEnd, Step, Trace, Trajectory, TrajectoryGroup

MAX_FAILED_GROUPS = 8
"""Consecutive failed groups of one task after which the run ends."""
FAILURES: dict[EpisodeEnd, type[TrainError]] = {
    EpisodeEnd.FAILED_ENGINE: EngineBroken,
    EpisodeEnd.FAILED_REWARD: RewardUnavailable,
}
"""Errors that end a run when group after group fails; other errors come from the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Replacement of groups without a learning signal by groups of other samples."""

    has_signal: Callable[[TrajectoryGroup], bool]
    most: int
    """Limit of consecutive replacements. The next group is trained on even without a signal."""


class Loop:
    """Plays groups and yields training steps until all are done, the time is up, or ``stop`` is called.

    The loop owns the work window and the journal. Its consumer (``Run``) trains each step and publishes the
    weights, and calls ``admit``, before it requests the next one.

    Args:
        actor: plays groups.
        window: decides which samples can start and which groups can be trained.
        journal: keeps every finished group until a checkpoint holds it.
        group_size: siblings per group.
        seed: seed of the run.
        stall_timeout_s: longest time without a finished group.
        run_timeout_s: time after which the loop ends cleanly, even if steps remain.
        finished: finished, untrained groups of a resumed run.
        dynamic_sampling: replaces groups without a learning signal; None keeps them.
        on_failure: called with a group, its failed episodes, and whether the group was dropped.
        describe_slots: returns the state of every slot, for the error about a stall.
        trace: records how long the trainer waits.
    """

    def __init__(
        self,
        *,
        actor: Actor,
        window: WorkWindow,
        journal: Journal,
        group_size: int,
        seed: int = 0,
        stall_timeout_s: float = 3600.0,
        run_timeout_s: float | None = None,
        finished: Sequence[TrajectoryGroup] = (),
        dynamic_sampling: DynamicSampling | None = None,
        on_failure: Callable[[AdmittedGroup, Sequence[Trajectory], bool], None] = lambda *failure: None,
        describe_slots: Callable[[], str] = lambda: "",
        trace: Trace = UNTRACED,
    ) -> None:
        self.window = window
        self._actor = actor
        self._journal = journal
        self._group_size = group_size
        self._seed = seed
        self._stall_timeout_s = stall_timeout_s
        self._run_timeout_s = run_timeout_s
        self._dynamic_sampling = dynamic_sampling
        self._replaced_in_a_row = 0
        self._on_failure = on_failure
        self._describe_slots = describe_slots
        self._trace = trace
        self._finished = {group.group_id: group for group in finished}
        self._playing: list[asyncio.Task[None]] = []
        self._deadline = math.inf
        self._changed = asyncio.Event()
        self._journaling = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._failed_in_a_row: Counter[str] = Counter()
        self._dropped_tokens = 0

    @property
    def trained_version(self) -> int:
        """Version of the weights of all trained steps, which is their number."""
        return self.window.steps

    @property
    def untrained(self) -> list[TrajectoryGroup]:
        """Finished groups that are not trained yet, oldest first; a checkpoint must keep them."""
        return [self._finished[i] for i in sorted(self._finished)]

    @property
    def discarded_tokens(self) -> int:
        """Running total of tokens sampled in failed attempts and dropped groups, never trained on."""
        return self._dropped_tokens + self._actor.discarded_tokens

    def stop(self) -> None:
        """End after the step in progress; finished groups are kept."""
        self._stopping.set()
        self._changed.set()

    def admit(self) -> None:
        """Start the groups that have a slot. Call it as soon as new weights are published.

        Otherwise the engine would be idle during the following checkpoint or evaluation.
        """
        if self._over():
            return
        while (admitted := self.window.admit(self.trained_version)) is not None:
            task = asyncio.create_task(self._play(admitted), name=f"group {admitted.group_id}")
            self._playing.append(task)
            task.add_done_callback(self._played)

    async def cut_journal(self, step: int) -> tuple[dict[str, Any], list[TrajectoryGroup]]:
        """Start a new journal segment at checkpoint ``step``; return the window's state and untrained groups.

        The three are taken atomically: no group can finish between them.
        """
        async with self._journaling:
            self._journal.rotate(step)
            return self.window.state(), self.untrained

    def prune_journal(self, oldest_step: int) -> None:
        """Delete journal segments that no checkpoint from ``oldest_step`` on needs."""
        self._journal.prune(oldest_step)

    async def steps(self) -> AsyncGenerator[Step]:
        """Yield each step once its groups are finished; close the iterator to cancel running groups.

        A step counts as trained from the moment it is yielded, so that a checkpoint taken while it is
        processed includes it.

        Raises:
            EnvironmentUnavailable: too many groups of a task failed in a row.
            EngineBroken: they failed because of the engine.
            RewardUnavailable: they failed because of a reward function.
            Stalled: no group finished within ``stall_timeout_s``.
        """
        if self._run_timeout_s is not None:
            self._deadline = time.monotonic() + self._run_timeout_s
        try:
            while not self._over():
                started = time.monotonic()
                with self._trace.span("trainer/steps", "wait for groups"):
                    groups = await self._next_groups()
                if groups is None:
                    break
                yield self._begin_step(groups, waited_s=time.monotonic() - started)
        finally:
            await self._cancel_playing()

    def _over(self) -> bool:
        return time.monotonic() >= self._deadline or self._stopping.is_set() or self.window.complete

    def _begin_step(self, groups: Sequence[TrajectoryGroup], *, waited_s: float) -> Step:
        for group in groups:
            self._finished.pop(group.group_id)
        step = Step(groups=groups, trained_version=self.trained_version, waited_s=waited_s)
        self.window.trained()
        return step

    async def _next_groups(self) -> list[TrajectoryGroup] | None:
        """Admit groups until a full step is finished; None if the run is over first."""
        while True:
            self._raise_broken()  # first: a group can also have failed while the last step was trained
            self.admit()
            if (ids := self.window.take()) is not None:
                self.admit()
                return [self._finished[i] for i in ids]
            if self._over():
                return None
            self._changed.clear()
            await self._wait()

    async def _wait(self) -> None:
        limit = min(self._stall_timeout_s, max(0.0, self._deadline - time.monotonic()))
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError:
            if not self._over():
                raise Stalled(self._stall_report()) from None

    def _played(self, task: asyncio.Task[None]) -> None:
        if task in self._playing and (task.cancelled() or task.exception() is None):
            self._playing.remove(task)
        self._changed.set()

    def _raise_broken(self) -> None:
        for task in list(self._playing):
            if task.done():
                self._playing.remove(task)
                task.result()

    async def _play(self, admitted: AdmittedGroup) -> None:
        group, failures = await self._actor.group(
            Episode(
                task=admitted.task,
                split=admitted.split,
                index=admitted.index,
                seed=admitted.seed,
                # Use the same draws after a resume: new draws would favour groups that finish quickly.
                draw_seed=(self._seed, admitted.group_id),
            ),
            size=self._group_size,
            group_id=admitted.group_id,
            admitted_version=admitted.admitted_version,
        )
        dropped = len(group.trajectories) < min(2, self._group_size)
        if failures:
            self._on_failure(admitted, failures, dropped)
        if dropped:
            self._dropped_tokens += sum(t.num_sampled_tokens for t in group.trajectories)
            self._drop(admitted, failures)
            return
        self._failed_in_a_row[group.task] = 0
        replacing = self._dynamic_sampling
        if (
            replacing is not None
            and self._replaced_in_a_row < replacing.most
            and not replacing.has_signal(group)
        ):
            self._replaced_in_a_row += 1
            self._dropped_tokens += sum(t.num_sampled_tokens for t in group.trajectories)
            self.window.drop(admitted.group_id)
            return
        self._replaced_in_a_row = 0
        keeping = asyncio.create_task(self._keep(group))
        try:
            await asyncio.shield(keeping)
        except asyncio.CancelledError:
            await keeping  # a group that is on disk counts as finished
            raise

    async def _keep(self, group: TrajectoryGroup) -> None:
        """Write a finished group to disk, then release it to the trainer."""
        # Locked: no checkpoint may be taken between the journal and ``_finished``.
        async with self._journaling:
            await asyncio.to_thread(self._journal.append, group)
            self._finished[group.group_id] = group
            self.window.finish(group.group_id)

    def _drop(self, admitted: AdmittedGroup, failures: Sequence[Trajectory]) -> None:
        self._failed_in_a_row[admitted.task] += 1
        if self._failed_in_a_row[admitted.task] >= MAX_FAILED_GROUPS:
            raise FAILURES.get(failures[-1].end, EnvironmentUnavailable)(
                f"{MAX_FAILED_GROUPS} groups of task {admitted.task} failed one after another, "
                f"the last with: {failures[-1].error}"
            )
        self.window.drop(admitted.group_id)

    async def _cancel_playing(self) -> None:
        tasks = list(self._playing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._playing.clear()

    def _stall_report(self) -> str:
        slots = ", ".join(
            f"{a.group_id} ({a.task} {a.index}, admitted at version {a.admitted_version})"
            for a in self.window.in_flight
        )
        return (
            f"no group finished for {self._stall_timeout_s:.0f} s at step {self.window.steps}; "
            f"playing: {slots or 'none'}; finished: {sorted(self._finished) or 'none'}\n"
            f"{self._describe_slots()}"
        ).rstrip()
