"""Concurrency limit controlled by KV cache utilization."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.engine.replica_supervisor import CUT, GROWTH, HIGH, LOW, ConcurrencyLimit, next_limit


@given(limit=st.floats(1, 64), kv_usage=st.floats(0, 1), preempted=st.booleans(), saturated=st.booleans())
def test_limit_follows_aimd_within_bounds(
    limit: float, kv_usage: float, preempted: bool, saturated: bool
) -> None:
    after = next_limit(limit, most=64, kv_usage=kv_usage, preempted=preempted, saturated=saturated)
    assert 1.0 <= after <= 64.0
    if preempted or kv_usage > HIGH:
        assert after == max(1.0, limit * CUT)
    elif saturated and kv_usage < LOW:
        assert after == min(64.0, limit + GROWTH)
    else:
        assert after == limit


async def test_requests_wait_and_full_cache_lowers_limit() -> None:
    pace, entered, leave = ConcurrencyLimit(most=4), [], asyncio.Event()

    async def request(number: int) -> None:
        async with pace:
            entered.append(number)
            await leave.wait()

    tasks = [asyncio.create_task(request(number)) for number in range(8)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert entered == [0, 1, 2, 3]
    pace.observe(kv_usage=0.99, preemptions=0)
    assert int(pace.limit) == 2
    tasks[0].cancel()
    tasks[5].cancel()
    await asyncio.gather(tasks[0], tasks[5], return_exceptions=True)
    assert (entered, pace.active) == ([0, 1, 2, 3], 3)
    pace.observe(kv_usage=0.1, preemptions=0)
    await asyncio.sleep(0)
    assert entered == [0, 1, 2, 3, 4]
    leave.set()
    await asyncio.gather(*(task for task in tasks if not task.cancelled()))
    assert entered == [0, 1, 2, 3, 4, 6, 7]
    assert pace.active == 0


async def test_waiting_request_can_be_cancelled_while_another_leaves() -> None:
    pace = ConcurrencyLimit(most=1)

    async def request() -> None:
        async with pace:
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended)
    assert pace.load == 0


def test_preemption_between_two_observations_lowers_limit_once() -> None:
    pace = ConcurrencyLimit(most=10)
    for preemptions, limit in [(0, 10), (3, 7), (3, 7), (4, 4)]:
        pace.observe(kv_usage=0.5, preemptions=preemptions)
        assert int(pace.limit) == limit
