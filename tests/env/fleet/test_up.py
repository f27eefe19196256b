"""``agentrl-env up`` with processes: serving, restarts, rolling replacement, shutdown."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Environment, ToolCall, tool
from agentrl_env.fleet.config import ControllerConfig, FleetConfig, TaskConfig
from agentrl_env.fleet.up import LocalFleet
from tests.processes import alive, until, until_dead

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


class Variables(Environment):
    """Shows its environment variables."""

    def reset(self, sample, rng):
        return f"{os.environ.get('COLOUR')}, {os.environ['AGENTRL_TOKEN'] == 'mine'}"

    @tool
    def look(self):
        """Look."""
        return "seen"


def servers(parent):
    """Return the pids of a fleet's servers."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True)
    lines = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return {int(pid) for pid, command in lines if "agentrl_env serve" in command}


def start(tmp_path, text=FILE):
    """Start ``agentrl-env up`` with a configuration."""
    (tmp_path / "fleet.toml").write_text(text)
    command = [sys.executable, "-m", "agentrl_env", "up", str(tmp_path / "fleet.toml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def fleet(tmp_path):
    """Run ``agentrl-env up``. Yield its process, address and log, and verify that no server remains."""
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


async def test_dead_server_is_restarted_and_roll_loses_no_session(fleet):
    process, url, log = fleet
    async with EnvClient.connect(url, token="s3cret") as client:
        sessions = [await client.open("guess") for _ in range(8)]
        assert len({session.session_id.partition(".")[0] for session in sessions}) == 2
        for session in sessions:
            await session.close()
        victim = min(servers(process.pid))
        os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: "serves again" in log.read_text(), "a restart")
        before = servers(process.pid)
        assert victim not in before
        session = await client.open("guess")
        process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(until, lambda: "the file is applied" in log.read_text(), "all are replaced")
        notice = r"(?m)^\d{4}-\d\d-\d\dT[\d:]{8}[+-]\d{4} SIGHUP: reading the fleet's file again$"
        assert re.search(notice, log.read_text())
        assert log.read_text().count("was replaced") == 2
        await session.step(ToolCall.of("guess", n=0))  # on its server, no matter how long it takes
        await session.close()
        await asyncio.to_thread(until, lambda: not before & servers(process.pid), "the old servers end")
        assert len(servers(process.pid)) == 2
        await (await client.open("guess")).close()


async def test_reload_scales_and_replaces_servers_while_their_sessions_continue(tmp_path):
    guess = TaskConfig(name="guess", target=f"{TASKS}:Guess", replicas=1, drain=0.0)
    config = FleetConfig(controller=ControllerConfig(port=0), tasks=(guess,))
    reports = []
    fleet = LocalFleet(config, report=reports.append)

    def changed(**update):
        return config.model_copy(update={"tasks": (guess.model_copy(update=update),)})

    def capacities():
        return sorted(server.capacity for server in fleet._controller.fleet.servers.values())

    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url, timeout=60) as client:
            first = await client.open("guess")
            await fleet.reload(changed(replicas=2))
            assert capacities() == [256, 256]
            second = await client.open("guess")
            assert second.session_id.partition(".")[0] != first.session_id.partition(".")[0]
            await fleet.reload(changed(replicas=2, max_sessions=7))
            assert capacities() == [7, 7, 256, 256]  # old servers stay until their sessions have ended
            await fleet.reload(changed(replicas=1, max_sessions=7))
            assert "the previous server of guess 0 finishes 1 sessions" in reports
            for seq in (1, 2):
                for session in (first, second):
                    assert (await session.step(ToolCall.of("guess", n=0))).seq == seq
            third = await client.open("guess")
            for session in (first, second):
                await session.close()
            await asyncio.to_thread(until, lambda: capacities() == [7], "the old servers end")
            assert (await third.step(ToolCall.of("guess", n=0))).seq == 1
            await fleet.reload(changed(max_sessions=7).model_copy(update={"name": "other"}))
            assert "changes of the fleet's name and of [controller] need a restart" in reports
            await third.close()
    finally:
        await fleet.stop()


async def test_file_that_is_invalid_at_a_reload_changes_nothing(fleet, tmp_path):
    process, url, log = fleet
    before = servers(process.pid)
    (tmp_path / "fleet.toml").write_text(FILE.replace("replicas", "replica"))
    process.send_signal(signal.SIGHUP)
    await asyncio.to_thread(until, lambda: "did you mean 'replicas'?" in log.read_text(), "it is refused")
    assert servers(process.pid) == before
    async with EnvClient.connect(url, token="s3cret") as client:
        await (await client.open("guess")).close()


async def test_sessions_resumed_after_a_reload_are_neither_counted_nor_logged_as_lost(caplog):
    walk = f"{TASKS.with_name('fleet') / 'test_failover_sessions.py'}:Walk"
    config = FleetConfig(
        controller=ControllerConfig(port=0, resume=True),
        tasks=(TaskConfig(name="walk", target=walk, drain=0.0),),
    )
    reports = []
    fleet = LocalFleet(config, report=reports.append)
    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url, timeout=60) as client:
            sessions = [await client.open("walk", seed=n) for n in range(3)]
            for session in sessions:
                await session.step(ToolCall.of("walk"))
            (old,) = servers(os.getpid())
            await fleet.reload(config)
            assert "the previous server of walk 0 finishes 3 sessions" in reports
            os.kill(old, signal.SIGKILL)
            results = await asyncio.gather(*(session.step(ToolCall.of("walk")) for session in sessions))
            assert [result.seq for result in results] == [2] * 3
            for session in sessions:
                await session.close()
        assert fleet._controller.fleet.metrics.ended["walk", "session_lost"] == 0
        (lost,) = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
        assert "is lost and other servers continue its 3 sessions: " in lost
        assert [line for line in reports if "lost" in line] == []
    finally:
        await fleet.stop()


async def test_resume_keeps_the_sessions_of_a_killed_server(tmp_path):
    config = FleetConfig(
        controller=ControllerConfig(port=0, resume=True),
        tasks=(
            TaskConfig(
                name="walk",
                target=f"{TASKS.with_name('fleet') / 'test_failover_sessions.py'}:Walk",
                replicas=2,
                drain=0.0,
            ),
        ),
    )
    fleet = LocalFleet(config)
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


async def test_failed_restart_is_retried_even_if_reports_cannot_be_written(monkeypatch):
    reports, served = [], asyncio.Event()

    def report(line):
        reports.append(line)
        if line.endswith("serves again"):
            served.set()
        raise BrokenPipeError(32, "Broken pipe")

    config = FleetConfig(
        controller=ControllerConfig(port=0), tasks=(TaskConfig(name="guess", target=f"{TASKS}:Guess"),)
    )
    fleet = LocalFleet(config, report=report)
    (replica,) = fleet.supervisor.replicas
    make, errors = replica.make, iter([OSError(11, "Resource temporarily unavailable")])

    def failing_once():
        for error in errors:
            raise error
        return make()

    try:
        await fleet.start()
        monkeypatch.setattr(replica, "make", failing_once)
        os.kill(min(servers(os.getpid())), signal.SIGKILL)
        await asyncio.wait_for(served.wait(), 60)
        assert "guess 0 does not start: [Errno 11] Resource temporarily unavailable" in reports
    finally:
        await fleet.stop()


async def test_process_has_its_tasks_environment_and_the_link_token():
    task = TaskConfig(
        name="variables",
        target=f"{__file__}:Variables",
        environment={"COLOUR": "blue", "AGENTRL_TOKEN": "mine"},
        drain=0.0,
    )
    fleet = LocalFleet(FleetConfig(controller=ControllerConfig(port=0), tasks=(task,)))
    try:
        await fleet.start()
        async with EnvClient.connect(fleet.url) as client:
            assert (await client.open("variables")).messages[0].content == "blue, False"
    finally:
        await fleet.stop()


async def test_second_interrupt_cuts_the_drain_short(tmp_path):
    with start(tmp_path, FILE.replace("drain = 5", "drain = 6000")) as process:
        url = process.stdout.readline().split()[3].rstrip(":")
        async with EnvClient.connect(url, token=os.environ.get("AGENTRL_TOKEN")) as client:
            session = await client.open("guess")
            process.send_signal(signal.SIGINT)
            for _ in range(2):
                await session.step(ToolCall.of("guess", n=0))
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 60) == 0


def test_killed_fleet_leaves_no_server(tmp_path):
    with start(tmp_path) as process:
        process.stdout.readline()
        running = servers(process.pid)
        assert len(running) == 2
        process.kill()
    until_dead(*running)


def test_fleet_that_cannot_start_prints_one_error_line(tmp_path):
    (tmp_path / "fleet.toml").write_text(FILE.replace(":Guess", ":Nothing"))
    command = [sys.executable, "-m", "agentrl_env", "up", str(tmp_path / "fleet.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no Environment class named 'Nothing'" in done.stderr
    assert "Traceback" not in done.stderr
