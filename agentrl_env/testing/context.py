"""What a check works with: one task of one client, a clock, and a list of what is still open."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError, ServerFull
from agentrl_env.testing.rollouts import Policy, Transcript, advance
from agentrl_env.types import TaskInfo

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for sessions that hang to close; no more than a check may take."""
WAIT = 5.0
"""Seconds to wait for a free session on a full server."""
ENDLESS = 1_000
"""Indices below this are asked for where a split never ends."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """One task under test; ``deadline`` is the seconds each check may take."""

    client: EnvClient
    task: TaskInfo
    deadline: float
    clock: Callable[[], float] = time.monotonic
    doing: str = ""
    """What the check waits for right now: the evidence when it never comes."""
    transcripts: list[Transcript] = field(default_factory=list)
    """Every episode played so far, by any check."""
    _open: list[ClientSession] = field(default_factory=list)
    _begin: float = 0.0

    @property
    def has_expert(self) -> bool:
        """Whether the oracle can be asked."""
        return "expert" in self.task.capabilities

    def begin(self) -> None:
        """Start the clock of a new check."""
        self._begin, self.doing = self.clock(), ""

    def while_time(self, items: Iterable[T], least: int = 2) -> Iterator[T]:
        """Yield items until half of the deadline is used, but ``least`` of them in any case."""
        for count, item in enumerate(items):
            if count >= least and self.clock() - self._begin > self.deadline / 2:
                return
            yield item

    def size(self, split: str) -> int | None:
        """Return the number of samples of a split; None where it never ends."""
        info = self.task.splits.get(split)
        return info.num_samples if info else None

    def indices(self, count: int, split: str = "train") -> list[int]:
        """Choose up to ``count`` different indices, spread over the split, the same every time."""
        size = self.size(split)
        total = ENDLESS if size is None else size
        return random.Random(0).sample(range(total), min(count, total))

    async def open(
        self, index: int | str | None, seed: int | None = None, split: str = "train"
    ) -> ClientSession:
        """Open a session that is closed at the end of the check at the latest."""
        self.doing = f"reset() of sample {split}/{index}"
        session = await self.client.open(self.task.name, split=split, index=index, seed=seed, wait=WAIT)
        self._open.append(session)
        return session

    async def fork(self, session: ClientSession, n: int) -> list[ClientSession]:
        """Fork a session; the forks are closed like those that were opened."""
        self.doing = f"fork of a session after turn {session.turn}"
        forks = await session.fork(n)
        self._open += forks
        return forks

    async def play(
        self, policy: Policy, index: int | None, seed: int | None = None, split: str = "train"
    ) -> Transcript:
        """Play one episode, to its end or as far as the policy goes."""
        session = await self.open(index, seed, split)
        transcript = Transcript(sample=session.sample, opening=session.messages)
        self.transcripts.append(transcript)
        while await self.advance(session, policy, transcript):
            pass
        self.doing = f"close() of {transcript.name}"
        await session.close()
        self._open.remove(session)
        return transcript

    async def advance(self, session: ClientSession, policy: Policy, transcript: Transcript) -> bool:
        """Play one turn of one session."""
        self.doing = f"turn {len(transcript.turns) + 1} of {transcript.name}"
        return await advance(session, policy, transcript)

    async def play_interleaved(self, episodes: Sequence[tuple[Policy, int, int]]) -> list[Transcript]:
        """Play (policy, index, seed) episodes at the same time, turn by turn.

        On a server with less room the first few are played, as many as there is room for.
        """
        sessions: list[ClientSession] = []
        try:
            for _, index, seed in episodes:
                sessions.append(await self.open(index, seed))
        except ServerFull:
            if not sessions:
                raise
        transcripts = [Transcript(sample=s.sample, opening=s.messages) for s in sessions]
        self.transcripts += transcripts
        going = True
        while going:
            turns = (
                self.advance(session, policy, transcript)
                for (policy, _, _), session, transcript in zip(episodes, sessions, transcripts, strict=False)
            )
            going = any(await asyncio.gather(*turns))
        await self.close_all()
        return transcripts

    async def close_all(self) -> None:
        """Close what a check left open, hanging sessions included, within a few seconds."""
        sessions, self._open = self._open, []
        closing = [asyncio.create_task(_close(session)) for session in sessions]
        if closing:
            _, pending = await asyncio.wait(closing, timeout=min(CLOSE_TIMEOUT, self.deadline))
            for task in pending:
                task.cancel()


async def _close(session: ClientSession) -> None:
    try:
        await session.close()
    except AgentRLError:
        return  # the check has its verdict; a server that is gone has nothing left to close
