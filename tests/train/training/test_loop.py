import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env.types import TaskSample
from agentrl_train.actor import Episode
from agentrl_train.errors import EngineBroken, EnvironmentUnavailable, Stalled
from agentrl_train.storage.journal import Journal
from agentrl_train.training.admission import Mixer, WorkWindow
from agentrl_train.training.loop import DynamicSampling, Loop
from agentrl_train.types import EpisodeEnd, Step, TaskSource, Trajectory, TrajectoryGroup
from tests.train.training.test_admission import staleness_bound


def episode(end: EpisodeEnd = EpisodeEnd.TERMINATED) -> Trajectory:
    return Trajectory(
        sample=TaskSample(task="a", index=0),
        opening=(),
        turns=(),
        end=end,
        reward=0.0,
        success=False,
        error="broken" if end.failed else None,
    )


class FakeActor:
    """Finishes groups after ``delay`` iterations of the event loop."""

    def __init__(
        self,
        delay: Callable[[int], int] = lambda group_id: 1,
        survivors: Callable[[int], int] = lambda group_id: 4,
        end: EpisodeEnd = EpisodeEnd.FAILED_ENVIRONMENT,
    ) -> None:
        self.end = end
        self.delay = delay
        self.survivors = survivors
        self.played: list[int] = []

    async def group(
        self, episode_: Episode, *, size: int, group_id: int, admitted_version: int
    ) -> tuple[TrajectoryGroup, list[Trajectory]]:
        self.played.append(group_id)
        for _ in range(self.delay(group_id)):
            await asyncio.sleep(0)
        survivors = self.survivors(group_id)
        group = TrajectoryGroup(
            group_id=group_id,
            task=episode_.task,
            trajectories=[episode()] * survivors,
            admitted_version=admitted_version,
        )
        return group, [episode(self.end)] * (size - survivors)


class Recorder:
    """A fake trainer that records groups and versions."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def __call__(self, step: Step) -> None:
        await asyncio.sleep(0)
        self.steps.append(step)

    @property
    def group_ids(self) -> list[int]:
        return [group.group_id for step in self.steps for group in step.groups]


def make_loop(
    folder: Path,
    actor: FakeActor,
    *,
    steps: int = 10,
    per_step: int = 3,
    staleness: int = 1,
    window: int = 1,
    stall_s: float = 30.0,
    **options: Any,
) -> Loop:
    sources = [TaskSource(task="a"), TaskSource(task="b")]
    return Loop(
        actor=actor,  # type: ignore[arg-type]
        window=WorkWindow(
            Mixer(sources, seed=0),
            groups_per_step=per_step,
            max_staleness=staleness,
            window=window,
            total_steps=steps,
        ),
        journal=Journal(folder),
        group_size=4,
        seed=0,
        stall_timeout_s=stall_s,
        **options,
    )


async def play(loop: Loop, train: Callable[[Step], Awaitable[None]]) -> None:
    try:
        async with aclosing(loop.steps()) as steps:
            async for step in steps:
                await train(step)
    finally:
        loop._journal.close()


async def test_groups_without_signal_are_replaced_by_other_samples(tmp_path: Path) -> None:
    actor, recorder = FakeActor(), Recorder()
    loop = make_loop(
        tmp_path,
        actor,
        steps=4,
        dynamic_sampling=DynamicSampling(has_signal=lambda group: group.group_id % 3 > 0, most=100),
    )
    await play(loop, recorder)
    assert len(recorder.group_ids) == 4 * 3
    assert all(group_id % 3 for group_id in recorder.group_ids)
    assert loop.window.dropped > 0


async def test_run_without_any_signal_ends(tmp_path: Path) -> None:
    actor, recorder = FakeActor(), Recorder()
    replacing = DynamicSampling(has_signal=lambda group: False, most=5)
    loop = make_loop(tmp_path, actor, steps=4, dynamic_sampling=replacing)
    await play(loop, recorder)
    assert len(recorder.group_ids) == 4 * 3
    assert len(actor.played) <= (4 * 3 + 1) * 6


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    staleness=st.integers(0, 3),
    window=st.integers(1, 6),
    per_step=st.integers(1, 4),
)
def test_every_group_is_trained_once_within_the_staleness_bound(
    seed: int, staleness: int, window: int, per_step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    delays = np.random.default_rng(seed).geometric(0.1, size=500)
    actor, recorder = FakeActor(delay=lambda i: int(delays[i])), Recorder()
    loop = make_loop(
        tmp_path_factory.mktemp("journal"),
        actor,
        per_step=per_step,
        staleness=staleness,
        window=window,
    )
    asyncio.run(play(loop, recorder))
    assert sorted(recorder.group_ids) == list(range(10 * per_step))
    for step in recorder.steps:
        for group in step.groups:
            assert step.trained_version - group.admitted_version <= staleness_bound(loop.window)


async def test_zero_staleness_is_synchronous(tmp_path: Path) -> None:
    recorder = Recorder()
    await play(make_loop(tmp_path, FakeActor(), staleness=0), recorder)
    for step in recorder.steps:
        assert {group.admitted_version for group in step.groups} == {step.trained_version}


async def test_generation_continues_during_training(tmp_path: Path) -> None:
    actor = FakeActor()
    seen: list[int] = []

    async def train(step: Step) -> None:
        before = len(actor.played)
        for _ in range(20):
            await asyncio.sleep(0)
        seen.append(len(actor.played) - before)

    loop = make_loop(tmp_path, actor, staleness=1)
    await play(loop, train)
    assert len(actor.played) == 30
    assert loop.window.steps == 10


async def test_groups_are_played_between_publishing_and_the_end_of_a_checkpoint(tmp_path: Path) -> None:
    actor, playing = FakeActor(delay=lambda group_id: 1000), []
    loop = make_loop(tmp_path, actor, staleness=1, steps=6)

    async def train(step: Step) -> None:
        for _ in range(3000):  # all admitted groups finish while the learner works
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while len(loop.window.in_flight):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        loop.admit()  # ``Run`` does this after publishing the weights
        await asyncio.sleep(0)
        playing.append(len(loop.window.in_flight))

    await play(loop, train)
    assert playing == [3, 3, 3, 3, 0, 0]  # all groups are admitted at the fifth step


class SlowDisk(Journal):
    """A journal whose disk blocks until ``released`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.appending, self.released, self.in_time = threading.Event(), threading.Event(), True

    def append(self, group: TrajectoryGroup) -> None:
        self.appending.set()
        self.in_time &= self.released.wait(20)
        super().append(group)


async def test_event_loop_runs_and_checkpoint_waits_while_journal_is_written(tmp_path: Path) -> None:
    loop, recorder = make_loop(tmp_path, FakeActor(), steps=1, per_step=1, staleness=0), Recorder()
    loop._journal.close()
    loop._journal = disk = SlowDisk(tmp_path / "slow")
    run = asyncio.create_task(play(loop, recorder))
    await asyncio.to_thread(disk.appending.wait, 20)
    assert not disk.released.is_set()
    cut = asyncio.create_task(loop.cut_journal(1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not cut.done()
    assert loop.window.finished == ()  # a group counts when it is on disk
    disk.released.set()
    window, untrained = await cut
    assert disk.in_time
    assert (window["finished"], [group.group_id for group in untrained]) == ([0], [0])
    await run
    assert recorder.group_ids == [0]


async def test_failed_group_is_replaced_and_not_trained(tmp_path: Path) -> None:
    recorder = Recorder()
    actor = FakeActor(survivors=lambda i: 0 if i % 3 == 0 else 4)
    await play(make_loop(tmp_path, actor), recorder)
    assert len(recorder.group_ids) == len(set(recorder.group_ids)) == 30
    assert all(i % 3 for i in recorder.group_ids)


async def test_group_with_some_failures_is_trained_with_remaining_episodes(tmp_path: Path) -> None:
    recorder, failed = Recorder(), []
    loop = make_loop(tmp_path, FakeActor(survivors=lambda i: 3), steps=2)
    loop._on_failure = lambda group, failures, dropped: failed.extend(failures)
    await play(loop, recorder)
    assert {len(group.trajectories) for step in recorder.steps for group in step.groups} == {3}
    assert len(failed) >= 6


async def test_repeated_environment_failures_end_the_run(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, FakeActor(survivors=lambda i: 0))
    with pytest.raises(EnvironmentUnavailable, match=r"8 groups of task a failed one after another.*broken"):
        await play(loop, Recorder())


async def test_repeated_engine_failures_raise_engine_broken(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, FakeActor(survivors=lambda i: 0, end=EpisodeEnd.FAILED_ENGINE))
    with pytest.raises(EngineBroken, match=r"8 groups of task a failed one after another"):
        await play(loop, Recorder())


async def test_failing_task_is_detected_alongside_a_working_task(tmp_path: Path) -> None:
    actor = FakeActor(survivors=lambda i: 4 * (i % 2))  # tasks alternate
    loop = make_loop(tmp_path, actor, steps=100)
    with pytest.raises(EnvironmentUnavailable, match="8 groups of task a failed"):
        await play(loop, Recorder())


async def test_stall_reports_groups_in_flight(tmp_path: Path) -> None:
    actor = FakeActor(delay=lambda i: 10**9 if i == 0 else 1)
    loop = make_loop(tmp_path, actor, stall_s=0.05)
    with pytest.raises(Stalled, match="playing: 0 \\(a 0, admitted at version 0\\)"):
        await play(loop, Recorder())


async def test_actor_exception_propagates(tmp_path: Path) -> None:
    def bug(group_id: int) -> int:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await play(make_loop(tmp_path, FakeActor(delay=bug)), Recorder())


async def test_exception_while_a_step_is_trained_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    training = asyncio.Event()

    class Broken(FakeActor):
        async def group(self, episode_: Episode, **options: Any) -> tuple[TrajectoryGroup, list[Trajectory]]:
            if options["group_id"] == 5:
                await training.wait()
                raise KeyError("a bug")
            return await super().group(episode_, **options)

    async def train(step: Step) -> None:
        training.set()
        await asyncio.sleep(0.1)

    with pytest.raises(KeyError, match="a bug"):
        await play(make_loop(tmp_path, Broken(), steps=2, stall_s=1.0), train)


async def test_failures_between_groups_without_signal_are_not_consecutive(tmp_path: Path) -> None:
    actor, recorder = FakeActor(survivors=lambda group_id: 2 * (group_id % 4 & 2)), Recorder()
    loop = make_loop(
        tmp_path,
        actor,
        steps=1,
        staleness=0,
        dynamic_sampling=DynamicSampling(has_signal=lambda group: group.group_id > 40, most=100),
    )
    await play(loop, recorder)
    assert len(recorder.group_ids) == 3


async def test_stop_finishes_current_step_and_keeps_finished_groups(tmp_path: Path) -> None:
    recorder = Recorder()
    loop = make_loop(tmp_path, FakeActor(), steps=1000)

    async def train(step: Step) -> None:
        await recorder(step)
        if len(recorder.steps) == 4:
            loop.stop()

    await play(loop, train)
    assert len(recorder.steps) == 4
    journalled = {group.group_id for group in loop._journal.read()}
    assert journalled == set(recorder.group_ids) | {group.group_id for group in loop.untrained}


async def test_run_timeout_ends_the_loop_cleanly(tmp_path: Path) -> None:
    actor = FakeActor(delay=lambda i: 10**9)
    loop = make_loop(tmp_path, actor)
    loop._run_timeout_s = 0.0
    await play(loop, Recorder())
    assert loop.window.steps == 0
