"""Clients of a fleet with several controllers, including one that does not answer."""

import asyncio
import contextlib
import random

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client import transport
from agentrl_env.errors import CallTimeout, ServerDraining, ServerUnreachable, SessionLost
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from tests.chaos.proxy import Proxy
from tests.env.tasks import Quick, Slow, until


class Pair:
    """Two controllers, each behind a proxy, and one server linked to both."""

    @property
    def url(self) -> str:
        return ",".join(f"http://127.0.0.1:{proxy.port}" for proxy in self.proxies)

    def client(self, first: int, **options) -> EnvClient:
        """Return a client that prefers one of the controllers."""
        client = EnvClient.connect(self.url, **options)
        client.backend._lane().transport._preferred = first
        return client


@pytest.fixture
async def pair():
    pair = Pair()
    async with contextlib.AsyncExitStack() as stack:
        pair.controllers = [ControllerServer(FleetService(queue_s=0.0), port=0) for _ in range(2)]
        pair.proxies = [Proxy(int(one.url.rpartition(":")[2])) for one in pair.controllers]
        for part in (*pair.controllers, *pair.proxies):
            await part.start()
            stack.push_async_callback(part.stop)
        urls = [one.url for one in pair.controllers]
        pair.server = EnvServer([Quick, Slow], host=NOWHERE, controllers=urls, drain_s=0)
        await pair.server.start()
        stack.push_async_callback(pair.server.stop)
        for one in pair.controllers:
            await one.fleet.registry.find(pair.server.pool.server_id)
        yield pair


async def note(session):
    return (await session.step(ToolCall.of("note", text="x"))).messages[0].content.split()[0]


async def test_session_continues_over_another_controller(pair):
    async with pair.client(0) as client:
        session = await client.open("quick")
        assert await note(session) == "1"
        pair.proxies[0].refusing = True
        pair.proxies[0].cut(random.Random(0), 1.0)
        assert await note(session) == "2"
        assert (await client.resume(session.session_id)).turn == 2


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_silent_controller_is_skipped_and_no_step_runs_twice(pair, monkeypatch, scheme):
    monkeypatch.setattr(transport, "ATTEMPT_TIMEOUT_S", 0.3)
    async with EnvClient.connect(pair.url.replace("http", scheme), timeout=60) as client:
        client.backend._lane().transport._preferred = 1
        sessions = [await client.open("quick") for _ in range(5)]
        pair.proxies[1].stall()
        assert await asyncio.gather(*map(note, sessions)) == ["1"] * 5
        pair.proxies[1].calm()
        assert await asyncio.gather(*map(note, sessions)) == ["2"] * 5


async def test_step_longer_than_an_attempt_runs_once(pair, monkeypatch):
    monkeypatch.setattr(transport, "ATTEMPT_TIMEOUT_S", 0.1)
    async with pair.client(0) as client:
        session = await client.open("slow")
        step = asyncio.create_task(session.step(ToolCall.of("wait")))
        asked = pair.controllers[1].metrics.calls
        await until(lambda: asked["step"])
        Slow.gate.set()
        assert (await step).messages[0].content == "waited 1"


async def test_opening_skips_a_draining_controller(pair):
    pair.controllers[0].fleet.draining = True
    async with pair.client(0) as client:
        assert (await client.open("quick")).session_id
        pair.controllers[1].fleet.draining = True
        with pytest.raises(ServerDraining):
            await client.open("quick")


async def test_typed_error_is_not_retried_at_another_controller(pair):
    async with pair.client(0) as client:
        session = await client.open("quick")
        for one in pair.controllers:
            await one.fleet.registry.lose(pair.server.pool.server_id, "a test")
        with pytest.raises(SessionLost):
            await note(session)


async def test_call_times_out_if_no_controller_answers(pair, monkeypatch):
    monkeypatch.setattr(transport, "ATTEMPT_TIMEOUT_S", 0.1)
    async with pair.client(0, timeout=0.5) as client:
        for proxy in pair.proxies:
            proxy.stall()
        with pytest.raises(CallTimeout):
            await client.tasks()


async def test_refused_connections_raise_server_unreachable(pair):
    for proxy in pair.proxies:
        proxy.refusing = True
    client = pair.client(0)
    client.backend._patience = 0.2
    async with client:
        with pytest.raises(ServerUnreachable):
            await client.tasks()


def test_each_address_is_validated():
    with pytest.raises(ServerUnreachable, match="'ftp://b' is not"):
        EnvClient.connect("http://a:1,ftp://b")
