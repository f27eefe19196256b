"""The link between a server and its controller: malformed frames, silence, limits."""

import asyncio
import json
import logging
import time
from contextlib import suppress

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from agentrl_env import EnvClient, ToolCall, tool
from agentrl_env.client.client import ClientSession
from agentrl_env.errors import CallTimeout, InternalError, SessionLost, StateUnavailable
from agentrl_env.fleet import link_endpoint, registry
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.remote_server import Outbox
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.fleet.store import MemoryStore
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server import controller_link
from agentrl_env.types import SessionInfo, TaskSample
from agentrl_env.wire import Beat, Hello, SessionRequest
from tests.env.tasks import Clock, Quick, Slow, until


class Forkable(Quick):
    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


class Loud(Quick):
    @tool
    def say(self, size: int):
        """Say much."""
        return "é" * (size // 2)


TASK = {"name": "quick", "max_turns": 5}


@pytest.fixture
async def controller():
    controller = ControllerServer(FleetService(queue_s=0.0), port=0)
    await controller.start()
    yield controller
    await controller.stop()


@pytest.fixture
async def serve(controller):
    servers = []

    async def start(*tasks, **options):
        server = EnvServer(tasks, host=NOWHERE, controllers=[controller.url], drain_s=0, **options)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()


def linked(controller):
    url = controller.url.replace("http", "ws") + "/v1/link"
    return connect(url, compression=None, max_size=None, max_queue=1, close_timeout=0.2)


def hello(server_id="peer", place="here 1", **fields):
    said = {"server_id": server_id, "tasks": [TASK], "capacity": 9, "place": place, **fields}
    return json.dumps({"hello": said})


def beat(**fields):
    return '{"beat":' + json.dumps(fields) + "}"


def session_of(client, session_id):
    info = SessionInfo(session_id=session_id, task="quick", sample=TaskSample(task="quick"))
    return ClientSession(client.backend, info)


async def close_code(websocket):
    with suppress(ConnectionClosed):
        while True:
            await websocket.recv()
    return websocket.close_code


@pytest.mark.parametrize("frame", [b"\x00\xff", b"[]", "\x00", '{"hello":{}}', '{"beat":{}}', "9" * 10_000])
async def test_malformed_hello_closes_the_link(controller, frame, caplog):
    async with linked(controller) as websocket:
        await websocket.send(frame)
        assert await close_code(websocket) == 1008
    assert controller.fleet.servers == {}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_missing_hello_closes_the_link(controller, monkeypatch):
    monkeypatch.setattr(link_endpoint, "HELLO_S", 0.05)
    async with linked(controller) as websocket:
        await close_code(websocket)
    assert controller.fleet.servers == {}


async def test_server_id_of_a_linked_process_is_rejected(controller):
    async with linked(controller) as first:
        await first.send(hello(place="here 1"))
        await first.recv()
        async with linked(controller) as second:
            await second.send(hello(place="here 2"))
            assert await close_code(second) == 1008
        assert controller.fleet.servers["peer"].linked
        assert controller.fleet.servers["peer"].place == "here 1"


async def test_second_link_of_a_server_replaces_the_first(controller):
    row = {"session_id": "peer.1", "task": "quick"}
    async with linked(controller) as old, linked(controller) as new:
        await old.send(hello(sessions=[row]))
        await old.recv()
        member = controller.fleet.servers["peer"]
        await new.send(hello())
        await new.recv()
        with suppress(ConnectionClosed):
            await old.send(beat(opened=[row]))  # late and out of date
        assert await close_code(old) == 1012
        assert member.linked
        assert member.sessions == {}


async def test_lost_server_is_disconnected_and_rejoins_with_a_new_id(controller, serve):
    server = await serve(Quick)
    first = server.pool.server_id
    async with EnvClient.connect(controller.url) as client:
        session = await client.open("quick")
        await controller.fleet.registry.lose(first, "a test")
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("note", text="x"))
        await until(lambda: server.pool.server_id in controller.fleet.servers)
        assert server.pool.server_id != first
        assert server.pool.open_sessions == 0
        await client.open("quick")


async def test_outbox_of_a_server_that_does_not_read_is_bounded(controller):
    """The server still sends heartbeats, so it is not lost, but calls to it time out."""
    watching = controller.fleet.registry
    watching._lost_after_s = watching._stuck_after_s = 600.0  # a round can be slow under other load
    async with linked(controller) as websocket:
        await websocket.send(hello())
        await websocket.recv()
        member = controller.fleet.servers["peer"]
        outbox = member._outbox
        text = "x" * 500_000
        for _ in range(4):
            async with EnvClient.connect(controller.url, timeout=0.5) as client:
                sessions = [session_of(client, f"peer.{n}") for n in range(20)]
                steps = (session.step(ToolCall.of("note", text=text)) for session in sessions)
                answers = await asyncio.gather(*steps, return_exceptions=True)
            assert {type(answer) for answer in answers} == {CallTimeout}
            await websocket.send(beat())
        probe = b'"probe":true'  # a probe call
        await until(lambda: all(probe in call.frame for call in member._calls.values()))
        assert len(outbox) <= len(member._calls)


async def test_cancelled_calls_are_not_sent():
    outbox = Outbox()
    outbox.put_call(1, b"one")
    outbox.put_call(2, b"two")
    outbox.drop_call(1)
    outbox.put_notice(b"news")
    assert [await outbox.take(), await outbox.take()] == [b"news", b"two"]
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await taking is None
    assert len(outbox) == 0


async def test_suspended_controller_declares_no_server_lost():
    clock = Clock()
    watching = FleetService(clock=clock).registry
    await watching.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    clock.now += 60
    watching._awake = clock.now  # set by its watch after a late wake-up
    await watching.check()
    assert set(watching.servers) == {"peer"}
    clock.now += 60
    await watching.check()
    assert watching.servers == {}


async def test_silent_server_is_lost_after_lost_after_s():
    clock = Clock()
    watching = FleetService(lost_after_s=5, clock=clock).registry
    await watching.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    last = clock.now
    while watching.servers:
        clock.now += 1
        await watching.check()
    assert clock.now - last in (5, 6)


async def test_heartbeats_are_reported_to_the_store():
    clock = Clock()
    fleet = FleetService(store=MemoryStore(clock), lost_after_s=5, clock=clock)
    await fleet.registry.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    for _ in range(20):
        clock.now += 1
        fleet.registry.hear_beat("peer", Beat())
        await fleet.registry.check()
        assert await fleet.store.is_alive("peer", 1)


async def test_controller_detects_its_suspension(monkeypatch):
    monkeypatch.setattr(registry, "BEAT_S", 0.05)
    watching = FleetService().registry
    watching.start()
    begin = watching._awake
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251  -- like a suspended process
    await until(lambda: watching._awake > begin)
    await watching.stop()


async def test_server_links_to_a_named_controller_that_starts_later(controller, monkeypatch):
    monkeypatch.setattr(controller_link, "MAX_PAUSE_S", 0.1)
    later = ControllerServer(FleetService(queue_s=0.0), port=0)  # bound to its port, but not listening yet
    urls = [controller.url, later.url]
    server = EnvServer([Quick], host=NOWHERE, controllers=urls, drain_s=0)
    await server.start()
    await later.start()
    await until(lambda: server.pool.server_id in later.fleet.servers)
    assert server.pool.server_id in controller.fleet.servers
    await server.stop()
    await later.stop()


async def test_session_of_a_server_linked_to_another_controller_is_unavailable_not_lost(
    controller, monkeypatch
):
    fleet = controller.fleet
    fleet.registry._started, fleet.registry._lost_after_s = -1e9, 0.2
    fleet.store._alive["elsewhere"] = float("inf")
    with pytest.raises(StateUnavailable):
        await fleet.info(SessionRequest(session_id="elsewhere.1"))
    fleet.store._alive["elsewhere"] = -1e9
    with pytest.raises(SessionLost):
        await fleet.info(SessionRequest(session_id="elsewhere.1"))
    assert await fleet.store.is_lost("elsewhere")


async def test_too_large_answer_fails_only_its_call(controller, serve, monkeypatch):
    await serve(Quick)
    async with EnvClient.connect(controller.url) as client:
        session = await client.open("quick")
        await session.step(ToolCall.of("note", text="x"))
        monkeypatch.setattr(controller_link, "MAX_ANSWER_BYTES", 100)
        with pytest.raises(InternalError, match="a controller accepts at most 100"):
            await client.resume(session.session_id)
        monkeypatch.undo()
        assert (await client.resume(session.session_id)).turn == 1


async def test_results_that_do_not_fit_in_a_batch_answer_are_requested_again(controller, serve, monkeypatch):
    server = await serve(Loud, max_sessions=40)
    monkeypatch.setattr(controller_link, "MAX_ANSWER_BYTES", 100_000)
    async with EnvClient.connect(controller.url) as client:
        sessions = [await client.open("loud") for _ in range(40)]
        sizes = [20_000] * 39 + [200_000]
        asking = (s.step(ToolCall.of("say", size=n)) for s, n in zip(sessions, sizes, strict=True))
        *answers, largest = await asyncio.gather(*asking, return_exceptions=True)
        assert [answer.messages[0].content for answer in answers] == ["é" * 10_000] * 39
        assert isinstance(largest, InternalError)
        assert "a controller accepts at most 100000" in str(largest)
    assert server.pool.gauges()["agentrl_sessions_open"] == 40


async def test_stopping_server_answers_pending_calls(controller, serve):
    server = await serve(Slow)
    async with EnvClient.connect(controller.url) as client:
        session = await client.open("slow")
        step = asyncio.create_task(session.step(ToolCall.of("end")))
        assert (await step).terminated
        other = await client.open("slow")
        step = asyncio.create_task(other.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        stopping = asyncio.create_task(server.stop())
        error = (await asyncio.gather(step, return_exceptions=True))[0]
        assert type(error).__name__ == "SessionEnded"
        await stopping


async def test_stopping_controller_fails_waiting_calls(controller, monkeypatch):
    async with linked(controller) as websocket:
        await websocket.send(hello())
        await websocket.recv()
        asking = asyncio.create_task(controller.fleet.info(SessionRequest(session_id="peer.1")))
        await websocket.recv()
        controller.fleet.fail_waiting()
        with pytest.raises(StateUnavailable, match="another"):
            await asking


async def test_websocket_calls_are_forwarded_with_new_ids(controller, serve):
    server = await serve(Forkable)
    member = controller.fleet.servers[server.pool.server_id]
    async with connect(controller.url.replace("http", "ws") + "/v1/ws") as websocket:

        async def ask(**call):
            before = next(member._numbers)
            await websocket.send(json.dumps(call))
            answer = json.loads(await asyncio.wait_for(websocket.recv(), 60))
            assert next(member._numbers) > before + 1  # the call was forwarded
            assert answer["id"] == call["id"]
            return answer["result"]

        opened = await ask(id=777, call="open", task="forkable")
        session_id = opened["session_id"]
        forks = await ask(id="a fork", call="fork", session_id=session_id, n=2)
        listed = await ask(id=778, call="sessions")
        ids = {session_id, *(fork["session_id"] for fork in forks["sessions"])}
        assert {session["session_id"] for session in listed["sessions"]} == ids
        shown = await ask(id=779, call="transcript", session_id=session_id)
        assert shown["session_id"] == session_id


async def test_server_that_disconnects_before_being_notified_of_its_loss_logs_no_error(
    controller, monkeypatch, caplog
):
    refused = asyncio.Event()
    async with connect(f"{controller.url.replace('http', 'ws')}/v1/link", proxy=None) as socket:

        async def refuse(hello, outbox):
            socket.transport.abort()
            for _ in range(20):  # meanwhile the abort reaches the other end of the socket
                await asyncio.sleep(0.001)
            refused.set()
            return False

        monkeypatch.setattr(controller.fleet.registry, "join", refuse)
        controller.fleet.registry._started = -1e9  # past the wait for servers after its start
        hello = Hello(server_id="gone", tasks=(), capacity=1, sessions=())
        await socket.send(json.dumps({"hello": hello.model_dump(mode="json")}))
        await refused.wait()
    async with connect(f"{controller.url.replace('http', 'ws')}/v1/ws", proxy=None) as other:
        await other.send('{"id": 1, "call": "tasks"}')
        await other.recv()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
