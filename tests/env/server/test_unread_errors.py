"""Abandoned work can fail without an error log of asyncio."""

import asyncio
import contextlib
import gc

import pytest
from websockets.exceptions import ConnectionClosedError

from agentrl_env.client.transport import _Connection
from agentrl_env.errors import ServerFull
from agentrl_env.server.embedded import unless_disconnected
from agentrl_env.session.single_flight import SingleFlight


@pytest.fixture
async def complaints():
    """Collect the errors that asyncio reports."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
    return found


async def full_when_cancelled():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise ServerFull("the queue is full") from None


class ConnectedRequest:
    """A request with a connected client."""

    async def receive(self):
        await asyncio.sleep(60)


async def abandon(work):
    """Cancel a task that waits for work, then let the work finish."""
    waiting = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()


async def test_request_that_is_cancelled_reads_the_error_of_its_work(complaints):
    await abandon(unless_disconnected(ConnectedRequest(), full_when_cancelled()))
    assert complaints == []


async def test_flight_without_callers_reads_its_error(complaints):
    flights = SingleFlight()
    await abandon(flights.run("key", full_when_cancelled))
    assert complaints == []
    assert await flights.run("key", lambda: asyncio.sleep(0, "again")) == "again"


class ClosingSocket:
    """A WebSocket that closes while a frame is being sent."""

    def __init__(self):
        self.closing = asyncio.Event()

    async def send(self, frame, text):
        self.closing.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise ConnectionClosedError(None, None)

    async def recv(self, decode):
        await self.closing.wait()
        raise ConnectionClosedError(None, None)


async def test_call_that_could_not_be_sent_raises_once(complaints):
    connection = _Connection(ClosingSocket())
    with pytest.raises(ConnectionResetError):
        await connection.call(1, b"{}")
    del connection
    gc.collect()
    assert complaints == []
