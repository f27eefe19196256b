"""Version 2 of the MCP SDK, in its own venv, for a client, a server and a task."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.hosting.loader import load_target
from agentrl_env.hosting.serve import EnvServer
from tests.env.bridges import calculator, odd_server
from tests.env.bridges.players import mcp_session
from tests.env.tasks import Guess

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-mcp2/bin"
PAGE = ROOT / "docs/how-to/bridges.md"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
TOKEN = "a-token-of-this-test-1234567890"
CLIENT = """
import asyncio, json, sys
from mcp import Client

async def main():
    async with Client(sys.argv[1]) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        result = await client.call_tool("guess", {"n": 0})
        print(json.dumps([tools, result.structured_content["messages"][0]["content"], client.instructions]))

asyncio.run(main())
"""
PLAYED = [["guess"], "higher", "I picked a number between 1 and 20. Use guess()."]
pytestmark = [
    pytest.mark.bridges,
    pytest.mark.skipif(
        not BIN.exists(), reason="version 2 of the MCP SDK is not installed; run make bridges"
    ),
]


@asynccontextmanager
async def second_server(target: str) -> AsyncIterator[str]:
    """Serve a target with the second SDK and yield the URL."""
    command = [BIN / "agentrl-env", "serve", target, "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        line = (await process.stdout.readline()).decode()
        (url,) = re.findall(r"http://\S+:\d+", line)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def played(url: str) -> list[object]:
    """Return the results that a client of the second SDK received."""
    process = await asyncio.create_subprocess_exec(
        BIN / "python", "-c", CLIENT, f"{url}/mcp/guess", stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    return json.loads(out)


async def test_client_of_the_second_sdk_plays_a_server_on_the_first() -> None:
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    try:
        assert await played(server.url) == PLAYED
    finally:
        await server.stop()


async def test_snippet_of_the_documentation_plays_with_its_changes_for_the_second_sdk() -> None:
    page = PAGE.read_text()
    (snippet,) = (block for block in BLOCK.findall(page) if "streamable_http_client" in block)
    changes = [
        ("import httpx\n", "import httpx2 as httpx"),
        ("result.structuredContent", "result.structured_content"),
    ]
    server = EnvServer([load_target(str(ROOT / "environments/household"))], port=0, drain_s=0.0, token=TOKEN)
    await server.start()
    snippet = snippet.replace("http://127.0.0.1:8000", server.url)
    for before, after in changes:
        assert f"`{after}`" in page
        assert snippet.count(before) == 1
        snippet = snippet.replace(before, f"{after}\n" if before.endswith("\n") else after)
    try:
        process = await asyncio.create_subprocess_exec(
            *(BIN / "python", "-W", "error", "-c", snippet),
            env={**os.environ, "AGENTRL_TOKEN": TOKEN, "no_proxy": "*"},
            stdout=subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        assert out.decode().splitlines()[-1].startswith("desk: ")
        assert out.decode().endswith(" 0.0\n")
        assert server.pool.open_sessions == 0
    finally:
        await server.stop()


async def test_clients_of_both_sdks_play_a_server_on_the_second() -> None:
    from mcp import McpError

    async with second_server("tests/env/tasks.py:Guess") as url:
        assert await played(url) == PLAYED
        async with mcp_session(f"{url}/mcp/guess?seed=7") as (session, begun):
            assert begun.serverInfo.name == "guess"
            wrong = await session.call_tool("gess", {})
            assert wrong.isError
            assert wrong.structuredContent["status"] == "running"
            (message,) = (await session.get_prompt("opening")).messages
            assert message.content.text == PLAYED[-1]
            with pytest.raises(McpError, match="there is no prompt"):
                await session.get_prompt("closing")
        with pytest.RaisesGroup(McpError, flatten_subgroups=True):
            async with mcp_session(f"{url}/mcp/gues"):
                pass
        async with httpx.AsyncClient() as http:
            assert "\nagentrl_sessions_open 0.0\n" in (await http.get(f"{url}/metrics")).text


async def test_mcp_server_is_a_task_on_the_second_sdk() -> None:
    reward = "reward=tests.env.bridges.calculator:reward"
    async with second_server(f"mcp:{sys.executable} {calculator.__file__}#{reward}&prompt=Go") as url:
        async with EnvClient.connect(url) as client, await client.open() as session:
            assert [message.content for message in session.messages] == ["Use the tools to compute.", "Go"]
            assert (await session.step(ToolCall.of("add", a=2, b=3))).messages[0].content == "5"
            failed = await session.step(ToolCall.of("divide", a=2, b=0))
            assert "division by zero" in failed.messages[0].content
            assert (await session.step("5")).reward == 1.0
        async with EnvClient.connect(url) as client, await client.open() as session:
            died = await session.step(ToolCall.of("divide", a=2, b=13))
            assert died.status.name == "FAILED_ENVIRONMENT"


async def test_tools_that_the_second_sdk_refuses_do_not_hide_the_others() -> None:
    reward = "reward=tests.env.bridges.calculator:reward"
    async with (
        second_server(f"mcp:{sys.executable} {odd_server.__file__}#{reward}") as url,
        EnvClient.connect(url) as client,
        await client.open() as session,
    ):
        names = [tool.function.name for tool in session.tools]
        assert names == ["echo", "files_read", "files_read_2", "list_"]
        answer = await session.step(ToolCall.of("files_read", kind="unknown"))
        assert json.loads(answer.messages[0].content) == {"type": "hologram", "size": 3}


async def test_task_served_on_the_first_sdk_is_a_task_again_on_the_second() -> None:
    server = EnvServer([Guess], port=0, drain_s=0.0)
    await server.start()
    try:
        target = f"mcp:{server.url}/mcp/guess#reward=tests.env.bridges.calculator:reward"
        async with (
            second_server(target) as url,
            EnvClient.connect(url) as client,
            await client.open() as session,
        ):
            assert (await session.step(ToolCall.of("guess", n=0))).messages[0].content == "higher"
    finally:
        await server.stop()
