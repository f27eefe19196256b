"""The loop: generation and training side by side, with a bound on staleness.

::

    admit -> play (many groups at a time) -> finished -> take -> advantages -> pack -> learn -> publish
      ^                                                                                            |
      +--------------------- slots of trained groups, policy_version + 1 --------------------------+

| part     | consumes          | waits for                          | is unblocked by                 |
|----------|-------------------|------------------------------------|---------------------------------|
| `_admit` | samples           | a free slot of the work window     | a step trained, a group dropped |
| `_play`  | an admitted group | the actor: environments and engine | its own deadlines               |
| `train`  | P finished groups | a full step's worth in the window  | a group finished                |

With ``max_staleness = 0`` the window admits a step's groups only after the step before is trained, and the
loop is synchronous. Every wait has a deadline; when nothing moves, the run ends with the table of slots.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentrl_train.actor import Actor, Episode
from agentrl_train.errors import EngineBroken, EnvironmentUnavailable, Stalled, TrainError
from agentrl_train.runtime.admission import AdmittedGroup, WorkWindow
from agentrl_train.runtime.journal import Journal
from agentrl_train.types import UNTRACED, EpisodeEnd, Trace, Trajectory, TrajectoryGroup

MAX_FAILED_GROUPS = 8
"""Groups of one task that may fail, none of it finishing between them, before the run gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How far and how fast the loop runs."""

    steps: int
    group_size: int
    seed: int
    minimum_siblings: int = 2
    """A group with fewer trajectories left is dropped: there is nothing to compare."""
    stall_s: float = 900.0
    """Longest time without a group finishing."""
    limit_s: float | None = None
    """Time after which the loop stops cleanly, whatever the number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step is about."""

    groups: Sequence[TrajectoryGroup]
    policy_version: int
    waited_s: float
    """Time the trainer stood idle for these groups."""


class Loop:
    """Plays and trains until the steps are done, the time is up, or ``stop`` is called.

    Args:
        actor: plays groups.
        window: says which sample may start, and which groups may be trained.
        journal: keeps every finished group until a checkpoint holds it.
        train: trains one step and publishes its weights; the policy version rises by one when it returns.
        pace: how far and how fast.
        policy_version: of the weights in force.
        finished: groups that a resumed run brings along, finished and untrained.
        failed: told of the episodes of a group that failed to the last, and whether it was dropped for it.
        slots: says what every slot waits for.
        trace: told how long the trainer waited.
    """

    def __init__(
        self,
        *,
        actor: Actor,
        window: WorkWindow,
        journal: Journal,
        train: Callable[[Step], Awaitable[None]],
        pace: Pace,
        policy_version: int = 0,
        finished: Sequence[TrajectoryGroup] = (),
        failed: Callable[[AdmittedGroup, Sequence[Trajectory], bool], None] = lambda *told: None,
        slots: Callable[[], str] = lambda: "",
        trace: Trace = UNTRACED,
    ) -> None:
        self.window = window
        self.policy_version = policy_version
        self._actor = actor
        self._journal = journal
        self._train = train
        self._pace = pace
        self._failed = failed
        self._slots = slots
        self._trace = trace
        self._finished = {group.group_id: group for group in finished}
        self._playing: dict[asyncio.Task[None], AdmittedGroup] = {}
        self._deadline = math.inf
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failed_in_a_row: Counter[str] = Counter()
        self._dropped_tokens = 0

    @property
    def untrained(self) -> list[TrajectoryGroup]:
        """The groups that are finished and not trained, oldest first: what a checkpoint must keep."""
        return [self._finished[i] for i in sorted(self._finished)]

    @property
    def discarded_tokens(self) -> int:
        """Tokens of finished turns that nobody will train on: of failed attempts and dropped groups."""
        return self._dropped_tokens + self._actor.discarded_tokens

    def stop(self) -> None:
        """End the run after the step under way; nothing that is finished is lost."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Run to the end.

        Raises:
            EnvironmentUnavailable: group after group failed.
            EngineBroken: so they did, and for want of completions.
            Stalled: nothing finished for too long.
            TrainError: whatever ``train`` raises.
        """
        if self._pace.limit_s is not None:
            self._deadline = time.monotonic() + self._pace.limit_s
        try:
            while not self._over():
                started = time.monotonic()
                with self._trace.span("trainer/steps", "wait for groups"):
                    groups = await self._next_groups()
                if groups is None:
                    break
                step = Step(
                    groups=groups,
                    policy_version=self.policy_version,
                    waited_s=time.monotonic() - started,
                )
                await self._train_step(step)
        finally:
            await self._cancel_playing()

    def _over(self) -> bool:
        return (
            time.monotonic() >= self._deadline
            or self._stopping.is_set()
            or self.window.steps >= self._pace.steps
        )

    async def _train_step(self, step: Step) -> None:
        for group in step.groups:
            self._finished.pop(group.group_id)
        # Numbered before training: a checkpoint taken inside ``train`` must count this step as done.
        self.policy_version += 1
        self.window.trained()
        await self._train(step)

    async def _next_groups(self) -> list[TrajectoryGroup] | None:
        """Admit what may start until a step's worth is finished; None if the run is over first."""
        while True:
            self._admit()
            if (ids := self.window.take()) is not None:
                self._admit()
                return [self._finished[i] for i in ids]
            if self._over():
                return None
            self._changed.clear()
            await self._wait()
            self._raise_broken()

    async def _wait(self) -> None:
        limit = min(self._pace.stall_s, max(0.0, self._deadline - time.monotonic()))
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError:
            if not self._over():
                raise Stalled(self._stall_report()) from None

    def _admit(self) -> None:
        while (admitted := self.window.admit(self.policy_version)) is not None:
            task = asyncio.create_task(self._play(admitted), name=f"group {admitted.group_id}")
            self._playing[task] = admitted
            task.add_done_callback(self._played)

    def _played(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._playing.pop(task, None)
        self._changed.set()

    def _raise_broken(self) -> None:
        for task in list(self._playing):
            if task.done():
                del self._playing[task]
                task.result()

    async def _play(self, admitted: AdmittedGroup) -> None:
        group, failures = await self._actor.group(
            Episode(
                task=admitted.task,
                split=admitted.split,
                index=admitted.index,
                seed=admitted.seed,
                # The same draws after a resume: new ones would favour groups that are quick to finish.
                draw_seed=(self._pace.seed, admitted.group_id),
            ),
            size=self._pace.group_size,
            group_id=admitted.group_id,
            admitted_version=admitted.admitted_version,
        )
        dropped = len(group.trajectories) < self._pace.minimum_siblings
        if failures:
            self._failed(admitted, failures, dropped)
        if dropped:
            self._dropped_tokens += sum(t.num_sampled_tokens for t in group.trajectories)
            self._drop(admitted, failures)
            return
        # Blocking on purpose: between the journal and ``_finished`` no checkpoint may be taken.
        self._journal.append(group)
        self._failed_in_a_row[group.task] = 0
        self._finished[group.group_id] = group
        self.window.finish(group.group_id)

    def _drop(self, admitted: AdmittedGroup, failures: Sequence[Trajectory]) -> None:
        self._failed_in_a_row[admitted.task] += 1
        if self._failed_in_a_row[admitted.task] >= MAX_FAILED_GROUPS:
            engine = failures[-1].end is EpisodeEnd.FAILED_ENGINE
            kind: type[TrainError] = EngineBroken if engine else EnvironmentUnavailable
            raise kind(
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
            for a in self._playing.values()
        )
        return (
            f"no group finished for {self._pace.stall_s:.0f} s at step {self.window.steps}; "
            f"playing: {slots or 'none'}; finished: {sorted(self._finished) or 'none'}\n{self._slots()}"
        ).rstrip()
