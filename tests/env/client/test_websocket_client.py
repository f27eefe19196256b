"""The client over one WebSocket: the same calls as over HTTP, and reconnection."""

import asyncio
import pickle
import socket
from contextlib import asynccontextmanager

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.client import transport as socket_module
from agentrl_env.client.transport import _parse
from agentrl_env.errors import (
    BodyTooLarge,
    CallTimeout,
    InvalidRequest,
    ProtocolError,
    SeqConflict,
    ServerFull,
    ServerUnreachable,
    SessionEnded,
    Unauthorized,
    UnknownSession,
    UnknownTask,
)
from agentrl_env.server.limits import Limits
from agentrl_env.wire import INFO, SessionRequest, StepRequest
from tests.chaos.proxy import Proxy
from tests.env.session.test_fork import Walk
from tests.env.tasks import Guess, Quick, Slow, until


def over_socket(url, **options):
    return EnvClient.connect(url.replace("http://", "ws://"), **options)


NOTE = ToolCall.of("note", text="x")


class Wire:
    """A relay that can be disconnected at any time or before the next answer."""

    def __init__(self, server):
        self.port = int(server.url.rpartition(":")[2])
        self.writers = set()
        self.connections = 0
        self.swallow_next = False

    async def relay(self, reader, writer):
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers |= {writer, back}
        try:
            await asyncio.gather(self.pump(reader, back), self.pump(there, writer, answers=True))
        except ConnectionError:
            return
        finally:
            writer.close()
            back.close()

    async def pump(self, reader, writer, answers=False):
        while data := await reader.read(65536):
            if answers and self.swallow_next:
                self.swallow_next = False
                self.cut()
            writer.write(data)
        writer.close()

    def cut(self):
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def relayed(server):
    wire = Wire(server)
    tasks = set()

    async def handle(reader, writer):
        tasks.add(asyncio.current_task())
        await wire.relay(reader, writer)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield wire, f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        wire.cut()
        await asyncio.gather(*tasks)


async def test_episode_is_played_over_the_websocket(serving):
    server = await serving(Guess, oracle=True)
    async with over_socket(server.url) as client:
        assert (await client.tasks())["guess"].max_turns == 8
        async with await client.open("guess", seed=7) as session:
            result = await session.step(await session.expert())
            assert (result.reward, result.terminated) == (1.0, True)
            assert (await client.resume(session.session_id)).last == result


async def test_close_and_fork_work_over_the_websocket(serving):
    server = await serving(Walk)
    async with over_socket(server.url) as client:
        session = await client.open("walk", seed=7)
        forks = await session.fork(2)
        assert server.pool.open_sessions == 3
        for one in (session, *forks):
            await one.close()
        assert server.pool.open_sessions == 0


async def test_sessions_share_one_socket(serving):
    server = await serving(Quick)
    async with relayed(server) as (wire, url), EnvClient.connect(url) as client:
        sessions = await asyncio.gather(*(client.open("quick", index=n % 10) for n in range(100)))
        for turn in range(1, 4):
            results = await asyncio.gather(*(session.step(NOTE) for session in sessions))
            assert [result.seq for result in results] == [turn] * 100
            assert {result.messages[0].content.split()[0] for result in results} == {str(turn)}
        assert wire.connections == 1


async def test_slow_session_does_not_delay_others(serving):
    server = await serving(Slow, Quick)
    async with over_socket(server.url) as client:
        late, quick = await client.open("slow"), await client.open("quick")
        waiting = asyncio.create_task(late.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        await quick.step(NOTE)
        assert not waiting.done()
        Slow.gate.set()
        assert (await waiting).messages[0].content == "waited 1"


async def test_errors_are_raised_as_their_classes(serving):
    server = await serving(Quick, max_sessions=1)
    async with over_socket(server.url) as client:
        with pytest.raises(UnknownTask):
            await client.open("nope")
        session = await client.open("quick")
        with pytest.raises(ServerFull) as caught:
            await client.open("quick")
        assert caught.value.details["retry_after"] == 1
        with pytest.raises(SeqConflict):
            await client.backend.step(session.session_id, 5, Message.assistant("x"))
        with pytest.raises(InvalidRequest):
            await session.step(Message(role="user", content="x"))
        with pytest.raises(UnknownSession):
            await client.backend.call(INFO, SessionRequest(session_id="nope"))
        await session.close()
        session.status = session.info.status
        with pytest.raises(SessionEnded):
            await session.step(NOTE)


async def test_concurrent_steps_get_their_own_results_and_errors(serving):
    server = await serving(Quick)
    async with over_socket(server.url) as client:
        session = await client.open("quick")
        message = Message.assistant(None, NOTE)
        steps = [StepRequest(session_id=id_, seq=1, message=message) for id_ in ("nope", session.session_id)]
        first, second = await asyncio.gather(
            *(client.backend.step(step.session_id, step.seq, step.message) for step in steps),
            return_exceptions=True,
        )
        assert isinstance(first, UnknownSession)
        assert second.seq == 1


async def test_aborted_socket_is_reopened_and_each_step_runs_once(serving):
    server = await serving(Quick)
    async with relayed(server) as (wire, url), EnvClient.connect(url) as client:
        session = await client.open("quick")
        for turn in range(1, 5):
            result = await session.step(NOTE)
            assert result.messages[0].content.split()[0] == str(turn)
            wire.cut()
        assert wire.connections >= 4


async def test_lost_answer_is_requested_again(serving):
    server = await serving(Quick)
    async with relayed(server) as (wire, url), EnvClient.connect(url) as client:
        sessions = [await client.open("quick") for _ in range(3)]
        for turn in range(1, 4):
            wire.swallow_next = True
            results = await asyncio.gather(*(session.step(NOTE) for session in sessions))
            assert {result.messages[0].content.split()[0] for result in results} == {str(turn)}
        assert server.metrics.steps["quick"] == 9


async def test_lost_answer_to_open_or_fork_leaks_no_session(serving):
    server = await serving(Walk)
    async with relayed(server) as (wire, url), EnvClient.connect(url) as client:
        await client.tasks()
        wire.swallow_next = True
        session = await client.open("walk")
        assert server.pool.open_sessions == 1
        wire.swallow_next = True
        assert len(await session.fork(2)) == 2
        assert server.pool.open_sessions == 3
        assert wire.connections == 3


async def test_client_reconnects_to_a_restarted_server(serving):
    first = await serving(Quick)
    port = int(first.url.rpartition(":")[2])
    async with over_socket(first.url) as client:
        await client.open("quick")
        await first.stop()
        opening = asyncio.create_task(client.open("quick"))
        await asyncio.sleep(0.02)
        await serving(Quick, port=port)
        assert (await (await opening).step(NOTE)).seq == 1


async def test_connection_refused_raises_server_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{free.getsockname()[1]}"
    client = EnvClient.connect(url)
    client.backend._patience = 0.1
    with pytest.raises(ServerUnreachable, match="no environment server answers"):
        await client.tasks()
    await client.aclose()


async def test_wrong_token_is_rejected(serving):
    server = await serving(Quick, token="sesame")
    async with over_socket(server.url, token="simsim") as client:
        with pytest.raises(Unauthorized):
            await client.tasks()
    async with over_socket(server.url, token="sesame") as client:
        assert "quick" in await client.tasks()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"220 mail.example\r\n\r\n",
    ],
)
async def test_server_without_a_websocket_raises_protocol_error(answer):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with EnvClient.connect(url) as client:
        client.backend._patience = 0.0
        with pytest.raises(ProtocolError, match="no WebSocket for environments"):
            await client.tasks()
    listener.close()


async def test_missing_answer_times_out(serving, monkeypatch):
    server = await serving(Slow)
    async with over_socket(server.url) as client:
        session = await client.open("slow")
        with monkeypatch.context() as patch:
            patch.setattr(client.backend, "_timeout", 0.2)
            with pytest.raises(CallTimeout):
                await session.step(ToolCall.of("wait"))
        Slow.gate.set()
        assert (await session.step(ToolCall.of("wait"))).messages[0].content == "waited 1"


async def test_closing_the_client_ends_pending_calls(serving):
    server = await serving(Slow)
    client = over_socket(server.url)
    session = await client.open("slow")
    step = asyncio.create_task(session.step(ToolCall.of("wait")))
    await until(Slow.started.is_set)
    await client.aclose()
    with pytest.raises(ServerUnreachable):
        await asyncio.wait_for(step, 60)


async def test_client_can_be_pickled(serving):
    server = await serving(Quick)
    client = pickle.loads(pickle.dumps(over_socket(server.url)))
    assert "quick" in await client.tasks()
    await client.aclose()


async def test_silent_connection_is_dropped_and_replaced(serving, monkeypatch):
    monkeypatch.setattr(socket_module, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(socket_module, "PING_TIMEOUT_S", 0.05)
    server = await serving(Quick)
    proxy = Proxy(int(server.url.rpartition(":")[2]))
    await proxy.start()
    async with EnvClient.connect(f"ws://127.0.0.1:{proxy.port}") as client:
        await client.tasks()
        connection = client.backend._lane().transport._connection
        connection._websocket.close_timeout = 0.05
        proxy.stall()
        await until(lambda: connection.closed)
        proxy.calm()
        assert "quick" in await client.tasks()
    await proxy.stop()


async def test_message_over_the_limit_of_the_server_fails_only_its_call(serving):
    server = await serving(Quick, Slow, limits=Limits(max_body_bytes=5_000))
    async with over_socket(server.url) as client:
        slow, quick = await client.open("slow"), await client.open("quick")
        waiting = asyncio.create_task(slow.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        with pytest.raises(BodyTooLarge):
            await quick.step(ToolCall.of("note", text="x" * 20_000))
        Slow.gate.set()
        assert (await waiting).messages[0].content == "waited 1"
        assert (await quick.step(NOTE)).seq == 1


@pytest.mark.parametrize(
    ("text", "number", "status", "body"),
    [
        (b'{"id":3,"result":{"a":"}"}}', 3, 200, b'{"a":"}"}'),
        (b'{"id":3,"result":null}', 3, 200, b"null"),
        (b'{"result": [1], "id": 3}', 3, 200, b"[1]"),
        (b'{"id":3,"error":{"type":"server_full","message":"m"}}', 3, 503, None),
        (b'{"error":{"type":"server_full","message":"m"}, "id":3}', 3, 503, None),
        (b'{"id":null,"error":{"type":"invalid_request","message":"m"}}', None, 500, b""),
        (b"nonsense", None, 500, b""),
        (b"[]", None, 500, b""),
    ],
)
def test_answers_are_parsed_with_fields_in_any_order(text, number, status, body):
    got, response = _parse(text)
    assert (got, response.status) == (number, status)
    if body is not None:
        assert response.body == body
