"""Tasks as MCP servers, driven by the official client."""

import asyncio
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import pytest

from agentrl_env import Done, EnvClient, Environment, Message, tool
from agentrl_env.bridges.mcp import sdk
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.wire import SessionRequest
from tests.env.bridges.players import mcp_session, shown
from tests.env.tasks import Guess, Quick, until

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-of-this-test-1234567890"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Talk(Environment):
    """Takes text, and answers with an image."""

    def reset(self, sample, rng):
        return "Say hello."

    @tool
    def look(self):
        """Look around."""
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        return Message(role="user", content=[{"type": "text", "text": "A room."}, image])

    def respond(self, text):
        return Done("Hello!", reward=float(text == "hello"))


class Shelf(Talk):
    """Samples with names, most of which are numbers."""

    def reset(self, sample, rng):
        return sample.data["name"]

    @classmethod
    def samples(cls, split):
        return {name: {"name": name} for name in ("2", "0", "1", "a")}


async def failure(url, **headers):
    """Return the error of a rejected connection."""
    from mcp import McpError

    with pytest.RaisesGroup(McpError, flatten_subgroups=True) as caught:
        async with mcp_session(url, **headers):
            pass
    return _innermost(caught.value)


def _innermost(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.error


async def test_server_has_the_tools_of_the_task(serving):
    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess?seed=7") as (session, begun):
        assert begun.serverInfo.name == "guess"
        assert begun.instructions == "I picked a number between 1 and 20. Use guess()."
        (offered,) = (await session.list_tools()).tools
        (spec,) = Guess.tool_specs()
        assert (offered.name, offered.description) == ("guess", "Guess the number.")
        assert offered.inputSchema == spec.function.parameters


async def test_call_carries_answer_reward_and_status(serving):
    server = await serving(Quick)
    async with mcp_session(f"{server.url}/mcp/quick?index=1") as (session, _):
        result = await session.call_tool("gain", {"amount": 0.25})
        assert [block.text for block in result.content] == ["earned"]
        assert result.structuredContent["reward"] == 0.25
        assert result.structuredContent["status"] == "running"
        assert result.meta["agentrl-env/metrics"]["gains"] == 1.0
        result = await session.call_tool("finish", {"reward": 2.0})
        assert result.structuredContent["reward"] == 2.0
        assert result.structuredContent["terminated"] is True
        assert not result.isError


async def test_invalid_call_is_an_error_for_the_model_and_uses_a_turn(serving):
    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess") as (session, _):
        for name, arguments in (("guess", {"n": "x"}), ("gess", {})):
            result = await session.call_tool(name, arguments)
            assert result.isError
            assert result.content[0].text.startswith("Error:")
        for _ in range(Guess.max_turns - 2):
            result = await session.call_tool("guess", {"n": 0})
        assert result.structuredContent["truncated"] is True


async def test_failure_of_the_environment_is_an_error_of_the_call_and_not_a_reward(serving):
    from mcp import McpError

    server = await serving(Quick)
    async with mcp_session(f"{server.url}/mcp/quick?index=1") as (session, _):
        with pytest.raises(McpError, match="the episode has no reward: ZeroDivisionError") as caught:
            await session.call_tool("crash", {})
        assert caught.value.error.data["type"] == "environment_failed"
        with pytest.raises(McpError, match="the session has ended"):
            await session.call_tool("gain", {})


@pytest.mark.parametrize("where", ["query", "headers"])
async def test_connection_chooses_the_problem_by_query_or_headers(serving, where):
    server = await serving(Quick)
    choice = {"split": "test", "index": "3", "seed": "11"}
    query = "&".join(f"{name}={value}" for name, value in choice.items()) if where == "query" else ""
    headers = {f"x-agentrl-{name}": value for name, value in choice.items()} if where == "headers" else {}
    async with mcp_session(f"{server.url}/mcp/quick?{query}", **headers) as (session, _):
        prompt = await session.get_prompt("opening")
        opened = server.pool.session(prompt.meta["agentrl-env/session"]["session_id"])
        assert (opened.sample.split, opened.sample.index, opened.sample.seed) == ("test", 3, 11)
        assert [message.content.text for message in prompt.messages] == ["Be quick.", str(opened.sample.data)]


@pytest.mark.parametrize(("index", "name"), [("2", "2"), ("0", "0"), ("a", "a"), ("3", "a")])
async def test_connection_chooses_a_sample_by_its_name_before_its_number(serving, index, name):
    server = await serving(Shelf)
    async with mcp_session(f"{server.url}/mcp/shelf?index={index}") as (session, _):
        prompt = await session.get_prompt("opening")
        assert [message.content.text for message in prompt.messages] == [name]


async def test_prompt_does_not_reveal_the_data_or_the_seed_of_the_sample(serving):
    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess?seed=71077345") as (session, _):
        assert "71077345" not in (await session.get_prompt("opening")).model_dump_json()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/mcp/gues", "unknown_task"),
        ("/mcp/quick?index=99", "unknown_sample"),
        ("/mcp/quick?seed=x", "invalid_request"),
        ("/mcp/quick?sed=1", "invalid_request"),
    ],
)
async def test_refused_connection_reports_the_type_and_the_reason(serving, path, kind):
    server = await serving(Quick)
    error = await failure(f"{server.url}{path}")
    assert error.data["type"] == kind
    assert error.message
    assert server.pool.open_sessions == 0


async def test_full_server_refuses_a_connection_unless_it_waits(serving):
    async def connect(url):
        async with mcp_session(url) as (_, begun):
            return begun.serverInfo.name

    server = await serving(Guess, max_sessions=1)
    async with mcp_session(f"{server.url}/mcp/guess"):
        assert (await failure(f"{server.url}/mcp/guess")).data["type"] == "server_full"
        waiting = asyncio.create_task(connect(f"{server.url}/mcp/guess?wait_s=600"))
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"] == 1)
    assert await waiting == "guess"


async def test_end_of_the_connection_closes_the_session(serving):
    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess"), mcp_session(f"{server.url}/mcp/guess"):
        assert server.pool.open_sessions == 2
    await until(lambda: server.pool.open_sessions == 0)


async def test_parallel_calls_of_one_connection_are_turns_in_order(serving):
    server = await serving(Quick)
    async with mcp_session(f"{server.url}/mcp/quick?index=1") as (session, _):
        results = await asyncio.gather(*(session.call_tool("note", {"text": str(n)}) for n in range(5)))
        counts = sorted(result.content[0].text.split()[0] for result in results)
        assert counts == ["1", "2", "3", "4", "5"]


async def test_tool_respond_is_offered_if_the_task_accepts_messages_without_a_call(serving):
    server = await serving(Talk, Guess)
    async with mcp_session(f"{server.url}/mcp/talk") as (session, _):
        assert [one.name for one in (await session.list_tools()).tools] == ["look", "respond"]
        seen = await session.call_tool("look", {})
        assert [block.type for block in seen.content] == ["text", "text", "image"]
        assert seen.content[2].data == PIXEL
        result = await session.call_tool("respond", {"text": "hello"})
        assert result.structuredContent["reward"] == 1.0
        assert shown(result.structuredContent["messages"]) == [("user", "Hello!")]


async def test_operator_token_is_required(serving):
    server = await serving(Guess, token=TOKEN)
    for headers in ({}, {"authorization": "Bearer wrong"}):
        async with httpx.AsyncClient(headers=headers) as http:
            answer = await http.post(f"{server.url}/mcp/guess", json={})
            assert answer.status_code == 401
    async with mcp_session(f"{server.url}/mcp/guess", authorization=f"Bearer {TOKEN}") as (session, _):
        assert (await session.call_tool("guess", {"n": 0})).structuredContent["status"] == "running"


async def test_connections_are_counted_in_the_metrics(serving):
    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess") as (session, _):
        await session.call_tool("guess", {"n": 0})
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{server.url}/metrics")).text
    assert 'agentrl_requests_total{method="POST",route="/mcp/{task}",status="200"}' in text
    assert server.metrics.calls["step"] == 1


async def test_stopping_server_ends_its_connections():
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    async with mcp_session(f"{server.url}/mcp/guess") as (session, _):
        await session.call_tool("guess", {"n": 0})
        async with asyncio.timeout(60):
            await server.stop()
    assert server.pool.open_sessions == 0


async def test_controller_serves_the_tasks_of_its_servers():
    front = ControllerServer(FleetService(), port=0)
    await front.start()
    server = EnvServer([Guess], host=NOWHERE, controllers=[front.url], drain_s=0.0)
    await server.start()
    try:
        await until(lambda: front.fleet.servers)
        async with mcp_session(f"{front.url}/mcp/guess?seed=3") as (session, _):
            prompt = await session.get_prompt("opening")
            held = prompt.meta["agentrl-env/session"]["session_id"]
            assert server.pool.session(held).sample.seed == 3
            assert (await session.call_tool("guess", {"n": 0})).content[0].text == "higher"
        async with EnvClient.connect(front.url) as client:
            assert (await client.resume(held)).status.final
    finally:
        await server.stop()
        await front.stop()


@pytest.mark.parametrize("installed", [None, "3.0.0"])
async def test_server_without_a_known_version_of_the_sdk_names_the_extra(serving, monkeypatch, installed):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    server = await serving(Guess)
    monkeypatch.setattr(sdk, "version", version)
    async with httpx.AsyncClient() as http:
        call = {"jsonrpc": "2.0", "id": 1, "method": "initialize"}
        answer = await http.post(f"{server.url}/mcp/guess", json=call)
    assert answer.status_code == 501
    assert "agentrl-kit[mcp]" in answer.json()["error"]["message"]


async def test_closed_session_is_an_error_of_the_next_call(serving):
    from mcp import McpError

    server = await serving(Guess)
    async with mcp_session(f"{server.url}/mcp/guess") as (session, _):
        prompt = await session.get_prompt("opening")
        held = prompt.meta["agentrl-env/session"]["session_id"]
        await server.pool.close(SessionRequest(session_id=held))
        with pytest.raises(McpError, match="the session has ended"):
            await session.call_tool("guess", {"n": 0})


def test_importing_the_server_does_not_import_the_sdk():
    modules = "agentrl_env.server.app, agentrl_env.bridges.mcp.server"
    statement = f"import sys, {modules}; print('mcp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
