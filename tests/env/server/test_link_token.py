"""The link token only permits a server to join a fleet."""

import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import Forbidden, ServeError, Unauthorized
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.auth import AgentTokens, is_link_token, link_token, metrics_token
from agentrl_env.server.middleware import TOKEN_PREFIX
from tests.env.fleet.test_failover_sessions import Walk
from tests.env.tasks import Quick

TOKEN = "sesam"
LINK = link_token(TOKEN)


def agent_token(token, session_id):
    """Return an agent token of another key."""
    return AgentTokens(token).issue(session_id)


OWN = "/v1/sessions/{}"
CALLS = [
    ("GET", "/v1/tasks", None),
    ("GET", "/v1/sessions", None),
    ("GET", "/v1/fleet", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("GET", "/nowhere", None),
    ("GET", "/v1/link", None),
    ("POST", "/v1/link", {}),
    ("POST", "/v1/sessions", {"task": "quick"}),
    ("POST", "/v1/step", {"steps": []}),
    ("GET", OWN, None),
    ("DELETE", OWN, None),
    ("POST", f"{OWN}/step", {}),
    ("POST", f"{OWN}/fork", {"n": 1}),
    ("POST", f"{OWN}/token", None),
    ("DELETE", f"{OWN}/token", None),
    ("POST", f"{OWN}/expert", None),
    ("GET", f"{OWN}/transcript", None),
]


@asynccontextmanager
async def running(*things):
    try:
        for thing in things:
            await thing.start()
        yield
    finally:
        for thing in reversed(things):
            await thing.stop()


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
async def fleet():
    """A controller and a server with different tokens. The server also listens."""
    front = ControllerServer(FleetService(resume=True), port=0, token=TOKEN)
    server = EnvServer([Quick, Walk], port=0, drain_s=0.0, token=LINK, controllers=[front.url], oracle=True)
    async with running(front, server), EnvClient.connect(front.url, token=TOKEN) as operator:
        yield SimpleNamespace(front=front, server=server, operator=operator)


async def test_link_token_suffices_for_a_server_and_for_failover(fleet):
    session = await fleet.operator.open("walk")
    await session.step(ToolCall.of("walk"))
    assert session.agent_token.startswith(f"agent.{session.session_id}.")
    known = EnvServer([Walk], host=NOWHERE, token=TOKEN, controllers=[fleet.front.url], drain_s=0.0)
    async with running(known):  # has the operator's token and accepts state sealed by the other server
        await fleet.server.stop()
        assert (await session.step(ToolCall.of("walk"))).seq == 2
        assert known.pool.open_sessions == 1


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
async def test_link_token_permits_no_call(fleet, method, path, body):
    session = await fleet.operator.open("quick")
    async with httpx.AsyncClient(headers=bearer(LINK), trust_env=False, timeout=60) as holder:
        path = path.format(session.session_id)
        answer = await holder.request(method, fleet.front.url + path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden")
        answer = await holder.request(method, fleet.server.url + path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "unauthorized")
        for url in (fleet.front.url, fleet.server.url):
            assert (await holder.get(f"{url}/health")).status_code == 200
    assert fleet.server.pool.session(session.session_id).turn == 0


@pytest.mark.parametrize("shown", ["header", "subprotocol"])
async def test_link_token_opens_only_the_link(fleet, shown):
    name = TOKEN_PREFIX + urlsafe_b64encode(LINK.encode()).rstrip(b"=").decode()
    options = {"additional_headers": bearer(LINK)} if shown == "header" else {"subprotocols": [name]}
    for url, path, status in ((fleet.front.url, "/v1/ws", 403), (fleet.server.url, "/v1/ws", 401)):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url.replace("http", "ws", 1) + path, **options)
        assert refused.value.response.status_code == status
    with pytest.raises(InvalidStatus) as refused:  # not an endpoint of a server
        await connect(fleet.server.url.replace("http", "ws", 1) + "/v1/link", **options)
    assert refused.value.response.status_code == 401


async def heard(line):
    with suppress(ConnectionClosedError):
        while True:
            yield json.loads(await line.recv())


async def test_calls_sent_over_a_link_are_rejected(fleet):
    session = await fleet.operator.open("quick")
    close = {"id": 1, "call": "close", "session_id": session.session_id}
    address = fleet.front.url.replace("http", "ws", 1) + "/v1/link"
    hello = {"server_id": "mine", "tasks": [], "capacity": 1}
    for frames in ([close], [{"hello": hello}, close]):
        async with connect(address, additional_headers=bearer(LINK)) as line:
            for frame in frames:
                await line.send(json.dumps(frame))
            assert all("welcome" in frame for frame in [frame async for frame in heard(line)])
            assert line.close_code == 1008
    assert (await fleet.operator.resume(session.session_id)).info.status == "running"


async def test_server_without_a_fleet_rejects_the_link_token():
    server = EnvServer([Quick], port=0, drain_s=0.0, token=TOKEN)
    async with running(server), EnvClient.connect(server.url, token=LINK) as client:
        with pytest.raises(Forbidden, match="only permits a server to join a fleet"):
            await client.open("quick")


async def test_tokens_of_the_fleet_are_invalid_on_its_servers(fleet):
    for token in (TOKEN, LINK, agent_token(LINK, "a.b"), agent_token(TOKEN, "a.b")):
        async with EnvClient.connect(fleet.server.url, token=token) as client:
            with pytest.raises(Unauthorized):
                await client.open("quick")


@pytest.mark.parametrize(
    "forged",
    [
        link_token("other"),
        LINK[:-1] + ("A" if LINK[-1] != "A" else "B"),
        LINK.removeprefix("link."),
        LINK + "=",
        "link.",
        agent_token(TOKEN, "link").removeprefix("agent."),
    ],
    ids=["other operator", "changed", "without prefix", "padded", "empty", "agent token"],
)
async def test_forged_link_token_is_rejected(fleet, forged):
    address = fleet.front.url.replace("http", "ws", 1) + "/v1/link"
    with pytest.raises(InvalidStatus) as refused:
        await connect(address, additional_headers=bearer(forged))
    assert refused.value.response.status_code == 401


def test_link_token_is_idempotent_and_not_an_agent_token():
    assert link_token(LINK) == LINK
    assert is_link_token(LINK)
    assert not is_link_token(TOKEN)
    assert AgentTokens(TOKEN).read(LINK) is None
    assert LINK.removeprefix("link.") != agent_token(TOKEN, "link").rpartition(".")[2]


def test_link_token_is_rejected_if_the_operator_token_is_required():
    with pytest.raises(ServeError, match="start the controller with the operator token"):
        ControllerServer(FleetService(), port=0, token=LINK)
    with pytest.raises(ServeError, match="give --controller, or a token of its own"):
        EnvServer([Quick], port=0, token=LINK)


async def test_metrics_token_permits_only_reading(fleet):
    headers = {"authorization": f"Bearer {metrics_token(TOKEN)}"}
    session = await fleet.operator.open("quick")
    (server_id,) = fleet.front.fleet.servers
    drain = ("POST", "/v1/fleet/drain", {"server_id": server_id})
    async with httpx.AsyncClient(base_url=fleet.front.url, headers=headers) as http:
        answer = await http.get("/metrics")
        assert answer.status_code == 200
        assert 'agentrl_server_sessions_open{place="' in answer.text
        reads = ("/v1/tasks", "/v1/sessions", "/v1/fleet", "/metrics", OWN, f"{OWN}/transcript")
        for method, path, body in (*CALLS, drain):
            answer = await http.request(method, path.format(session.session_id), json=body)
            if method == "GET" and path in reads:
                assert answer.status_code == 200, path
            else:
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden"), path
    assert (await session.step(ToolCall.of("gain"))).seq == 1  # nothing was played, closed or drained
    await (await fleet.operator.open("quick")).close()
    for path in ("/v1/ws", "/v1/link"):
        with pytest.raises(InvalidStatus) as refused:
            await connect(fleet.front.url.replace("http", "ws", 1) + path, additional_headers=headers)
        assert refused.value.response.status_code == 403


@pytest.mark.parametrize(
    ("option", "derived"),
    [
        (["controller", "--print-link-token"], LINK),
        (["serve", "--print-metrics-token"], metrics_token(TOKEN)),
    ],
)
def test_command_prints_a_derived_token(option, derived):
    command = [sys.executable, "-m", "agentrl_env", *option]
    environment = {key: value for key, value in os.environ.items() if key != "AGENTRL_TOKEN"}
    known = {**environment, "AGENTRL_TOKEN": TOKEN}
    done = subprocess.run(command, env=known, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{derived}\n")
    without = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr == (
        "error: the token is derived from the operator's; give --token-file or AGENTRL_TOKEN\n"
    )
