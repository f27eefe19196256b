"""What carries a call: lone steps a WebSocket where there is one, everything else HTTP."""

import asyncio

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client.picking import TRY_AGAIN_S, PickingTransport
from agentrl_env.client.transport import Call, HttpResponse
from agentrl_env.errors import ProtocolError, Unauthorized
from agentrl_env.server.serve import EnvServer
from tests.env.tasks import Clock, Quick

NOTE = ToolCall.of("note", text="x")
STEP = Call(name="step", method="POST", path="/v1/sessions/a/step", session_id="a")
OTHERS = [
    Call(name=name, method="POST", path="/") for name in ("tasks", "open", "step_many", "close", "fork")
]


class Carrier:
    """Stands for either transport; remembers what it carried."""

    def __init__(self):
        self.carried = []
        self.offers_socket = False
        self.connected = False
        self.tries = 0
        self.problem = None
        self.closed = False

    async def send(self, call, *, timeout):
        self.carried.append(call.name)
        return HttpResponse(status=200, body=b"")

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
    return http, socket, clock, PickingTransport(http, socket, clock=clock)


async def test_without_an_offer_all_goes_over_http(parts):
    http, socket, _, transport = parts
    for call in (STEP, *OTHERS):
        await transport.send(call, timeout=1)
    assert (len(http.carried), socket.tries) == (6, 0)


async def test_lone_steps_take_the_socket_once_it_is_offered(parts):
    http, socket, _, transport = parts
    http.offers_socket = True
    for call in (*OTHERS, STEP, STEP):
        await transport.send(call, timeout=1)
    assert socket.carried == ["step", "step"]
    assert http.carried == [call.name for call in OTHERS]
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
async def test_a_socket_that_cannot_be_opened_is_left_alone_for_a_while(parts, problem):
    http, socket, clock, transport = parts
    http.offers_socket, socket.problem = True, problem
    for _ in range(3):
        await transport.send(STEP, timeout=1)
    assert (http.carried, socket.tries) == (["step"] * 3, 1)
    clock.now += TRY_AGAIN_S
    socket.problem = None
    await transport.send(STEP, timeout=1)
    assert (socket.carried, socket.tries) == (["step"], 2)


async def test_a_socket_that_never_opens_delays_a_step_no_longer_than_its_time(parts):
    http, socket, _, transport = parts

    async def hang():
        await asyncio.Event().wait()

    http.offers_socket, socket.connect = True, hang
    await transport.send(STEP, timeout=0.01)
    assert http.carried == ["step"]


async def test_both_are_hung_up(parts):
    http, socket, _, transport = parts
    await transport.aclose()
    assert (http.closed, socket.closed) == (True, True)


async def test_a_client_picks_by_itself_and_survives_the_loss_of_the_socket():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    async with EnvClient.connect(server.url) as client:
        sessions = [await client.open("quick") for _ in range(3)]
        socket = client.backend._lane().transport._socket
        assert not socket.connected
        assert (await sessions[0].step(NOTE)).seq == 1
        assert socket.connected
        socket._connection.close()
        assert [(await session.step(NOTE)).seq for session in sessions] == [2, 1, 1]
        results = await asyncio.gather(*(session.step(NOTE) for session in sessions))
        assert [result.seq for result in results] == [3, 2, 2]
        assert server.pool.metrics.steps["quick"] == 7
    await server.stop()
