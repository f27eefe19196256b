"""Tasks as OpenEnv servers, driven by the client classes of ``openenv``."""

import asyncio

import httpx
import pytest

from tests.env.tasks import Guess, Quick, until

pytestmark = pytest.mark.bridges
pytest.importorskip("openenv", reason="OpenEnv is not installed; run make bridges")
TOKEN = "a-token-of-this-test-1234567890"


def generic_client(**options):
    from openenv.core.generic_client import GenericEnvClient  # slow import, only for these tests

    return GenericEnvClient(**options)


def tool_client(**options):
    from openenv.core.mcp_client import MCPToolClient

    return MCPToolClient(**options)


async def test_generic_client_plays_an_episode(serving):
    server = await serving(Quick)
    async with generic_client(base_url=f"{server.url}/openenv/quick") as client:
        begun = await client.reset(index=2, seed=5, episode_id="mine")
        assert [message["role"] for message in begun.observation["messages"]] == ["system", "user"]
        assert (begun.metadata["index"], begun.metadata["seed"]) == (2, 5)
        result = await client.step({"type": "call_tool", "tool_name": "gain", "arguments": {"amount": 0.5}})
        assert (result.reward, result.done) == (0.5, False)
        assert result.observation["result"]["data"] == "earned"
        state = await client.state()
        assert (state["episode_id"], state["step_count"]) == ("mine", 1)
        result = await client.step({"tool_name": "finish"})
        assert (result.reward, result.done) == (1.0, True)
        assert result.metadata["terminated"] is True
        assert result.metadata["metrics"]["success"] == 1.0


async def test_turn_limit_is_done_and_truncated(serving):
    server = await serving(Guess)
    async with generic_client(base_url=f"{server.url}/openenv/guess") as client:
        await client.reset()
        for _ in range(Guess.max_turns):
            result = await client.step({"tool_name": "guess", "arguments": {"n": 0}})
        assert result.done
        assert (result.metadata["terminated"], result.metadata["truncated"]) == (False, True)


async def test_generic_client_can_send_whole_messages(serving):
    server = await serving(Quick)
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "note", "arguments": '{"text": "a"}'}}
        for n in range(2)
    ]
    async with generic_client(base_url=f"{server.url}/openenv/quick") as client:
        await client.reset(index=1)
        result = await client.step({"message": {"role": "assistant", "content": "Hm.", "tool_calls": calls}})
        assert [one["tool_call_id"] for one in result.observation["messages"]] == ["0", "1"]
        result = await client.step({"message": {"role": "assistant", "content": "No call."}})
        assert result.observation["messages"][0]["content"].startswith("Call one of the tools")


async def test_tool_client_lists_and_calls_tools(serving):
    server = await serving(Guess)
    async with tool_client(base_url=f"{server.url}/openenv/guess") as client:
        begun = await client.reset(seed=3)
        assert begun.observation.messages[0]["content"].startswith("I picked a number")
        (tool,) = await client.list_tools()
        assert (tool.name, tool.input_schema["required"]) == ("guess", ["n"])
        assert await client.call_tool("guess", n=0) == "higher"
        assert (await client.call_tool("guess", n="x")).startswith("Error:")
        assert (await client.state()).step_count == 2
        assert server.pool.open_sessions == 1
    await until(lambda: server.pool.open_sessions == 0)


async def test_synchronous_wrapper_works(serving):
    server = await serving(Guess)

    def play():
        with generic_client(base_url=f"{server.url}/openenv/guess").sync() as client:
            client.reset(seed=3)
            first = client.step({"tool_name": "guess", "arguments": {"n": 0}}).observation["result"]["data"]
        with tool_client(base_url=f"{server.url}/openenv/guess").sync() as client:
            client.reset(seed=3)
            return first, client.call_tool("guess", n=0), [tool.name for tool in client.list_tools()]

    assert await asyncio.to_thread(play) == ("higher", "higher", ["guess"])
    await until(lambda: server.pool.open_sessions == 0)


async def test_end_of_the_socket_and_another_reset_close_the_session(serving):
    server = await serving(Guess)
    async with generic_client(base_url=f"{server.url}/openenv/guess") as client:
        for _ in range(3):
            await client.reset()
            assert server.pool.open_sessions == 1
    await until(lambda: server.pool.open_sessions == 0)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"sed": 1}, "reset takes split, index, seed"),
        ({"index": 99}, "EXECUTION_ERROR"),
        ({"seed": "x"}, "VALIDATION_ERROR"),
    ],
)
async def test_bad_reset_is_an_error_and_the_socket_stays_open(serving, choice, words):
    server = await serving(Quick)
    async with generic_client(base_url=f"{server.url}/openenv/quick") as client:
        with pytest.raises(RuntimeError, match=words):
            await client.reset(**choice)
        assert not (await client.reset()).done


async def test_failure_of_the_environment_is_an_error_and_not_a_reward(serving):
    server = await serving(Quick)
    async with generic_client(base_url=f"{server.url}/openenv/quick") as client:
        await client.reset(index=1)
        with pytest.raises(RuntimeError, match="the episode has no reward"):
            await client.step({"tool_name": "crash"})
        with pytest.raises(RuntimeError, match="the session has ended"):
            await client.step({"tool_name": "gain"})


async def test_full_server_answers_capacity_reached(serving):
    server = await serving(Guess, max_sessions=1)
    url = f"{server.url}/openenv/guess"
    async with generic_client(base_url=url) as one, generic_client(base_url=url) as other:
        await one.reset()
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            await other.reset()
        waiting = asyncio.create_task(other.reset(wait_s=600))
        await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"] == 1)
        await one.close()
        assert not (await waiting).done


async def test_operator_token_is_required(serving):
    server = await serving(Guess, token=TOKEN)
    url = f"{server.url}/openenv/guess"
    with pytest.raises(ConnectionError):
        await generic_client(base_url=url).reset()
    async with generic_client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        assert not (await client.reset()).done


async def test_http_routes_describe_the_task_and_its_samples(serving):
    server = await serving(Quick, Guess)
    async with httpx.AsyncClient(base_url=f"{server.url}/openenv/quick") as http:
        assert (await http.get("/health")).json() == {"status": "healthy"}
        assert (await http.get("/metadata")).json()["name"] == "quick"
        assert (await http.get("/schema")).json()["action"]["title"] == "CallToolAction"
        assert (await http.get("/list_environments")).json() == ["quick"]
        splits = (await http.get("/quick/splits")).json()
        assert [split["name"] for split in splits] == ["train", "test", "empty"]
        assert (await http.post("/quick/num_tasks", json={"split": "test"})).json() == {"num_tasks": 10}
        answer = await http.post("/quick/task", json={"split": "test", "index": 3})
        assert answer.json() == {"task": {"split": "test", "index": 3}}
        assert (await http.post("/quick/task", json={"split": "test", "index": 10})).status_code == 404
        for path in ("/reset", "/step"):
            answer = await http.post(path, json={})
            assert answer.status_code == 501
            assert "WebSocket" in answer.json()["error"]["message"]
        assert (await http.get(f"{server.url}/openenv/nope/health")).status_code == 404
