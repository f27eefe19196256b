"""``agentrl-env serve --workers N`` with real processes that are killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from agentrl_env import EnvClient, Environment, ToolCall, tool
from agentrl_env.errors import SessionLost
from agentrl_env.fleet.serve import WorkerServer
from agentrl_env.launch.process import ServerProcess
from tests.processes import until_dead

TARGET = f"{__file__}:Process"


class Process(Environment):
    """Answers questions about its process."""

    max_turns = 50

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def ask(self):
        """Return the process id."""
        return str(os.getpid())

    @tool
    def say(self):
        """Print more than a pipe holds."""
        print("x" * 300_000, flush=True)
        return "said"

    @tool
    def token(self):
        """Return the token in the environment."""
        return os.environ["AGENTRL_TOKEN"]


class Count(Process):
    """Counts, and can be resumed."""

    def reset(self, sample, rng):
        self.count = 0
        return "Hello."

    @tool
    def add(self):
        """Count one."""
        self.count += 1
        return str(self.count)

    def snapshot(self):
        return self.count

    def restore(self, state):
        self.count = state


@contextlib.contextmanager
def serving(*options: str, target: str = TARGET):
    command = [sys.executable, "-m", "agentrl_env", "serve", target, "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        line = process.stdout.readline()
        task = target.rpartition(":")[2].lower()
        assert line.startswith(f"serving {task} at http://"), process.stderr.read()
        yield process, line.split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


async def ask(session):
    return int((await session.step(ToolCall.of("ask"))).messages[0].content)


async def ask_until_error(session):
    """Repeat a step until it fails, because detecting a death can take a moment."""
    while True:
        await ask(session)


async def workers_of(client):
    """Open a session on every worker. Return them by pid."""
    sessions = [await client.open("process", wait=60) for _ in range(4)]
    found = {await ask(session): session for session in sessions}
    assert len(found) == 2
    return found


async def test_sessions_stay_with_their_worker_and_are_lost_with_it():
    with serving("--workers", "2", "--drain", "0") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            found = await workers_of(client)
            (dead, held), (alive, other) = found.items()
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(SessionLost):
                await asyncio.wait_for(ask_until_error(held), 60)
            assert await ask(other) == alive
            while True:  # until the replacement serves
                pid = await ask(await client.open("process", wait=60))
                if pid not in (dead, alive):
                    break
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        until_dead(alive, pid)


@pytest.mark.slow
async def test_sessions_of_a_killed_worker_resume_even_if_the_others_are_full():
    options = ["--workers", "2", "--max-sessions", "4", "--drain", "0", "--resume"]
    with serving(*options, target=f"{__file__}:Count") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            sessions = [await client.open("count", wait=60) for _ in range(4)]
            pids = [await ask(session) for session in sessions]
            assert len(set(pids)) == 2
            for session in sessions:
                assert said(await session.step(ToolCall.of("add"))) == "1"
            os.kill(pids[0], signal.SIGKILL)  # the other worker is full, so a new worker must start
            seconds = await asyncio.gather(*(session.step(ToolCall.of("add")) for session in sessions))
            assert [said(second) for second in seconds] == ["2"] * 4
            assert pids[0] not in [await ask(session) for session in sessions]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def said(result):
    return result.messages[0].content


@contextlib.asynccontextmanager
async def own_workers():
    server = WorkerServer([TARGET], workers=1, arguments=[], drain_s=0, port=0)
    await server.start()
    try:
        async with EnvClient.connect(server.announcement.split()[3], timeout=60) as client:
            yield client
    finally:
        await server.stop()


@pytest.mark.extended
@pytest.mark.slow
async def test_failed_restart_of_a_worker_is_retried(monkeypatch, caplog):
    start, errors = ServerProcess.start, iter([BlockingIOError(11, "Resource temporarily unavailable")])

    def failing_once(self):
        for error in errors:
            raise error
        return start(self)

    async with own_workers() as client:
        session = await client.open("process")
        dead = await ask(session)
        monkeypatch.setattr(ServerProcess, "start", failing_once)
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(ask_until_error(session), 60)
        assert await ask(await client.open("process", wait=30)) != dead
    assert "worker 0 does not start: [Errno 11]" in caplog.text


async def test_worker_keeps_serving_if_its_output_cannot_be_written(monkeypatch):
    class ClosedPipe:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    async with own_workers() as client:
        session = await client.open("process")
        dead = await ask(session)
        monkeypatch.setattr(sys, "stdout", ClosedPipe())
        assert said(await session.step(ToolCall.of("say"))) == "said"
        assert said(await session.step(ToolCall.of("say"))) == "said"
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(ask_until_error(session), 60)
        assert await ask(await client.open("process", wait=30)) != dead


@pytest.mark.extended
@pytest.mark.slow
async def test_workers_end_with_a_killed_parent():
    with serving("--workers", "2") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            pids = list(await workers_of(client))
        process.kill()
        until_dead(*pids)


@pytest.mark.slow
async def test_stop_drains_and_a_second_signal_ends_the_drain():
    with serving("--workers", "2", "--drain", "60") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            found = await workers_of(client)
            process.send_signal(signal.SIGTERM)
            for pid, session in found.items():
                assert await ask(session) == pid
            process.send_signal(signal.SIGTERM)  # ends the drain
            assert process.wait(60) == 0
            until_dead(*found)


def test_workers_that_cannot_start_end_the_server_with_one_error_line():
    command = [sys.executable, "-m", "agentrl_env", "serve", "/nowhere", "--workers", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: a worker ended during the start; see its error above"
