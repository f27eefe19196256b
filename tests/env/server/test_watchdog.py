"""The watchdog of a serving process, tested with real stuck processes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from agentrl_env import EnvClient, Environment, Message, ToolCall, tool
from agentrl_env.errors import AgentRLError, SessionLost
from agentrl_env.fleet.config import ControllerConfig, FleetConfig, TaskConfig
from agentrl_env.fleet.up import LocalFleet
from agentrl_env.server.watchdog import Watchdog
from tests.env.fleet.test_supervisor import ask
from tests.env.tasks import until
from tests.processes import until_dead


class Sticks(Environment):
    """Tools that hold up their process."""

    max_turns = 10_000

    def reset(self, sample, rng):
        return "Hello."

    @tool
    async def ask(self):
        """Return the process id."""
        return str(os.getpid())

    @tool(timeout=2)
    def backtrack(self):
        """Hold the interpreter's lock on a thread, so that no other thread runs."""
        return str(re.search("(a+)+$", "a" * 60 + "b"))

    @tool(timeout=3600)
    def hang(self):
        """Hang within the timeout, on a thread."""
        threading.Event().wait()

    @tool
    async def block(self, seconds: float):
        """Hold the event loop only."""
        time.sleep(seconds)  # noqa: ASYNC251
        return str(os.getpid())

    @tool(timeout=3600)
    async def compute(self, seconds: float):
        """Use this much CPU time on the event loop while another process uses ten times as much."""
        processor = {min(os.sched_getaffinity(0))}
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:  # noqa: ASYNC220
            try:
                os.sched_setaffinity(busy.pid, processor)
                os.sched_setaffinity(0, processor)
                thread = threading.get_native_id()
                niceness = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, niceness + 10)
                begin, wall = time.thread_time(), time.monotonic()
                while time.thread_time() - begin < seconds:
                    pass
                return f"{os.getpid()} {time.monotonic() - wall:.1f}"
            finally:
                busy.kill()


class Kept(Sticks):
    """Its sessions survive their server."""

    def snapshot(self):
        return 0

    def restore(self, state):
        pass


class Inline(Sticks):
    """A slow tool on the event loop."""

    blocking = False

    @tool
    def query(self):
        """Hold the event loop for a while."""
        time.sleep(0.17)
        return "found"


STICKING = [ToolCall.of("backtrack"), ToolCall.of("block", seconds=600.0)]
BACKTRACK_SLOW = [pytest.param(STICKING[0], marks=pytest.mark.slow), STICKING[1]]
TARGET = f"{__file__}:Sticks"


@contextlib.contextmanager
def serving(*options, task="Sticks", log=subprocess.PIPE):
    target = f"{__file__}:{task}"
    command = [sys.executable, "-m", "agentrl_env", "serve", target, "--port", "0", "--drain", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        line = process.stdout.readline()
        assert line.startswith(f"serving {task.lower()} at http://"), process.stderr.read()
        yield process, line.split(" at ")[1].split()[0]
    finally:
        process.kill()
        process.communicate()


async def by_worker(client, number):
    """Open sessions until every worker has one. Return one session per worker, by process id."""
    found, others = {}, []
    while len(found) < number:
        session = await client.open("sticks", wait=60)
        if found.setdefault(await ask(session), session) is not session:
            others.append(session)  # closing it would make its worker the least loaded one
            await asyncio.sleep(0.05)  # a replacement is starting
    await asyncio.gather(*(session.close() for session in others))
    return found


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two workers, shared by tests that block them, and their log."""
    log = tmp_path_factory.mktemp("workers") / "log"
    with log.open("wb") as output, serving("--workers", "2", "--stuck-after", "1", log=output) as (_, url):
        yield url, log


@pytest.mark.parametrize("call", STICKING, ids=lambda call: call.function.name)
async def test_stuck_worker_is_killed_and_replaced_and_other_workers_stay(workers, call):
    url, log = workers
    async with EnvClient.connect(url, timeout=180) as client:
        (stuck, lost), (alive, kept) = (await by_worker(client, 2)).items()
        with pytest.raises(SessionLost):
            await lost.step(call)
        until_dead(stuck)
        assert await ask(kept) == alive
        assert stuck not in await by_worker(client, 2)
    errors = log.read_text()
    assert "ERROR killed by its watchdog: its event loop has not run for 1 s (--stuck-after); " in errors
    assert f"pid={stuck}" in errors
    assert f"in {call.function.name}" in errors  # its stack
    assert "ended (exit code -9); starting another" in errors


@pytest.mark.parametrize("call", BACKTRACK_SLOW, ids=lambda call: call.function.name)
async def test_stuck_session_kills_only_one_worker_and_other_sessions_continue(call):
    options = ("--workers", "2", "--stuck-after", "1", "--resume")
    with serving(*options, task="Kept") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            found = {}
            while len(found) < 2 or min(map(len, found.values())) < 2:
                session = await client.open("kept", wait=20)
                found.setdefault(await ask(session), []).append(session)
            (stuck, (guilty, neighbour, *_)), (other, (kept, *_)) = found.items()
            under_way = asyncio.create_task(guilty.step(call))
            await asyncio.sleep(0.3)
            asked = asyncio.create_task(ask(neighbour))
            with pytest.raises(SessionLost, match="its step got the session's server stuck"):
                await under_way
            until_dead(stuck)
            assert await asked != stuck
            assert await ask(kept) == other
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    (line,) = [line for line in errors.splitlines() if "killed by its watchdog" in line]
    assert f"(--stuck-after); session {guilty.session_id} held it; its stacks follow" in line


@pytest.mark.slow
async def test_valid_message_of_127_slow_calls_loses_no_other_session():
    with serving("--workers", "2", "--stuck-after", "2", task="Inline") as (_, url):
        async with EnvClient.connect(url, timeout=60) as client:
            greedy = await client.open("inline", wait=20)
            neighbours = [await client.open("inline", wait=20) for _ in range(10)]
            pids = [await ask(session) for session in neighbours]
            assert await ask(greedy) in pids
            message = Message.assistant(None, *(ToolCall.of("query") for _ in range(127)))
            step = asyncio.create_task(greedy.step(message))
            rounds = 0
            while not step.done():
                assert [await ask(session) for session in neighbours[:2]] == pids[:2]
                rounds += 1
            assert rounds > 1
            answers = [message.content for message in (await step).messages]
            assert answers[0] == "found"
            assert answers[-1].startswith("Not executed: the calls of a message may hold the server for 5 s")
            assert [await ask(session) for session in neighbours] == pids


async def test_stuck_server_of_up_is_replaced_with_the_reason():
    task = TaskConfig(name="sticks", target=TARGET, stuck_after=1.0, drain=0.0)
    lines = []
    fleet = LocalFleet(FleetConfig(controller=ControllerConfig(port=0), tasks=(task,)), report=lines.append)
    await fleet.start()
    try:
        async with EnvClient.connect(fleet.url, timeout=60) as client:
            session = await client.open("sticks")
            stuck = await ask(session)
            with pytest.raises(SessionLost):
                await session.step(STICKING[0])
            assert await ask(await client.open("sticks", wait=30)) != stuck
    finally:
        await fleet.stop()
    assert "killed by its watchdog: its event loop has not run for 1 s" in lines[0]


@pytest.mark.parametrize(
    ("call", "stuck_after"),
    [
        pytest.param(STICKING[0], "1", id="backtrack-watched"),
        pytest.param(STICKING[0], "0", id="backtrack-unwatched", marks=pytest.mark.slow),
        pytest.param(STICKING[1], "1", id="block-watched", marks=pytest.mark.slow),
        pytest.param(STICKING[1], "0", id="block-unwatched", marks=pytest.mark.slow),
    ],
)
async def test_stuck_worker_ends_with_a_killed_parent(call, stuck_after):
    with serving("--workers", "2", "--stuck-after", stuck_after) as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            (stuck, session), (other, _) = (await by_worker(client, 2)).items()
            step = asyncio.create_task(session.step(call))
            await asyncio.sleep(0.2)
            process.kill()
            until_dead(stuck, other)
            step.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentRLError):
                await step


@pytest.mark.extended
@pytest.mark.slow
async def test_worker_with_hanging_threads_ends_with_its_killed_parent_and_not_after_its_drain():
    with serving("--workers", "2", "--drain", "3600") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            workers = await by_worker(client, 2)
            steps = [asyncio.create_task(one.step(ToolCall.of("hang"))) for one in workers.values()]
            await asyncio.sleep(0.5)
            process.kill()
            until_dead(*workers)
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)


@pytest.mark.extended
@pytest.mark.parametrize("log_format", [pytest.param("text", marks=pytest.mark.slow), "json"])
async def test_stuck_server_without_workers_ends_with_a_line_in_its_log(log_format):
    with serving("--stuck-after", "1", "--log-format", log_format) as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            session = await client.open("sticks")
            step = asyncio.create_task(session.step(STICKING[0]))
            _, errors = await asyncio.to_thread(process.communicate, timeout=60)
            step.cancel()
            with contextlib.suppress(asyncio.CancelledError, AgentRLError):
                await step
    assert process.returncode == -signal.SIGKILL
    (line,) = [line for line in errors.splitlines() if "killed by its watchdog" in line]
    if log_format == "json":
        fields = json.loads(line)
        assert (fields["level"], fields["pid"]) == ("error", process.pid)
    assert "in backtrack" in errors


@pytest.mark.extended
@pytest.mark.slow
async def test_busy_worker_is_not_lost():
    with serving("--workers", "2", "--stuck-after", "60") as (_, url):
        async with EnvClient.connect(url, timeout=60) as client:
            session = await client.open("sticks", wait=20)
            pid = await ask(session)
            result = await session.step(ToolCall.of("block", seconds=7.0))  # more than --lost-after
            assert result.messages[0].content == str(pid)
            assert await ask(session) == pid


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not report processor waits"
)
async def test_worker_that_waits_for_a_processor_is_not_stuck(workers):
    async with EnvClient.connect(workers[0], timeout=180) as client:
        session = await client.open("sticks", wait=60)
        pid = await ask(session)
        result = await session.step(ToolCall.of("compute", seconds=0.3))
        answer, wall_s = result.messages[0].content.split()
        assert float(wall_s) > 2  # twice --stuck-after
        assert int(answer) == pid
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("compute", seconds=3600.0))
        until_dead(int(pid))


async def test_stopped_process_counts_as_stuck(workers):
    async with EnvClient.connect(workers[0], timeout=180) as client:
        (stopped, session), _ = (await by_worker(client, 2)).items()
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("ask"))
        until_dead(stopped)
        assert stopped not in await by_worker(client, 2)


async def test_frozen_server_keeps_sessions_with_waiting_steps():
    with serving("--lease", "2") as (process, url):
        async with EnvClient.connect(url, timeout=60) as client:
            sessions = [await client.open("sticks") for _ in range(5)]
            process.send_signal(signal.SIGSTOP)
            steps = [asyncio.create_task(ask(session)) for session in sessions]
            await asyncio.sleep(3)
            process.send_signal(signal.SIGCONT)
            assert await asyncio.gather(*steps) == [process.pid] * 5


async def test_ended_watchdog_is_replaced(caplog):
    watchdog = Watchdog(60.0)
    watchdog.start()
    beating = asyncio.create_task(watchdog.keep_beating())
    first = watchdog._process
    first.kill()
    await until(lambda: watchdog._process is not first and watchdog._process is not None)
    assert "the watchdog of this process has ended" in caplog.text
    second = watchdog._process
    beating.cancel()
    watchdog.stop()
    assert (first.returncode, second.returncode) == (-signal.SIGKILL, 0)


async def test_drain_reports_what_it_waits_for():
    with serving("--drain", "60") as (process, url):
        async with EnvClient.connect(url) as client:
            await client.open("sticks")
            process.send_signal(signal.SIGTERM)
            line = await asyncio.to_thread(process.stderr.readline)
            assert "INFO draining" in line
            assert (
                'signal=SIGTERM what="1 open sessions get 60 s to end; a second signal ends them at once"'
                in line
            )
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0
    assert [line.split(" INFO ")[1].split(" pid=")[0] for line in errors.splitlines()] == [
        "stopping at once",
        "stopped",
    ]
