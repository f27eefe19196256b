import asyncio
import random
import threading
import time

import pytest

from agentrl_env import Message, ToolCall, tool
from agentrl_env.session import threads as threads_module
from agentrl_env.session.answering import settled
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.runner import Runner
from agentrl_env.session.threads import AuthorTimeout, Threads
from agentrl_env.wire import OpenRequest, StepRequest
from tests.env.tasks import Quick, until


async def called(threads, function, seconds=5.0):
    answer = asyncio.get_running_loop().create_future()
    threads.start(function, seconds, answer.set_result)
    value, error = await answer
    if error is not None:
        raise error
    return value


async def test_jobs_that_wait_for_one_another_each_get_a_thread():
    threads, barrier = Threads(32), threading.Barrier(32)
    await asyncio.gather(*(called(threads, lambda: barrier.wait(10), 10.0) for _ in range(32)))
    threads.stop()


async def test_every_job_runs_once_on_no_more_threads_than_there_may_be():
    threads, ran, names = Threads(3), [], set()

    def job(number):
        ran.append(number)
        names.add(threading.get_ident())

    await asyncio.gather(*(called(threads, lambda n=n: job(n)) for n in range(2000)))
    assert sorted(ran) == list(range(2000))
    assert len(names) <= 3
    threads.stop()


async def test_no_job_is_forgotten_however_they_come():
    threads = Threads(2)

    async def one_after_another():
        for _ in range(500):
            await called(threads, int)

    await asyncio.wait_for(asyncio.gather(*(one_after_another() for _ in range(5))), 60)
    threads.stop()


async def test_a_job_that_was_given_up_before_it_began_never_runs():
    threads, blocker, ran = Threads(1), threading.Event(), []
    first = asyncio.get_running_loop().create_future()
    threads.start(lambda: blocker.wait(10), 10.0, first.set_result)
    job = threads.start(lambda: ran.append(1), 10.0, ran.append)
    job.give_up()
    blocker.set()
    await settled(first)
    await job.settle(5)
    assert (ran, job.ended) == ([], True)
    threads.stop()


class Meets(Quick):
    """Every session's tool waits until all sessions have called it."""

    blocking = True
    barrier = threading.Barrier(16)

    @tool
    def meet(self):
        """Wait for the others."""
        return str(self.barrier.wait(10) >= 0)


async def test_the_blocking_tools_of_a_batch_run_at_the_same_time():
    pool = SessionPool([Meets])
    ids = [(await pool.open(OpenRequest(task="meets"))).session_id for _ in range(16)]
    meet = Message.assistant(None, ToolCall.of("meet"))
    steps = [StepRequest(session_id=session_id, seq=1, message=meet) for session_id in ids]
    results = await pool.step_many(steps)
    assert {result.messages[0].content for result in results} == {"True"}
    await pool.aclose()


async def test_an_answer_that_nobody_can_take_holds_up_no_other(caplog):
    threads, last, told = Threads(1), threading.Event(), []

    def tell(number):
        if number == 2:
            raise LookupError("nobody is there")
        told.append(number)

    jobs = [threads.start(int, 30.0, lambda _, n=n: tell(n)) for n in range(6)]
    jobs.append(threads.start(last.set, 30.0, lambda _: tell(6)))
    last.wait(10)  # on the event loop: all but the last are now told together
    await until(lambda: len(told) == 6)
    assert told == [0, 1, 3, 4, 5, 6]
    assert "nobody is there" in caplog.text
    threads.stop()


async def test_an_answer_that_comes_just_when_its_caller_leaves_holds_up_no_other(caplog):
    threads, last = Threads(1), threading.Event()

    def call(function):
        return asyncio.create_task(Runner(blocking=True, threads=threads).call(function, 30.0))

    calls = [call(lambda n=n: n) for n in range(6)]
    calls.append(call(last.set))
    await asyncio.sleep(0)
    last.wait(10)
    calls[2].cancel()
    answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert [answer for answer in answers if not isinstance(answer, BaseException)] == [0, 1, 3, 4, 5, None]
    assert isinstance(answers[2], asyncio.CancelledError)
    assert "Exception in callback" not in caplog.text
    threads.stop()


def test_several_event_loops_at_once_lose_nothing():
    threads, ended = Threads(3), []

    async def play(seed):
        rng = random.Random(seed)

        async def one(number):
            pause = rng.choice((0.0, 0.0, 0.0, 0.0005, 0.003))
            assert await called(threads, lambda: time.sleep(pause) or number, 30.0) == number

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


async def test_threads_that_were_stopped_end_and_what_comes_still_runs():
    threads, names = Threads(2), []
    await asyncio.gather(
        *(called(threads, lambda: names.append(threading.current_thread())) for _ in range(20))
    )
    threads.stop()
    for thread in names:
        thread.join(10)
    assert not any(thread.is_alive() for thread in names)
    assert await called(threads, lambda: 3) == 3


class Hang:
    """A job that does not return before it is told to."""

    def __init__(self):
        self.release, self.threads = threading.Event(), []

    def __call__(self):
        self.threads.append(threading.current_thread())
        self.release.wait(60)


async def test_threads_that_do_not_come_back_are_replaced_and_end_when_they_do():
    threads, hang = Threads(1), Hang()
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


async def test_a_thread_is_replaced_too_where_nobody_waits_for_its_job_any_more():
    threads, hang = Threads(1), Hang()
    job = threads.start(hang, 0.05, lambda _: None)
    await until(lambda: hang.threads)
    job.give_up()
    assert await called(threads, lambda: 3) == 3
    hang.release.set()
    await job.settle(10)
    threads.stop()


async def test_no_more_threads_are_replaced_than_there_may_ever_be(monkeypatch):
    monkeypatch.setattr(threads_module, "LEAST_CEILING", 2)
    monkeypatch.setattr(threads_module, "REPLACED", 2)
    threads, hang = Threads(1), Hang()
    for _ in range(2):
        with pytest.raises(AuthorTimeout, match="still running"):
            await called(threads, hang, 0.1)
    with pytest.raises(AuthorTimeout, match="no thread came free"):
        await called(threads, int, 0.05)
    hang.release.set()
    assert await called(threads, lambda: 3, 30.0) == 3
    assert len(hang.threads) == 2
    threads.stop()
