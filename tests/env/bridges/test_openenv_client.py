"""Real OpenEnv servers as tasks."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.server import serve

from agentrl_env import EnvClient, ToolCall
from agentrl_env.bridges.openenv.client import OpenEnvSocket, OpenEnvTask, openenv_task
from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target
from tests.chaos.site import free_ports

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.bridges


@pytest.fixture(scope="module")
def peer():
    """Return a function that starts a server of ``openenv_peers`` and returns its address."""
    pytest.importorskip("openenv", reason="OpenEnv is not installed; run make bridges")
    processes, addresses = [], {}

    def start(name):
        if name in addresses:
            return addresses[name]
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "tests.env.bridges.openenv_peers", name, str(port)]
        processes.append(subprocess.Popen(command, cwd=ROOT))
        url = addresses[name] = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 300
        while time.monotonic() < end and processes[-1].poll() is None:
            try:
                httpx.get(f"{url}/health").raise_for_status()
                return url
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError(f"{name} did not start")

    yield start
    for process in processes:
        process.kill()
        process.wait()


async def test_actions_of_a_server_are_one_tool(peer):
    task = load_target(f"openenv+{peer('dice')}#max_turns=9&name=dice")
    (spec,) = task.tool_specs()
    assert spec.function.name == "step"
    assert spec.function.parameters["required"] == ["number"]
    assert (task.name, task.max_turns) == ("dice", 9)
    async with EnvClient.local(task) as client, await client.open(seed=4) as session:
        right = int(session.messages[0].content.split()[-1].rstrip("."))
        result = await session.step(ToolCall.of("step", number=right % 6 + 1))
        assert (result.reward, result.status) == (0.0, "running")
        assert result.messages[0].content == f"you said {right % 6 + 1}"
        result = await session.step(ToolCall.of("step", number="six"))
        assert result.metrics["invalid_calls"] == 1.0
        result = await session.step(ToolCall.of("step", number=right))
        assert (result.reward, result.terminated) == (1.0, True)
        assert "seed_ignored" not in result.metrics


async def test_seed_and_data_of_the_sample_reach_the_server(peer):
    task = openenv_task(peer("dice"))
    async with EnvClient.local(task) as client:
        openings = set()
        for _ in range(3):
            async with await client.open(seed=11) as session:
                openings.add(session.messages[0].content)
        assert len(openings) == 1
        async with await client.open(sample={"side": 2}) as session:
            assert "['side']" in session.messages[0].content


async def test_server_that_ignores_seeds_is_reported(peer, caplog):
    task = openenv_task(peer("careless"), name="careless")
    with caplog.at_level(logging.WARNING, "agentrl_env"):
        for _ in range(20):  # two throws of a die can be equal
            await task.startup()
            if task.seed_ignored:
                break
    assert "ignores seeds" in caplog.text
    async with EnvClient.local(task) as client, await client.open() as session:
        task.seed_ignored = True
        right = int(session.messages[0].content.split()[-1].rstrip("."))
        assert (await session.step(ToolCall.of("step", number=right))).metrics["seed_ignored"] == 1.0


async def test_tools_of_a_server_are_tools(peer):
    task = load_target(f"openenv+{peer('tools')}")
    (spec,) = task.tool_specs()
    assert (spec.function.name, spec.function.description) == ("add", "Add two numbers.")
    async with EnvClient.local(task) as client, await client.open() as session:
        result = await session.step(ToolCall.of("add", a=2, b=3))
        assert result.messages[0].content == "5"


async def test_failure_of_the_server_fails_the_session(peer):
    task = openenv_task(peer("dice"))
    async with EnvClient.local(task) as client, await client.open() as session:
        result = await session.step(ToolCall.of("step", number=13))
        assert result.status == "failed_environment"
        assert "unlucky" in result.info["error"]["message"]


async def test_lost_answer_closes_the_socket_and_never_reaches_a_later_request(peer):
    connection = OpenEnvSocket(peer("dice"), {})
    await connection.ask("reset", {"seed": 1})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await connection.ask("step", {"number": 99})
    with pytest.raises(ConnectionError, match="closed after a lost answer"):
        await connection.ask("step", {"number": 1})


async def test_session_waits_for_room_on_a_full_server(peer):
    task = openenv_task(peer("dice"))
    async with EnvClient.local(task) as client:
        held = [await client.open() for _ in range(2)]
        waiting = asyncio.create_task(client.open())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await held[0].close()
        async with await waiting as session:
            assert session.status == "running"
        await held[1].close()


async def test_episode_without_any_reward_fails_unless_the_target_gives_one(peer):
    for options, status, reward in (
        ("", "failed_environment", 0.0),
        ("#missing_reward=-1", "completed", -1.0),
    ):
        task = load_target(f"openenv+{peer('silent')}{options}")
        async with EnvClient.local(task) as client, await client.open() as session:
            result = await session.step(ToolCall.of("step", number=1))
            assert (result.status, result.reward) == (status, reward)
            if not options:
                assert "add #missing_reward=0 to the target" in result.info["error"]["message"]


@pytest.fixture
async def talk():
    """Return a function that starts a WebSocket server with one answer to every message."""
    servers = []

    async def start(answer):
        async def speak(connection):
            async for _ in connection:
                await connection.send(answer if isinstance(answer, str | bytes) else json.dumps(answer))

        servers.append(await serve(speak, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<html>", "sent no JSON"),
        (b"\xff", "sent no JSON"),
        ("[" * 10_000, "sent no JSON"),
        ([], "sent no JSON object"),
        ({"type": "observation"}, "observation: Field required"),
        ({"data": [1]}, "data: Input should be"),
        ({"data": {"observation": "text"}}, "observation: Input should be"),
        ({"data": {"observation": {}, "reward": "0.5"}}, "reward: Input should be"),
        ({"data": {"observation": {}, "reward": float("nan")}}, "reward: Input should be"),
        ({"data": {"observation": {}, "done": "yes"}}, "done: Input should be"),
        ({"type": "error", "data": "out of memory"}, "answered with an error: out of memory"),
    ],
)
async def test_invalid_answer_of_a_server_is_an_error_with_the_reason(talk, answer, reason):
    connection = OpenEnvSocket(await talk(answer), {})
    with pytest.raises(ConnectionError, match=reason):
        await connection.ask("step", {"number": 1})
    with pytest.raises(ConnectionError, match="closed after a lost answer"):
        await connection.ask("step", {"number": 1})


async def test_unknown_fields_of_answers_are_logged_once(talk, caplog):
    answer = {"data": {"observation": {"text": "go"}, "rewards": 1.0, "done": False}}

    foreign = type(
        "Foreign", (OpenEnvTask,), {"name": "foreign", "url": await talk(answer), "unknown": set()}
    )
    task = foreign()
    task.socket, task.rewarded = OpenEnvSocket(task.url, {}), False
    for _ in range(2):
        assert (await task.play("step", {})).reward == 0.0
    await task.close()
    assert caplog.text.count("which are ignored: rewards") == 1


@pytest.mark.parametrize(
    "target",
    [
        "openenv+http://127.0.0.1:9",
        "openenv+http://127.0.0.1:9#turns=3",
        "openenv+http://127.0.0.1:9#missing_reward=nan",
    ],
)
def test_bad_target_is_refused_with_the_reason(target):
    with pytest.raises(
        TargetError, match=r"cannot reach an OpenEnv server|there is no option|not a finite number"
    ):
        load_target(target)
