"""Ends of episodes, for every combination of overridden methods and for unusual author code."""

import asyncio
import functools
import itertools
import threading

import pytest

from agentrl_env import Done, Environment, Session, SessionStatus, TaskSample, ToolError, tool
from agentrl_env.session.threads import ThreadPool
from agentrl_env.types import Message, ToolCall

THREADS = ThreadPool()
WITH = list(itertools.product([False, True], repeat=4))


def task(*, scores: bool, closes: bool, blocks: bool, timed: bool) -> type[Environment]:
    """Return a task of two turns with or without ``score``, ``close``, threads and a time limit."""

    class Ends(Environment):
        """End, or wait for the last turn."""

        max_turns = 2
        blocking = blocks
        max_seconds = 100.0 if timed else None
        closed = 0

        def reset(self, sample, rng):
            return "go"

        @tool
        def end(self):
            """End at once."""
            return Done("bye", reward=1.0)

        @tool
        def stay(self):
            """Go on."""
            return "hm"

    def score(self):
        return {"success": 1.0}

    def close(self):
        Ends.closed += 1

    if scores:
        Ends.score = score
    if closes:
        Ends.close = close
    return Ends


async def started(environment: type[Environment]) -> Session:
    sample = TaskSample(task=environment.name, seed=1)
    session = Session(environment, sample, session_id="s", threads=THREADS)
    await session.start()
    return session


def says(name: str) -> Message:
    return Message.assistant(None, ToolCall.of(name))


@pytest.mark.parametrize(("scores", "closes", "blocks", "timed"), WITH)
async def test_last_step_returns_its_result_and_closes_the_environment_once(scores, closes, blocks, timed):
    environment = task(scores=scores, closes=closes, blocks=blocks, timed=timed)
    session = await started(environment)
    result = await session.step(says("end"))
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, 1.0)
    assert ("success" in result.metrics) >= scores
    await session.close()
    assert environment.closed == closes
    session = await started(environment)
    assert (await session.step(says("stay"))).status is SessionStatus.RUNNING
    last = await session.step(says("stay"))
    assert last.status is SessionStatus.TRUNCATED_TURNS
    assert await session.step(says("stay"), seq=2) == last
    await session.close()
    assert environment.closed == 2 * closes


class Unreadable(Exception):
    """An exception whose message cannot be read."""

    def __str__(self):
        raise AttributeError("no text")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["plain", "coroutine"])
async def test_exception_without_a_readable_message_fails_the_session(name, blocks):
    class Obscure(Environment):
        """Raises an exception without a readable message."""

        blocking = blocks

        def reset(self, sample, rng):
            return "go"

        @tool
        def plain(self):
            """Break."""
            raise Unreadable

        @tool
        async def coroutine(self):
            """Break."""
            raise Unreadable

    session = await started(Obscure)
    async with asyncio.timeout(30):
        result = await session.step(says(name))
    assert result.status is SessionStatus.FAILED_ENVIRONMENT
    assert result.info["error"]["message"].startswith("Unreadable: its text cannot be read (tests/env/")
    assert session.turn == 1


class Panic(BaseException):
    """An exception that is not an Exception, as Rust extensions raise."""


def panicking(kind):
    def text(self):
        raise Panic

    return type("Panicking", (kind,), {"__str__": text})()


@pytest.mark.parametrize("kind", [ValueError, ToolError])
async def test_exception_whose_message_raises_a_base_exception_fails_the_session(kind):
    class Obscure(Environment):
        """Raises an exception whose message raises another one."""

        def reset(self, sample, rng):
            return "go"

        @tool
        def panic(self):
            """Break."""
            raise panicking(kind)

    session = await started(Obscure)
    result = await session.step(says("panic"))
    assert (result.status, session.turn) == (SessionStatus.FAILED_ENVIRONMENT, 1)


def noted(function):
    """Wrap a tool in a plain function, like decorators without support for coroutines."""

    @functools.wraps(function)
    def inner(*arguments, **named):
        return function(*arguments, **named)

    return inner


@pytest.mark.parametrize("blocks", [False, True])
async def test_coroutine_in_a_plain_decorator_is_awaited_with_a_timeout(blocks):
    class Wrapped(Environment):
        """Tools in a plain decorator."""

        blocking = blocks
        tool_timeout = 0.2

        def reset(self, sample, rng):
            return "go"

        @tool
        @noted
        async def quick(self):
            """Say so."""
            return "quick"

        @tool
        @noted
        async def endless(self):
            """Never end."""
            await asyncio.Event().wait()

    session = await started(Wrapped)
    async with asyncio.timeout(30):
        assert (await session.step(says("quick"))).messages[0].content == "quick"
        late = await session.step(says("endless"))
    assert late.status is SessionStatus.FAILED_ENVIRONMENT
    assert "still running after 0.2 s" in late.info["error"]["message"]


async def test_awaitable_returned_by_a_plain_tool_has_a_timeout():
    class Lazy(Environment):
        """A plain tool that returns an awaitable."""

        tool_timeout = 0.2

        def reset(self, sample, rng):
            return "go"

        @tool
        def endless(self):
            """Never end."""
            return asyncio.Event().wait()

    session = await started(Lazy)
    async with asyncio.timeout(30):
        late = await session.step(says("endless"))
    assert late.status is SessionStatus.FAILED_ENVIRONMENT


async def test_environment_constructed_after_its_opening_was_cancelled_is_closed():
    making, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Environment):
        """``__init__`` waits until the test releases it."""

        def __init__(self):
            making.set()
            go_on.wait()

        def reset(self, sample, rng):
            return "go"

        def close(self):
            closed.set()

    session = Session(Slow, TaskSample(task="slow", seed=1), session_id="s", threads=THREADS)
    opening = asyncio.create_task(session.start())
    await asyncio.to_thread(making.wait)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(30):
        await closing
    assert closed.is_set()
