"""Agent tokens over other protocols. Each token permits only its own session."""

import json
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agentrl_env import EnvClient, ToolCall
from agentrl_env.server.limits import Limits
from tests.env.bridges.players import mcp_session
from tests.env.bridges.test_mcp_server import failure
from tests.env.tasks import Guess, Quick

TOKEN = "a-token-of-this-test-1234567890"


@pytest.fixture
async def site(serving):
    """Serve two tasks with a token. Return the server and the operator's client."""
    server = await serving(Quick, Guess, token=TOKEN)
    async with EnvClient.connect(server.url, token=TOKEN) as operator:
        yield server, operator


def bearer(token):
    return {"authorization": f"Bearer {token}"}


@asynccontextmanager
async def openenv(url, task, token, query=""):
    """Connect to OpenEnv's WebSocket. Yield a function that sends a frame and returns the answer."""
    address = f"{url.replace('http', 'ws')}/openenv/{task}/ws{query}"
    async with connect(address, additional_headers=bearer(token), max_size=None) as socket:

        async def ask(kind, **data):
            with suppress(ConnectionClosed):  # a rejected socket receives the reason
                await socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await socket.recv())
            return answer["type"], answer["data"]

        yield ask


async def test_mcp_connection_with_an_agent_token_plays_its_session_and_leaves_it_open(site):
    server, operator = site
    session = await operator.open("quick", index=4)
    async with mcp_session(f"{server.url}/mcp/quick", **bearer(session.agent_token)) as (mcp, _):
        result = await mcp.call_tool("gain", {"amount": 0.5})
        assert result.structuredContent["reward"] == 0.5
        assert result.meta["agentrl-env/metrics"] == {}
    assert (await operator.resume(session.session_id)).turn == 1
    async with mcp_session(f"{server.url}/mcp/quick", **bearer(session.agent_token)) as (mcp, _):
        assert (await mcp.call_tool("gain", {"amount": 0.5})).structuredContent["reward"] == 0.5
    assert server.pool.open_sessions == 1


@pytest.mark.parametrize("path", ["/mcp/guess", "/mcp/quick?seed=3", "/mcp/quick?index=5"])
async def test_mcp_connection_of_an_agent_chooses_neither_task_nor_problem(site, path):
    server, operator = site
    session = await operator.open("quick", index=4)
    error = await failure(f"{server.url}{path}", **bearer(session.agent_token))
    assert error.data["type"] == "forbidden"
    assert server.pool.open_sessions == 1


async def test_mcp_connection_accepts_only_the_token_that_opened_it(site):
    server, operator = site
    mine, other = await operator.open("quick", index=4), await operator.open("quick", index=5)
    begin = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    accept = {"accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(base_url=server.url, headers=accept) as http:
        begun = await http.post(
            "/mcp/quick",
            headers=bearer(mine.agent_token),
            json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": begin},
        )
        named = {"mcp-session-id": begun.headers["mcp-session-id"]}
        call = {"name": "gain", "arguments": {"amount": 1}}
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
        for token, status in ((other.agent_token, 404), (mine.agent_token, 200)):
            answer = await http.post("/mcp/quick", headers=bearer(token) | named, json=body)
            assert answer.status_code == status
        assert (await http.delete("/mcp/quick", headers=bearer(other.agent_token) | named)).status_code == 404


async def test_new_mcp_connection_of_an_agent_ends_the_previous_connection(site):
    server, operator = site
    session = await operator.open("quick", index=4)
    url, headers = f"{server.url}/mcp/quick", bearer(session.agent_token)
    async with mcp_session(url, **headers) as (first, _), mcp_session(url, **headers) as (second, _):
        await second.call_tool("gain", {"amount": 0.5})
        with pytest.raises(Exception, match=r"terminated|not found"):
            await first.call_tool("gain", {"amount": 0.5})


async def test_openenv_socket_with_an_agent_token_plays_its_session(site):
    server, operator = site
    session = await operator.open("quick", index=4, seed=77)
    async with openenv(server.url, "quick", session.agent_token) as ask:
        kind, begun = await ask("reset")
        assert (kind, begun["metadata"]["index"], "seed" in begun["metadata"]) == ("observation", 4, False)
        _, gained = await ask("step", tool_name="gain", arguments={"amount": 0.5})
        assert (gained["reward"], gained["metadata"]["metrics"]) == (0.5, {})
    async with openenv(server.url, "quick", session.agent_token) as ask:
        _, refused = await ask("reset")
        assert (refused["type"], "has begun" in refused["message"]) == ("forbidden", True)
        assert (await ask("step", tool_name="gain", arguments={"amount": 0.5}))[1]["reward"] == 0.5
        assert (await ask("state"))[1]["step_count"] == 2
    assert server.pool.open_sessions == 1


async def test_openenv_agent_reaches_no_other_task_problem_or_player(site):
    server, operator = site
    session, other = await operator.open("quick", index=4), await operator.open("quick", index=5)
    token = session.agent_token
    async with openenv(server.url, "guess", token) as ask:
        assert "a session of the task quick" in (await ask("reset"))[1]["message"]
    async with openenv(server.url, "quick", token) as ask:
        assert (await ask("reset", index=5))[1]["type"] == "forbidden"
    async with httpx.AsyncClient(base_url=f"{server.url}/openenv", headers=bearer(token)) as http:
        create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        made = (await http.post("/quick/mcp", json=create, headers=bearer(other.agent_token))).json()
        theirs = made["result"]["session_id"]
        call = {**create, "method": "tools/call", "params": {"name": "gain", "session_id": theirs}}
        assert "no such session" in (await http.post("/quick/mcp", json=call)).json()["error"]["message"]
        assert (await http.post("/quick/mcp", json=create)).json()["result"]["session_id"] != theirs
        assert (await http.get("/quick/metadata")).json()["name"] == "quick"
        assert (await http.get("/guess/metadata")).status_code == 403
        assert (await http.get("/quick/quick/splits")).status_code == 403
    async with openenv(server.url, "quick", token, f"?session_id={theirs}") as ask:
        assert (await ask("state"))[1]["code"] == "SESSION_ERROR"


async def test_agentrl_calls_with_an_agent_token_play_only_its_session(site):
    server, operator = site
    session, other = await operator.open("quick", index=4), await operator.open("quick", index=5)
    async with httpx.AsyncClient(base_url=f"{server.url}/api/", auth=("any", session.agent_token)) as http:
        for body in ({"name": "guess"}, {"name": "quick", "index": 5}, {"name": "quick", "seed": 1}):
            assert (await http.post("start_sample", json=body)).status_code == 403
        begun = await http.post("start_sample", json={"name": "quick", "index": 4})
        again = await http.post("start_sample", json={"name": "quick-train"})
        assert begun.headers["session_id"] == again.headers["session_id"]
        theirs = await http.post("start_sample", json={"name": "quick"}, auth=("any", other.agent_token))
        call = ToolCall.of("gain", amount=0.5).model_dump()
        turn = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
        for headers, status in ((theirs.headers, 400), (begun.headers, 200)):
            named = {"session_id": headers["session_id"]}
            answer = await http.post("interact", headers=named, json=turn)
            assert answer.status_code == status
        assert answer.json()["reward"] == 0.5
        assert (await http.post("start_sample", json={"name": "quick"})).status_code == 403  # it has begun
        for path in ("get_indices?name=quick", "list_sessions", "list_workers"):
            assert (await http.get(path)).status_code == 403
        for path in ("cancel", "cancel_all", "mark_stale"):
            assert (await http.post(path, json={})).status_code == 403
    assert server.pool.open_sessions == 2


async def test_token_of_a_closed_session_is_refused_by_every_bridge(site):
    server, operator = site
    session = await operator.open("quick", index=4)
    async with openenv(server.url, "quick", session.agent_token) as ask:
        await ask("reset")
        await session.close()
        assert (await ask("step", tool_name="gain"))[1]["type"] == "unauthorized"
    with pytest.raises(InvalidStatus, match="401"):
        async with openenv(server.url, "quick", session.agent_token):
            pass
    async with httpx.AsyncClient(base_url=server.url, headers=bearer(session.agent_token)) as http:
        for path in ("/mcp/quick", "/openenv/quick/mcp", "/api/start_sample"):
            assert (await http.post(path, json={})).status_code == 401


async def test_large_openenv_frame_gets_a_typed_error_and_the_socket_stays_open(serving):
    limit = 100_000
    server = await serving(Quick, token=TOKEN, limits=Limits(max_body_bytes=limit))
    async with openenv(server.url, "quick", TOKEN) as ask:
        await ask("reset", index=4)
        kind, refused = await ask("step", tool_name="note", arguments={"text": "x" * limit})
        assert (kind, refused["type"]) == ("error", "body_too_large")
        assert (await ask("step", tool_name="note", arguments={"text": "x" * (limit // 2)}))[
            0
        ] == "observation"
    assert server.metrics.errors["body_too_large"] == 1
    assert server.metrics.held_bytes == 0
