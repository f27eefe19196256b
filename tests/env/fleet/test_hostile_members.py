"""Fleet members that never answer or answer garbage, and controllers with a wrong clock."""

import asyncio
import json
import time
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from agentrl_env import ToolCall
from agentrl_env.errors import ServerFull, StateUnavailable, from_wire
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.redis_store import RedisStore
from agentrl_env.server.auth import link_token
from agentrl_env.types import SessionInfo, TaskSample
from agentrl_env.wire import SessionRequest
from tests.env.fleet.test_controller import Site
from tests.env.redis_server import RedisServer
from tests.env.tasks import Quick, until

NOTE = ToolCall.of("note", text="x")
NOT_ANSWERS = [
    "7",
    "null",
    "[]",
    '"text"',
    "{}",
    '{"session_id":"evil.1"}',
    '{"session_id":7,"messages":1}',
    "[" * 5000 + "]" * 5000,
]
OPENED = SessionInfo(session_id="evil.1", task="quick", sample=TaskSample(task="quick")).model_dump_json()


@asynccontextmanager
async def member(site, answer):
    """Join the fleet with a large capacity, so that every opening comes here first.

    Args:
        site: the fleet.
        answer: returns the answer frame for a call, or None.
    """
    headers = {"authorization": f"Bearer {link_token('secret')}"}
    url = site.controller.url.replace("http", "ws", 1) + "/v1/link"
    calls = []

    async def beat(line):
        with suppress(ConnectionClosed):
            while True:
                await line.send('{"beat":{}}')
                await asyncio.sleep(0.1)

    async def listen(line):
        with suppress(ConnectionClosed):
            async for frame in line:
                call = json.loads(frame)
                calls.append(call["call"])
                if (said := answer(call)) is not None:
                    await line.send(said)

    async with connect(url, additional_headers=headers) as line:
        task = {"name": "quick", "max_turns": 9}
        await line.send(json.dumps({"hello": {"server_id": "evil", "tasks": [task], "capacity": 100_000}}))
        await line.recv()
        tasks = [asyncio.create_task(beat(line)), asyncio.create_task(listen(line))]
        try:
            yield calls
        finally:
            for task in tasks:
                task.cancel()


def members(site):
    return set(site.fleet.servers)


def result(call, body):
    return f'{{"id":{call["id"]},"result":{body}}}'


async def test_silent_member_is_excluded_and_its_openings_go_elsewhere():
    async with Site(queue_s=30.0, lost_after_s=1.0) as site, member(site, lambda call: None) as calls:
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        assert session.session_id.startswith(server.pool.server_id)
        assert members(site) == {server.pool.server_id}
        assert calls[0] == "open"
        assert "fleet" in calls  # a probe call


async def test_list_of_sessions_omits_a_silent_member():
    async with Site(lost_after_s=60.0) as site:
        await site.serve(Quick)
        session = await site.client.open("quick")
        async with member(site, lambda call: None), httpx.AsyncClient(timeout=60) as http:
            url = f"{site.controller.url}/v1/sessions"
            answer = await http.get(url, headers={"authorization": "Bearer secret"}, timeout=30)
            assert [row["session_id"] for row in answer.json()["sessions"]] == [session.session_id]
            assert "evil" in members(site)


async def test_controller_waits_for_slow_calls_of_a_responsive_member():
    def answer(call):
        return result(call, "{}") if call["call"] == "fleet" else None

    async with Site(lost_after_s=1.0) as site, member(site, answer) as calls:
        opening = asyncio.create_task(site.client.open("quick"))
        await until(lambda: "fleet" in calls)
        await asyncio.sleep(3.0)  # more than twice lost_after_s
        assert members(site) == {"evil"}
        assert not opening.done()
        opening.cancel()


@pytest.mark.parametrize("body", [*NOT_ANSWERS, OPENED.replace("evil.1", "other.1")])
async def test_opening_answered_with_garbage_is_retried_elsewhere(body):
    async with Site(queue_s=30.0) as site, member(site, lambda call: result(call, body)) as calls:
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        assert session.session_id.startswith(server.pool.server_id)
        assert members(site) == {server.pool.server_id}
        assert calls == ["open"]


@pytest.mark.parametrize("frame", ["garbage", '{"id":1,"error":3}', '{"id":1,"result":', '{"id":1,"error":{'])
async def test_malformed_frame_excludes_a_member(frame):
    async with Site(queue_s=30.0) as site, member(site, lambda call: frame):
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        assert session.session_id.startswith(server.pool.server_id)
        await until(lambda: members(site) == {server.pool.server_id})


@pytest.mark.parametrize("call", ["info", "transcript", "expert", "fork", "step"])
@pytest.mark.parametrize("body", NOT_ANSWERS[:4])
async def test_call_of_a_session_answered_with_garbage_loses_it(call, body):
    def answer(asked):
        return result(asked, OPENED if asked["call"] == "open" else body)

    async with Site() as site, member(site, answer), httpx.AsyncClient(timeout=30) as http:
        session = await site.client.open("quick")
        path = f"{site.controller.url}/v1/sessions/{session.session_id}"
        message = {"role": "assistant", "content": "x"}
        requests = {
            "info": ("GET", path, None),
            "transcript": ("GET", f"{path}/transcript", None),
            "expert": ("POST", f"{path}/expert", None),
            "fork": ("POST", f"{path}/fork", {"n": 1}),
            "step": ("POST", f"{path}/step", {"seq": 1, "message": message}),
        }
        method, url, sent = requests[call]
        done = await http.request(method, url, json=sent, headers={"authorization": "Bearer secret"})
        assert (done.status_code, done.json()["error"]["type"]) == (410, "session_lost")
        assert members(site) == set()


@pytest.mark.parametrize(
    "body",
    [
        "7",
        "{}",
        '{"results":7}',
        '{"results":[]}',
        '{"results":[1]}',
        '{"results":[{"a":}]}',
        '{"results":[{}',
    ],
)
async def test_batch_answered_with_garbage_loses_no_other_step(body):
    def answer(asked):
        return result(asked, OPENED if asked["call"] == "open" else body)

    message = {"role": "assistant", "content": "x"}
    async with Site() as site, httpx.AsyncClient(timeout=30) as http:
        await site.serve(Quick)
        honest = await site.client.open("quick")
        async with member(site, answer):
            lost = await site.client.open("quick")
            assert lost.session_id == "evil.1"
            steps = [
                {"session_id": session.session_id, "seq": 1, "message": message} for session in (honest, lost)
            ]
            url, headers = f"{site.controller.url}/v1/step", {"authorization": "Bearer secret"}
            answered = await http.post(url, json={"steps": steps}, headers=headers)
            kept, gone = answered.json()["results"]
        assert (answered.status_code, kept["session_id"], kept["seq"]) == (200, honest.session_id, 1)
        assert gone["error"]["type"] == "session_lost"


def test_error_with_odd_details_has_a_type():
    said = {"type": "server_full", "message": "x", "retry_after": "soon", "self": 1, "status": "odd"}
    error = from_wire({"error": said})
    assert isinstance(error, ServerFull)
    assert "retry_after" not in error.details
    for retry_after in (float("nan"), float("inf"), -1, 1e300, [], None, True):
        error = from_wire({"error": {"type": "server_full", "retry_after": retry_after}})
        assert "retry_after" not in error.details
    assert from_wire({"error": {"type": "server_full", "retry_after": 2}}).details == {"retry_after": 2}


async def test_error_of_a_member_with_odd_details_is_answered_with_its_own_status():
    error = '{"type":"server_full","message":"x","retry_after":"soon","self":1}'

    async with Site() as site, member(site, lambda call: f'{{"id":{call["id"]},"error":{error}}}'):
        async with httpx.AsyncClient(timeout=60) as http:
            url = f"{site.controller.url}/v1/sessions/evil.1"
            answer = await http.get(url, headers={"authorization": "Bearer secret"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_full")


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.extended
@pytest.mark.parametrize("skew_s", [30.0, -30.0, pytest.param(86_400.0, marks=pytest.mark.slow)])
async def test_controller_with_a_wrong_clock_and_no_link_ends_no_session(redis, monkeypatch, skew_s):
    async with Site(store=RedisStore(redis.url)) as site:
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + skew_s)
        skewed = FleetService(
            store=RedisStore(redis.url), lost_after_s=5.0, clock=lambda: time.monotonic() + skew_s
        )
        await skewed.start()
        skewed.registry._started, skewed.registry._lost_after_s = -1e9, 5.0
        finding = asyncio.create_task(skewed.info(SessionRequest(session_id=session.session_id)))
        for _ in range(10):
            await skewed.registry.check()
        with pytest.raises(StateUnavailable):
            await finding
        await site.fleet.registry.check()
        assert members(site) == {server.pool.server_id}
        assert (await session.step(NOTE)).seq == 1
        await skewed.aclose()
