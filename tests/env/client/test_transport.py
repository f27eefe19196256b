"""The transport to a server: its WebSocket if it offers one, otherwise HTTP."""

import asyncio

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client.transport import RECONNECT_S, Response, ServerTransport
from agentrl_env.errors import ProtocolError, Unauthorized
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.wire import CLOSE, FORK, OPEN, STEP, STEP_MANY, TASKS
from tests.env.tasks import Clock, Quick

NOTE = ToolCall.of("note", text="x")
CALLS = (TASKS, OPEN, STEP, STEP_MANY, CLOSE, FORK)


async def send(transport, *calls, timeout=1.0):
    for call in calls:
        await transport.send(call, b"{}", None, timeout=timeout)


class Carrier:
    """Replaces either transport and records the calls sent over it."""

    def __init__(self):
        self.carried = []
        self.offers_socket = False
        self.connected = False
        self.tries = 0
        self.problem = None
        self.closed = False

    async def send(self, call, body, session_id, *, timeout):
        self.carried.append(call.name)
        return Response(200, b"")

    async def connect(self):
        self.tries += 1
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        self.connected = True

    async def aclose(self):
        self.closed = True


@pytest.fixture
def parts():
    http, socket, clock = Carrier(), Carrier(), Clock()
    return http, socket, clock, ServerTransport(http, socket, clock=clock)


async def test_without_a_websocket_all_calls_use_http(parts):
    http, socket, _, transport = parts
    await send(transport, *CALLS)
    assert (len(http.carried), socket.tries) == (6, 0)


async def test_all_calls_use_the_websocket_once_it_is_offered(parts):
    http, socket, _, transport = parts
    await send(transport, TASKS)
    http.offers_socket = True
    await send(transport, *CALLS)
    assert (http.carried, socket.carried) == (["tasks"], [call.name for call in CALLS])
    assert socket.tries == 1


@pytest.mark.parametrize(
    "problem",
    [
        ConnectionRefusedError(),
        TimeoutError(),
        ProtocolError("x"),
        Unauthorized("x"),
    ],
)
async def test_failed_websocket_is_retried_later(parts, problem):
    http, socket, clock, transport = parts
    http.offers_socket, socket.problem = True, problem
    for _ in range(3):
        await send(transport, STEP)
    assert (http.carried, socket.tries) == (["step"] * 3, 1)
    clock.now += RECONNECT_S
    socket.problem = None
    await send(transport, STEP)
    assert (socket.carried, socket.tries) == (["step"], 2)


async def test_websocket_that_never_opens_delays_a_step_by_its_timeout_at_most(parts):
    http, socket, _, transport = parts

    async def hang():
        await asyncio.Event().wait()

    http.offers_socket, socket.connect = True, hang
    await send(transport, STEP, timeout=0.01)
    assert http.carried == ["step"]


async def test_closing_closes_both_connections(parts):
    http, socket, _, transport = parts
    await transport.aclose()
    assert (http.closed, socket.closed) == (True, True)


async def test_client_switches_to_the_websocket_and_survives_its_loss():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    async with EnvClient.connect(server.url) as client:
        socket = client.backend._lane().transport._socket
        await client.tasks()
        assert not socket.connected
        sessions = [await client.open("quick") for _ in range(3)]
        assert socket.connected
        assert (await sessions[0].step(NOTE)).seq == 1
        socket._connection._websocket.transport.abort()
        assert [(await session.step(NOTE)).seq for session in sessions] == [2, 1, 1]
        results = await asyncio.gather(*(session.step(NOTE) for session in sessions))
        assert [result.seq for result in results] == [3, 2, 2]
        assert server.metrics.steps["quick"] == 7
    await server.stop()
