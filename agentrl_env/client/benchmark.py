"""Load test of a server: many concurrent sessions that make random calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.schema_sampler import CannotSample, sample_call
from agentrl_env.errors import AgentRLError
from agentrl_env.types import Message, TaskInfo
from agentrl_env.wire import choose_task

NUM_CALLS = 256
"""Number of random calls, drawn before the measurement and then repeated."""

STOP_S = 10.0
"""Grace period in seconds at the end of the measurement, after which calls are cancelled."""


class LoadResult(BaseModel):
    """The figures of one measurement."""

    model_config = ConfigDict(frozen=True)

    task: str
    sessions: int
    """Number of concurrent sessions."""
    seconds: float
    steps: int
    episodes: int
    """Number of sessions opened."""
    failures: int
    """Number of calls that raised an error."""
    first_failure: str | None
    steps_per_s: float
    p50_ms: float
    """Median latency of a step, measured by the caller."""
    p99_ms: float

    def text(self) -> str:
        """Return the figures in two lines, and a third if a call failed."""
        lines = [
            f"{self.task}: {self.steps_per_s:,.0f} steps/s in {self.sessions} sessions, {self.seconds:.1f} s",
            f"latency of a step: {self.p50_ms:.2f} ms (p50), {self.p99_ms:.2f} ms (p99); "
            f"{self.steps} steps, {self.episodes} episodes, {self.failures} failures",
        ]
        return "\n".join([*lines, f"first failure: {self.first_failure}"] if self.failures else lines)


class _LoadGenerator:
    """Plays one session after another in each slot until ``stopping`` is set."""

    def __init__(self, client: EnvClient, task: TaskInfo, seed: int) -> None:
        self._client = client
        self.task = task.name
        self._calls = _random_calls(task, np.random.default_rng(seed))
        self.counting = False
        self.stopping = False
        self.times: list[float] = []
        self.episodes = 0
        self.failures: list[AgentRLError] = []

    async def play(self, number: int) -> None:
        """Play one episode after another. After an error, count it and continue with the next episode."""
        while not self.stopping:
            try:
                async with await self._client.open(self.task, seed=number, wait=60.0) as session:
                    self.episodes += self.counting
                    number = await self._play_episode(session, number)
            except AgentRLError as error:
                self.failures.append(error)
                await asyncio.sleep(0.05)

    async def _play_episode(self, session: ClientSession, number: int) -> int:
        while not (self.stopping or session.status.final):
            begin = time.perf_counter()
            await session.step(self._calls[number % len(self._calls)])
            if self.counting:
                self.times.append(time.perf_counter() - begin)
            number += 1
        return number


def measure(
    connect: Callable[[], EnvClient],
    *,
    task: str | None,
    sessions: int,
    seconds: float,
    warmup: float = 1.0,
    seed: int = 0,
) -> LoadResult:
    """Play ``sessions`` sessions of a task concurrently and measure the throughput and latency of steps.

    Args:
        connect: Returns the client.
        task: Name of the task. None if there is only one.
        sessions: Number of concurrent sessions.
        seconds: Duration of the measurement.
        warmup: Seconds to run before the measurement starts.
        seed: Seed of the calls and the episodes.

    Raises:
        UnknownTask: The task is not served, or no task is named and several are served.
        ServerUnreachable: The server does not answer.
        AgentRLError: No step succeeded.
    """

    async def play() -> tuple[_LoadGenerator, float]:
        async with connect() as client:
            tasks = await client.tasks()
            load = _LoadGenerator(client, tasks[choose_task(task, tasks)], seed)
            players = [asyncio.create_task(load.play(number)) for number in range(sessions)]
            await asyncio.sleep(warmup)
            load.counting, begin = True, time.perf_counter()
            await asyncio.sleep(seconds)
            load.counting, elapsed = False, time.perf_counter() - begin
            load.stopping = True
            _, stuck = await asyncio.wait(players, timeout=STOP_S)
            for player in stuck:
                player.cancel()
        return load, elapsed

    load, elapsed = asyncio.run(play())
    if not load.times:
        reason = f": {load.failures[0]}" if load.failures else "; measure for longer"
        raise AgentRLError(f"no step of {load.task!r} succeeded{reason}")
    return LoadResult(
        task=load.task,
        sessions=sessions,
        seconds=elapsed,
        steps=len(load.times),
        episodes=load.episodes,
        failures=len(load.failures),
        first_failure=str(load.failures[0]) if load.failures else None,
        steps_per_s=len(load.times) / elapsed,
        p50_ms=1e3 * float(np.percentile(load.times, 50)),
        p99_ms=1e3 * float(np.percentile(load.times, 99)),
    )


def _random_calls(task: TaskInfo, rng: np.random.Generator) -> list[Message]:
    """Return messages with random valid calls, or with text if the task has no tools."""
    calls: list[Message] = []
    for _ in range(NUM_CALLS if task.tools else 0):
        try:
            calls.append(Message.assistant(None, sample_call(task.tools, rng)))
        except CannotSample:
            continue
    return calls or [Message.assistant("hello")]
