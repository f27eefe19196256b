"""Shutdown of a server with running steps, openings and forks."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from agentrl_env import Done, EnvClient, Environment, ToolCall, tool
from agentrl_env.errors import EnvironmentFailed, ServerDraining, SessionEnded
from agentrl_env.session.capacity import Capacity
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import OpenRequest
from tests.env.tasks import Quick, Slow, close_session, fork_session, until


class WaitsInTool(Environment):
    """The tool ``wait`` waits for a file to appear."""

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


class WaitsInReset(Environment):
    """``reset`` waits for a file to appear."""

    reset_timeout = 60.0

    def reset(self, sample, rng):
        self.path = sample.data["path"]
        mark(f"{self.path}.begun")
        while not os.path.exists(self.path):
            time.sleep(0.005)
        return "ready"

    @tool
    def end(self):
        """End."""
        return Done("over", reward=1.0)

    def close(self):
        mark(f"{self.path}.closed")


@pytest.fixture
def process():
    targets = [f"tests.env.server.test_shutdown:{name}" for name in ("WaitsInTool", "WaitsInReset")]
    command = ["serve", "--port", "0", "--drain", "60", *targets]
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


def is_there(path):
    return os.path.exists(path)


def status(url):
    return httpx.get(f"{url}/health", trust_env=False, timeout=60).json()["status"]


def logged(text):
    """Return the events of a text log, which must contain only process events."""
    lines = text.splitlines()
    found = [re.fullmatch(r'\S+Z INFO ([\w ]+?)( \w+=(\S+|"[^"]*"))+', line) for line in lines]
    assert all(found), text
    return [match[1] for match in found]


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_sigterm_lets_running_steps_and_sessions_end(process, tmp_path, scheme):
    path = tmp_path / "file"
    async with EnvClient.connect(process.url.replace("http", scheme, 1)) as client:
        session = await client.open("waits_in_tool")
        step = asyncio.create_task(session.step(ToolCall.of("wait", path=str(path))))
        await until(lambda: os.path.exists(f"{path}.begun"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: status(process.url) == "draining")
        with pytest.raises(ServerDraining):
            await client.open("waits_in_tool")
        assert not step.done()
        mark(path)
        assert (await step).messages[0].content == "it is there"
        assert (await session.step(ToolCall.of("end"))).terminated
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert (logged(err), process.returncode) == (["draining", "stopped"], 0)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_second_signal_ends_open_sessions(process, tmp_path, scheme):
    path = tmp_path / "file"
    async with EnvClient.connect(process.url.replace("http", scheme, 1)) as client:
        session = await client.open("waits_in_tool")
        step = asyncio.create_task(session.step(ToolCall.of("wait", path=str(path))))
        await until(lambda: os.path.exists(f"{path}.begun"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: status(process.url) == "draining")
        process.send_signal(signal.SIGINT)
        with pytest.raises(SessionEnded):
            await asyncio.wait_for(step, 60)
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert (logged(err), process.returncode) == (["draining", "stopping at once", "stopped"], 0)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_second_signal_rejects_pending_opening_and_closes_its_environment(process, tmp_path, scheme):
    path = tmp_path / "file"
    async with EnvClient.connect(process.url.replace("http", scheme, 1)) as client:
        opening = asyncio.create_task(client.open("waits_in_reset", sample={"path": str(path)}))
        await until(lambda: os.path.exists(f"{path}.begun"))
        process.send_signal(signal.SIGTERM)
        await until(lambda: status(process.url) == "draining")
        assert not opening.done()
        process.send_signal(signal.SIGINT)
        with pytest.raises(ServerDraining):
            await asyncio.wait_for(opening, 60)
        assert not is_there(f"{path}.closed")
        mark(path)
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert (logged(err), process.returncode) == (["draining", "stopping at once", "stopped"], 0)
    assert is_there(f"{path}.closed")


class Blocks(Slow):
    """``reset`` and ``restore`` wait until the test releases them."""

    def reset(self, sample, rng):
        self.started.set()
        self.blocker.wait(60)
        return "ready"

    def snapshot(self):
        return None

    def restore(self, state):
        self.reset(None, None)


def begin_opening(pool):
    return asyncio.create_task(pool.open(OpenRequest(task="blocks")))


async def begun(slow):
    await until(slow.started.is_set)
    slow.started.clear()


async def still_waits(task):
    await asyncio.wait((task,), timeout=0.02)
    return not task.done()


async def test_drain_lets_a_pending_opening_finish(slow):
    pool = SessionPool([Blocks])
    opening = begin_opening(pool)
    await begun(slow)
    drained = asyncio.create_task(pool.drain(60))
    assert await still_waits(drained)
    with pytest.raises(ServerDraining):
        await begin_opening(pool)
    slow.blocker.set()
    session_id = (await opening).session_id
    assert await still_waits(drained)
    await close_session(pool, session_id)
    await drained
    await pool.aclose()


async def test_drain_ends_when_its_last_opening_fails(slow):
    pool = SessionPool([Blocks])
    opening = begin_opening(pool)
    await begun(slow)
    drained = asyncio.create_task(pool.drain(60))
    assert await still_waits(drained)
    opening.cancel()
    await asyncio.wait_for(drained, 60)
    slow.blocker.set()
    await pool.aclose()


async def test_close_rejects_a_pending_opening_and_closes_its_environment(slow):
    pool = SessionPool([Blocks])
    opening = begin_opening(pool)
    await begun(slow)
    closing = asyncio.create_task(pool.aclose())
    with pytest.raises(ServerDraining):
        await opening
    assert await still_waits(closing)
    slow.blocker.set()
    await closing
    assert len(slow.closed) == 1


async def test_close_rejects_a_pending_fork_and_closes_its_environment(slow):
    pool = SessionPool([Blocks])
    slow.blocker.set()
    session_id = (await begin_opening(pool)).session_id
    slow.blocker.clear()
    slow.started.clear()
    forking = asyncio.create_task(fork_session(pool, session_id))
    await begun(slow)
    closing = asyncio.create_task(pool.aclose())
    with pytest.raises(ServerDraining):
        await forking
    assert await still_waits(closing)
    slow.blocker.set()
    await closing
    assert len(slow.closed) == 2


async def test_opening_that_ignores_cancellation_is_rejected():
    places, ready = Capacity(1, lambda: None), asyncio.Event()

    async def open_anyway():
        with places.opening():
            try:
                await ready.wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
            places.check_open()

    opening = asyncio.create_task(open_anyway())
    await until(lambda: places.openings)
    await places.cancel_openings()
    with pytest.raises(ServerDraining):
        await opening
    assert places.openings == 0


class Building(Slow):
    """``startup`` waits until the test releases it."""

    log: list[str]

    @classmethod
    def startup(cls):
        cls.started.set()
        cls.blocker.wait(60)
        cls.log.append("up")

    @classmethod
    async def shutdown(cls):
        cls.log.append("down")


class ShortTimeout(Building):
    reset_timeout = 0.1


class Next(Quick):
    @classmethod
    def startup(cls):
        raise AssertionError("its startup began while the server ended")


async def test_shutdown_waits_for_a_running_startup(slow):
    Building.log = []
    pool = SessionPool([Building, Next])
    starting = asyncio.create_task(pool.tasks())
    await begun(slow)
    closing = asyncio.create_task(pool.aclose())
    assert await still_waits(closing)
    slow.blocker.set()
    await closing
    assert Building.log == ["up", "down"]
    with pytest.raises(ServerDraining):
        await starting


async def test_shutdown_waits_for_a_startup_past_its_timeout(slow):
    Building.log = []
    pool = SessionPool([ShortTimeout])
    with pytest.raises(EnvironmentFailed, match="startup of task 'short_timeout' failed"):
        await pool.tasks()
    closing = asyncio.create_task(pool.aclose())
    assert await still_waits(closing)
    slow.blocker.set()
    await closing
    assert Building.log == ["up", "down"]
