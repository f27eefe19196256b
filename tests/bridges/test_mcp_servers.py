"""Public MCP servers from npm and PyPI as tasks. Every tool is described, called and answered."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import get_default_environment, stdio_client

from agentrl_env import EnvClient, ToolCall
from agentrl_env.bridges.mcp.client import mcp_task
from agentrl_env.client.schema_sampler import sample_json

pytestmark = [pytest.mark.bridges, pytest.mark.extended]

PYPI = ["mcp-server-fetch", "mcp-server-git", "mcp-server-time"]
FOR_MCP_1 = ["mcp-server-sqlite"]
"""Packages from PyPI that need the first version of the SDK."""
NPM = {
    "@modelcontextprotocol/server-everything": "mcp-server-everything",
    "@modelcontextprotocol/server-filesystem": "mcp-server-filesystem FOLDER",
    "@modelcontextprotocol/server-github": "mcp-server-github",
    "@modelcontextprotocol/server-gitlab": "mcp-server-gitlab",
    "@modelcontextprotocol/server-memory": "mcp-server-memory",
    "@modelcontextprotocol/server-sequential-thinking": "mcp-server-sequential-thinking",
    "@modelcontextprotocol/server-slack": "mcp-server-slack",
    "@notionhq/notion-mcp-server": "notion-mcp-server",
    "@playwright/mcp": "playwright-mcp --headless --isolated --no-sandbox --executable-path CHROMIUM",
    "@upstash/context7-mcp": "context7-mcp",
    "exa-mcp-server": "exa-mcp-server",
    "firecrawl-mcp": "firecrawl-mcp",
    "tavily-mcp": "tavily-mcp",
}
"""Commands by package."""
KEYS = dict.fromkeys(
    [
        "GITHUB_PERSONAL_ACCESS_TOKEN",
        "GITLAB_PERSONAL_ACCESS_TOKEN",
        "SLACK_BOT_TOKEN",
        "SLACK_TEAM_ID",
        "NOTION_TOKEN",
        "EXA_API_KEY",
        "FIRECRAWL_API_KEY",
        "TAVILY_API_KEY",
    ],
    "none",
)
"""Servers without an account start with any key, but answer calls with an error."""
ENDS_THE_SERVER = {"browser_close"}
OPTIONS = {
    "mcp-server-git": "--repository FOLDER",
    "mcp-server-sqlite": "--db-path FOLDER/shop.db",
    "mcp-server-time": "--local-timezone UTC",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the servers. Skips the tests if the packages are unavailable."""
    folder = tmp_path_factory.mktemp("servers")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    for command in (
        [sys.executable, "-m", "venv", folder / "venv"],
        [sys.executable, "-m", "venv", folder / "venv-1"],
        [folder / "venv/bin/pip", "--quiet", "install", *PYPI],
        [folder / "venv-1/bin/pip", "--quiet", "install", *FOR_MCP_1, "mcp<2"],
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", folder, *NPM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            pytest.skip(f"cannot install a server: {done.stderr[-300:]}")
    (folder / "data").mkdir()
    subprocess.run(["git", "init", "-q", folder / "data"], check=True)
    return folder


def command_of(package: str, folder: Path) -> str:
    if package in NPM:
        command = f"node {folder}/node_modules/.bin/{NPM[package]}"
    else:
        environment = "venv-1" if package in FOR_MCP_1 else "venv"
        command = f"{folder}/{environment}/bin/{package} {OPTIONS.get(package, '')}"
    return command.replace("FOLDER", f"{folder}/data").replace("CHROMIUM", str(shutil.which("chromium")))


async def described_by(command: str) -> dict[str, object]:
    """Return the schemas of a server's tools as read by the SDK."""
    program, *arguments = shlex.split(command)
    environment = {**get_default_environment(), **KEYS}
    parameters = StdioServerParameters(command=program, args=arguments, env=environment)
    async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
        await session.initialize()
        return {tool.name: tool.inputSchema for tool in (await session.list_tools()).tools}


@pytest.mark.parametrize("package", [*PYPI, *FOR_MCP_1, *NPM])
async def test_every_tool_of_a_public_server_is_described_called_and_answered(
    package: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "@playwright/mcp" and shutil.which("chromium") is None:
        pytest.skip("Chromium is not installed")
    monkeypatch.chdir(installed)  # some tools write to the working directory
    command = command_of(package, installed)
    described = await described_by(command)
    task = mcp_task(command, lambda sample, calls, answer: 0.0, env=KEYS, max_turns=1000, prompt="Go on.")
    rng, answered = np.random.default_rng(0), 0
    async with EnvClient.local(task) as client, await client.open(seed=1) as session:
        assert {tool.function.name: tool.function.parameters for tool in session.tools} == described
        for tool in session.tools:
            if tool.function.name in ENDS_THE_SERVER:
                continue
            arguments = sample_json(tool.function.parameters, rng)
            assert isinstance(arguments, dict)
            result = await session.step(ToolCall.of(tool.function.name, **arguments))
            assert result.status == "running", (tool.function.name, arguments)
            assert result.messages[0].content, tool.function.name
            answered += 1
    print(f"{package}: {answered} of {len(described)} tools called and answered")
    assert answered
