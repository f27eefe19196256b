"""Author code on the event loop. Other callers run between its calls, and each message has a budget."""

import asyncio
import time

import httpx
import pytest

from agentrl_env import EnvClient, Message, ToolCall, tool
from agentrl_env.errors import InvalidRequest, ServerFull, SessionExpired
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.limits import Limits
from agentrl_env.session import threads as threads_module
from agentrl_env.session.loop_share import SLICE_S, LoopShare
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import MAX_WAIT_S, OpenRequest, StepBatch, StepRequest
from tests.env.tasks import Clock, Quick, Slow, play_many, play_step, until


class Holds(Quick):
    """Its tool holds the event loop, and records how often others ran before."""

    max_turns = 1000
    others = 0
    seen: list[int]

    @tool
    def hold(self):
        """Hold the event loop for more than a slice."""
        Holds.seen.append(Holds.others)
        time.sleep(1.1 * SLICE_S)
        return "held"


@pytest.fixture
async def others():
    """Another user of the event loop that runs in each of its rounds."""

    async def run():
        while True:
            Holds.others += 1
            await asyncio.sleep(0)

    Holds.others, Holds.seen = 0, []
    running = asyncio.create_task(run())
    yield
    running.cancel()


async def opened(pool, number=1, task="holds"):
    return [(await pool.open(OpenRequest(task=task))).session_id for _ in range(number)]


def calls(number, name="hold"):
    return Message.assistant(None, *(ToolCall.of(name) for _ in range(number)))


async def test_loop_runs_between_the_calls_of_a_message(others):
    pool = SessionPool([Holds])
    (session_id,) = await opened(pool)
    result = await play_step(pool, session_id, 1, calls(20))
    assert [message.content for message in result.messages] == ["held"] * 20
    assert len(set(Holds.seen)) == 20
    await pool.aclose()


@pytest.mark.parametrize("in_one_batch", [True, False])
async def test_loop_runs_between_the_calls_of_many_sessions(others, in_one_batch):
    pool = SessionPool([Holds])
    ids = await opened(pool, 40)
    if in_one_batch:
        await play_many(pool, [StepRequest(session_id=name, seq=1, message=calls(1)) for name in ids])
    else:
        await asyncio.gather(*(play_step(pool, name, 1, calls(1)) for name in ids))
    assert len(set(Holds.seen)) == 40
    await pool.aclose()


async def test_waiting_calls_run_in_order_and_cancelled_ones_never():
    share, ran = LoopShare(), []

    async def call(number):
        if share.taken:
            await share.turn()
        ran.append(number)
        share.charge(1.0)

    tasks = [asyncio.create_task(call(number)) for number in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(ran) < 40
    tasks[40].cancel()
    await asyncio.wait(tasks)
    assert ran == [number for number in range(50) if number != 40]
    await until(lambda: not share.taken)


def test_share_of_an_ended_loop_does_not_block_the_next_loop():
    share = LoopShare()

    async def charge():
        share.charge(1.0)

    async def call():
        if share.taken:
            await asyncio.wait_for(share.turn(), 60)

    asyncio.run(charge())
    asyncio.run(call())
    assert not share.taken


async def test_calls_past_the_loop_time_of_a_message_are_not_executed(others):
    pool = SessionPool([Holds], message_loop_s=1.05 * SLICE_S)
    (session_id,) = await opened(pool)
    result = await play_step(pool, session_id, 1, calls(4))
    answers = [message.content for message in result.messages]
    assert answers[0] == "held"
    assert {answer.split(":")[0] for answer in answers[1:]} == {"Not executed"}
    assert "the calls of a message may hold the server for" in answers[1]
    assert len(Holds.seen) == 1
    assert result.status == "running"
    again = await play_step(pool, session_id, 2, calls(1))  # each message has its own budget
    assert again.messages[0].content == "held"
    await pool.aclose()


async def test_loop_time_of_a_message_is_a_limit_of_the_server(others):
    server = EnvServer([Holds], port=0, drain_s=0, limits=Limits.parse([f"message_loop_s={1.05 * SLICE_S}"]))
    await server.start()
    async with EnvClient.connect(server.url) as client:
        session = await client.open("holds")
        result = await session.step(calls(2))
        assert result.messages[1].content.startswith("Not executed: the calls of a message")
        await session.close()
    await server.stop()


class Hangs(Slow):
    """Calls that never return, in addition to calls on the event loop."""

    @tool(timeout=0.05)
    def hang(self):
        """Never return."""
        self.blocker.wait(600)
        return "returned"

    @tool(timeout=3600)
    def hang_long(self):
        """Hang within the timeout."""
        Hangs.hanging += 1
        self.blocker.wait(600)

    @tool
    async def ask(self):
        """Answer on the event loop."""
        return "served"

    hanging = 0


@pytest.fixture
def hangs():
    Hangs.prepare()
    Hangs.hanging = 0
    yield
    Hangs.blocker.set()


async def hang(client, number):
    sessions = [await client.open("hangs") for _ in range(number)]
    return await asyncio.gather(*(session.step(ToolCall.of("hang")) for session in sessions))


async def test_hanging_calls_on_64_threads_leave_other_sessions_served(hangs):
    server = EnvServer([Hangs], port=0, drain_s=0, max_sessions=80, threads=8)
    await server.start()
    async with (
        EnvClient.connect(server.url) as client,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        other = await client.open("hangs")
        for _ in range(8):
            results = await hang(client, 8)
            assert {result.status for result in results} == {"failed_environment"}
        assert (await other.step(ToolCall.of("ask"))).messages[0].content == "served"
        assert (await client.open("hangs")).status == "running"
        assert (await http.get("/ready")).status_code == 200
        Hangs.blocker.set()
    await server.stop()


async def test_server_with_only_hanging_threads_refuses_sessions_immediately_and_reports_it(
    hangs, monkeypatch
):
    monkeypatch.setattr(threads_module, "MIN_CEILING", 2)
    monkeypatch.setattr(threads_module, "REPLACEMENT_FACTOR", 2)
    server = EnvServer([Hangs], port=0, drain_s=0, threads=1)
    await server.start()
    async with (
        EnvClient.connect(server.url) as client,
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
    ):
        other = await client.open("hangs")
        for _ in range(2):
            await hang(client, 1)
        with pytest.raises(ServerFull, match="all 2 threads of this server run author code that does not"):
            await client.open("hangs")
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_full")
        assert "does not return" in answer.json()["error"]["message"]
        assert (await other.step(ToolCall.of("ask"))).messages[0].content == "served"
        Hangs.blocker.set()
        await until(lambda: not server.pool.gauges()["agentrl_threads_abandoned"])
        assert (await http.get("/ready")).status_code == 200
        assert (await client.open("hangs")).status == "running"
    await server.stop()


class Threaded(Quick):
    """Another task whose tools run on threads."""

    blocking = True


async def test_calls_that_hang_within_their_timeout_occupy_only_the_threads_of_their_task(hangs, monkeypatch):
    pool = SessionPool([Hangs, Threaded], threads=2)
    tries = [
        asyncio.create_task(play_step(pool, name, 1, calls(1, "hang_long")))
        for name in await opened(pool, 2, "hangs")
    ]
    await until(lambda: Hangs.hanging == 2)
    (other,) = await opened(pool, task="threaded")
    assert (await play_step(pool, other, 1, calls(1, "finish"))).status == "completed"
    pool.check_ready()
    monkeypatch.setattr(threads_module, "STALLED_S", 0.5)
    with pytest.raises(ServerFull, match="no thread of this server came free within"):
        await opened(pool, task="hangs")
    with pytest.raises(ServerFull, match=r"all 2 threads .* does not return \(task hangs\)"):
        await opened(pool, task="hangs")
    Hangs.blocker.set()
    await asyncio.gather(*tries)
    await until(lambda: not pool._tasks.exhausted("hangs"))
    await opened(pool, task="hangs")
    await pool.aclose()


async def test_sweep_after_a_freeze_ends_no_session_with_a_possibly_unread_step(monkeypatch):
    clock = Clock()
    pool = SessionPool([Quick], lease_s=2.0, clock=clock)
    sweeps = asyncio.Semaphore(0)
    swept = asyncio.Event()

    async def sleep(seconds):
        swept.set()
        await sweeps.acquire()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    (session_id,) = await opened(pool, task="quick")
    await swept.wait()

    async def sweep():
        swept.clear()
        sweeps.release()
        await swept.wait()

    clock.now += 3.0  # the process was frozen, and its sweep runs before it reads its sockets
    await sweep()
    assert (await play_step(pool, session_id, 1, calls(1, "refuse"))).seq == 1
    clock.now += 1.0
    await sweep()
    assert pool.open_sessions == 1
    clock.now += 3.0  # idle for longer than its lease
    await sweep()
    await sweep()
    with pytest.raises(SessionExpired):
        await play_step(pool, session_id, 2, calls(1, "refuse"))
    monkeypatch.undo()
    await pool.aclose()


@pytest.mark.parametrize("wait_s", [MAX_WAIT_S + 1, 1e300])
async def test_wait_of_a_call_is_bounded(wait_s):
    with pytest.raises(ValueError, match="less than or equal to 3600"):
        OpenRequest(task="quick", wait_s=wait_s)
    with pytest.raises(ValueError, match="less than or equal to 3600"):
        StepBatch(steps=[], wait_s=wait_s)
    server = EnvServer([Quick], port=0, drain_s=0)
    await server.start()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as http,
        EnvClient.connect(server.url) as client,
    ):
        for path, body in (("/v1/sessions", {"task": "quick"}), ("/v1/step", {"steps": []})):
            answer = await http.post(path, json={**body, "wait_s": wait_s})
            assert (answer.status_code, answer.json()["error"]["type"]) == (422, InvalidRequest.type)
        assert (await client.open("quick", wait=wait_s)).status == "running"  # the client requests less
    await server.stop()
