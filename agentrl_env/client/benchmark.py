"""Load on a server: sessions that are played at once with random calls, and what that took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.client.schema_sampler import CannotSample, sample_call
from agentrl_env.errors import AgentRLError, UnknownTask
from agentrl_env.types import Message, TaskInfo

CALLS_KEPT = 256
"""Calls drawn before the clock starts, and then made again and again."""


class Load(BaseModel):
    """What a measurement found."""

    model_config = ConfigDict(frozen=True)

    task: str
    sessions: int
    seconds: float
    steps: int
    episodes: int
    """Sessions opened."""
    failures: int
    """Calls that ended with an error."""
    first_failure: str | None
    steps_per_s: float
    p50_ms: float
    p99_ms: float
    """Of a step, as its caller sees it."""

    def text(self) -> str:
        """Return it in two lines, and a third where something failed."""
        lines = [
            f"{self.task}: {self.steps_per_s:,.0f} steps/s in {self.sessions} sessions, {self.seconds:.1f} s",
            f"a step took {self.p50_ms:.2f} ms (p50), {self.p99_ms:.2f} ms (p99); "
            f"{self.steps} steps, {self.episodes} episodes, {self.failures} failures",
        ]
        return "\n".join([*lines, f"first failure: {self.first_failure}"] if self.failures else lines)


class _Players:
    """Sessions that begin anew when they end, until they are told to stop."""

    def __init__(self, client: EnvClient, task: TaskInfo, seed: int) -> None:
        self._client = client
        self._task = task
        self._moves = _moves(task, np.random.default_rng(seed))
        self.counting = False
        self.stopping = False
        self.times: list[float] = []
        self.episodes = 0
        self.failures: list[AgentRLError] = []

    async def play(self, player: int) -> None:
        """Play episode after episode; what fails is counted, and the next begins."""
        number = player
        while not self.stopping:
            try:
                async with await self._client.open(self._task.name, seed=number, wait=60.0) as session:
                    self.episodes += self.counting
                    number = await self._episode(session, number)
            except AgentRLError as error:
                self.failures.append(error)
                await asyncio.sleep(0.05)

    async def _episode(self, session: ClientSession, number: int) -> int:
        while not (self.stopping or session.status.final):
            begin = time.perf_counter()
            await session.step(self._moves[number % len(self._moves)])
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
) -> Load:
    """Play ``sessions`` sessions of a task at once for so long; return what that took.

    Args:
        connect: makes the client.
        task: its name; None where the server has one alone.
        sessions: how many at once.
        seconds: how long is measured.
        warmup: seconds before that.
        seed: of the calls and the episodes.

    Raises UnknownTask, ServerUnreachable, and AgentRLError where not one step succeeds.
    """
    return asyncio.run(_measure(connect, task, sessions, seconds, warmup, seed))


async def _measure(
    connect: Callable[[], EnvClient],
    name: str | None,
    sessions: int,
    seconds: float,
    warmup: float,
    seed: int,
) -> Load:
    async with connect() as client:
        task = _chosen(await client.tasks(), name)
        players = _Players(client, task, seed)
        playing = [asyncio.create_task(players.play(number)) for number in range(sessions)]
        await asyncio.sleep(warmup)
        players.counting, begin = True, time.perf_counter()
        await asyncio.sleep(seconds)
        players.counting, took = False, time.perf_counter() - begin
        players.stopping = True
        await asyncio.gather(*playing)
    if not players.times:
        why = f": {players.failures[0]}" if players.failures else "; measure for longer"
        raise AgentRLError(f"not one step of {task.name!r} was answered{why}")
    return Load(
        task=task.name,
        sessions=sessions,
        seconds=took,
        steps=len(players.times),
        episodes=players.episodes,
        failures=len(players.failures),
        first_failure=str(players.failures[0]) if players.failures else None,
        steps_per_s=len(players.times) / took,
        p50_ms=1e3 * float(np.percentile(players.times, 50)),
        p99_ms=1e3 * float(np.percentile(players.times, 99)),
    )


def _chosen(tasks: dict[str, TaskInfo], name: str | None) -> TaskInfo:
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name not in tasks:
        known = ", ".join(tasks) or "none"
        raise UnknownTask(f"choose one with --task; there are: {known}")
    return tasks[name]


def _moves(task: TaskInfo, rng: np.random.Generator) -> list[Message]:
    """Return random moves: calls that fit the tools, or text where the task has none."""
    moves: list[Message] = []
    for _ in range(CALLS_KEPT if task.tools else 0):
        try:
            moves.append(Message.assistant(None, sample_call(task.tools, rng)))
        except CannotSample:
            continue
    return moves or [Message.assistant("hello")]
