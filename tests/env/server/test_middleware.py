"""Tokens for two roles. The operator token permits every call, an agent token only its session."""

import asyncio
import json
import re
from base64 import b64encode
from socket import gethostname

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import Forbidden, Unauthorized
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.auth import AgentTokens
from agentrl_env.server.limits import Limits
from agentrl_env.server.middleware import route_of
from agentrl_env.wire import INFO, SessionRequest
from tests.env.conftest import UNHURRIED
from tests.env.session.test_fork import Walk
from tests.env.tasks import Quick, until

TOKEN = "sesam"
NOTE = Message.assistant(None, ToolCall.of("note", text="x"))


@pytest.fixture(params=["server", "controller"])
async def url(request):
    """A server with a token, alone or behind a controller."""
    if request.param == "server":
        server = EnvServer([Quick, Walk], port=0, drain_s=0.0, token=TOKEN, oracle=True, limits=UNHURRIED)
        await server.start()
        yield server.url
        await server.stop()
    else:
        front = ControllerServer(FleetService(), port=0, token=TOKEN, limits=UNHURRIED)
        await front.start()
        options = {"drain_s": 0.0, "token": TOKEN, "oracle": True, "limits": UNHURRIED}
        server = EnvServer([Quick, Walk], host="none", controllers=[front.url], **options)
        await server.start()
        yield front.url
        await server.stop()
        await front.stop()


def raw(url, token):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60)


def step(session_id, seq=1):
    return {"session_id": session_id, "seq": seq, "message": NOTE.wire()}


async def test_agent_token_permits_step_and_info_of_its_session(url):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        session = await operator.open("quick")
        agent = HttpBackend(url, token=session.agent_token)
        assert (await agent.step(session.session_id, 1, NOTE)).seq == 1
        assert (await agent.step(session.session_id, 2, NOTE)).seq == 2  # over the WebSocket
        assert (await agent.step(session.session_id, 3, NOTE)).seq == 3
        info = await agent.call(INFO, SessionRequest(session_id=session.session_id))
        assert (info.turn, info.agent_token) == (3, None)
        await agent.aclose()


async def test_agent_token_forbids_all_other_calls(url):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        mine, other = await operator.open("walk"), await operator.open("walk")
        own, foreign = f"/v1/sessions/{mine.session_id}", f"/v1/sessions/{other.session_id}"
        forbidden = [
            ("GET", "/v1/tasks", None),
            ("POST", "/v1/sessions", {"task": "quick"}),
            ("DELETE", own, None),
            ("POST", f"{own}/fork", {"n": 1}),
            ("POST", f"{own}/token", None),
            ("DELETE", f"{own}/token", None),
            ("POST", f"{own}/expert", None),
            ("GET", f"{own}/transcript", None),
            ("GET", "/v1/sessions", None),
            ("GET", "/v1/fleet", None),
            ("GET", "/metrics", None),
            ("GET", "/openapi.json", None),
            ("GET", "/nowhere", None),
            ("GET", foreign, None),
            ("POST", f"{foreign}/step", step(other.session_id)),
            ("POST", "/v1/step", {"steps": [step(mine.session_id), step(other.session_id)]}),
        ]
        async with raw(url, mine.agent_token) as agent:
            for method, path, body in forbidden:
                answer = await agent.request(method, path, json=body)
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden"), path
            assert (await agent.get(own)).json()["turn"] == 0  # the whole batch was rejected
            assert (await agent.get("/health")).status_code == 200


async def test_agent_token_has_the_same_permissions_over_the_websocket(url):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        mine, other = await operator.open("quick"), await operator.open("quick")
        headers = {"authorization": f"Bearer {mine.agent_token}"}
        address = url.replace("http", "ws", 1)
        calls = [
            {"call": "step", **step(mine.session_id)},
            {"call": "info", "session_id": mine.session_id},
            {"call": "step_many", "steps": [step(mine.session_id, 2)]},
            {"call": "step", **step(other.session_id)},
            {"call": "info", "session_id": other.session_id},
            {"call": "step_many", "steps": [step(mine.session_id, 3), step(other.session_id)]},
            {"call": "tasks"},
            {"call": "open", "task": "quick"},
            {"call": "close", "session_id": mine.session_id},
            {"call": "fork", "session_id": mine.session_id},
            {"call": "revoke_tokens", "session_id": mine.session_id},
            {"call": "expert", "session_id": mine.session_id},
            {"call": "sessions"},
            {"call": "transcript", "session_id": mine.session_id},
        ]
        async with connect(f"{address}/v1/ws", additional_headers=headers) as socket:
            for number, call in enumerate(calls):
                await socket.send(json.dumps({"id": number, **call}))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
                assert answer["id"] == number
                kind = answer.get("error", {}).get("type")
                assert kind == (None if number < 3 else "forbidden"), call
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{address}/v1/link", additional_headers=headers)
        assert refused.value.response.status_code == 403


async def test_forks_have_their_own_agent_tokens(url):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        session = await operator.open("walk")
        forks = await session.fork(2)
        for one in (session, *forks):
            assert one.agent_token.startswith(f"agent.{one.session_id}.")
        async with EnvClient.connect(url, token=forks[0].agent_token) as agent:
            assert (await agent.resume(forks[0].session_id)).agent_token is None
            with pytest.raises(Forbidden):
                await agent.resume(forks[1].session_id)


@pytest.mark.parametrize(
    "change",
    [
        lambda token: token[:-1] + ("A" if token[-1] != "A" else "B"),
        lambda token: token.replace("agent.", "agent.x", 1),
        lambda token: "agent..",
        lambda token: "agent.",
        lambda token: token + "=",
        lambda token: "agent.\xff.\xff",
        lambda token: token.rpartition(".")[0],
    ],
)
async def test_forged_token_is_rejected(url, change):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        session = await operator.open("quick")
        headers = {"authorization": b"Bearer " + change(session.agent_token).encode("latin-1")}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as agent:
            answer = await agent.get(f"/v1/sessions/{session.session_id}")
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "unauthorized")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR", "Bearer "])
async def test_case_of_the_scheme_of_a_token_does_not_matter(url, scheme):
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        answer = await http.get("/v1/tasks", headers={"authorization": f"{scheme} {TOKEN}"})
        assert answer.status_code == 200
        for refused in (f"{scheme} {TOKEN}x", f"{scheme}\t{TOKEN}", f"x{scheme} {TOKEN}", TOKEN):
            answer = await http.get("/v1/tasks", headers={"authorization": refused})
            assert answer.status_code == 401
    address = url.replace("http", "ws", 1) + "/v1/ws"
    async with connect(address, additional_headers={"authorization": f"{scheme} {TOKEN}"}):
        pass


@pytest.mark.parametrize("scheme", ["Basic", "basic"])
async def test_peers_of_agentrl_send_the_token_as_the_password_in_an_address(url, scheme):
    password = b64encode(f"any:{TOKEN}".encode()).decode()
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        headers = {"authorization": f"{scheme} {password}"}
        assert (await http.get("/api/list_workers", headers=headers)).status_code != 401
        assert (await http.get("/v1/tasks", headers=headers)).status_code == 401


def test_agent_token_of_another_operator_is_invalid():
    tokens = AgentTokens(TOKEN)
    assert tokens.read(AgentTokens("other").issue("a.b")) is None
    assert tokens.read(tokens.issue("a.b")).session_id == "a.b"


async def test_client_with_an_invalid_agent_token_raises_unauthorized(url):
    async with EnvClient.connect(url, token="agent.x.y") as client:
        with pytest.raises(Unauthorized):
            await client.tasks()


async def test_server_without_a_token_issues_no_agent_tokens():
    server = EnvServer([Quick, Walk], port=0, drain_s=0.0)
    await server.start()
    async with raw(server.url, None) as client, EnvClient.connect(server.url) as ours:
        info = (await client.post("/v1/sessions", json={"task": "quick"})).json()
        assert "agent_token" not in info
        assert (await ours.open("walk")).agent_token is None
    await server.stop()


async def test_ready_probe_fails_while_the_server_drains():
    server = EnvServer([Quick], port=0, drain_s=60.0, token=TOKEN, limits=Limits(idle_s=5))
    await server.start()
    async with EnvClient.connect(server.url, token=TOKEN) as client, raw(server.url, None) as probe:
        assert (await probe.get("/ready")).json() == {"status": "ready"}
        session = await client.open("quick")
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.pool.draining)
        answer = await probe.get("/ready")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_draining")
        assert "retry-after" in answer.headers
        assert (await probe.get("/health")).json() == {"status": "draining"}
        assert (await session.step(ToolCall.of("finish"))).terminated
        await stopping


def test_route_labels_are_bounded():
    assert route_of("/v1/step") == "/v1/step"
    assert route_of("/v1/sessions/abc.d/step") == "/v1/sessions/{id}/step"
    assert route_of("/v1/sessions/abc") == "/v1/sessions/{id}"
    for path in ("/v1/sessions/", "/v1/sessions/a/b", "/v1/sessions/a/step/x", "/x\n", "/v1/step/"):
        assert route_of(path) == "other"


async def test_other_origins_are_rejected_without_a_token():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    async with raw(server.url, None) as http:
        elsewhere = {"origin": "https://elsewhere.example", "content-type": "text/plain"}
        refused = await http.post("/v1/sessions", json={"task": "quick"}, headers=elsewhere)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "forbidden")
        assert server.pool.open_sessions == 0
        own = await http.post("/v1/sessions", json={"task": "quick"}, headers={"origin": server.url})
        assert own.status_code == 201
    await server.stop()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", ["evil.example", "evil", "localhost.", "localhost.evil"])
async def test_rebound_host_names_are_rejected_without_a_token(method, name):
    server = EnvServer([Quick], port=0, drain_s=0.0)
    await server.start()
    port = server.url.rpartition(":")[2]
    borrowed = {"host": f"{name}:{port}", "origin": f"http://{name}:{port}"}
    async with raw(server.url, None) as http:
        refused = await http.request(method, "/v1/sessions", headers=borrowed, json={"task": "quick"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "forbidden")
        assert name in refused.json()["error"]["message"]
        for own in ("localhost", "dev.localhost", "127.0.0.1", "[::1]", gethostname()):
            assert (await http.get("/v1/tasks", headers={"host": f"{own}:{port}"})).status_code == 200
        assert (await http.get("/health", headers=borrowed)).status_code == 200
    with pytest.raises(InvalidStatus):
        await connect(f"ws://127.0.0.1:{port}/v1/ws", additional_headers={"Host": f"{name}:{port}"})
    await server.stop()


async def test_any_host_name_is_accepted_with_a_token():
    server = EnvServer([Quick], port=0, drain_s=0.0, token=TOKEN)
    await server.start()
    async with raw(server.url, TOKEN) as http:
        assert (await http.get("/v1/tasks", headers={"host": "tasks.example"})).status_code == 200
    await server.stop()


async def test_agent_token_shows_no_sample_data_seed_or_metrics(url):
    async with EnvClient.connect(url, token=TOKEN) as operator:
        session = await operator.open("walk", sample={"solution": "a secret"}, seed=987654)
        own = f"/v1/sessions/{session.session_id}"
        socket_url = url.replace("http", "ws", 1) + "/v1/ws"
        headers = {"authorization": f"Bearer {session.agent_token}"}
        async with raw(url, session.agent_token) as agent:
            texts = [
                (await agent.post(f"{own}/step", json=step(session.session_id))).text,
                (await agent.post("/v1/step", json={"steps": [step(session.session_id, 2)]})).text,
                (await agent.get(own)).text,
            ]
        async with connect(socket_url, additional_headers=headers) as socket:
            for call in ({"call": "step", **step(session.session_id, 3)}, {"call": "info"}):
                await socket.send(json.dumps({"id": 1, "session_id": session.session_id, **call}))
                texts.append(await socket.recv())
        for text in texts:
            assert '"reward"' in text
            assert not re.search('solution|secret|987654|seed|metrics|"info"', text), text
        assert set(json.loads(texts[2])["sample"]) == {"task", "split", "index"}
        whole = await operator.resume(session.session_id)
        assert (whole.sample.seed, whole.sample.data) == (987654, {"solution": "a secret"})
