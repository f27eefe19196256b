"""Data that a server keeps of ended sessions."""

import asyncio
import contextlib
import gc
import logging
import weakref

import pytest

from agentrl_env import Done, Environment, Message, ToolCall, tool
from agentrl_env.errors import EnvironmentFailed
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import OpenRequest
from tests.env.tasks import Quick, close_session, play_step


def says(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


async def opened(pool):
    return (await pool.open(OpenRequest(task="long"))).session_id


@pytest.fixture
async def pool():
    pool = SessionPool([Long])
    yield pool
    await pool.aclose()


class Long(Quick):
    """Returns large results."""

    max_turns = 20

    @tool
    def say(self):
        """Return a large result."""
        return "x" * 20_000


async def test_ended_session_keeps_only_its_last_large_results(pool):
    session_id = await opened(pool)
    for seq in range(1, 6):
        last = await play_step(pool, session_id, seq, says("say"))
    assert len(list(pool.session(session_id).history)) == 5
    await close_session(pool, session_id)
    assert [result.seq for _, result in pool.session(session_id).history] == [4, 5]
    assert await play_step(pool, session_id, 5, says("say")) == last


async def test_ended_session_keeps_all_small_results(pool):
    session_id = await opened(pool)
    for seq in range(1, 6):
        await play_step(pool, session_id, seq, says("note", text="x"))
    await close_session(pool, session_id)
    assert len(list(pool.session(session_id).history)) == 5


class Large(Environment):
    """Ends in every way. ``made`` refers to the environments that are still in memory."""

    made: weakref.WeakSet[Environment]

    def reset(self, sample, rng):
        self.made.add(self)
        return "Go."

    @tool
    def end(self):
        """End."""
        return Done("well", reward=1.0)

    @tool
    async def wait(self):
        """End, later."""
        await asyncio.sleep(0)
        return Done("well", reward=1.0)

    @tool
    def fail(self):
        """Fail."""
        raise RuntimeError("it broke")

    @tool
    async def fail_later(self):
        """Fail, later."""
        await asyncio.sleep(0)
        raise RuntimeError("it broke")


class Closing(Large):
    """Has something to close."""

    def close(self):
        pass


class Asynchronous(Large):
    """Runs on the event loop."""

    blocking = False


class Unprepared(Large):
    """Fails immediately."""

    def reset(self, sample, rng):
        super().reset(sample, rng)
        raise RuntimeError("it broke")


@pytest.fixture
def no_log(monkeypatch):
    """Keep pytest from recording tracebacks, which refer to environments."""
    monkeypatch.setattr(logging.getLogger("agentrl_env"), "disabled", True)


async def released(made):
    """Wait until no environment is in memory."""
    async with asyncio.timeout(60):
        while made:
            gc.collect()
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_log")
@pytest.mark.parametrize("task", [Large, Closing, Asynchronous])
@pytest.mark.parametrize("call", ["end", "wait", "fail", "fail_later", None])
async def test_ended_session_keeps_no_environment_in_memory(task, call):
    made = weakref.WeakSet()
    pool = SessionPool([type("Task", (task,), {"made": made})])
    session_id = (await pool.open(OpenRequest())).session_id
    assert len(made) == 1
    if call is not None:
        with contextlib.suppress(EnvironmentFailed):
            await play_step(pool, session_id, 1, says(call))
    await close_session(pool, session_id)
    assert pool.session(session_id).status.final
    await released(made)
    await pool.aclose()


@pytest.mark.usefixtures("no_log")
async def test_session_that_failed_to_start_keeps_no_environment_in_memory():
    made = weakref.WeakSet()
    pool = SessionPool([type("Task", (Unprepared,), {"made": made})])
    with pytest.raises(EnvironmentFailed):
        await pool.open(OpenRequest())
    await released(made)
    await pool.aclose()
