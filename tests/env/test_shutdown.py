"""A server process that is told to end keeps its promise to whoever has a step under way."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agentrl_env import Done, EnvClient, Environment, ToolCall, tool
from agentrl_env.errors import ServerDraining, SessionEnded
from tests.env.tasks import until


class Patient(Environment):
    """Waits for a file to appear."""

    def reset(self, sample, rng):
        return "ready"

    @tool
    async def wait(self, path: str):
        """Wait for a file."""
        mark(f"{path}.begun")
        await until(lambda: os.path.exists(path))
        return "it is there"

    @tool
    def end(self):
        """End."""
        return Done("over", reward=1.0)


@pytest.fixture
def process():
    command = ["serve", "--port", "0", "--drain", "60", "tests.env.test_shutdown:Patient"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl_env", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    process.url = re.search(r"http://\S+", process.stdout.readline())[0]
    yield process
    process.kill()
    process.communicate()


def mark(path):
    Path(path).touch()


def status(url):
    return httpx.get(f"{url}/health", trust_env=False).json()["status"]


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_steps_under_way_are_answered_and_the_session_may_end(process, tmp_path, scheme):
    path = tmp_path / "file"
    async with EnvClient.connect(process.url.replace("http", scheme, 1)) as client:
        session = await client.open("patient")
        step = asyncio.create_task(session.step(ToolCall.of("wait", path=str(path))))
        await until(lambda: os.path.exists(f"{path}.begun"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: status(process.url) == "draining")
        with pytest.raises(ServerDraining):
            await client.open("patient")
        assert not step.done()
        mark(path)
        assert (await step).messages[0].content == "it is there"
        assert (await session.step(ToolCall.of("end"))).terminated
    _, err = await asyncio.to_thread(process.communicate, timeout=20)
    assert (err, process.returncode) == ("", 0)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_second_signal_hurries_and_who_waits_is_told(process, tmp_path, scheme):
    path = tmp_path / "file"
    async with EnvClient.connect(process.url.replace("http", scheme, 1)) as client:
        session = await client.open("patient")
        step = asyncio.create_task(session.step(ToolCall.of("wait", path=str(path))))
        await until(lambda: os.path.exists(f"{path}.begun"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: status(process.url) == "draining")
        process.send_signal(signal.SIGINT)
        with pytest.raises(SessionEnded):
            await asyncio.wait_for(step, 20)
    _, err = await asyncio.to_thread(process.communicate, timeout=20)
    assert (err, process.returncode) == ("", 0)
