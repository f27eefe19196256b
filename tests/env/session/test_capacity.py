import asyncio

import pytest

from agentrl_env.errors import ServerDraining, ServerFull
from agentrl_env.session.capacity import Capacity


def capacity(total=1):
    return Capacity(total, lambda: None)


async def test_places_are_counted_and_released():
    places = capacity()
    await places.take()
    for wait_s in (0.0, 0.01):
        with pytest.raises(ServerFull):
            await places.take(wait_s=wait_s)
    places.release()
    await places.take()


async def test_several_places_are_acquired_atomically():
    places = capacity(2)
    with pytest.raises(ServerFull):
        await places.take(3)
    await places.take(2)


async def test_place_granted_to_a_cancelled_waiter_goes_to_the_next():
    places = capacity()
    await places.take()
    first, second = (asyncio.create_task(places.take(wait_s=5)) for _ in range(2))
    await asyncio.sleep(0)
    places.release()  # granted to the first waiter, which is cancelled before it runs
    first.cancel()
    await second
    assert places.waiting == 0


async def test_refuse_fails_waiting_and_later_openings():
    places = capacity()
    await places.take()
    waiting = asyncio.create_task(places.take(wait_s=5))
    await asyncio.sleep(0)
    places.refuse_new()
    with pytest.raises(ServerDraining):
        await waiting
    with pytest.raises(ServerDraining):
        await places.take(wait_s=5)
