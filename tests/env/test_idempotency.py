"""Idempotency keys are bound to their payload, and survive the loss of a server."""

import asyncio

import httpx
import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.client.local import LocalBackend
from agentrl_env.errors import IdempotencyConflict, from_wire
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.redis_store import RedisStore
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import (
    FORK,
    OPEN,
    OPEN_MANY,
    STEP_MANY,
    ForkRequest,
    OpenBatch,
    OpenRequest,
    StepBatch,
    StepRequest,
)
from tests.env.fleet.test_controller import Site
from tests.env.fleet.test_failover_sessions import WALK, Walk, die, holder
from tests.env.redis_server import RedisServer
from tests.env.tasks import Quick, Slow, until

NOTE = Message.assistant(None, ToolCall.of("note", text="a"))
OTHER = Message.assistant(None, ToolCall.of("note", text="b"))


@pytest.fixture(params=["http", "ws", "fleet", "local"])
async def client(request):
    """A client of one server, over each transport."""
    if request.param == "local":
        async with EnvClient(LocalBackend(SessionPool([Quick, Walk]))) as client:
            yield client
        return
    servers = []
    if request.param == "fleet":
        servers.append(ControllerServer(FleetService(queue_s=0.0), port=0))
        await servers[0].start()
        servers.append(EnvServer([Quick, Walk], host=NOWHERE, controllers=[servers[0].url], drain_s=0.0))
    else:
        servers.append(EnvServer([Quick, Walk], port=0, drain_s=0.0))
    await servers[-1].start()
    url = servers[0].url.replace("http", "ws", 1) if request.param == "ws" else servers[0].url
    async with EnvClient.connect(url) as client:
        yield client
    for server in reversed(servers):
        await server.stop()


def opening(request_id="once", **fields):
    return OpenRequest(**{"task": "quick", "index": 1, "request_id": request_id, **fields})


@pytest.mark.parametrize(
    "change",
    [{"index": 2}, {"seed": 7}, {"split": "test"}, {"sample": {"x": 1}}, {"task": "walk"}, {"index": "1"}],
)
async def test_request_id_with_another_opening_is_a_conflict(client, change):
    first = await client.backend.call(OPEN, opening())
    with pytest.raises(IdempotencyConflict, match="used for another request"):
        await client.backend.call(OPEN, opening(**change))
    again = await client.backend.call(
        OPEN, opening(wait_s=1.0, client="me")
    )  # changes how the session opens, not its content
    assert again.session_id == first.session_id


async def test_request_id_with_another_fork_is_a_conflict(client):
    session = await client.open("walk")
    request = ForkRequest(session_id=session.session_id, n=2, request_id="once")
    first = await client.backend.call(FORK, request)
    for n in (1, 3):
        with pytest.raises(IdempotencyConflict):
            await client.backend.call(FORK, request.model_copy(update={"n": n}))
    again = await client.backend.call(FORK, request)
    assert [fork.session_id for fork in again.sessions] == [fork.session_id for fork in first.sessions]


async def test_seq_with_another_message_is_a_conflict(client):
    session = await client.open("quick")
    first = await client.backend.step(session.session_id, 1, NOTE)
    with pytest.raises(IdempotencyConflict, match="seq 1 was played with another message; the next is 2"):
        await client.backend.step(session.session_id, 1, OTHER)
    assert await client.backend.step(session.session_id, 1, NOTE) == first
    assert (await client.backend.step(session.session_id, 2, OTHER)).seq == 2
    assert await client.backend.step(session.session_id, 1, NOTE) == first


async def test_conflict_in_a_batch_affects_only_its_item(client):
    sessions = [await client.open("quick") for _ in range(2)]
    for session in sessions:
        await session.step(NOTE)
    messages = {sessions[0].session_id: OTHER, sessions[1].session_id: NOTE}
    steps = [StepRequest(session_id=name, seq=1, message=message) for name, message in messages.items()]
    if isinstance(client.backend, LocalBackend):
        answers = await client.backend.pool.step_many(StepBatch(steps=steps))
        assert isinstance(answers[0], IdempotencyConflict)
        assert isinstance(answers[1], bytes)
    else:
        answer = await client.backend.call(STEP_MANY, StepBatch(steps=steps))
        assert isinstance(from_wire(answer.results[0].model_dump()), IdempotencyConflict)
        assert answer.results[1].seq == 1


async def test_conflict_in_a_batch_of_openings_affects_only_its_item(client):
    first = await client.backend.call(OPEN, opening("a"))
    conflict, same = await client.open_batch([opening("a", index=2), opening("a")])
    assert isinstance(conflict, IdempotencyConflict)
    assert same.session_id == first.session_id


async def test_other_spellings_of_a_message_do_not_conflict():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    call = {"id": "c", "function": {"name": "note", "arguments": '{"text":"ä"}'}}
    spellings = [
        {"role": "assistant", "tool_calls": [{**call, "type": "function"}]},
        {"tool_calls": [call], "content": None, "role": "assistant"},
        {"role": "assistant", "tool_calls": [call], "name": None, "refusal": None},
    ]
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        session = (await http.post("/v1/sessions", json={})).json()
        path = f"/v1/sessions/{session['session_id']}/step"
        answers = [await http.post(path, json={"seq": 1, "message": one}) for one in spellings]
        malformed = {"session_id": session["session_id"], "seq": 0}  # the models read the whole batch
        step = {"session_id": session["session_id"], "seq": 1, "message": spellings[0]}
        batch = await http.post("/v1/step", json={"steps": [malformed, step]})
        other = await http.post(path, json={"seq": 1, "message": {"role": "assistant", "content": "x"}})
    assert [answer.json() for answer in answers] == [batch.json()["results"][1]] * 3
    assert (other.status_code, other.json()["error"]["type"]) == (409, "idempotency_conflict")
    await server.stop()


async def test_number_of_siblings_is_part_of_the_payload():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        bodies = [{"n": n, "request_id": "once"} for n in (2, 3, 2)]
        first, more, again = [(await http.post("/v1/sessions", json=body)).json() for body in bodies]
    assert {item["error"]["type"] for item in more["sessions"][:2]} == {"idempotency_conflict"}
    assert again == first
    await server.stop()


async def test_siblings_that_open_later_have_the_problem_of_the_others():
    server = EnvServer([Quick], port=0, drain_s=0.0, max_sessions=2)
    await server.start()
    body = {"n": 2, "request_id": "once"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        blocking = (await http.post("/v1/sessions", json={})).json()
        first = (await http.post("/v1/sessions", json=body)).json()["sessions"]
        assert "error" in first[1]
        await http.delete(f"/v1/sessions/{blocking['session_id']}")
        second = (await http.post("/v1/sessions", json=body)).json()["sessions"]
    assert second[0] == first[0]
    assert second[1]["sample"] == first[0]["sample"]
    await server.stop()


async def test_concurrent_openings_with_one_key_and_two_payloads_conflict():
    async with EnvClient.local(Slow) as client:
        calls = [client.backend.call(OPEN, OpenRequest(request_id="once", seed=seed)) for seed in (1, 2, 1)]
        first, conflict, again = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(conflict, IdempotencyConflict)
        assert again.session_id == first.session_id


async def test_concurrent_steps_with_one_seq_and_two_messages_conflict():
    async with EnvClient.local(Slow) as client:
        session = await client.open()
        wait, other = Message.assistant(None, ToolCall.of("wait")), Message.assistant("x")
        steps = [
            asyncio.create_task(client.backend.step(session.session_id, 1, m)) for m in (wait, other, wait)
        ]
        await until(lambda: Slow.started)
        Slow.gate.set()
        first, conflict, again = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(conflict, IdempotencyConflict)
        assert again == first


WALKING = OpenRequest(task="walk", seed=3, request_id="once")


async def test_repeated_opening_returns_the_same_session_after_failover():
    async with Site(resume=True) as site:
        await site.serve(Walk), await site.serve(Walk)
        call = site.client.backend.call
        first = await call(OPEN, WALKING)
        siblings = [WALKING.model_copy(update={"request_id": f"once/{n}"}) for n in range(3)]
        before = await call(OPEN_MANY, OpenBatch(sessions=siblings))
        for server in list(site.servers):
            await site.serve(Walk)
            await die(site, server)
        again, after = await call(OPEN, WALKING), await call(OPEN_MANY, OpenBatch(sessions=siblings))
        assert again.session_id == first.session_id
        assert [s.session_id for s in after.sessions] == [s.session_id for s in before.sessions]
        with pytest.raises(IdempotencyConflict):
            await call(OPEN, WALKING.model_copy(update={"seed": 4}))
        assert sum(server.pool.open_sessions for server in site.servers[2:]) == 4


async def test_repeated_fork_returns_the_same_sessions_after_failover():
    async with Site(resume=True) as site:
        await site.serve(Walk)
        session = await site.client.open("walk", seed=3)
        await session.step(WALK)
        request = ForkRequest(session_id=session.session_id, n=2, request_id="once")
        call = site.client.backend.call
        first = await call(FORK, request)
        await site.serve(Walk)
        await die(site, site.servers[0])
        again = await call(FORK, request)
        assert [fork.session_id for fork in again.sessions] == [fork.session_id for fork in first.sessions]
        assert {fork.turn for fork in again.sessions} == {1}
        with pytest.raises(IdempotencyConflict):
            await call(FORK, request.model_copy(update={"n": 3}))
        assert (await site.client.resume(again.sessions[0].session_id)).turn == 1


async def test_message_of_a_seq_is_compared_after_failover():
    async with Site(resume=True) as site:
        await site.serve(Walk), await site.serve(Walk)
        session = await site.client.open("walk", seed=3)
        first = await session.step(WALK)
        await die(site, holder(site, session))
        step = site.client.backend.step
        with pytest.raises(IdempotencyConflict):
            await step(session.session_id, 1, Message.assistant("x"))
        assert await step(session.session_id, 1, Message.assistant(None, WALK)) == first


async def test_repeated_opening_at_another_controller_returns_the_same_session(tmp_path):
    redis = RedisServer(tmp_path)
    redis.start()
    async with (
        Site(store=RedisStore(redis.url), resume=True) as site,
        Site(store=RedisStore(redis.url), resume=True) as other,
    ):
        dead = await site.serve(Walk, controllers=[other.controller.url])
        first = await site.client.backend.call(OPEN, WALKING)
        await other.serve(Walk, controllers=[site.controller.url])
        await die(site, dead)
        again = await other.client.backend.call(OPEN, WALKING)
        assert again.session_id == first.session_id
        with pytest.raises(IdempotencyConflict):
            await other.client.backend.call(OPEN, WALKING.model_copy(update={"seed": 4}))
    redis.kill()


async def test_opening_is_repeated_elsewhere_if_its_session_cannot_continue():
    async with Site(resume=True, queue_s=20.0) as site:
        await site.serve(Quick)
        request = OpenRequest(task="quick", request_id="once")
        first = await site.client.backend.call(OPEN, request)
        await site.serve(Quick)
        await die(site, site.servers[0])
        again = await site.client.backend.call(OPEN, request)
        assert again.session_id != first.session_id
        assert (await site.client.backend.call(OPEN, request)).session_id == again.session_id
