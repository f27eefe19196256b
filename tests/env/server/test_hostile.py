"""Clients that stall, send incomplete or oversized requests, or open many connections."""

import asyncio
import json
import resource

import httpx
import pytest
from websockets.asyncio.client import connect

from agentrl_env import Done, EnvClient, Environment, Message, ToolCall, tool
from agentrl_env.errors import InvalidRequest
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.limits import Limits
from tests.env.tasks import Quick, Slow, until

SHORT_TIMEOUTS = Limits(head_s=0.3, body_s=0.3, idle_s=0.3, max_header_bytes=4096)
NOTE = Message.assistant(None, ToolCall.of("note", text="x"))


class Wordy(Environment):
    """Returns large results."""

    max_turns = 10_000
    max_output_chars = 4_000_000
    blocking = False

    def reset(self, sample, rng):
        return "ready"

    @tool
    def talk(self):
        """Say very much."""
        return "x" * 4_000_000

    @tool
    def end(self):
        """End."""
        return Done("over")


@pytest.fixture
async def server(serving):
    return await serving(Quick, Slow, Wordy, limits=SHORT_TIMEOUTS)


def place(server):
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


class Peer:
    """A raw connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, server, data=b""):
        peer = cls(*await asyncio.open_connection(*place(server)))
        peer.writer.write(data)
        return peer

    async def read_rest(self):
        """Return all data until the server disconnects. It must disconnect soon."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    def close(self):
        self.writer.transport.abort()


async def assert_serving(server):
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        assert (await session.step(NOTE)).seq == 1


HALVES = {
    "no headers": (b"POST /v1/sess", b"408"),
    "half headers": (b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\nconte", b"408"),
    "half a body": (b"POST /v1/sessions HTTP/1.1\r\ncontent-length: 50\r\n\r\n{", b"408"),
    "no body": (b"POST /v1/sessions HTTP/1.1\r\ncontent-length: 50\r\n\r\n", b"408"),
    "half a chunk": (
        b"POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{",
        b"408",
    ),
    "nothing at all": (b"", b""),
}


@pytest.mark.parametrize("name", HALVES)
async def test_incomplete_request_times_out(server, name):
    data, status = HALVES[name]
    peers = [await Peer.connect(server, data) for _ in range(5)]
    await assert_serving(server)
    for peer in peers:
        answer = await peer.read_rest()
        assert answer.startswith(b"HTTP/1.1 " + status if status else b"")
        if status:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "request_timeout"
        peer.close()
    assert server.pool.open_sessions == 1


async def test_slow_headers_time_out(server):
    peer = await Peer.connect(server, b"GET /health HTTP/1.1\r\n")
    rest = asyncio.create_task(peer.read_rest())
    number = 0
    while not rest.done():
        number += 1
        peer.writer.write(b"x-%d: y\r\n" % number)
        await asyncio.wait((rest,), timeout=0.05)
    assert (await rest).startswith(b"HTTP/1.1 408")
    peer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 100_000,
        b"GET /" + b"y" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000,
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n",
    ],
)
async def test_oversized_headers_are_rejected(server, data):
    peer = await Peer.connect(server, data)
    assert (await peer.read_rest()).startswith(b"HTTP/1.1 431")
    peer.close()
    await assert_serving(server)


async def test_oversized_trailers_and_chunk_extensions_are_rejected(server):
    head = b"POST /v1/sessions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    for flood in (b"2\r\n{}\r\n0\r\nx: " + b"y" * 1_000_000, b"2;" + b"e" * 1_000_000):
        peer = await Peer.connect(server, head + flood)
        answer = await peer.read_rest()
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), answer[:50]
        peer.close()


async def test_idle_connection_is_closed(server):
    peer = await Peer.connect(server, b"GET /health HTTP/1.1\r\n\r\n")
    assert (await peer.read_rest()).startswith(b"HTTP/1.1 200")
    peer.close()


async def test_step_can_exceed_the_timeouts_of_the_connection(server):
    async with EnvClient.connect(server.url) as client:
        session = await client.open("slow")
        step = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        idle = await Peer.connect(server)
        await idle.read_rest()  # past the timeouts of the connection
        Slow.gate.set()
        assert (await step).seq == 1
        idle.close()


async def test_answers_to_a_slow_reader_are_bounded():
    server = EnvServer([Wordy], port=0, drain_s=0.0, limits=Limits())
    await server.start()
    async with connect(f"{server.url.replace('http', 'ws', 1)}/v1/ws", max_size=None, max_queue=1) as socket:
        await socket.send(json.dumps({"id": 0, "call": "open", "task": "wordy"}))
        session_id = json.loads(await socket.recv())["result"]["session_id"]
        socket.transport.pause_reading()
        call = Message.assistant(None, ToolCall.of("talk")).wire()
        sending = asyncio.create_task(flood(socket, session_id, call))
        steps = server.metrics.steps
        await until(lambda: steps["wordy"] >= 2)
        seen = -1
        while seen != steps["wordy"]:  # until no further call is accepted
            seen = steps["wordy"]
            async with EnvClient.connect(server.url) as client:
                for _ in range(20):
                    await client.tasks()
        assert seen * 4_000_000 < 64 * 2**20, "of two hundred answers of four megabytes each"
        sending.cancel()
        socket.transport.abort()
    await server.stop()


async def flood(socket, session_id, call):
    for seq in range(1, 201):
        text = {"id": seq, "call": "step", "session_id": session_id, "seq": seq, "message": call}
        await socket.send(json.dumps(text))


async def test_thousand_concurrent_connections_are_served():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    body = b'{"task":"quick"}'
    request = b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )

    async def come():
        peer = await Peer.connect(server, request)
        async with asyncio.timeout(60):
            line = await peer.reader.readline()
        return peer, line

    met = await asyncio.gather(*(come() for _ in range(1000)))
    assert {line for _, line in met} == {b"HTTP/1.1 201 Created\r\n"}
    assert server.pool.open_sessions == 1000
    for peer, _ in met:
        peer.close()
    await server.stop()


async def test_disconnect_in_a_request_logs_no_error(server):
    for data, _ in HALVES.values():
        peer = await Peer.connect(server, data)
        await peer.writer.drain()
        peer.close()
    await assert_serving(server)
    assert server.metrics.errors["internal_error"] == 0


@pytest.mark.parametrize("body", [b"content-length: 1", b"transfer-encoding: chunked"])
async def test_upgrade_with_a_body_is_refused_and_the_connection_closed(server, body):
    peer = await Peer.connect(
        server,
        b"GET /v1/ws HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n%b\r\n\r\n" % body,
    )
    assert b"must not have a body" in await peer.read_rest()
    peer.close()


MANY = 2_000_000


@pytest.mark.parametrize(
    ("path", "head", "item", "tail"),
    [
        ("/v1/step", '{"steps":[', "0", "]}"),
        ("/v1/step", '{"steps":[', '{"session_id":"a"}', "]}"),
        ("/v1/sessions", '{"sessions":[', "0", "]}"),
        ("/v1/sessions", '{"task":"quick","sample":{"a":[', "1", "]}}"),
        ("/v1/sessions/{id}/step", '{"seq":1,"message":{"role":"assistant","content":[', "{}", "]}}"),
        ("/v1/sessions/{id}/step", '{"seq":1,"message":{"role":"assistant","tool_calls":[', "1", "]}}"),
    ],
)
async def test_body_of_millions_of_values_is_refused_in_one_line(server, path, head, item, tail):
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        body = head + ",".join([item] * (MANY // len(item))) + tail
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as raw:
            answer = await raw.post(path.replace("{id}", session.session_id), content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request")
        assert len(answer.content) < 300
        assert (await session.step(NOTE)).seq == 1


async def test_agents_message_has_a_lower_limit_of_values_that_text_does_not_count_towards():
    server = EnvServer([Quick], port=0, drain_s=0.0, token="open sesame")
    await server.start()
    async with EnvClient.connect(server.url, token="open sesame") as operator:
        session = await operator.open("quick")
        async with EnvClient.connect(server.url, token=session.agent_token) as agent:
            mine = await agent.resume(session.session_id)
            commas = Message.assistant(None, ToolCall.of("note", text=",[{" * 100_000))
            assert (await mine.step(commas)).seq == 1
            with pytest.raises(InvalidRequest, match="more than 65536 values"):
                await mine.step(Message(role="assistant", content=[{}] * 70_000))
    await server.stop()
