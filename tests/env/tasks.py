"""Tasks and helpers shared by the tests of the SDK."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import ClassVar

from agentrl_env import Done, Environment, Message, Reply, StepResult, ToolCall, ToolError, WireError, tool
from agentrl_env.wire import ForkRequest, SessionRequest, StepBatch, StepRequest


class Guess(Environment):
    """Guess a secret number between 1 and 20."""

    max_turns = 8

    def reset(self, sample, rng):
        self.n = int(rng.integers(1, 21))
        return "I picked a number between 1 and 20. Use guess()."

    @tool
    def guess(self, n: int):
        """Guess the number."""
        if n == self.n:
            return Done("Correct!", reward=1.0)
        return "higher" if n < self.n else "lower"

    def expert(self, rng):
        return ToolCall.of("guess", n=self.n)


class Quick(Environment):
    """Pure Python, run on the event loop; one tool for each way a tool can end."""

    max_turns = 6
    blocking = False
    splits = ("train", "test", "empty")

    def reset(self, sample, rng):
        self.notes: list[str] = []
        self.draws = [int(n) for n in rng.integers(0, 1000, 3)]
        return [Message(role="system", content="Be quick."), Message(role="user", content=str(sample.data))]

    @classmethod
    def samples(cls, split):
        return [] if split == "empty" else [{"n": n, "deep": {"list": [n]}} for n in range(10)]

    @tool
    def note(self, text: str):
        """Write something down."""
        self.notes.append(text)
        return f"{len(self.notes)} {self.draws[0]}"

    @tool
    def gain(self, amount: float = 0.5):
        """Earn a reward."""
        return Reply("earned", reward=amount, metrics={"gains": 1.0})

    @tool
    def finish(self, reward: float = 1.0):
        """End the task."""
        return Done("bye", reward=reward)

    @tool
    def refuse(self):
        """Always complain."""
        raise ToolError("not like this")

    @tool
    def crash(self):
        """Break."""
        raise ZeroDivisionError("author bug")

    @tool
    def leave(self):
        """Try to end the process."""
        raise SystemExit(3)

    @tool
    def confuse(self):
        """Return what no tool may return."""
        return 42

    @tool
    def poison(self):
        """Give a reward that is no number."""
        return Reply("x", reward=float("nan"))

    def expert(self, rng):
        return ToolCall.of("finish")


class Slow(Environment):
    """Tools with a duration that the test controls. Records closed instances."""

    tool_timeout = 60.0
    closed: ClassVar[list[Slow]] = []
    gate: ClassVar[asyncio.Event]
    blocker: ClassVar[threading.Event]
    started: ClassVar[threading.Event]

    @classmethod
    def prepare(cls):
        """Reset the state left by earlier tests."""
        cls.closed = []
        cls.gate = asyncio.Event()
        cls.blocker = threading.Event()
        cls.started = threading.Event()

    def __init__(self):
        self.log = self.closed  # the list of the current test
        self.count = 0

    def reset(self, sample, rng):
        return "ready"

    @tool
    async def wait(self):
        """Wait on the event loop."""
        self.started.set()
        await self.gate.wait()
        self.count += 1
        return f"waited {self.count}"

    @tool
    def block(self):
        """Wait on a thread."""
        self.started.set()
        self.blocker.wait(60)
        self.count += 1
        return f"blocked {self.count}"

    @tool(timeout=0.02)
    def block_too_long(self):
        """Wait on a thread, past the timeout."""
        self.blocker.wait(5)
        return "too late"

    @tool(timeout=0.02)
    async def wait_too_long(self):
        """Wait on the event loop, past the timeout."""
        await asyncio.sleep(5)
        return "too late"

    @tool
    def end(self):
        """End the task."""
        return Done("over", reward=1.0)

    def close(self):
        self.log.append(self)


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def until(condition):
    """Wait until a condition holds. Fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        await asyncio.sleep(0.005)


async def play_step(pool, session_id, seq, message):
    """Step a session of a pool."""
    answer = await pool.step(StepRequest(session_id=session_id, seq=seq, message=message))
    return StepResult.model_validate_json(answer)


async def play_many(pool, steps, wait_s=None):
    """Step sessions of a pool. Return results and errors."""
    answers = await pool.step_many(StepBatch(steps=list(steps), wait_s=wait_s))
    return [
        answer if isinstance(answer, WireError) else StepResult.model_validate_json(answer)
        for answer in answers
    ]


async def session_info(pool, session_id):
    """Return the state of a session of a pool."""
    return await pool.info(SessionRequest(session_id=session_id))


async def ask_expert(pool, session_id):
    """Return the expert's next message."""
    return (await pool.expert(SessionRequest(session_id=session_id))).message


async def fork_session(pool, session_id, n=1, request_id=None):
    """Fork a session of a pool."""
    answer = await pool.fork(ForkRequest(session_id=session_id, n=n, request_id=request_id))
    return list(answer.sessions)


async def expire_idle(pool):
    """Expire every session that is idle past its lease, as the pool's sweep does. Return their number."""
    closing = pool._expire(pool.now())
    if closing:
        await asyncio.wait(closing)
    return len(closing)


async def close_session(pool, session_id):
    """Close a session of a pool."""
    await pool.close(SessionRequest(session_id=session_id))
