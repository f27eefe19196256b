"""A fleet of processes from one file: served behind one address, kept, replaced, and stopped whole."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Environment, ToolCall, tool
from agentrl_env.fleet.config import ControllerPlan, FleetPlan, TaskPlan
from agentrl_env.fleet.up import LocalFleet

TASKS = Path(__file__).parents[1] / "tasks.py"
FILE = f"""
name = "test"

[controller]
port = 0

[[tasks]]
name = "guess"
target = "{TASKS}:Guess"
replicas = 2
max_sessions = 4
drain = 5
"""


class Told(Environment):
    """Says what it was told."""

    def reset(self, sample, rng):
        return f"{os.environ.get('COLOUR')}, {os.environ['AGENTRL_TOKEN'] == 'mine'}"

    @tool
    def look(self):
        """Look."""
        return "seen"


def until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.05)
    return found


def servers(parent):
    """Return the process ids of a fleet's servers."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True)
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return {int(pid) for pid, command in lines if "agentrl_env serve" in command}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def fleet(tmp_path):
    """Start ``agentrl-env up`` and give its process and its address; prove that it leaves no server."""
    file = tmp_path / "fleet.toml"
    file.write_text(FILE)
    log = tmp_path / "log"
    environment = {**os.environ, "AGENTRL_TOKEN": "s3cret"}
    command = [sys.executable, "-m", "agentrl_env", "up", str(file)]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with process:
        line = process.stdout.readline()
        assert line.startswith("fleet test at http://127.0.0.1:"), log.read_text()
        assert line.endswith(": guess x2\n")
        seen = servers(process.pid)
        yield process, line.split()[3].rstrip(":"), log
        seen |= servers(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
        assert not any(alive(pid) for pid in seen)


async def test_a_fleet_serves_survives_a_death_and_is_replaced_without_losing_a_session(fleet):
    process, url, log = fleet
    async with EnvClient.connect(url, token="s3cret") as client:
        sessions = [await client.open("guess") for _ in range(8)]
        assert len({session.session_id.partition(".")[0] for session in sessions}) == 2
        for session in sessions:
            await session.close()
        victim = min(servers(process.pid))
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: "serves again" in log.read_text(), "the dead one is replaced")
        before = servers(process.pid)
        assert victim not in before
        session = await client.open("guess")
        process.send_signal(signal.SIGHUP)
        await session.step(ToolCall.of("guess", n=0))
        await session.close()
        await asyncio.to_thread(until, lambda: log.read_text().count("was replaced") == 2, "all are replaced")
        assert len(servers(process.pid)) == 2
        assert not before & servers(process.pid)
        await (await client.open("guess")).close()


async def test_a_fleet_that_resumes_takes_no_session_with_a_killed_server(tmp_path):
    plan = FleetPlan(
        controller=ControllerPlan(port=0, resume=True),
        tasks=(
            TaskPlan(
                name="walk",
                target=f"{TASKS.with_name('fleet') / 'test_failover_sessions.py'}:Walk",
                replicas=2,
                drain=0.0,
            ),
        ),
    )
    fleet = LocalFleet(plan)
    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url, timeout=60) as client:
            sessions = [await client.open("walk", seed=n) for n in range(4)]
            assert len({session.session_id.partition(".")[0] for session in sessions}) == 2
            for session in sessions:
                await session.step(ToolCall.of("walk"))
            os.kill(min(servers(os.getpid())), signal.SIGKILL)
            results = await asyncio.gather(*(session.step(ToolCall.of("walk")) for session in sessions))
            assert [result.seq for result in results] == [2] * 4
    finally:
        await fleet.stop()


async def test_a_machine_that_refuses_to_start_a_server_is_asked_again_even_where_nobody_hears(monkeypatch):
    told, served = [], asyncio.Event()

    def tell(line):
        told.append(line)
        if line.endswith("serves again"):
            served.set()
        raise BrokenPipeError(32, "Broken pipe")

    plan = FleetPlan(
        controller=ControllerPlan(port=0), tasks=(TaskPlan(name="guess", target=f"{TASKS}:Guess"),)
    )
    fleet = LocalFleet(plan, report=tell)
    place, refusals = fleet._place, iter([OSError(11, "Resource temporarily unavailable")])

    def refusing(task):
        for refusal in refusals:
            raise refusal
        return place(task)

    try:
        await fleet.start()
        monkeypatch.setattr(fleet, "_place", refusing)
        os.kill(min(servers(os.getpid())), signal.SIGKILL)
        await asyncio.wait_for(served.wait(), 60)
        assert "guess 0 does not start: [Errno 11] Resource temporarily unavailable" in told
    finally:
        await fleet.stop()


async def test_a_process_has_the_environment_of_its_task_and_the_token_of_the_fleet():
    task = TaskPlan(
        name="told",
        target=f"{__file__}:Told",
        environment={"COLOUR": "blue", "AGENTRL_TOKEN": "mine"},
        drain=0.0,
    )
    fleet = LocalFleet(FleetPlan(controller=ControllerPlan(port=0), tasks=(task,)))
    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url) as client:
            assert (await client.open("told")).messages[0].content == "blue, False"
    finally:
        await fleet.stop()


def test_a_killed_fleet_leaves_no_server(tmp_path):
    (tmp_path / "fleet.toml").write_text(FILE)
    command = [sys.executable, "-m", "agentrl_env", "up", str(tmp_path / "fleet.toml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        running = servers(process.pid)
        assert len(running) == 2
        process.kill()
    until(lambda: not any(map(alive, running)), "the servers have ended")


def test_a_fleet_that_cannot_start_is_one_sentence(tmp_path):
    (tmp_path / "fleet.toml").write_text(FILE.replace(":Guess", ":Nothing"))
    command = [sys.executable, "-m", "agentrl_env", "up", str(tmp_path / "fleet.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no Environment class named 'Nothing'" in done.stderr
    assert "Traceback" not in done.stderr
