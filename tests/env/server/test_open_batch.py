"""Open many sessions in one call, as siblings with the same problem or as a list."""

import asyncio

import httpx
import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import InternalError, InvalidRequest, ServerFull, UnknownTask
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.limits import Limits
from agentrl_env.session.tasks import Tasks
from agentrl_env.wire import OpenRequest
from tests.env.tasks import Guess, Quick, until


@pytest.fixture(params=["http", "ws", "fleet", "local"])
async def client(request):
    if request.param == "local":
        async with EnvClient.local(Quick, max_sessions=8) as client:
            yield client
        return
    servers = []
    if request.param == "fleet":
        servers.append(ControllerServer(FleetService(queue_s=0.0), port=0))
        await servers[0].start()
        nowhere = EnvServer([Quick], host=NOWHERE, controllers=[servers[0].url], drain_s=0.0, max_sessions=8)
        servers.append(nowhere)
    else:
        servers.append(EnvServer([Quick], port=0, drain_s=0.0, max_sessions=8))
    await servers[-1].start()
    if request.param == "fleet":
        servers[0].fleet.registry._started = -1e9  # past the wait for servers after its start
    url = servers[0].url.replace("http", "ws", 1) if request.param == "ws" else servers[0].url
    async with EnvClient.connect(url) as client:
        yield client
    for server in reversed(servers):
        await server.stop()


async def test_siblings_have_the_same_problem_and_separate_sessions(client):
    sessions = await client.open_many(4)
    assert len({session.session_id for session in sessions}) == 4
    assert len({session.sample.model_dump_json() for session in sessions}) == 1
    results = await asyncio.gather(*(s.step(ToolCall.of("note", text="x")) for s in sessions))
    assert len({result.messages[0].content for result in results}) == 1


async def test_siblings_open_atomically(client):
    with pytest.raises(ServerFull):
        await client.open_many(9, index=1)
    assert len(await client.open_many(8, index=1)) == 8


async def test_list_returns_the_session_or_error_of_each_item(client):
    wanted = [OpenRequest(task="quick", index=2), OpenRequest(task="nope"), OpenRequest(index=3)]
    first, second, third = await client.open_batch(wanted)
    assert (first.sample.index, third.sample.index) == (2, 3)
    assert isinstance(second, UnknownTask)


async def test_bug_in_one_opening_of_a_list_fails_only_this_opening(client, monkeypatch):
    sample = Tasks.sample

    async def break_one(self, request):
        if request.index == 2:
            raise ZeroDivisionError
        return await sample(self, request)

    monkeypatch.setattr(Tasks, "sample", break_one)
    first, second, third = await client.open_batch([OpenRequest(task="quick", index=n) for n in (1, 2, 3)])
    assert (first.sample.index, third.sample.index) == (1, 3)
    assert isinstance(second, InternalError)
    assert second.message == "a bug in the server: ZeroDivisionError"


async def test_http_body_with_n_or_sessions_opens_many_with_agent_tokens():
    server = EnvServer([Guess], port=0, drain_s=0.0, token="sesame", limits=Limits(max_batch_opens=3))
    await server.start()
    headers = {"authorization": "Bearer sesame"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60) as http:
        for body in ({"task": "guess", "n": 3}, {"sessions": [{"task": "guess"}] * 3}):
            answer = await http.post("/v1/sessions", json=body)
            assert answer.status_code == 201
            for info in answer.json()["sessions"]:
                assert info["agent_token"].startswith(f"agent.{info['session_id']}.")
        for body in ({"n": 4}, {"sessions": [{}] * 4}, {"n": 2**40}):
            answer = await http.post("/v1/sessions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (422, InvalidRequest.type)
    await server.stop()


@pytest.mark.parametrize("sessions", [{}, {"task": "guess"}, None, "guess", 2, True])
@pytest.mark.parametrize("others", [{}, {"n": 2}])
async def test_sessions_that_are_not_a_list_open_nothing(sessions, others):
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        answer = await http.post("/v1/sessions", json={"sessions": sessions, **others})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "sessions: Input should be a valid array"
    assert server.pool.open_sessions == 0
    await server.stop()


async def test_repeated_idempotency_key_returns_the_same_siblings():
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http:
        body = {"n": 2, "request_id": "once"}
        first, second = [(await http.post("/v1/sessions", json=body)).json() for _ in range(2)]
    ids = [[info["session_id"] for info in answer["sessions"]] for answer in (first, second)]
    assert ids[0] == ids[1]
    await server.stop()


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_cancelled_opening_leaves_the_queue(scheme):
    server = EnvServer([Quick], port=0, drain_s=0.0, max_sessions=1)
    await server.start()
    async with EnvClient.connect(server.url.replace("http", scheme, 1)) as client:
        first = await client.open("quick")
        waiting = asyncio.create_task(client.open("quick", wait=60))
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"])
        waiting.cancel()
        await until(lambda: not server.pool.gauges()["agentrl_sessions_waiting"])
        await first.close()
    await server.stop()
