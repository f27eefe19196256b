"""Operator calls: session lists, transcripts and the fleet, and the files of the dashboard."""

import sys

import httpx
import pytest
from websockets.asyncio.client import connect

from agentrl_env import Message, ToolCall
from agentrl_env.errors import InvalidRequest
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.dashboard import FILES
from agentrl_env.server.telemetry.history import History
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.listing import merge_lists
from agentrl_env.session.pool import SessionPool
from agentrl_env.session.session import MAX_TURNS
from agentrl_env.types import FleetInfo
from agentrl_env.wire import OpenRequest, SessionList, SessionQuery, Transcript, TranscriptRequest
from tests.env.tasks import Clock, Guess, Quick, close_session, expire_idle, play_step


class Talk(Quick):
    """``Quick`` with a high turn limit."""

    max_turns = 10_000

    def respond(self, text):
        return f"heard {text}"


@pytest.fixture
async def pool():
    pool = SessionPool((Talk, Guess), max_sessions=500, clock=Clock())
    yield pool
    await pool.aclose()


@pytest.fixture
def service(pool):
    return pool


async def opened(pool, task="talk", **fields):
    pool._clock.now += 1
    return (await pool.open(OpenRequest(task=task, **fields))).session_id


async def listed(service, **query):
    return await service.sessions(SessionQuery(**query))


async def transcript_of(service, session_id, after=None):
    return await service.transcript(TranscriptRequest(session_id=session_id, after=after))


def ids(answer):
    return [row.session_id for row in answer.sessions]


async def test_pages_list_every_session_once_and_newest_first(pool, service):
    expected = [await opened(pool) for _ in range(25)][::-1]
    first = await listed(service, limit=10)
    assert first.total == 25
    await opened(pool)  # a newer session does not shift later pages
    second = await listed(service, limit=10, after=first.next)
    await close_session(pool, expected[3])  # nor does a session that ends
    third = await listed(service, limit=10, after=second.next)
    assert ids(first) + ids(second) + ids(third) == expected
    assert third.next is None


async def test_sessions_opened_at_the_same_time_are_all_listed(pool, service):
    same = {(await pool.open(OpenRequest(task="talk"))).session_id for _ in range(7)}
    found, after = set(), None
    while True:
        page = await listed(service, limit=2, after=after)
        found |= set(ids(page))
        after = page.next
        if after is None:
            break
    assert found == same


async def test_list_is_filtered_by_task_and_status(pool, service):
    guess, talk = await opened(pool, "guess"), await opened(pool)
    await play_step(pool, talk, 1, Message.assistant(None, ToolCall.of("finish")))
    assert ids(await listed(service, task="guess")) == [guess]
    assert ids(await listed(service, status="completed")) == [talk]
    assert (await listed(service, status="expired")).total == 0


async def test_search_finds_sessions_by_id_task_index_and_seed(pool, service):
    guess = await opened(pool, "guess", seed=1)
    talk = await opened(pool, split="test", index=3, seed=77)
    assert ids(await listed(service, search=guess.rpartition(".")[2].upper())) == [guess]
    assert ids(await listed(service, search="GUESS")) == [guess]
    assert ids(await listed(service, search="test 3 seed 77")) == [talk]
    assert ids(await listed(service, search="seed 77", task="guess")) == []


async def test_row_of_a_failed_session_has_the_reason(pool, service):
    failed, fine = await opened(pool), await opened(pool)
    await play_step(pool, failed, 1, Message.assistant(None, ToolCall.of("crash")))
    rows = {row.session_id: row for row in (await listed(service)).sessions}
    assert rows[failed].status == "failed_environment"
    assert rows[failed].error.startswith("ZeroDivisionError: author bug")
    assert rows[fine].error == ""


async def test_history_has_one_point_for_each_measurement_and_returns_points_after_a_time(pool):
    observer = Metrics()
    now = iter((10.0, 20.0, 30.0))
    history = History(observer, pool.gauges, clock=lambda: next(now))
    history.take()
    await opened(pool)
    observer.ended["talk", "completed"] += 2
    observer.ended["talk", "failed_environment"] += 1
    observer.ended["talk", "session_lost"] += 3
    observer.scored["talk"], observer.succeeded["talk"], observer.steps["talk"] = 2, 1, 9
    history.take()
    history.take()
    first, second, third = history.since(0.0)
    assert (first.time, first.open, first.steps, first.capacity) == (10.0, 0, 0, 500)
    assert (second.open, second.steps, second.scored, second.succeeded, second.failed) == (1, 9, 2, 1, 4)
    assert history.since(20.0) == (third,)


async def test_row_has_the_state_of_a_session(pool, service):
    session_id = await opened(pool, split="test", index=3, seed=7)
    await play_step(pool, session_id, 1, Message.assistant(None, ToolCall.of("gain", amount=0.25)))
    pool._clock.now += 5
    (row,) = (await listed(service)).sessions
    assert (row.task, row.split, row.index, row.seed, row.status) == ("talk", "test", 3, 7, "running")
    assert (row.turn, row.reward, row.age_s, row.idle_s) == (1, 0.25, 5, 5)
    assert row.server == pool.server_id


@pytest.mark.parametrize("after", ["", "x/y", "nothing"])
async def test_invalid_page_token_is_rejected(service, after):
    with pytest.raises(InvalidRequest, match="previous page"):
        await service.sessions(SessionQuery(after=after))


async def test_lists_of_several_servers_are_merged_into_the_same_pages():
    clock = Clock()
    pools = [SessionPool((Talk,), clock=clock) for _ in range(3)]
    services = [pool for pool in pools]
    for service in services:
        service._epoch = 0.0
    expected = [await opened(pools[n % 3]) for n in range(20)][::-1]
    found, after = [], None
    while True:
        query = SessionQuery(limit=6, after=after)
        page = merge_lists([await listed(s, limit=6, after=after) for s in services], query)
        assert page.total == 20
        found += ids(page)
        after = page.next
        if after is None:
            break
    assert found == expected
    for pool in pools:
        await pool.aclose()


async def test_transcript_has_messages_and_results(pool, service):
    session_id = await opened(pool)
    said = [Message.assistant("hello"), Message.assistant(None, ToolCall.of("gain"))]
    results = [await play_step(pool, session_id, seq, message) for seq, message in enumerate(said, 1)]
    whole = await transcript_of(service, session_id)
    assert [turn.message for turn in whole.turns] == said
    assert [turn.result for turn in whole.turns] == results
    assert [message.role for message in whole.messages] == ["system", "user"]
    assert whole.tools
    assert (whole.turn, whole.reward, whole.status) == (2, 0.5, "running")
    later = await transcript_of(service, session_id, after=1)
    assert [turn.result.seq for turn in later.turns] == [2]
    assert later.messages == later.tools == ()


async def test_transcript_has_only_the_last_turns(pool, service):
    session_id = await opened(pool)
    for seq in range(1, MAX_TURNS + 11):
        await play_step(pool, session_id, seq, Message.assistant("again"))
    turns = (await transcript_of(service, session_id)).turns
    assert [turn.result.seq for turn in turns] == list(range(11, MAX_TURNS + 11))


async def test_expired_session_has_a_transcript(pool, service):
    session_id = await opened(pool)
    await play_step(pool, session_id, 1, Message.assistant("hello"))
    pool._clock.now += 10_000
    await expire_idle(pool)
    answer = await transcript_of(service, session_id)
    assert (answer.status, len(answer.turns)) == ("expired", 1)


@pytest.fixture
async def server():
    server = EnvServer([Talk], port=0, token="secret", drain_s=0)
    await server.start()
    yield server
    await server.stop()


async def test_listing_requires_the_operator_token(server):
    session_id = await opened_at(server)
    paths = ["/v1/fleet", "/v1/sessions", f"/v1/sessions/{session_id}/transcript"]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        renewed = await http.post(f"/v1/sessions/{session_id}/token", headers=bearer("secret"))
        for path in paths:
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=bearer("secret"))).status_code == 200
            agent = await http.get(path, headers=bearer(renewed.json()["agent_token"]))
            assert agent.status_code == 403


@pytest.mark.parametrize(
    "path",
    ["/v1/sessions?limit=0", "/v1/sessions?status=well", "/v1/sessions?after=x", "TRANSCRIPT?after=-1"],
)
async def test_invalid_query_is_rejected(server, path):
    path = path.replace("TRANSCRIPT", f"/v1/sessions/{await opened_at(server)}/transcript")
    async with httpx.AsyncClient(base_url=server.url, headers=bearer("secret"), timeout=60) as http:
        answer = await http.get(path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request")


async def test_transcript_of_an_unknown_session_is_not_found(server):
    async with httpx.AsyncClient(base_url=server.url, headers=bearer("secret"), timeout=60) as http:
        answer = await http.get("/v1/sessions/nobody/transcript")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "unknown_session")


async def test_fleet_of_a_single_server_contains_the_server(server):
    await opened_at(server)
    async with httpx.AsyncClient(base_url=server.url, headers=bearer("secret"), timeout=60) as http:
        fleet = FleetInfo.model_validate_json((await http.get("/v1/fleet")).content)
    (own,) = fleet.servers
    assert (fleet.kind, own.server_id, own.tasks) == ("server", server.pool.server_id, ("talk",))
    assert (own.open, own.capacity, own.draining) == (1, 1024, False)
    assert fleet.history == ()
    assert own.version


async def test_drained_server_finishes_its_sessions_and_opens_no_new_one(server):
    session_id = await opened_at(server)
    body = {"server_id": server.pool.server_id}
    async with httpx.AsyncClient(base_url=server.url, headers=bearer("secret"), timeout=60) as http:
        unknown = await http.post("/v1/fleet/drain", json={"server_id": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "unknown_server")
        drained = FleetInfo.model_validate_json((await http.post("/v1/fleet/drain", json=body)).content)
        assert [row.stale for row in drained.servers] == [True]
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post("/v1/sessions", json={"task": "talk"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_draining")
        await play_step(server.pool, session_id, 1, Message.assistant("still here"))
        again = await http.post("/v1/fleet/drain", json={**body, "draining": False})
        assert again.status_code == (await http.get("/ready")).status_code == 200
        looked = FleetInfo.model_validate_json((await http.get("/v1/fleet?since=0")).content)
    assert looked.history  # at least the event of the start
    await opened_at(server)


async def test_websocket_accepts_the_same_calls(server):
    session_id = await opened_at(server)
    url = server.url.replace("http", "ws") + "/v1/ws"
    async with connect(url, additional_headers=bearer("secret")) as socket:
        await socket.send('{"id":1,"call":"sessions","limit":5}')
        assert session_id in await socket.recv()
        await socket.send(f'{{"id":2,"call":"transcript","session_id":"{session_id}"}}')
        assert '"turns":[]' in await socket.recv()


async def test_dashboard_files_need_no_token_and_have_a_strict_content_security_policy(server):
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        for path in FILES:
            answer = await http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await http.get("/")).headers["content-type"].startswith("text/html")
        for path in ("/page/../gate.py", "/page/shell.py", "/page/"):
            assert (await http.get(path)).status_code in (401, 404)


async def opened_at(server):
    return (await server.pool.open(OpenRequest(task="talk"))).session_id


def bearer(token):
    return {"authorization": f"Bearer {token}"}


async def test_infinite_return_is_shown_as_the_largest_float(pool, service):
    session_id = await opened(pool)
    for seq in (1, 2):
        await play_step(pool, session_id, seq, Message.assistant(None, ToolCall.of("gain", amount=1.5e308)))
    rows, turns = await listed(service), await transcript_of(service, session_id)
    assert SessionList.model_validate_json(rows.model_dump_json()).sessions[0].reward == sys.float_info.max
    assert Transcript.model_validate_json(turns.model_dump_json()).reward == sys.float_info.max
