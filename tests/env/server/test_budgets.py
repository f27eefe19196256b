"""Budgets per caller: bytes, unfinished requests, connections, loop time and history."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from agentrl_env import EnvClient, Environment, Message, ToolCall, tool
from agentrl_env.errors import RateLimited, SeqConflict
from agentrl_env.fast_wire import FastBatch, FastStep
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server import limits as limits_module
from agentrl_env.server.limits import MAX_BUCKETS, Budget, Budgets, Limits
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.session import History
from agentrl_env.wire import OpenRequest
from tests.env.server.test_hostile import Peer, Wordy, flood
from tests.env.tasks import Clock, Quick, Slow, until

TOKEN = "open sesame"
NOTE = Message.assistant(None, ToolCall.of("note", text="x"))
KIB = 1024


class Hog(Environment):
    """Holds the event loop."""

    blocking = False
    max_turns = 10_000

    def reset(self, sample, rng):
        return "ready"

    @tool
    def hold(self):
        """Hold the event loop for longer than an agent may."""
        time.sleep(limits_module.HOLD_BURST_S + 0.1)
        return "held"

    @tool
    def note(self, text: str):
        """Take a note."""
        return text


@pytest.fixture
def serving(serving):
    """Return a function that starts a server with limits."""

    def start(token=TOKEN, loop_share=1.0, **limits):  # unlimited, because other load would exhaust it
        chosen = Limits(loop_share=loop_share, **limits)
        return serving(Quick, Slow, Hog, Wordy, token=token, limits=chosen)

    return start


@asynccontextmanager
async def agents(server, number=2, task="quick"):
    """Open sessions and yield their ids and agent tokens."""
    async with EnvClient.connect(server.url, token=TOKEN) as client:
        sessions = [await client.open(task) for _ in range(number)]
        yield [(one.session_id, one.agent_token) for one in sessions]


def step_head(agent, length, *, chunked=False):
    session_id, token = agent
    framing = "transfer-encoding: chunked" if chunked else f"content-length: {length}"
    head = f"POST /v1/sessions/{session_id}/step HTTP/1.1\r\nhost: localhost\r\n"
    return f"{head}authorization: Bearer {token}\r\n{framing}\r\n\r\n".encode()


async def answer_of(peer):
    """Return the status and the error of an answer, even before the request is complete."""
    async with asyncio.timeout(30):
        head = await peer.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        return int(head.split()[1]), json.loads(await peer.reader.readexactly(length)).get("error", {})


async def step(server, agent, seq, call=NOTE):
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http:
        body = {"seq": seq, "message": call.wire()}
        headers = {"authorization": f"Bearer {agent[1]}"}
        return await http.post(f"/v1/sessions/{agent[0]}/step", json=body, headers=headers)


def socket_of(server, agent, **options):
    headers = {"authorization": f"Bearer {agent[1]}"}
    url = f"{server.url.replace('http', 'ws', 1)}/v1/ws"
    return connect(url, additional_headers=headers, max_size=None, proxy=None, **options)


async def test_unfinished_bodies_of_an_agent_are_bounded_and_others_are_served(serving):
    server = await serving(max_unfinished=2)
    async with agents(server) as (greedy, other):
        peers = [await Peer.connect(server, step_head(greedy, 100_000) + b"{") for _ in range(2)]
        await until(lambda: server.metrics.unfinished == 2)
        refused = await Peer.connect(server, step_head(greedy, 100_000))
        status, error = await answer_of(refused)
        assert (status, error["type"], error["budget"]) == (429, "rate_limited", "max_unfinished")
        assert error["retry_after"] > 0
        assert server.metrics.refusals["max_unfinished"] == 1
        assert (await step(server, other, 1)).status_code == 200
        for peer in (*peers, refused):
            peer.close()
        await until(lambda: server.metrics.unfinished == server.metrics.held_bytes == 0)
        again = await Peer.connect(server, step_head(greedy, 100_000) + b"{")
        await until(lambda: server.metrics.unfinished == 1)
        again.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_bytes_of_unfinished_bodies_are_bounded(serving, chunked):
    server = await serving(max_held_bytes=256 * KIB, max_message_chars=32 * KIB)
    async with agents(server) as (greedy, other):
        size = 200 * KIB
        data = b"%x\r\n%b\r\n" % (size, b" " * size) if chunked else b" " * (size - 1)
        first = await Peer.connect(server, step_head(greedy, size, chunked=chunked) + data)
        await until(lambda: server.metrics.held_bytes >= size)
        second = await Peer.connect(server, step_head(greedy, size, chunked=chunked) + data)
        status, error = await answer_of(second)
        assert (status, error["type"], error["budget"]) == (429, "rate_limited", "max_held_bytes")
        assert (await step(server, other, 1)).status_code == 200
        first.close()
        second.close()
        await until(lambda: server.metrics.held_bytes == 0)
        assert (await step(server, greedy, 1)).status_code == 200


async def test_agents_body_over_its_limit_is_rejected_before_it_is_read(serving):
    server = await serving()
    async with agents(server, 1) as (agent,):
        peer = await Peer.connect(server, step_head(agent, 8_000_001))
        status, error = await answer_of(peer)
        assert (status, error["type"]) == (413, "body_too_large")
        assert "8000000 bytes" in error["message"]
        peer.close()


async def test_unfinished_websocket_message_times_out(serving):
    server = await serving(body_s=0.3)
    async with agents(server, 1) as (agent,):
        for opcode in (b"\x81", b"\x01"):  # a message without its end, and a first fragment
            async with socket_of(server, agent) as socket:
                masked = b"\xfe\x00\x80\x00\x00\x00\x00{" if opcode == b"\x81" else b"\x81\x00\x00\x00\x00{"
                socket.transport.write(opcode + masked)
                async with asyncio.timeout(30):
                    assert json.loads(await socket.recv())["error"]["type"] == "request_timeout"
                    with pytest.raises(ConnectionClosed) as closed:
                        await socket.recv()
                assert closed.value.rcvd.code == CloseCode.POLICY_VIOLATION


async def test_websocket_with_finished_messages_has_no_deadline(serving):
    server = await serving(body_s=1.0)
    async with agents(server, 1) as (agent,), socket_of(server, agent) as socket:
        frame = {"call": "step", "session_id": agent[0], "message": NOTE.wire()}
        for seq in range(1, 6):
            text = json.dumps({"id": seq, "seq": seq, **frame})
            await socket.send([text[:10], text[10:]])  # two fragments
            assert json.loads(await socket.recv())["id"] == seq
            await asyncio.sleep(0.3)


def begun(size):
    """Return a WebSocket message without its last bytes."""
    return b"\x81\xff" + (size + 10).to_bytes(8, "big") + b"\x00\x00\x00\x00" + b" " * size


async def test_unfinished_websocket_messages_of_an_agent_are_bounded(serving):
    server = await serving(max_held_bytes=256 * KIB, max_message_chars=32 * KIB)
    async with agents(server) as (greedy, other):
        sockets = [await socket_of(server, greedy) for _ in range(3)]
        for number, socket in enumerate(sockets[:2], start=1):
            socket.transport.write(begun(200 * KIB))
            await until(lambda: server.metrics.held_bytes >= number * 200 * KIB)  # noqa: B023
            assert server.metrics.unfinished == number
        sockets[2].transport.write(begun(200 * KIB))
        error = json.loads(await sockets[2].recv())["error"]
        assert (error["type"], error["budget"]) == ("rate_limited", "max_held_bytes")
        assert (await step(server, other, 1)).status_code == 200
        for socket in sockets:
            socket.transport.abort()
        await until(lambda: server.metrics.held_bytes == server.metrics.unfinished == 0)


async def test_concurrent_messages_of_an_agent_are_bounded(serving):
    server = await serving(max_held_bytes=256 * KIB, max_message_chars=31 * KIB)
    async with agents(server, 1, "slow") as (agent,), socket_of(server, agent) as socket:
        call = Message.assistant("\u00e9" * 30 * KIB, ToolCall.of("wait")).wire()
        for seq in range(1, 3):
            frame = {"id": seq, "call": "step", "session_id": agent[0], "seq": seq, "message": call}
            await socket.send(json.dumps(frame))
            await until(Slow.started.is_set)
        refused = json.loads(await socket.recv())
        assert (refused["id"], refused["error"]["budget"]) == (2, "max_held_bytes")
        Slow.gate.set()
        assert json.loads(await socket.recv())["result"]["seq"] == 1
        await until(lambda: server.metrics.held_bytes == 0)


async def test_unread_answers_of_a_slow_reader_count(serving):
    server = await serving()
    async with agents(server, 2, "wordy") as (agent, other):
        call = Message.assistant(None, ToolCall.of("talk")).wire()
        async with socket_of(server, agent, max_queue=1) as socket:
            socket.transport.pause_reading()
            sending = asyncio.create_task(flood(socket, agent[0], call))
            await until(lambda: server.metrics.held_bytes > 4_000_000)
            sending.cancel()
            socket.transport.abort()
        await until(lambda: server.metrics.held_bytes == 0)
        peer = await Peer.connect(server)
        body = json.dumps({"seq": 1, "message": call}).encode()
        peer.writer.transport.pause_reading()
        peer.writer.write((step_head(other, len(body)) + body) * 8)  # more than the system buffers
        await until(lambda: server.metrics.held_bytes > 4_000_000)
        peer.close()
        await until(lambda: server.metrics.held_bytes == 0)


async def test_idle_connections_of_an_address_make_room_for_new_ones(serving):
    server = await serving(token=None, max_connections=1)
    peers = [await Peer.connect(server) for _ in range(15)]
    peers.append(
        await Peer.connect(
            server, b"POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        )
    )
    await until(lambda: server.metrics.connections == 16)
    answers = []
    for _ in range(16):
        peers.append(await Peer.connect(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"))
        answers.append(await peers[-1].reader.readline())
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}
    assert await peers[0].read_rest() == b""
    assert (await peers[15].read_rest()).startswith(b"HTTP/1.1 429")
    assert server.metrics.connections == 16
    for peer in peers:
        peer.close()
    await until(lambda: server.metrics.connections == 0)


async def test_connection_is_refused_if_all_others_of_its_address_are_in_use(serving):
    server = await serving(token=None, max_connections=1)
    url = f"{server.url.replace('http', 'ws', 1)}/v1/ws"
    sockets = [await connect(url, proxy=None) for _ in range(16)]
    refused = await Peer.connect(server)
    assert b'"budget":"max_connections"' in await refused.read_rest()
    refused.close()
    await sockets[0].close()
    await until(lambda: server.metrics.connections == 15)
    async with connect(url, proxy=None):
        pass
    for socket in sockets:
        await socket.close()
    await until(lambda: server.metrics.connections == 0)


async def test_websockets_of_an_agent_are_bounded(serving):
    server = await serving(max_connections=2)
    async with agents(server) as (greedy, other), socket_of(server, greedy), socket_of(server, greedy):
        with pytest.raises(InvalidStatus) as refused:
            await socket_of(server, greedy)
        assert refused.value.response.status_code == 429
        assert b"max_connections" in refused.value.response.body
        async with socket_of(server, other):
            pass


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_agent_that_blocks_the_event_loop_has_to_wait(serving, transport):
    server = await serving(loop_share=0.001)
    hold = Message.assistant(None, ToolCall.of("hold"))
    async with agents(server, task="hog") as (greedy, other):
        if transport == "http":
            assert (await step(server, greedy, 1, hold)).status_code == 200
            refused = await step(server, greedy, 2)
            assert refused.status_code == 429
            error = refused.json()["error"]
        else:
            async with socket_of(server, greedy) as socket:
                frame = {"call": "step", "session_id": greedy[0]}
                for seq, call in ((1, hold), (2, NOTE)):
                    await socket.send(json.dumps({"id": 1, **frame, "seq": seq, "message": call.wire()}))
                    error = json.loads(await socket.recv()).get("error")
        assert (error["type"], error["budget"]) == ("rate_limited", "loop_share")
        assert error["retry_after"] > 10
        assert server.metrics.held_seconds > limits_module.HOLD_BURST_S
        assert (await step(server, other, 1)).status_code == 200
        async with EnvClient.connect(server.url, token=TOKEN) as operator:
            assert (await operator.resume(greedy[0])).turn == 1


async def test_websocket_frame_is_measured_once(serving, monkeypatch):
    server = await serving()
    seen = []
    check = Limits.check_values
    monkeypatch.setattr(
        Limits,
        "check_values",
        lambda self, text, *, agent: seen.append(text) or check(self, text, agent=agent),
    )
    async with agents(server, 1) as (agent,), socket_of(server, agent) as socket:
        seen.clear()
        await socket.send(json.dumps({"id": 1, "call": "info", "session_id": agent[0]}))
        assert "result" in json.loads(await socket.recv())
        assert len(seen) == 1


async def test_metrics_report_usage_and_refusals(serving):
    server = await serving(max_unfinished=1)
    async with agents(server, 1) as (agent,):
        first = await Peer.connect(server, step_head(agent, 100_000))
        await until(lambda: server.metrics.unfinished == 1)
        second = await Peer.connect(server, step_head(agent, 100_000))
        await answer_of(second)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
            answer = await http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        for line in (
            'agentrl_budget_refusals_total{limit="max_unfinished"} 1.0',
            "agentrl_unfinished_requests 1.0",
            "agentrl_held_bytes 100000.0",
            "agentrl_event_loop_held_seconds_total ",
            "agentrl_connections ",
        ):
            assert line in answer.text
        first.close()
        second.close()


async def test_history_of_a_session_is_bounded_in_bytes():
    server = EnvServer([Hog], port=0, drain_s=0.0, limits=Limits(max_history_bytes=1_000_000))
    await server.start()
    async with EnvClient.connect(server.url) as client:
        session = await client.open("hog")
        message = Message.assistant("x" * 300_000, ToolCall.of("note", text="x"))
        for seq in range(1, 65):
            assert (await session.step(message)).seq == seq
        kept = server.pool.session(session.session_id).history.tail()
        assert 2 <= len(kept) < 4
        assert (await client.backend.step(session.session_id, 64, message)).seq == 64
        with pytest.raises(SeqConflict, match="no longer kept"):
            await client.backend.step(session.session_id, 1, message)
    await server.stop()


def test_history_keeps_the_last_turns_whatever_their_size():
    history = History(max_bytes=10)
    for seq in range(5):
        history.add(b"x" * 100_000, b"%d" % seq)
    assert [result for _, result in history.tail()] == ["3", "4"]


async def test_large_batch_lets_other_callers_take_turns():
    pool = SessionPool([Hog])
    session = await pool.open(OpenRequest(task="hog"))
    rounds = 0

    async def count():
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    before = rounds
    steps = [FastStep(session.session_id, seq, NOTE) for seq in range(1, 1025)]
    answers = await pool.step_many(FastBatch(steps))
    assert rounds - before >= 3
    counting.cancel()
    assert all(isinstance(answer, bytes) for answer in answers)
    await pool.aclose()


@pytest.fixture
def budgets():
    return Budgets(Limits(max_held_bytes=KIB, loop_share=0.1), Metrics(), clock=Clock())


def test_budget_belongs_to_the_session_or_else_to_the_address(budgets):
    agent = budgets.of("a", ("10.0.0.1", 1))
    assert agent is budgets.of("a", ("10.0.0.2", 2))
    assert agent is not budgets.of("b", ("10.0.0.1", 1))
    assert budgets.of(None, ("10.0.0.1", 1)) is budgets.of(None, ("10.0.0.1", 2))
    assert budgets.of(None, None) is budgets.of(None, None)


def test_address_has_sixteen_times_the_budget_of_an_agent():
    budgets = Budgets(Limits(max_held_bytes=10_000_000), Metrics())
    for budget, size in ((budgets.of("a", None), 10_000_000), (budgets.of(None, None), 160_000_000)):
        budget.hold(size)
        with pytest.raises(RateLimited, match="max_held_bytes"):
            budget.hold(1)
        budget.release(size)


def test_one_request_of_the_largest_size_is_always_possible():
    limits = Limits(max_held_bytes=KIB)
    for session_id in ("a", None):
        budget = Budgets(limits, Metrics()).of(session_id, None)
        budget.hold(limits.max_bytes(agent=session_id is not None))


def test_loop_time_is_paid_off_at_the_callers_share(budgets):
    agent, clock = budgets.of("a", None), budgets.clock
    agent.charge(limits_module.HOLD_BURST_S)
    agent.admit()
    agent.charge(0.2)
    with pytest.raises(RateLimited, match="loop_share") as refused:
        agent.admit()
    assert refused.value.details["retry_after"] == 2.0
    assert not agent.idle
    clock.now += 2.0
    agent.admit()
    assert agent.idle
    operator = budgets.of(None, None)
    operator.charge(100.0)
    operator.admit()


async def test_stretches_of_loop_time_are_charged_and_results_errors_and_cancels_pass(budgets):
    budget, clock = Budget(budgets, agent=True), budgets.clock

    async def work(seconds, error=None):
        clock.now += seconds
        await asyncio.sleep(0)
        if error is not None:
            raise error
        clock.now += limits_module.HOLD_S / 2  # too short to count
        return "done"

    assert await budget.timed(work(0.25)) == "done"
    with pytest.raises(KeyError):
        await budget.timed(work(0.25, KeyError()))
    assert budgets.metrics.held_seconds == 0.5
    cancelled = asyncio.create_task(asyncio.wait_for(budget.timed(asyncio.sleep(60)), None))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


def _counts_waiting() -> bool:
    try:
        return Path("/proc/thread-self/schedstat").read_text() != "0 0 0\n"
    except OSError:
        return False


async def test_time_spent_waiting_for_a_processor_is_not_charged():
    clock, waited = Clock(), Clock()
    budgets = Budgets(Limits(), Metrics(), clock=clock, delay=lambda: waited.now)
    budget = Budget(budgets, agent=True)

    async def work(seconds, of_it_waiting):
        clock.now += seconds
        waited.now += of_it_waiting

    waited.now += 100.0  # of the thread, before any call
    await budget.timed(work(3.0, 3.0 - limits_module.HOLD_S / 2))
    assert budgets.metrics.held_seconds == 0
    waited.now += 100.0
    await budget.timed(work(3.0, 1.0))
    assert budgets.metrics.held_seconds == pytest.approx(2.0)


@pytest.mark.skipif(not _counts_waiting(), reason="this system does not count the time")
def test_thread_that_shares_its_processor_has_waited_for_it():
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    busy = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        os.sched_setaffinity(busy.pid, one)
        busy.stdout.readline()
        os.sched_setaffinity(0, one)
        before, used = limits_module.processor_delay(), time.thread_time()
        while time.thread_time() < used + 0.2:
            pass
        assert limits_module.processor_delay() > before
    finally:
        os.sched_setaffinity(0, allowed)
        busy.kill()
        busy.communicate()


def test_number_of_budgets_is_bounded(budgets):
    held = budgets.of("held", None)
    held.hold(1)
    for number in range(MAX_BUCKETS + 10):
        budgets.of(str(number), None)
    assert len(budgets._of) <= MAX_BUCKETS
    assert budgets.of("held", None) is held
