import asyncio
import random
import threading
import time
from contextvars import ContextVar

import pytest

from agentrl_env import Message, ToolCall, tool
from agentrl_env.session import threads as threads_module
from agentrl_env.session.executor import Executor, run_eagerly
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.threads import ROW_BYTES, AuthorTimeout, RunningCalls, ThreadPool
from agentrl_env.wire import OpenRequest, StepRequest
from tests.env.tasks import Quick, play_many, until


async def called(threads, function, seconds=60.0):
    value, error = await threads.submit(function, seconds).answer
    if error is not None:
        raise error
    return value


async def test_jobs_that_wait_for_each_other_run_on_separate_threads():
    threads, barrier = ThreadPool(32), threading.Barrier(32)
    await asyncio.gather(*(called(threads, lambda: barrier.wait(60), 60.0) for _ in range(32)))
    threads.stop()


async def test_every_job_runs_once_within_the_thread_limit():
    threads, ran, names = ThreadPool(3), [], set()

    def job(number):
        ran.append(number)
        names.add(threading.get_ident())

    await asyncio.gather(*(called(threads, lambda n=n: job(n)) for n in range(2000)))
    assert sorted(ran) == list(range(2000))
    assert len(names) <= 3
    threads.stop()


async def test_sequential_jobs_of_several_callers_all_run():
    threads = ThreadPool(2)

    async def one_after_another():
        for _ in range(500):
            await called(threads, int)

    await asyncio.wait_for(asyncio.gather(*(one_after_another() for _ in range(5))), 60)
    threads.stop()


async def test_job_cancelled_before_its_start_never_runs():
    threads, blocker, ran = ThreadPool(1), threading.Event(), []
    first = threads.submit(lambda: blocker.wait(60), 60.0)
    job = threads.submit(lambda: ran.append(1), 60.0)
    job.answer.cancel()
    blocker.set()
    await first.answer
    await job.ended(60)
    assert (ran, job.ran) == ([], True)
    threads.stop()


class Meets(Quick):
    """The tool of every session waits until all sessions have called it."""

    blocking = True
    barrier = threading.Barrier(16)

    @tool
    def meet(self):
        """Wait for the others."""
        return str(self.barrier.wait(60) >= 0)


async def test_blocking_tools_of_a_batch_run_concurrently():
    pool = SessionPool([Meets])
    ids = [(await pool.open(OpenRequest(task="meets"))).session_id for _ in range(16)]
    meet = Message.assistant(None, ToolCall.of("meet"))
    steps = [StepRequest(session_id=session_id, seq=1, message=meet) for session_id in ids]
    results = await play_many(pool, steps)
    assert {result.messages[0].content for result in results} == {"True"}
    await pool.aclose()


async def test_cancelled_caller_does_not_delay_other_results(caplog):
    threads, last = ThreadPool(1), threading.Event()

    def call(function):
        return asyncio.create_task(Executor(blocking=True, threads=threads).run(function, 60.0))

    calls = [call(lambda n=n: n) for n in range(6)]
    calls.append(call(last.set))
    await asyncio.sleep(0)
    last.wait(60)
    calls[2].cancel()
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [0, 1, 3, 4, 5, None]
    assert isinstance(answers[2], asyncio.CancelledError)
    assert "Exception in callback" not in caplog.text
    threads.stop()


def test_pool_serves_several_event_loops_concurrently():
    threads, ended = ThreadPool(3), []

    async def play(seed):
        rng = random.Random(seed)

        async def one(number):
            pause = rng.choice((0.0, 0.0, 0.0, 0.0005, 0.003))
            assert await called(threads, lambda: time.sleep(pause) or number, 60.0) == number

        for _ in range(10):
            await asyncio.gather(*(one(number) for number in range(rng.choice((1, 7, 40)))))
        ended.append(seed)

    def loop(seed):
        asyncio.run(asyncio.wait_for(play(seed), 60))

    loops = [threading.Thread(target=loop, args=(seed,)) for seed in range(3)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    assert sorted(ended) == [0, 1, 2]
    threads.stop()


async def test_stopped_threads_end_and_later_jobs_still_run():
    threads, names = ThreadPool(2), []
    await asyncio.gather(
        *(called(threads, lambda: names.append(threading.current_thread())) for _ in range(20))
    )
    threads.stop()
    for thread in names:
        thread.join(60)
    assert not any(thread.is_alive() for thread in names)
    assert await called(threads, lambda: 3) == 3


class Hang:
    """A job that blocks until it is released."""

    def __init__(self):
        self.release, self.threads = threading.Event(), []

    def __call__(self):
        self.threads.append(threading.current_thread())
        self.release.wait(60)


async def test_hanging_threads_are_replaced_and_end_when_they_return():
    threads, hang = ThreadPool(1), Hang()
    for _ in range(3):
        with pytest.raises(AuthorTimeout, match="still running"):
            await called(threads, hang, 0.1)
    assert threads.abandoned == 3
    replacement = await called(threads, threading.current_thread)
    hang.release.set()
    for thread in hang.threads:
        await asyncio.to_thread(thread.join, 10)
    assert [thread.is_alive() for thread in hang.threads] == [False, False, False]
    assert threads.abandoned == 0
    assert await called(threads, threading.current_thread) is replacement
    threads.stop()


async def test_thread_of_a_cancelled_hanging_job_is_replaced():
    threads, hang = ThreadPool(1), Hang()
    job = threads.submit(hang, 0.05)
    await until(lambda: hang.threads)
    job.answer.cancel()
    assert await called(threads, lambda: 3) == 3
    hang.release.set()
    await job.ended(10)
    threads.stop()


async def test_thread_of_an_ended_session_is_replaced_within_the_timeout_of_its_call():
    threads, hang = ThreadPool(1), Hang()
    job = threads.submit(hang, 3600.0)
    await until(lambda: hang.threads)
    job.answer.cancel()
    await job.ended(0.01)  # as Session.close() does
    assert threads.abandoned == 1
    assert await called(threads, lambda: 3) == 3
    hang.release.set()
    await job.ended(10)
    threads.stop()


async def test_full_pool_that_starts_no_job_for_a_while_is_exhausted(monkeypatch):
    threads, hang = ThreadPool(2), Hang()
    jobs = [threads.submit(hang, 3600.0) for _ in range(2)]
    await until(lambda: len(hang.threads) == 2)
    assert not threads.exhausted
    monkeypatch.setattr(threads_module, "STALLED_S", 0.0)
    await until(lambda: threads.exhausted)
    hang.release.set()
    await asyncio.gather(*(job.answer for job in jobs))
    await until(lambda: not threads.exhausted)
    threads.stop()


async def test_sessions_with_running_calls_are_shown_with_their_threads():
    memory = bytearray(4 * ROW_BYTES)
    threads, hang = ThreadPool(2, calls=RunningCalls(memory)), Hang()
    seen = []

    def running():
        rows = (row.split() for row in memory.decode().splitlines() if row[:1].strip(" \0"))
        return {session: int(thread) for session, thread in rows}

    async def look_twice():
        seen.append(running())
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        seen.append(running())
        raise KeyError

    hanging = Executor(blocking=True, threads=threads, session_id="hanging")
    waiting = asyncio.create_task(hanging.run(hang, 10.0))
    await until(lambda: hang.threads)
    here, there = threading.get_native_id(), hang.threads[0].native_id
    inline = Executor(blocking=False, threads=threads, session_id="inline")
    assert await inline.run(running, 5) == {"hanging": there, "inline": here}
    with pytest.raises(KeyError):
        await Executor(blocking=True, threads=threads, session_id="async").run(look_twice, 5)
    assert seen == 2 * [{"hanging": there, "async": here}]
    assert running() == {"hanging": there}  # even while the coroutine waited
    hang.release.set()
    await waiting
    await until(lambda: not running())
    threads.stop()


async def test_shown_coroutine_is_cancelled_and_can_finish_its_work():
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append(True)
            raise

    with pytest.raises(AuthorTimeout):
        await Executor(blocking=True, threads=ThreadPool(1)).run(wait, 0.01)
    await until(lambda: ended)


async def test_replacement_of_hanging_threads_stops_at_the_ceiling(monkeypatch):
    monkeypatch.setattr(threads_module, "MIN_CEILING", 2)
    monkeypatch.setattr(threads_module, "REPLACEMENT_FACTOR", 2)
    threads, hang = ThreadPool(1), Hang()
    for _ in range(2):
        with pytest.raises(AuthorTimeout, match="still running"):
            await called(threads, hang, 0.1)
    with pytest.raises(AuthorTimeout, match="no thread came free"):
        await called(threads, int, 0.05)
    hang.release.set()
    assert await called(threads, lambda: 3, 30.0) == 3
    assert len(hang.threads) == 2
    threads.stop()


async def test_threads_are_reused_and_bounded():
    threads, names = ThreadPool(2), set()
    executor = Executor(blocking=True, threads=threads)
    for _ in range(10):
        names.add(await executor.run(threading.get_ident, 5))
    assert len(names) <= 2
    threads.stop()
    threads = ThreadPool(2)
    executor = Executor(blocking=True, threads=threads)
    barrier = threading.Barrier(2)
    await asyncio.gather(*(executor.run(barrier.wait, 60) for _ in range(4)))
    threads.stop()


async def test_waiting_for_a_thread_times_out():
    threads, release = ThreadPool(1), threading.Event()
    executor = Executor(blocking=True, threads=threads)
    holding = asyncio.create_task(executor.run(lambda: release.wait(60), 60))
    await asyncio.sleep(0)
    with pytest.raises(AuthorTimeout, match="no thread came free"):
        await Executor(blocking=True, threads=threads).run(int, 0.01)
    release.set()
    await holding
    assert await executor.run(int, 60) == 0
    threads.stop()


async def test_settle_waits_for_a_call_past_its_deadline():
    threads, release, over = ThreadPool(1), threading.Event(), []
    executor = Executor(blocking=True, threads=threads)
    with pytest.raises(AuthorTimeout, match="still running"):
        await executor.run(lambda: over.append(release.wait(60)), 0.01)
    release.set()
    await executor.settle(60)
    assert over == [True]
    threads.stop()


async def test_plain_function_can_return_an_awaitable():
    async def later():
        return 3

    for blocking in (True, False):
        threads = ThreadPool(1)
        assert await Executor(blocking=blocking, threads=threads).run(lambda: later(), 5) == 3
        threads.stop()


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(1), KeyError("x")])
async def test_exceptions_of_a_thread_reach_the_caller(error):
    threads = ThreadPool(1)

    def fail():
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await Executor(blocking=True, threads=threads).run(fail, 5)
    threads.stop()


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt(), SystemExit(1)]
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_exceptions_on_the_event_loop_reach_the_caller(error, is_async):
    def fail():
        raise error

    async def fail_later():
        await asyncio.sleep(0)
        raise error

    with pytest.raises((RuntimeError, SystemExit)):
        await Executor(blocking=False, threads=ThreadPool(1)).run(fail_later if is_async else fail, 5)


class Panic(BaseException):
    """An exception that is not an Exception, as Rust extensions raise."""


@pytest.mark.parametrize("blocking", [False, True])
async def test_base_exceptions_of_coroutines_are_runtime_errors(blocking):
    async def fail():
        await asyncio.sleep(0)
        raise Panic

    threads = ThreadPool(1)
    with pytest.raises(RuntimeError, match="Panic was raised"):
        await Executor(blocking=blocking, threads=threads).run(fail, 5)
    threads.stop()


async def test_coroutine_that_ignores_cancellation_times_out():
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    executor = Executor(blocking=False, threads=ThreadPool(1))
    with pytest.raises(AuthorTimeout):
        await executor.run(stubborn, 0.01)
    release.set()
    await executor.settle(60)


def test_hanging_thread_does_not_keep_the_event_loop_open():
    release = threading.Event()
    threads = ThreadPool(1)

    async def run():
        with pytest.raises(AuthorTimeout):
            await Executor(blocking=True, threads=threads).run(lambda: release.wait(60), 0.01)

    asyncio.run(run())
    release.set()
    threads.stop()


async def test_eager_coroutine_ends_immediately_or_continues_in_its_own_context():
    number, gate = ContextVar("number", default=0), asyncio.get_running_loop().create_future()

    async def count(wait):
        number.set(1)
        if wait:
            await gate
        return number.get()

    assert run_eagerly(count(wait=False)) == 1
    waiting = run_eagerly(count(wait=True))
    assert number.get() == 0
    gate.set_result(None)
    assert await waiting == 1


async def test_cancelled_eager_coroutine_ends_before_its_result_is_cancelled():
    ended = []

    async def wait():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(True)

    waiting = run_eagerly(wait())
    assert waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [True]
