import asyncio
import pickle
import random
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import date

import pytest

from agentrl_env import EnvClient, Message, StepResult, ToolCall
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import (
    BodyTooLarge,
    CallTimeout,
    EnvironmentFailed,
    InvalidRequest,
    ProtocolError,
    SeqConflict,
    ServerFull,
    ServerUnreachable,
    SessionEnded,
    SessionExpired,
    Unauthorized,
    UnknownSession,
    UnknownTask,
)
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.wire import TaskList
from tests.env.tasks import Guess, Quick, Slow, until


@asynccontextmanager
async def listening(handler):
    """Serve connections with ``handler(reader, writer)`` and yield the URL."""
    handlers = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client has disconnected
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*handlers)


@pytest.fixture
async def canned():
    """Start a server that answers requests with the given bytes, one after another."""
    async with AsyncExitStack() as stack:

        async def start(*answers):
            left, seen = list(answers), []

            async def serve(reader, writer):
                while left:
                    head = await reader.readuntil(b"\r\n\r\n")
                    _, has_body, rest = head.lower().partition(b"content-length: ")
                    length = int(rest.split(b"\r\n")[0]) if has_body else 0
                    seen.append((head, await reader.readexactly(length)))
                    writer.write(left.pop(0))
                await reader.read()

            return await stack.enter_async_context(listening(serve)), seen

        yield start


def http(body, status=b"200 OK", headers=b""):
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)


TASKS = b'{"protocol":1,"tasks":[]}'


async def test_episode_is_played_over_http(serving):
    server = await serving(Guess, Quick, oracle=True)
    async with EnvClient.connect(server.url) as client:
        assert set(await client.tasks()) == {"guess", "quick"}
        async with await client.open("guess", index=3) as session:
            while not session.status.final:
                result = await session.step(await session.expert())
        assert result.metrics["success"] == 1.0
    assert server.pool.open_sessions == 0


async def test_http_and_local_give_equal_results(serving):
    server = await serving(Quick)

    async def play(client):
        async with client:
            session = await client.open("quick", index=4, seed=3)
            results = [
                await session.step(ToolCall.of(name, **arguments))
                for name, arguments in [
                    ("note", {"text": "é\n☃"}),
                    ("gain", {}),
                    ("nope", {}),
                    ("finish", {}),
                ]
            ]
            return (
                session.messages,
                session.tools,
                [result.model_copy(update={"session_id": ""}) for result in results],
            )

    assert await play(EnvClient.connect(server.url)) == await play(Quick.local())


async def test_concurrent_sessions_are_isolated(serving):
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as client:

        async def play(number):
            session = await client.open("quick", index=number % 10, seed=number)
            first = await session.step(ToolCall.of("note", text="a"))
            for turn in range(2, 6):
                result = await session.step(ToolCall.of("note", text="b"))
                own = first.messages[0].content.split()[1]
                assert result.messages[0].content == f"{turn} {own}"
                assert result.session_id == session.session_id
            await session.close()

        await asyncio.gather(*map(play, range(150)))
    assert server.metrics.steps["quick"] == 750
    assert server.pool.open_sessions == 0


async def test_slow_step_does_not_delay_other_sessions(serving):
    server = await serving(Slow, Quick)
    async with EnvClient.connect(server.url) as client:
        slow, quick = await client.open("slow"), await client.open("quick")
        waiting = asyncio.create_task(slow.step(ToolCall.of("wait")))
        for _ in range(3):
            await quick.step(ToolCall.of("note", text="x"))
        assert not waiting.done()
        Slow.gate.set()
        assert (await waiting).messages[0].content == "waited 1"
        assert (await slow.step(ToolCall.of("wait"))).messages[0].content == "waited 2"


async def test_errors_are_raised_as_their_classes(serving):
    server = await serving(Quick, max_sessions=1, lease_s=30)
    backend = HttpBackend(server.url)
    async with EnvClient(backend) as client:
        with pytest.raises(UnknownTask, match="no task 'nope' here"):
            await client.open("nope")
        session = await client.open("quick")
        with pytest.raises(ServerFull) as caught:
            await client.open("quick")
        assert caught.value.details["retry_after"] == 1
        with pytest.raises(SeqConflict) as conflict:
            await backend.step(session.session_id, 5, Message.assistant("x"))
        assert conflict.value.details == {"expected": 1}
        with pytest.raises(UnknownSession):
            await client.resume('"no%pe?')
        with pytest.raises(UnknownSession):
            await backend.step('"nope\n', 1, Message.assistant("x"))
        await session.step(ToolCall.of("finish"))
        with pytest.raises(SessionEnded):
            await session.step("again")


async def test_expired_session_raises_session_expired(serving):
    server = await serving(Quick, lease_s=0.02)
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        await until(lambda: not server.pool.open_sessions)
        with pytest.raises(SessionExpired):
            await session.step("hello")


async def test_opening_waits_in_the_queue_of_the_server(serving):
    server = await serving(Quick, max_sessions=1)
    async with EnvClient.connect(server.url) as client:
        first = await client.open("quick")
        waiting = asyncio.create_task(client.open("quick", wait=20))
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"])
        await first.close()
        second = await waiting
        gone = asyncio.create_task(client.open("quick", wait=20))
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"])
        gone.cancel()  # disconnecting leaves the queue
        await until(lambda: not server.pool.gauges()["agentrl_sessions_waiting"])
        await second.close()


async def test_token_is_taken_from_the_argument_or_the_environment_variable(serving, monkeypatch):
    server = await serving(Quick, token="sesam")
    async with EnvClient.connect(server.url) as unauthorized:
        with pytest.raises(Unauthorized):
            await unauthorized.tasks()
    async with EnvClient.connect(server.url, token="sesam") as client:
        await client.tasks()
    monkeypatch.setenv("AGENTRL_TOKEN", "sesam")
    async with EnvClient.connect(server.url) as client:
        await client.tasks()


async def test_concurrent_steps_get_their_own_results(serving):
    server = await serving(Quick)
    backend = HttpBackend(server.url)
    async with EnvClient(backend) as client:
        a, b = await client.open("quick"), await client.open("quick")
        message = Message.assistant(None, ToolCall.of("note", text="x"))
        steps = [(a.session_id, 1), ("nope", 1), (b.session_id, 1), (a.session_id, 2)]
        results = await asyncio.gather(
            *(backend.step(session_id, seq, message) for session_id, seq in steps), return_exceptions=True
        )
    assert [type(result) for result in results] == [StepResult, UnknownSession, StepResult, StepResult]
    assert results[3].seq == 2


class Failing(Quick):
    def reset(self, sample, rng):
        raise OSError("no disk")


async def test_failed_reset_raises_environment_failed(serving):
    server = await serving(Failing)
    async with EnvClient.connect(server.url) as client:
        with pytest.raises(EnvironmentFailed, match="no disk"):
            await client.open("failing")


async def test_lost_response_is_requested_again_with_the_same_seq(serving):
    """A proxy drops every second answer."""
    server = await serving(Quick)
    port = int(server.url.rpartition(":")[2])
    lost = [0]

    async def proxy(reader, writer):
        upstream, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while data := await reader.read(65536):
                upstream_writer.write(data)
                answer = await upstream.read(65536)
                lost[0] += 1
                if lost[0] % 2:
                    break
                writer.write(answer)
        finally:
            upstream_writer.close()

    async with listening(proxy) as url, EnvClient.connect(url) as client:
        session = await client.open("quick")
        contents = [(await session.step(ToolCall.of("note", text="x"))).messages[0].content for _ in range(4)]
        assert [content.split()[0] for content in contents] == ["1", "2", "3", "4"]
        assert server.pool.open_sessions == 1
        await session.close()
    assert lost[0] > 6
    assert server.metrics.steps["quick"] == 4


async def test_connection_refused_raises_server_unreachable():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with EnvClient(HttpBackend(url, patience=0.1)) as client:
            with pytest.raises(ServerUnreachable, match=f"no environment server answers at {url}"):
                await client.tasks()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "", "http://"])
def test_invalid_url_is_rejected(url):
    with pytest.raises(ServerUnreachable, match="is not an http"):
        EnvClient.connect(url)


async def test_errors_show_the_url_without_its_credentials():
    async with EnvClient(HttpBackend("http://bob:PASSW0RD@127.0.0.1:9/?key=QSECRET", patience=0)) as client:
        with pytest.raises(
            ServerUnreachable, match=r"answers at http://127\.0\.0\.1:9/\?key=\*\*\* "
        ) as found:
            await client.tasks()
    assert not [secret for secret in ("bob", "PASSW0RD", "QSECRET") if secret in str(found.value)]
    with pytest.raises(ServerUnreachable, match=r"'ftp://h' is not an http://"):
        EnvClient.connect("ftp://bob:PASSW0RD@h")


async def test_body_over_the_limit_of_a_proxy_raises_body_too_large(canned):
    url, _ = await canned(http(b"<html>", b"413 Request Entity Too Large"))
    async with EnvClient.connect(url) as client:
        with pytest.raises(BodyTooLarge, match="accepts no request of this size"):
            await client.tasks()


async def test_call_to_a_silent_server_times_out():
    async def silence(reader, writer):
        await reader.read()

    async with listening(silence) as url, EnvClient.connect(url, timeout=0.05) as client:
        with pytest.raises(CallTimeout, match=r"did not answer GET /v1/tasks within 0\.05 s"):
            await client.tasks()
        with pytest.raises(CallTimeout):
            await client.open("x")


async def test_bad_gateway_is_retried(canned):
    url, seen = await canned(http(b"<html>", b"502 Bad Gateway"), http(b"", b"503 x"), http(TASKS))
    async with EnvClient.connect(url) as client:
        assert await client.tasks() == {}
    assert len(seen) == 3


async def test_retries_do_not_draw_from_the_random_numbers_of_the_program(canned):
    url, _ = await canned(http(b"<html>", b"502 Bad Gateway"), http(TASKS))
    before = random.getstate()
    async with EnvClient.connect(url) as client:
        await client.tasks()
    assert random.getstate() == before


@pytest.mark.parametrize(
    "answer",
    [
        http(b"<html>not found</html>", b"404 Not Found"),
        http(b"hello"),
        http(b'{"error": "odd"}', b"400 Bad Request"),
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_foreign_response_raises_protocol_error(canned, answer):
    url, _ = await canned(answer)
    async with EnvClient.connect(url) as client:
        with pytest.raises(ProtocolError):
            await client.tasks()


async def test_other_protocol_version_is_rejected(canned):
    url, _ = await canned(http(b'{"protocol":2,"tasks":[]}'))
    async with EnvClient.connect(url) as client:
        with pytest.raises(ProtocolError, match="speaks protocol 2, this client 1"):
            await client.tasks()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n14;x=y\r\n%b\r\n0\r\n\r\n" % (
    TASKS[:5],
    TASKS[5:],
)


@pytest.mark.parametrize(
    "answer",
    [
        http(TASKS, headers=b"Connection: close\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + http(TASKS),
        CHUNKED,
        b"HTTP/1.0 200 OK\r\n\r\n" + TASKS,
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_responses_are_read_in_every_framing_and_chunking(answer, piece):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(answer), piece):
            writer.write(answer[at : at + piece])
            await asyncio.sleep(0)

    async with listening(serve) as url, EnvClient.connect(url + "/") as client:
        assert await client.tasks() == {}
        assert await client.tasks() == {}


async def test_connections_are_kept_and_reused(canned):
    url, seen = await canned(*[http(TASKS)] * 5)
    async with EnvClient.connect(url + "/prefix/") as client:
        for _ in range(5):
            await client.tasks()
    assert {head.split()[1] for head, _ in seen} == {b"/prefix/v1/tasks"}


async def test_steps_of_one_tick_share_a_request(canned):
    results = [StepResult(session_id=str(n), seq=1).model_dump_json() for n in range(3)]
    url, seen = await canned(http(f'{{"results":[{",".join(results)}]}}'.encode()))
    backend = HttpBackend(url)
    answers = await asyncio.gather(*(backend.step(str(n), 1, Message.assistant("x")) for n in range(3)))
    assert [answer.session_id for answer in answers] == ["0", "1", "2"]
    assert len(seen) == 1
    await backend.aclose()


async def test_batch_response_with_missing_results_fails_every_step(canned):
    url, _ = await canned(http(b'{"results":[]}'))
    backend = HttpBackend(url)
    steps = [asyncio.create_task(backend.step(str(n), 1, Message.assistant("x"))) for n in range(2)]
    for step in steps:
        with pytest.raises(ProtocolError, match="answered 0 of 2 steps"):
            await step
    await backend.aclose()


async def test_client_can_be_pickled_after_use(serving):
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as client:
        await client.tasks()
        copy = pickle.loads(pickle.dumps(client))
        assert set(await copy.tasks()) == {"quick"}
        await copy.aclose()


def test_client_works_on_successive_event_loops():
    async def play(client):
        server = EnvServer([Quick], port=int(client.backend.url.rpartition(":")[2]), drain_s=0.0)
        await server.start()
        names = await client.tasks()
        await client.aclose()
        await server.stop()
        return set(names)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = EnvClient.connect(f"http://127.0.0.1:{port}")
    assert asyncio.run(play(client)) == asyncio.run(play(client)) == {"quick"}


async def test_closing_the_client_ends_pending_calls(serving):
    server = await serving(Slow)
    client = EnvClient.connect(server.url)
    session = await client.open("slow")
    step = asyncio.create_task(session.step(ToolCall.of("wait")))
    await until(Slow.started.is_set)
    await client.aclose()
    with pytest.raises(ServerUnreachable, match="this client is closed"):
        await step


async def test_message_that_is_not_json_is_rejected_before_sending(serving):
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        with pytest.raises(InvalidRequest, match="cannot be sent as JSON"):
            await session.step("\ud800")
        assert (await session.step("hello")).seq == 1


async def test_invalid_opening_is_rejected_before_sending(serving):
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as client:
        with pytest.raises(InvalidRequest, match=r"^seed: Input should be greater than or equal to 0$"):
            await client.open("quick", seed=-1)


@pytest.mark.parametrize("value", [date(2026, 1, 2), {1, 2}, float("nan"), {3: "a"}, object()])
async def test_sample_that_is_not_json_is_rejected_in_this_process_and_before_sending(serving, value):
    server = await serving(Quick)
    async with EnvClient.connect(server.url) as served, Quick.local() as local:
        for client in (served, local):
            with pytest.raises(InvalidRequest, match=r"^sample cannot be sent as JSON: it h.* at \['x'\]"):
                await client.open("quick", sample={"x": value})


async def test_waiting_openings_leave_connections_for_steps(serving):
    server = await serving(Quick, max_sessions=2)
    async with EnvClient(HttpBackend(server.url, max_connections=4)) as client:
        running = [await client.open("quick") for _ in range(2)]
        waiting = [asyncio.create_task(client.open("quick", wait=60.0)) for _ in range(8)]
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"] >= 2)
        # Two steps at once are a batch over HTTP.
        async with asyncio.timeout(30):
            await asyncio.gather(*(session.step(ToolCall.of("note", text="x")) for session in running))
            for session in running:
                await session.close()
            for opened in asyncio.as_completed(waiting):
                await (await opened).close()


async def test_connection_timeout_raises_server_unreachable(monkeypatch):
    async def never(*_arguments, **_options):
        await asyncio.Event().wait()

    monkeypatch.setattr("agentrl_env.client.transport.CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never, raising=False)
    backend = HttpBackend("http://10.255.255.1:9", patience=0.0)
    with pytest.raises(ServerUnreachable, match=r"no connection within 0\.05 s"):
        await EnvClient(backend).tasks()
    await backend.aclose()


async def test_patience_counts_from_the_first_failure_and_not_from_the_call():
    answer = TaskList(tasks=()).model_dump_json().encode()
    requests = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        requests.append(writer)
        if len(requests) == 1:
            await asyncio.sleep(0.5)  # busy, for longer than the client's patience
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with EnvClient(HttpBackend(url, patience=0.2)) as client:
            assert await client.tasks() == {}
    assert len(requests) == 2


async def test_line_break_after_a_token_does_not_belong_to_it(serving, monkeypatch):
    token = "an-operators-token-of-some-length"
    url = (await serving(token=token)).url
    async with EnvClient.connect(url, token=f"{token}\n") as client:
        assert await client.tasks()
    monkeypatch.setenv("AGENTRL_TOKEN", f" {token}\r\n")
    async with EnvClient.connect(url) as client:
        assert await client.tasks()


@pytest.mark.parametrize("token", ["two\nlines-of-a-token", "tökens-are-ascii"])
def test_token_that_is_invalid_in_a_header_is_rejected_without_quoting_it(token):
    with pytest.raises(Unauthorized, match="not allowed in an HTTP header") as raised:
        EnvClient.connect("http://127.0.0.1:1", token=token)
    assert "token-" not in str(raised.value)
    assert "tökens" not in str(raised.value)


@asynccontextmanager
async def answering(answer):
    """Serve one answer to every request, whatever the path."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("answer", [b"{}", b'{"protocol":1}', b'{"hello":"world"}', b"[]"])
async def test_answer_of_an_unrelated_server_is_not_an_empty_list_of_tasks(answer):
    async with answering(answer) as url, EnvClient.connect(url) as client:
        with pytest.raises(ProtocolError, match="something that is not a TaskList"):
            await client.tasks()
