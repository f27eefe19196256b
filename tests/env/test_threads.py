import asyncio
import threading
import time

import pytest

from agentrl_env import Message, ToolCall, tool
from agentrl_env.runner import Runner, settled
from agentrl_env.server.pool import SessionPool
from agentrl_env.threads import Threads
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


async def test_quick_jobs_share_few_threads():
    threads, ran, names = Threads(64), [], set()

    def job(number):
        ran.append(number)
        names.add(threading.get_ident())

    await asyncio.gather(*(called(threads, lambda n=n: job(n)) for n in range(2000)))
    assert sorted(ran) == list(range(2000))
    assert len(names) < 16
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


@pytest.mark.parametrize("through", ["runner", "threads"])
async def test_an_answer_that_comes_just_when_its_caller_leaves_holds_up_no_other(through, caplog):
    threads, gate, begun = Threads(2), threading.Event(), []

    def wait(number):
        begun.append(number)
        gate.wait(5)
        return number

    def call(number):
        if through == "runner":
            return asyncio.ensure_future(
                Runner(blocking=True, threads=threads).call(lambda: wait(number), 30.0)
            )
        answer = asyncio.get_running_loop().create_future()
        threads.start(lambda: wait(number), 30.0, answer.set_result)
        return answer

    calls = [call(0), call(1)]
    await until(lambda: len(begun) == 2)
    gate.set()
    while len(threads._mailbox._ended) < 2:  # both have ended, and nobody was told yet
        time.sleep(0.001)  # noqa: ASYNC251
    first = threads._mailbox._ended[0]._function()
    calls[first].cancel()
    assert await asyncio.wait_for(calls[1 - first], 5) in ((1 - first), ((1 - first), None))
    assert ("Exception in callback" in caplog.text) == (through == "threads")
    threads.stop()
