import asyncio

import pytest

from agentrl_env import Message, SessionStatus, StepResult, ToolCall, tool
from agentrl_env.errors import (
    DefinitionError,
    EnvironmentFailed,
    InternalError,
    NotSupported,
    ServeError,
    ServerDraining,
    ServerFull,
    SessionEnded,
    SessionExpired,
    StepPending,
    UnknownSample,
    UnknownSession,
    UnknownTask,
)
from agentrl_env.server.telemetry.metrics import Metrics, SessionMetrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.session_table import SessionTable
from agentrl_env.wire import OpenRequest, StepRequest
from tests.env.tasks import (
    Clock,
    Guess,
    Quick,
    Slow,
    ask_expert,
    close_session,
    expire_idle,
    play_many,
    play_step,
    session_info,
    until,
)


@pytest.fixture
async def pools():
    made = []

    def make(*environments, **options):
        made.append(SessionPool(environments, **options))
        return made[-1]

    yield make
    for pool in made:
        await pool.aclose()


def says(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


async def opened(pool, task="quick", **options):
    return (await pool.open(OpenRequest(task=task, **options))).session_id


async def test_tasks_are_described(pools):
    guess, quick = (await pools(Guess, Quick).tasks()).tasks
    assert (guess.name, guess.max_turns, guess.splits["train"].num_samples) == ("guess", 8, None)
    assert quick.splits["test"].num_samples == 10
    assert quick.tools == Quick.tool_specs()
    assert quick.capabilities == ()
    assert (await pools(Quick, Slow, oracle=True).tasks()).tasks[0].capabilities == ("expert",)
    assert (await pools(Slow, oracle=True).tasks()).tasks[0].capabilities == ()


def test_duplicate_task_names_are_rejected():
    with pytest.raises(DefinitionError, match="two tasks are named 'quick'"):
        SessionPool([Quick, Quick])


async def test_session_is_opened_stepped_inspected_and_closed(pools):
    pool = pools(Quick)
    session_id = await opened(pool, index=4, seed=9)
    result = await play_step(pool, session_id, 1, says("note", text="x"))
    info = await session_info(pool, session_id)
    assert (info.turn, info.last, info.sample.index, info.sample.seed) == (1, result, 4, 9)
    await close_session(pool, session_id)
    await close_session(pool, session_id)
    assert (await session_info(pool, session_id)).status is SessionStatus.CANCELLED
    with pytest.raises(SessionEnded):
        await play_step(pool, session_id, 2, says("note", text="x"))


async def test_sessions_are_isolated(pools):
    pool = pools(Quick)
    ids = [await opened(pool, index=n, seed=1) for n in range(3)]
    for turn in range(1, 4):
        for session_id in ids:
            result = await play_step(pool, session_id, turn, says("note", text="x"))
            assert result.messages[0].content.split()[0] == str(turn)


async def test_unknown_tasks_splits_and_sessions_raise(pools):
    pool = pools(Quick)
    with pytest.raises(UnknownTask, match="no task 'nope' here; tasks: quick"):
        await opened(pool, "nope")
    with pytest.raises(UnknownSample):
        await opened(pool, split="dev")
    with pytest.raises(UnknownSession):
        await play_step(pool, "nope", 1, says("note", text="x"))
    with pytest.raises(UnknownSession):
        await session_info(pool, "nope")
    await close_session(pool, "nope")
    assert pool.open_sessions == 0


async def test_session_ids_are_unique_and_long(pools):
    pool = pools(Quick)
    ids = {await opened(pool) for _ in range(20)}
    assert len(ids) == 20
    assert all(len(session_id) >= 20 for session_id in ids)


async def test_full_pool_rejects_openings_until_a_session_ends(pools):
    pool = pools(Quick, max_sessions=1)
    session_id = await opened(pool)
    with pytest.raises(ServerFull, match="all 1 sessions") as caught:
        await opened(pool)
    assert caught.value.details["retry_after"] == 1
    await play_step(pool, session_id, 1, says("finish"))
    await opened(pool)


async def test_waiting_openings_are_served_in_fifo_order(pools):
    pool = pools(Quick, max_sessions=1)
    first, order = await opened(pool), []

    async def wait(name):
        session_id = await opened(pool, wait_s=5)
        order.append(name)
        await close_session(pool, session_id)

    waiting = [asyncio.create_task(wait(name)) for name in "abc"]
    await until(lambda: pool.gauges()["agentrl_sessions_waiting"] == 3)
    with pytest.raises(ServerFull):  # an opening without wait_s does not skip the queue
        await opened(pool)
    await close_session(pool, first)
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c"]


async def test_waiting_opening_times_out(pools):
    pool = pools(Quick, max_sessions=1)
    await opened(pool)
    with pytest.raises(ServerFull):
        await opened(pool, wait_s=0.01)
    assert pool.gauges()["agentrl_sessions_waiting"] == 0


async def test_cancelled_opening_leaves_the_queue(pools):
    pool = pools(Quick, max_sessions=1)
    session_id = await opened(pool)
    waiting = asyncio.create_task(opened(pool, wait_s=5))
    await until(lambda: pool.gauges()["agentrl_sessions_waiting"])
    waiting.cancel()
    await asyncio.wait((waiting,))
    await close_session(pool, session_id)
    await opened(pool)


async def test_slot_is_released_only_after_the_environment_is_closed(pools):
    pool = pools(Slow, max_sessions=1)
    session_id = await opened(pool, "slow")
    step = asyncio.create_task(play_step(pool, session_id, 1, says("block")))
    await asyncio.to_thread(Slow.started.wait, 5)
    closing = asyncio.create_task(close_session(pool, session_id))
    await asyncio.sleep(0.01)
    with pytest.raises(ServerFull):
        await opened(pool, "slow")
    Slow.blocker.set()
    await closing
    with pytest.raises(SessionEnded):
        await step
    await opened(pool, "slow")
    assert len(Slow.closed) == 1


class NoReset(Slow):
    def reset(self, sample, rng):
        raise OSError("no disk")


async def test_failed_opening_releases_its_slot(pools):
    pool = pools(NoReset, max_sessions=1)
    for _ in range(3):
        with pytest.raises(EnvironmentFailed, match="no disk"):
            await opened(pool, "no_reset", wait_s=5)
    assert pool.open_sessions == 0


class NoSamples(Quick):
    @classmethod
    def samples(cls, split):
        if split == "train":
            return [{}]
        raise OSError("no file")


async def test_unreadable_samples_raise_environment_failed(pools):
    with pytest.raises(EnvironmentFailed, match=r"samples\('test'\) of task 'no_samples' failed: OSError"):
        await pools(NoSamples).tasks()


async def test_repeated_request_id_returns_the_same_session(pools):
    pool = pools(Quick, Slow)
    first, second = await asyncio.gather(opened(pool, request_id="r1"), opened(pool, request_id="r1"))
    await play_step(pool, first, 1, says("note", text="x"))
    info = await pool.open(OpenRequest(task="quick", request_id="r1"))
    assert first == second == info.session_id
    assert info.turn == 1
    assert pool.open_sessions == 1
    assert await opened(pool, request_id="r2") != first


async def test_idle_session_expires_and_its_environment_is_closed(pools):
    clock = Clock()
    pool = pools(Slow, lease_s=10.0, clock=clock)
    idle, busy = await opened(pool, "slow"), await opened(pool, "slow")
    clock.now += 6
    await play_step(pool, busy, 1, Message.assistant("hello"))
    clock.now += 6
    assert await expire_idle(pool) == 1
    assert len(Slow.closed) == 1
    for call in (play_step(pool, idle, 1, says("wait")), session_info(pool, idle)):
        with pytest.raises(SessionExpired):
            await call
    await close_session(pool, idle)
    assert (await session_info(pool, busy)).status is SessionStatus.RUNNING
    clock.now += 6
    assert await expire_idle(pool) == 1
    assert pool.open_sessions == 0


async def test_session_with_a_running_step_does_not_expire(pools):
    clock = Clock()
    pool = pools(Slow, lease_s=10.0, clock=clock)
    session_id = await opened(pool, "slow")
    steps = [asyncio.create_task(play_step(pool, session_id, 1, says("wait"))) for _ in range(2)]
    await asyncio.sleep(0.01)
    clock.now += 100
    assert await expire_idle(pool) == 0
    Slow.gate.set()
    assert await steps[0] == await steps[1]
    assert await expire_idle(pool) == 0  # the lease is renewed
    clock.now += 10
    assert await expire_idle(pool) == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"lease_s": 0}, "lease_s is 0; it must be above 0, or every session expires immediately"),
        ({"lease_s": -1.5}, "lease_s is -1.5; it must be above 0"),
        ({"lease_s": float("nan")}, "lease_s is nan; it must be above 0"),
        ({"max_sessions": 0}, "max_sessions is 0; it must be at least 1"),
    ],
)
def test_limits_that_allow_no_session_are_rejected(limits, message):
    with pytest.raises(ServeError, match=message):
        SessionPool([Quick], **limits)


async def test_leases_expire_in_the_background(pools):
    pool = pools(Quick, lease_s=0.02)
    session_id = await opened(pool)
    await until(lambda: not pool.open_sessions)
    with pytest.raises(SessionExpired):
        await session_info(pool, session_id)


class ClosesLate(Slow):
    """``close`` of sample 0 waits until the test releases it."""

    def reset(self, sample, rng):
        self.late = sample.index == 0
        return "ready"

    def close(self):
        if self.late:
            self.started.set()
            self.blocker.wait(60)
        super().close()


async def test_slow_close_does_not_delay_other_leases(pools):
    pool = pools(ClosesLate, lease_s=0.02)
    await opened(pool, "closes_late", index=0)
    await until(Slow.started.is_set)
    await opened(pool, "closes_late", index=1)
    await until(lambda: not pool.open_sessions)
    closing = asyncio.create_task(pool.aclose())
    await asyncio.wait((closing,), timeout=0.02)
    assert not closing.done()  # unlike the sweep it waits for the close
    Slow.blocker.set()
    await closing
    assert [environment.late for environment in Slow.closed] == [False, True]


class Hangs(Slow):
    reset_timeout = 3.0

    @tool(timeout=0.1)
    def hang(self):
        """Wait on a thread for longer than any session can."""
        self.blocker.wait(60)


async def test_hanging_tools_do_not_starve_other_sessions_of_threads(pools):
    pool = pools(Hangs, max_sessions=2)
    for _ in range(2):
        result = await play_step(pool, await opened(pool, "hangs"), 1, says("hang"))
        assert result.status is SessionStatus.FAILED_ENVIRONMENT
        pool._capacity.release()  # as after the timeout of the close
    assert (await session_info(pool, await opened(pool, "hangs"))).status is SessionStatus.RUNNING
    assert pool.gauges()["agentrl_threads_abandoned"] == 2
    Slow.blocker.set()


async def test_ended_sessions_are_removed_after_their_retention(pools):
    clock = Clock()
    pool = pools(Quick, clock=clock)
    session_id = await opened(pool, request_id="r")
    result = await play_step(pool, session_id, 1, says("finish"))
    assert await play_step(pool, session_id, 1, says("finish")) == result
    clock.now += 601
    await expire_idle(pool)
    with pytest.raises(UnknownSession):
        await play_step(pool, session_id, 1, says("finish"))
    assert await opened(pool, request_id="r") != session_id


async def test_number_of_ended_sessions_is_bounded():
    pool = SessionPool([Quick])
    table = SessionTable(Clock(), max_ended=2)
    ids = []
    for _ in range(3):
        session = pool._session(Quick, await pool._tasks.sample(OpenRequest(task="quick")))
        table.add(session, None)
        table.retire(session.session_id)
        ids.append(session.session_id)
    with pytest.raises(UnknownSession):
        table.find(ids[0])
    assert table.find(ids[2]).session.session_id == ids[2]
    assert table.retire(ids[2]) is None
    await pool.aclose()


def item(session_id, seq, name="note", **arguments):
    arguments = arguments or ({"text": "x"} if name == "note" else {})
    return StepRequest(session_id=session_id, seq=seq, message=says(name, **arguments))


async def test_batch_results_are_in_order_and_items_fail_independently(pools):
    pool = pools(Quick)
    a, b = await opened(pool), await opened(pool)
    results = await play_many(
        pool, [item(a, 1), item("nope", 1), item(b, 7), item(a, 2), item(b, 1, "crash"), item(a, 1)]
    )
    kinds = [type(r).__name__ for r in results]
    assert kinds == ["StepResult", "UnknownSession", "SeqConflict", "StepResult", "StepResult", "StepResult"]
    assert [results[i].session_id for i in (0, 3, 4)] == [a, a, b]
    assert results[5] == results[0]
    assert results[4].status is SessionStatus.FAILED_ENVIRONMENT


async def test_batch_runs_sessions_concurrently_and_steps_of_a_session_in_order(pools):
    pool = pools(Slow)
    a, b = await opened(pool, "slow"), await opened(pool, "slow")
    batch = asyncio.create_task(
        play_many(pool, [item(a, 1, "wait"), item(b, 1, "block"), item(a, 2, "wait")])
    )
    await asyncio.sleep(0.01)
    Slow.gate.set()
    Slow.blocker.set()
    contents = [r.messages[0].content for r in await batch]
    assert contents == ["waited 1", "blocked 1", "waited 2"]


async def test_batch_with_wait_s_returns_step_pending_for_slow_items(pools):
    pool = pools(Slow, Quick)
    slow, quick = await opened(pool, "slow"), await opened(pool)
    batch = [item(slow, 1, "wait"), item(quick, 1), item(slow, 2, "end")]
    pending, ready, also_pending = await play_many(pool, batch, wait_s=0.01)
    assert isinstance(pending, StepPending)
    assert isinstance(also_pending, StepPending)
    assert isinstance(ready, StepResult)
    Slow.gate.set()
    again = await play_many(pool, batch)
    assert [r.messages[0].content.split()[0] for r in again] == ["waited", "1", "over"]


async def test_expert_requires_the_oracle_option(pools):
    closed, open_ = pools(Quick), pools(Quick, oracle=True)
    with pytest.raises(NotSupported, match="--oracle"):
        await ask_expert(closed, await opened(closed))
    message = await ask_expert(open_, await opened(open_))
    assert message.tool_calls[0].function.name == "finish"


async def test_draining_pool_finishes_open_sessions_and_rejects_openings(pools):
    pool = pools(Quick, max_sessions=1)
    session_id = await opened(pool)
    waiting = asyncio.create_task(opened(pool, wait_s=5))
    await until(lambda: pool.gauges()["agentrl_sessions_waiting"])
    drained = asyncio.create_task(pool.drain(5))
    with pytest.raises(ServerDraining):
        await waiting
    with pytest.raises(ServerDraining):
        await opened(pool)
    assert not drained.done()
    await play_step(pool, session_id, 1, says("finish"))
    await drained


async def test_drain_closes_open_sessions_at_its_deadline(pools):
    pool = pools(Slow)
    session_id = await opened(pool, "slow")
    await pool.drain(0.01)
    assert len(Slow.closed) == 1
    assert (await session_info(pool, session_id)).status is SessionStatus.CANCELLED


async def test_stop_waiting_ends_a_drain_early(pools):
    pool = pools(Slow)
    await opened(pool, "slow")
    drained = asyncio.create_task(pool.drain(60))
    await asyncio.sleep(0)
    pool.stop_waiting()
    await drained
    assert len(Slow.closed) == 1


class Shared(Quick):
    log: list[str]

    @classmethod
    def startup(cls):
        cls.log = ["up"]

    @classmethod
    async def shutdown(cls):
        cls.log.append("down")


async def test_startup_and_shutdown_run_once():
    pool = SessionPool([Shared])
    await asyncio.gather(*(opened(pool, "shared") for _ in range(5)))
    assert Shared.log == ["up"]
    await pool.aclose()
    await pool.aclose()
    assert Shared.log == ["up", "down"]


class BadShared(Quick):
    @classmethod
    def startup(cls):
        raise OSError("no database")

    @classmethod
    def shutdown(cls):
        raise OSError("still no database")


async def test_failed_startup_raises_environment_failed_and_close_completes(caplog):
    pool = SessionPool([BadShared])
    with pytest.raises(EnvironmentFailed, match=r"startup of task 'bad_shared' failed.*no database"):
        await opened(pool, "bad_shared")
    await pool.aclose()
    assert "shutdown of task bad_shared failed" in caplog.text


async def test_metrics_count_steps_and_ended_sessions(pools):
    metrics = Metrics()
    pool = pools(Quick, observer=SessionMetrics(metrics))
    a, b = await opened(pool), await opened(pool)
    await play_step(pool, a, 1, says("note", text="x"))
    await play_step(pool, a, 1, says("note", text="x"))
    await play_step(pool, a, 2, says("finish"))
    text = metrics.render(pool.gauges()).decode()
    assert 'agentrl_steps_total{task="quick"} 2.0' in text
    assert 'agentrl_sessions_ended_total{status="completed",task="quick"} 1.0' in text
    assert "agentrl_sessions_open 1.0" in text
    assert "agentrl_step_seconds_count 2.0" in text
    assert 'agentrl_step_seconds_bucket{le="+Inf"} 2.0' in text
    await close_session(pool, b)


@pytest.mark.parametrize("later", [False, True])
async def test_bug_in_one_step_of_a_batch_fails_only_this_step(pools, monkeypatch, later):
    pool = pools(Quick)
    ids = [await opened(pool) for _ in range(3)]

    async def fail():
        await asyncio.sleep(0)
        raise RuntimeError("a bug")

    def submit(message, seq):
        if later:
            return asyncio.create_task(fail())
        raise RuntimeError("a bug")

    monkeypatch.setattr(pool.session(ids[1]), "submit", submit)
    first, second, third = await play_many(
        pool, [StepRequest(session_id=one, seq=1, message=says("note", text="x")) for one in ids]
    )
    assert (first.session_id, third.session_id) == (ids[0], ids[2])
    assert isinstance(second, InternalError)
    assert second.message == "a bug in the server: RuntimeError"
