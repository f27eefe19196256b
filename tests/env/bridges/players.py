"""Play the same episode through each protocol."""

from contextlib import asynccontextmanager
from typing import NamedTuple

from agentrl_env import EnvClient
from agentrl_env.gym.env import GymEnv


class Played(NamedTuple):
    """Role and content of the opening messages and answers, the total reward, and the end of an episode."""

    opening: list
    answers: list
    reward: float
    terminated: bool
    truncated: bool


@asynccontextmanager
async def mcp_session(url, **headers):
    """Connect the official client. Yield its session and the answer to ``initialize``."""
    import httpx
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async with (
        httpx.AsyncClient(headers=headers) as http,
        streamable_http_client(url, http_client=http) as streams,
        ClientSession(*streams[:2]) as session,
    ):
        yield session, await session.initialize()


def shown(messages):
    return [(message["role"], message["content"]) for message in messages]


async def by_wire(url, task, choice):
    """Let the expert play. Return the episode and its moves."""
    async with EnvClient.connect(url) as client, await client.open(task, **choice) as session:
        answers, reward, moves = [], 0.0, []
        while not session.status.final:
            moves.append(await session.expert())
            result = await session.step(moves[-1])
            answers.append(shown(message.wire() for message in result.messages))
            reward += result.reward
        opening = shown(message.wire() for message in session.messages)
        return Played(opening, answers, reward, result.terminated, result.truncated), moves


def calls(move):
    """Return the name and arguments of each call of a move, or ``respond`` for a move without calls."""
    import json

    if not move.tool_calls:
        return [("respond", {"text": move.content})]
    return [(call.function.name, json.loads(call.function.arguments)) for call in move.tool_calls]


async def by_mcp(url, task, choice, moves):
    """Play moves with the official MCP client."""
    query = "&".join(f"{name}={value}" for name, value in choice.items())
    async with mcp_session(f"{url}/mcp/{task}?{query}") as (session, begun):
        prompt = await session.get_prompt("opening")
        opening = shown(prompt.meta["agentrl-env/session"]["messages"])
        assert begun.instructions == "\n\n".join(content for _, content in opening)
        answers, reward = [], 0.0
        for move in moves:
            ((name, arguments),) = calls(move)
            result = await session.call_tool(name, arguments)
            step = result.structuredContent
            assert [block.text for block in result.content] == [one["content"] for one in step["messages"]]
            answers.append(shown(step["messages"]))
            reward += step["reward"]
        return Played(opening, answers, reward, step["terminated"], step["truncated"])


async def by_openenv(url, task, choice, moves):
    """Play moves with OpenEnv's generic client, alternating whole messages and calls."""
    from openenv.core.generic_client import GenericEnvClient

    async with GenericEnvClient(base_url=f"{url}/openenv/{task}") as client:
        opening = shown((await client.reset(**choice)).observation["messages"])
        answers, reward = [], 0.0
        for number, move in enumerate(moves):
            ((name, arguments),) = calls(move)
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            result = await client.step(action if number % 2 else {"message": move.wire()})
            answers.append(shown(result.observation["messages"]))
            reward += result.reward
        assert result.done
        return Played(opening, answers, reward, result.metadata["terminated"], result.metadata["truncated"])


def by_gym(url, task, choice, moves):
    """Play moves with the Gymnasium environment."""
    options = {name: value for name, value in choice.items() if name != "seed"}
    env = GymEnv(url, task)
    try:
        before, _ = env.reset(seed=choice.get("seed"), options=options)
        opening, answers, reward = shown(before), [], 0.0
        for move in moves:
            seen = len(before) + 1
            before, gained, terminated, truncated, _ = env.step(move.wire())
            answers.append(shown(before[seen:]))
            reward += gained
        return Played(opening, answers, reward, terminated, truncated)
    finally:
        env.close()


async def by_agentrl(url, task, choice, moves):
    """Play moves over AgentRL's HTTP protocol."""
    import httpx

    start = {"name": f"{task}-{choice.get('split', 'train')}", **choice}
    async with httpx.AsyncClient(base_url=f"{url}/api/", timeout=120) as http:
        begun = (await http.post("start_sample", json=start)).raise_for_status()
        opening, answers, result = shown(begun.json()["messages"]), [], {}
        for move in moves:
            turn = {"messages": [move.wire()]}
            headers = {"session_id": begun.headers["session_id"]}
            result = (await http.post("interact", headers=headers, json=turn)).raise_for_status().json()
            answers.append(shown(result["messages"]))
        assert result["finish"]
        ended = [result["status"] == status for status in ("completed", "task limit reached")]
        return Played(opening, answers, result["reward"], *ended)
