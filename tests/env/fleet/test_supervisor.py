"""``agentrl-env serve --workers N``: real processes, killed for real."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from agentrl_env import EnvClient, Environment, ToolCall, tool
from agentrl_env.errors import SessionLost
from agentrl_env.fleet.serve import WorkerServer
from agentrl_env.fleet.supervisor import Workers

TARGET = f"{__file__}:Who"


class Who(Environment):
    """Says which process it lives in."""

    max_turns = 50

    def reset(self, sample, rng):
        return "Hello."

    @tool
    def ask(self):
        """Ask for the process."""
        return str(os.getpid())

    @tool
    def say(self):
        """Print more than a pipe holds."""
        print("x" * 300_000, flush=True)
        return "said"

    @tool
    def token(self):
        """Ask for what the process could show."""
        return os.environ["AGENTRL_TOKEN"]


class Count(Who):
    """Counts, and can be gone on with."""

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


def until_dead(pids, seconds=20.0):
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") and "Z" not in state(pid) for pid in pids):
        assert time.monotonic() < end, f"one of {pids} still lives"
        time.sleep(0.02)


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


async def ask(session):
    return int((await session.step(ToolCall.of("ask"))).messages[0].content)


async def ask_on(session):
    """Ask until it fails: it may take a moment until a death is seen."""
    while True:
        await ask(session)


async def workers_of(client):
    """Open a session on every worker; return them by their process."""
    sessions = [await client.open("who", wait=20) for _ in range(4)]
    found = {await ask(session): session for session in sessions}
    assert len(found) == 2
    return found


async def test_sessions_stay_with_their_worker_and_the_death_of_one_is_told_at_once():
    with serving("--workers", "2", "--drain", "0") as (process, url):
        async with EnvClient.connect(url, timeout=30) as client:
            found = await workers_of(client)
            (dead, held), (alive, other) = found.items()
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(SessionLost):
                await asyncio.wait_for(ask_on(held), 20)
            assert await ask(other) == alive
            while True:  # another is started in its place
                pid = await ask(await client.open("who", wait=20))
                if pid not in (dead, alive):
                    break
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        until_dead([alive, pid])


async def test_with_resume_the_sessions_of_a_killed_worker_go_on_at_the_others_even_where_these_are_full():
    options = ["--workers", "2", "--max-sessions", "4", "--drain", "0", "--resume"]
    with serving(*options, target=f"{__file__}:Count") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            sessions = [await client.open("count", wait=20) for _ in range(4)]
            pids = [await ask(session) for session in sessions]
            assert len(set(pids)) == 2
            for session in sessions:
                assert said(await session.step(ToolCall.of("add"))) == "1"
            os.kill(pids[0], signal.SIGKILL)  # the other worker is full: another has to be started
            seconds = await asyncio.gather(*(session.step(ToolCall.of("add")) for session in sessions))
            assert [said(second) for second in seconds] == ["2"] * 4
            assert pids[0] not in [await ask(session) for session in sessions]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def said(result):
    return result.messages[0].content


@contextlib.asynccontextmanager
async def own_workers():
    server = WorkerServer([TARGET], workers=1, arguments=[], drain_s=0, port=0)
    await server.start()
    try:
        async with EnvClient.connect(server.announcement.split()[3], timeout=30) as client:
            yield client
    finally:
        await server.stop()


async def test_a_machine_that_refuses_to_start_a_worker_is_asked_again(monkeypatch, caplog):
    begin, refusals = Workers._begin, iter([BlockingIOError(11, "Resource temporarily unavailable")])

    async def refusing(self):
        for refusal in refusals:
            raise refusal
        return await begin(self)

    async with own_workers() as client:
        session = await client.open("who")
        dead = await ask(session)
        monkeypatch.setattr(Workers, "_begin", refusing)
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(ask_on(session), 20)
        assert await ask(await client.open("who", wait=30)) != dead
    assert "no worker could be started: [Errno 11]" in caplog.text


async def test_a_worker_goes_on_where_nobody_takes_its_output_and_is_started_again(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    async with own_workers() as client:
        session = await client.open("who")
        dead = await ask(session)
        monkeypatch.setattr(sys, "stdout", Gone())
        assert said(await session.step(ToolCall.of("say"))) == "said"
        assert said(await session.step(ToolCall.of("say"))) == "said"
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(SessionLost):
            await asyncio.wait_for(ask_on(session), 20)
        assert await ask(await client.open("who", wait=30)) != dead


async def test_the_workers_end_with_their_parent_even_where_it_is_killed():
    with serving("--workers", "2") as (process, url):
        async with EnvClient.connect(url, timeout=30) as client:
            pids = list(await workers_of(client))
        process.kill()
        until_dead(pids)


async def test_stopping_lets_open_sessions_end():
    with serving("--workers", "2", "--drain", "60") as (process, url):
        async with EnvClient.connect(url, timeout=30) as client:
            found = await workers_of(client)
            process.send_signal(signal.SIGTERM)
            for pid, session in found.items():
                assert await ask(session) == pid
            process.send_signal(signal.SIGTERM)  # hurries
            assert process.wait(30) == 0
            until_dead(found)


def test_workers_and_a_controller_together_are_refused():
    command = [sys.executable, "-m", "agentrl_env", "serve", TARGET, "--workers", "2"]
    done = subprocess.run([*command, "--controller", "http://x"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: --workers brings a controller of its own; give --workers or --controller\n"
    )


def test_resuming_without_workers_is_refused():
    command = [sys.executable, "-m", "agentrl_env", "serve", TARGET, "--resume"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: --resume goes on with the sessions of a worker that dies; give --workers too, "
        "or let the controller resume: agentrl-env controller --resume\n"
    )


def test_workers_that_cannot_start_end_the_server_with_one_sentence():
    command = [sys.executable, "-m", "agentrl_env", "serve", "/nowhere", "--workers", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: a worker ended at once; its last words are above"
