"""Bad manners on the line between a server and its controller."""

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
from agentrl_env.fleet import registry as roster
from agentrl_env.fleet import worker_endpoint as link
from agentrl_env.fleet.controller import Fleet
from agentrl_env.fleet.serve import Controller
from agentrl_env.fleet.store import MemoryState
from agentrl_env.fleet.worker import Outbox
from agentrl_env.server import controller_link as dial
from agentrl_env.server.serve import NOWHERE, EnvServer
from agentrl_env.types import SessionInfo, TaskSample
from agentrl_env.wire import Beat, Hello
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
    controller = Controller(Fleet(queue_s=0.0), port=0)
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


def dialled(controller):
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
async def test_what_is_no_hello_is_hung_up_on(controller, frame, caplog):
    async with dialled(controller) as websocket:
        await websocket.send(frame)
        assert await close_code(websocket) == 1008
    assert controller.fleet.members == {}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_line_on_which_nobody_says_hello_is_hung_up(controller, monkeypatch):
    monkeypatch.setattr(link, "HELLO_S", 0.05)
    async with dialled(controller) as websocket:
        await close_code(websocket)
    assert controller.fleet.members == {}


async def test_an_id_that_another_process_has_is_refused_as_long_as_that_one_has_a_line(controller):
    async with dialled(controller) as first:
        await first.send(hello(place="here 1"))
        await first.recv()
        async with dialled(controller) as second:
            await second.send(hello(place="here 2"))
            assert await close_code(second) == 1008
        assert controller.fleet.members["peer"].linked
        assert controller.fleet.members["peer"].place == "here 1"


async def test_a_servers_second_line_takes_the_place_of_its_first(controller):
    row = {"session_id": "peer.1", "task": "quick"}
    async with dialled(controller) as old, dialled(controller) as new:
        await old.send(hello(sessions=[row]))
        await old.recv()
        member = controller.fleet.members["peer"]
        await new.send(hello())
        await new.recv()
        with suppress(ConnectionClosed):
            await old.send(beat(opened=[row]))  # it comes late, and is no longer so
        assert await close_code(old) == 1012
        assert member.linked
        assert member.sessions == {}


async def test_a_server_that_is_given_up_is_hung_up_at_once_and_comes_back_under_a_new_id(controller, serve):
    server = await serve(Quick)
    first = server.pool.server_id
    async with EnvClient.connect(controller.url) as client:
        session = await client.open("quick")
        await controller.fleet.roster.lose(first, "a test")
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("note", text="x"))
        await until(lambda: server.pool.server_id in controller.fleet.members)
        assert server.pool.server_id != first
        assert server.pool.open_sessions == 0
        await client.open("quick")


async def test_a_server_that_does_not_read_costs_no_more_than_the_calls_that_wait(controller):
    """It gives signs of life, so that it is not given up; callers come, and go again unanswered."""
    async with dialled(controller) as websocket:
        await websocket.send(hello())
        await websocket.recv()
        member = controller.fleet.members["peer"]
        outbox = member._outbox
        text = "x" * 500_000
        for _ in range(4):
            async with EnvClient.connect(controller.url, timeout=0.5) as client:
                sessions = [session_of(client, f"peer.{n}") for n in range(20)]
                steps = (session.step(ToolCall.of("note", text=text)) for session in sessions)
                answers = await asyncio.gather(*steps, return_exceptions=True)
            assert {type(answer) for answer in answers} == {CallTimeout}
            await websocket.send(beat())
        await until(lambda: not member._calls)
        assert len(outbox) == 0


async def test_calls_that_were_given_up_are_not_sent():
    outbox = Outbox()
    outbox.put(1, b"one")
    outbox.put(2, b"two")
    outbox.drop(1)
    outbox.tell(b"news")
    assert [await outbox.take(), await outbox.take()] == [b"news", b"two"]
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await taking is None
    assert len(outbox) == 0


async def test_nobody_is_given_up_for_a_silence_in_which_the_controller_slept():
    clock = Clock()
    watching = Fleet(clock=clock).roster
    await watching.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    clock.now += 60
    watching._awake = clock.now  # what its watch notes when it wakes up late
    await watching.look()
    assert set(watching.members) == {"peer"}
    clock.now += 60
    await watching.look()
    assert watching.members == {}


async def test_a_silent_server_is_given_up_after_the_time_that_was_set_and_no_later():
    clock = Clock()
    watching = Fleet(lost_after_s=5, clock=clock).roster
    await watching.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    last = clock.now
    while watching.members:
        clock.now += 1
        await watching.look()
    assert clock.now - last in (5, 6)


async def test_a_server_that_is_heard_is_told_of_to_the_other_controllers_as_long_as_it_lives():
    clock = Clock()
    fleet = Fleet(state=MemoryState(clock), lost_after_s=5, clock=clock)
    await fleet.roster.join(Hello.model_validate_json(json.dumps(json.loads(hello())["hello"])), Outbox())
    for _ in range(20):
        clock.now += 1
        await fleet.roster.hear_beat("peer", Beat())
        await fleet.roster.look()
        assert await fleet.state.seen("peer", 1)


async def test_a_controller_notes_that_it_slept(monkeypatch):
    monkeypatch.setattr(roster, "BEAT_S", 0.05)
    watching = Fleet().roster
    watching.start()
    begin = watching._awake
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251  -- as a process does that is paused
    await until(lambda: watching._awake > begin)
    watching.stop()


async def test_server_links_to_a_named_controller_that_starts_later(controller, monkeypatch):
    monkeypatch.setattr(dial, "LONGEST_PAUSE_S", 0.1)
    later = Controller(Fleet(queue_s=0.0), port=0)  # it has its port, and does not listen yet
    urls = [controller.url, later.url]
    server = EnvServer([Quick], host=NOWHERE, controllers=urls, drain_s=0)
    await server.start()
    await later.start()
    await until(lambda: server.pool.server_id in later.fleet.members)
    assert server.pool.server_id in controller.fleet.members
    await server.stop()
    await later.stop()


async def test_a_session_whose_server_only_others_hear_is_not_called_lost(controller, monkeypatch):
    fleet = controller.fleet
    fleet.roster._begin, fleet.roster._lost_after_s = -1e9, 0.2
    fleet.state._seen["elsewhere"] = float("inf")
    with pytest.raises(StateUnavailable):
        await fleet.info("elsewhere.1")
    fleet.state._seen["elsewhere"] = -1e9
    with pytest.raises(SessionLost):
        await fleet.info("elsewhere.1")
    assert await fleet.state.is_lost("elsewhere")


async def test_an_answer_that_no_controller_takes_is_an_error_of_its_own_call(controller, serve, monkeypatch):
    await serve(Quick)
    async with EnvClient.connect(controller.url) as client:
        session = await client.open("quick")
        await session.step(ToolCall.of("note", text="x"))
        monkeypatch.setattr(dial, "MAX_ANSWER_BYTES", 100)
        with pytest.raises(InternalError, match="a controller takes 100"):
            await client.resume(session.session_id)
        monkeypatch.undo()
        assert (await client.resume(session.session_id)).turn == 1


async def test_what_of_a_batch_a_controller_does_not_take_is_asked_for_alone(controller, serve, monkeypatch):
    server = await serve(Loud, max_sessions=40)
    monkeypatch.setattr(dial, "MAX_ANSWER_BYTES", 100_000)
    async with EnvClient.connect(controller.url) as client:
        sessions = [await client.open("loud") for _ in range(40)]
        sizes = [20_000] * 39 + [200_000]
        asking = (s.step(ToolCall.of("say", size=n)) for s, n in zip(sessions, sizes, strict=True))
        *answers, largest = await asyncio.gather(*asking, return_exceptions=True)
        assert [answer.messages[0].content for answer in answers] == ["é" * 10_000] * 39
        assert isinstance(largest, InternalError)
        assert "a controller takes 100000" in str(largest)
    assert server.pool.gauges()["agentrl_sessions_open"] == 40


async def test_a_server_that_leaves_answers_what_is_under_way(controller, serve):
    Slow.prepare()
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


async def test_a_controller_that_ends_tells_who_waits_to_ask_another(controller, monkeypatch):
    async with dialled(controller) as websocket:
        await websocket.send(hello())
        await websocket.recv()
        asking = asyncio.create_task(controller.fleet.info("peer.1"))
        await websocket.recv()
        controller.fleet.give_up()
        with pytest.raises(StateUnavailable, match="another"):
            await asking


async def test_a_call_that_came_over_a_websocket_is_passed_on_under_an_id_of_its_own(controller, serve):
    server = await serve(Forkable)
    member = controller.fleet.members[server.pool.server_id]
    async with connect(controller.url.replace("http", "ws") + "/v1/ws") as websocket:

        async def ask(**call):
            before = next(member._numbers)
            await websocket.send(json.dumps(call))
            answer = json.loads(await asyncio.wait_for(websocket.recv(), 10))
            assert next(member._numbers) > before + 1  # it was asked of the server
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


async def test_a_server_that_is_gone_when_it_is_to_hear_of_its_loss_is_no_bug(
    controller, monkeypatch, caplog
):
    refused = asyncio.Event()
    async with connect(f"{controller.url.replace('http', 'ws')}/v1/link", proxy=None) as socket:

        async def refuse(hello, outbox):
            socket.transport.abort()
            for _ in range(20):  # the abort reaches the other end of the socket meanwhile
                await asyncio.sleep(0.001)
            refused.set()
            return False

        monkeypatch.setattr(controller.fleet.roster, "join", refuse)
        hello = Hello(server_id="gone", tasks=(), capacity=1, sessions=())
        await socket.send(json.dumps({"hello": hello.model_dump(mode="json")}))
        await refused.wait()
    async with connect(f"{controller.url.replace('http', 'ws')}/v1/ws", proxy=None) as other:
        await other.send('{"id": 1, "call": "tasks"}')
        await other.recv()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
