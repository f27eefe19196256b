"""The context of a check: one task of a client, a deadline, and the sessions to close afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError, ServerFull
from agentrl_env.testing.rollouts import Policy, Rollout, advance
from agentrl_env.types import TaskInfo

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for hanging sessions to close; at most the deadline of a check."""
WAIT = 5.0
"""Seconds to wait for a free session on a full server."""
ENDLESS = 1_000
"""Indices of an endless split are drawn below this."""


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """One task under test. Each check may take ``deadline`` seconds."""

    client: EnvClient
    task: TaskInfo
    deadline: float
    clock: Callable[[], float] = time.monotonic
    doing: str = ""
    """The call that the check is waiting for, reported if the deadline passes."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The episodes played so far, by all checks."""
    _open: list[ClientSession] = field(default_factory=list)
    _begin: float = 0.0

    @property
    def has_expert(self) -> bool:
        """True if the client offers the task's expert."""
        return "expert" in self.task.capabilities

    def begin(self) -> None:
        """Start the clock of a new check."""
        self._begin, self.doing = self.clock(), ""

    def while_time(self, items: Iterable[T], least: int = 2) -> Iterator[T]:
        """Yield items until half of the deadline has passed, but at least ``least`` of them."""
        for count, item in enumerate(items):
            if count >= least and self.clock() - self._begin > self.deadline / 2:
                return
            yield item

    def size(self, split: str) -> int | None:
        """Return the number of samples of a split, or None if it is endless."""
        info = self.task.splits.get(split)
        return info.num_samples if info else None

    def indices(self, count: int, split: str = "train") -> list[int]:
        """Return up to ``count`` different indices, spread over the split and always the same."""
        size = self.size(split)
        total = ENDLESS if size is None else size
        return random.Random(0).sample(range(total), min(count, total))

    async def open(
        self, index: int | str | None, seed: int | None = None, split: str = "train"
    ) -> ClientSession:
        """Open a session, which is closed at the end of the check."""
        self.doing = f"reset() of sample {split}/{index}"
        session = await self.client.open(self.task.name, split=split, index=index, seed=seed, wait=WAIT)
        self._open.append(session)
        return session

    async def fork(self, session: ClientSession, n: int) -> list[ClientSession]:
        """Fork a session; the forks are closed at the end of the check."""
        self.doing = f"fork of a session after turn {session.turn}"
        forks = await session.fork(n)
        self._open += forks
        return forks

    async def play(
        self, policy: Policy, index: int | None, seed: int | None = None, split: str = "train"
    ) -> Rollout:
        """Play one episode until it ends or the policy stops."""
        session = await self.open(index, seed, split)
        rollout = Rollout(sample=session.sample, opening=session.messages)
        self.rollouts.append(rollout)
        await self.play_on(session, policy, rollout)
        self.doing = f"close() of {rollout.name}"
        await session.close()
        self._open.remove(session)
        return rollout

    async def play_on(self, session: ClientSession, policy: Policy, rollout: Rollout) -> None:
        """Continue an episode until it ends or the policy stops."""
        while await self._advance(session, policy, rollout):
            continue

    async def play_interleaved(self, episodes: Sequence[tuple[Policy, int, int]]) -> list[Rollout]:
        """Play episodes, given as (policy, index, seed), concurrently and turn by turn.

        If the server is full, only those that could be opened are played.
        """
        sessions: list[ClientSession] = []
        try:
            for _, index, seed in episodes:
                sessions.append(await self.open(index, seed))
        except ServerFull:
            if not sessions:
                raise
        rollouts = [Rollout(sample=s.sample, opening=s.messages) for s in sessions]
        self.rollouts += rollouts
        running = True
        while running:
            turns = (
                self._advance(session, policy, rollout)
                for (policy, _, _), session, rollout in zip(episodes, sessions, rollouts, strict=False)
            )
            running = any(await asyncio.gather(*turns))
        await self.close_all()
        return rollouts

    async def close_all(self) -> None:
        """Close the sessions that the check left open; cancel those that do not close in time."""
        sessions, self._open = self._open, []
        closing = [asyncio.create_task(_close(session)) for session in sessions]
        if closing:
            _, pending = await asyncio.wait(closing, timeout=min(CLOSE_TIMEOUT, self.deadline))
            for task in pending:
                task.cancel()

    async def _advance(self, session: ClientSession, policy: Policy, rollout: Rollout) -> bool:
        self.doing = f"turn {len(rollout.turns) + 1} of {rollout.name}"
        return await advance(session, policy, rollout)


async def _close(session: ClientSession) -> None:
    with contextlib.suppress(AgentRLError):  # the verdict of the check does not depend on it
        await session.close()
