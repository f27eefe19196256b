"""The last turn is answered whatever a task overrides, and whatever its code raises or wraps."""

import asyncio
import functools
import itertools
import threading

import pytest

from agentrl_env import Done, Environment, Session, SessionStatus, TaskSample, tool
from agentrl_env.session.executor import ThreadPool
from agentrl_env.types import Message, ToolCall

THREADS = ThreadPool()
WITH = list(itertools.product([False, True], repeat=4))


def task(*, scores: bool, closes: bool, blocks: bool, timed: bool) -> type[Environment]:
    """Return a task of two turns with or without a score, something to close, threads, a time limit."""

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
async def test_the_last_turn_is_answered_and_the_environment_closed_once(scores, closes, blocks, timed):
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
    """An error that cannot say what it is."""

    def __str__(self):
        raise AttributeError("no text")


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["plain", "coroutine"])
async def test_an_error_that_cannot_be_read_ends_the_episode_as_any_other(name, blocks):
    class Obscure(Environment):
        """Break without a word."""

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
    assert result.info["error"]["message"] == "Unreadable: its text cannot be read"
    assert session.turn == 1


def noted(function):
    """Wrap a tool as decorators do that know nothing of coroutines."""

    @functools.wraps(function)
    def inner(*arguments, **named):
        return function(*arguments, **named)

    return inner


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_coroutine_below_a_plain_decorator_is_awaited_and_has_a_deadline(blocks):
    class Wrapped(Environment):
        """Be wrapped."""

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


async def test_what_a_plain_tool_returns_to_be_awaited_has_the_deadline_too():
    class Lazy(Environment):
        """Return what is still to be done."""

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


async def test_an_environment_that_was_still_being_made_when_its_opening_was_given_up_is_closed():
    making, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Environment):
        """Take long to be made."""

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
