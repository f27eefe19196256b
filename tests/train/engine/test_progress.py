"""Waits that continue while work makes progress."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from agentrl_train.engine.torch import while_progress
from agentrl_train.errors import EngineError


def counting(values: Iterator[int], *, then: Callable[[int], None] = lambda value: None) -> Callable[[], int]:
    """Return a progress function that calls ``then`` with each value before returning it."""

    def progress() -> int:
        value = next(values)
        then(value)
        return value

    return progress


async def test_slow_work_with_progress_is_awaited_past_any_number_of_deadlines() -> None:
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    end = counting(iter(range(1000)), then=lambda value: work.set_result("done") if value == 500 else None)
    assert await while_progress(work, progress=end, within_s=0.0) == "done"


async def test_work_without_progress_is_cancelled() -> None:
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    values = iter([1, 2, 3, 3, 4])
    with pytest.raises(EngineError, match="the engine made no progress for 0 s"):
        await while_progress(work, progress=counting(values), within_s=0.0)
    assert work.cancelled()
    assert list(values) == [4]


async def test_error_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_progress(fail(), progress=lambda: 0, within_s=60.0)


async def test_cancelled_wait_cancels_the_work() -> None:
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    started = asyncio.Event()

    def progress() -> int:
        started.set()
        return 0

    wait = asyncio.create_task(while_progress(work, progress=progress, within_s=60.0))
    await started.wait()
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    assert work.cancelled()
