import asyncio
import threading

import pytest

from agentrl_env.session.runner import FairSlots, Runner
from agentrl_env.session.threads import AuthorTimeout, Threads


async def test_slots_are_counted_and_given_back():
    slots = FairSlots(1)
    assert await slots.acquire(0)
    assert not await slots.acquire(0)
    assert not await slots.acquire(0.01)
    slots.release()
    assert await slots.acquire(0)


async def test_a_slot_given_to_somebody_who_left_is_passed_on():
    slots = FairSlots(1)
    await slots.acquire(0)
    first, second = (asyncio.create_task(slots.acquire(5)) for _ in range(2))
    await asyncio.sleep(0)
    slots.release()  # to the first, which leaves before it wakes
    first.cancel()
    assert await second
    assert slots.waiting == 0


async def test_refusing_sends_everybody_away_for_good():
    slots = FairSlots(1)
    await slots.acquire(0)
    waiting = asyncio.create_task(slots.acquire(5))
    await asyncio.sleep(0)
    slots.refuse_all()
    assert not await waiting
    assert not await slots.acquire(5)


async def test_threads_are_reused_and_bounded():
    threads, names = Threads(2), set()
    runner = Runner(blocking=True, threads=threads)
    for _ in range(10):
        names.add(await runner.call(threading.get_ident, 5))
    assert len(names) <= 2
    threads.stop()
    threads = Threads(2)
    runner = Runner(blocking=True, threads=threads)
    barrier = threading.Barrier(2)
    await asyncio.gather(*(runner.call(barrier.wait, 5) for _ in range(4)))
    threads.stop()


async def test_waiting_for_a_thread_has_an_end():
    threads, release = Threads(1), threading.Event()
    runner = Runner(blocking=True, threads=threads)
    holding = asyncio.create_task(runner.call(lambda: release.wait(5), 5))
    await asyncio.sleep(0)
    with pytest.raises(AuthorTimeout, match="no thread came free"):
        await Runner(blocking=True, threads=threads).call(int, 0.01)
    release.set()
    await holding
    assert await runner.call(int, 5) == 0
    threads.stop()


async def test_a_call_that_outlived_its_deadline_can_be_waited_for():
    threads, release, over = Threads(1), threading.Event(), []
    runner = Runner(blocking=True, threads=threads)
    with pytest.raises(AuthorTimeout, match="still running"):
        await runner.call(lambda: over.append(release.wait(5)), 0.01)
    release.set()
    await runner.settle(5)
    assert over == [True]
    threads.stop()


async def test_a_plain_function_may_return_an_awaitable():
    async def later():
        return 3

    for blocking in (True, False):
        threads = Threads(1)
        assert await Runner(blocking=blocking, threads=threads).call(lambda: later(), 5) == 3
        threads.stop()


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(1), KeyError("x")])
async def test_whatever_a_thread_raises_arrives(error):
    threads = Threads(1)

    def fail():
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await Runner(blocking=True, threads=threads).call(fail, 5)
    threads.stop()


async def test_a_coroutine_that_ignores_its_cancellation_is_left_behind():
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    runner = Runner(blocking=False, threads=Threads(1))
    with pytest.raises(AuthorTimeout):
        await runner.call(stubborn, 0.01)
    release.set()
    await runner.settle(5)


def test_a_thread_that_never_ends_does_not_keep_its_loop():
    release = threading.Event()
    threads = Threads(1)

    async def run():
        with pytest.raises(AuthorTimeout):
            await Runner(blocking=True, threads=threads).call(lambda: release.wait(5), 0.01)

    asyncio.run(run())
    release.set()
    threads.stop()
