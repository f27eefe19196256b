"""Honest clients that play episodes during the attacks and detect any failure."""

from __future__ import annotations

import asyncio
import time
from random import Random

from agentrl_env import EnvClient, SessionStatus, ToolCall
from agentrl_env.client.client import ClientSession
from agentrl_env.errors import AgentRLError, RateLimited, ServerDraining, ServerFull, StateUnavailable
from agentrl_env.types import StepResult
from tests.hostile.account import Account
from tests.hostile.site import Site
from tests.hostile.tasks import PRIVATE

PATIENCE_S = 90.0
"""Seconds that a neighbour waits for one call with its retries (``Site.within``). Several sessions can
block its worker one after another, each until the watchdog replaces the worker after ten seconds.
"""
CALL_S = 900.0
"""Client timeout in wall-clock seconds."""
EVERY = ("tally", "thread_tally", "agent", "socket")
KINDS = {"single": EVERY, "workers": EVERY, "fleet": EVERY, "threads": ("tally", "agent", "socket")}
"""Kinds of neighbours on each layout. Sandbox layouts also have a shell."""
THINK_S = 0.15
ENDING_S = 90.0
BUSY = (ServerFull, ServerDraining, StateUnavailable, RateLimited)
"""Errors after which an opening is retried."""


class Lost(Exception):
    """Raised if an episode goes wrong. The message gives the reason."""


class Neighbours:
    """Players on one site: over HTTP, over a WebSocket, and with an agent token.

    Args:
        site: the servers to play on.
        account: counts played and lost episodes.
        rng: source of random choices.
    """

    def __init__(self, site: Site, account: Account, rng: Random) -> None:
        self._site, self._account = site, account
        self._over = asyncio.Event()
        self.slowest_s = 0.0
        """Longest time that a call took."""
        kinds = KINDS.get(site.name, ("shell", "tally"))
        self._playing = [asyncio.create_task(self._play(kind, Random(rng.random()))) for kind in kinds]

    async def stop(self) -> None:
        """Wait for the running episodes to end."""
        self._over.set()
        _, late = await asyncio.wait(self._playing, timeout=ENDING_S)
        for task in late:
            self._lose("an episode did not end")
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _lose(self, what: str) -> None:
        self._account.find("neighbours_lost", what, *self._site.running)

    async def _play(self, kind: str, rng: Random) -> None:
        urls = ",".join(self._site.urls)
        address = urls.replace("http://", "ws://") if kind == "socket" else urls
        async with EnvClient.connect(address, token=self._site.token, timeout=CALL_S) as client:
            while not self._over.is_set():
                try:
                    await self._episode(client, kind, rng)
                    self._account.neighbours_played += 1
                except (Lost, AgentRLError) as error:
                    name = type(error).__name__
                    self._lose(f"{kind}: {name}: {error}")
                    await asyncio.sleep(1.0)

    async def _episode(self, client: EnvClient, kind: str, rng: Random) -> None:
        task = kind if kind in ("thread_tally", "shell") else "tally"
        secret = f"{PRIVATE}{rng.randbytes(8).hex()}"
        session = await self._open(client, task, secret)
        if kind == "agent":
            urls = ",".join(self._site.urls)
            async with EnvClient.connect(urls, token=session.agent_token, timeout=CALL_S) as agent:
                await self._steps(await agent.resume(session.session_id), rng)
        elif kind == "shell":
            await self._commands(session, secret, rng)
        else:
            await self._steps(session, rng)

    async def _open(self, client: EnvClient, task: str, secret: str) -> ClientSession:
        refused = None
        try:
            async with self._site.within(PATIENCE_S):
                while True:
                    try:
                        return await client.open(task, sample={"secret": secret}, wait=5.0)
                    except BUSY as error:
                        refused = error
                        await asyncio.sleep(0.5)
        except TimeoutError:
            raise Lost(f"no session opened in {PATIENCE_S:g} s: {refused}") from refused

    async def _steps(self, session: ClientSession, rng: Random) -> None:
        total = 0
        for _ in range(rng.randint(3, 8)):
            number = rng.randrange(1000)
            total += number
            await self._step(session, rng, ToolCall.of("add", n=number), str(total))
        result = await self._step(session, rng, ToolCall.of("finish"), str(total))
        if result.reward != 1.0:
            raise Lost(f"a reward of {result.reward} in place of 1")

    async def _commands(self, session: ClientSession, secret: str, rng: Random) -> None:
        for number in range(rng.randint(2, 4)):
            command = f"cat mine.txt; echo {number} >>log; wc -l <log"
            expected = f"{secret}\n{number + 1}"
            await self._step(session, rng, ToolCall.of("run", command=command), expected)
        await self._step(session, rng, ToolCall.of("finish"), "bye")

    async def _step(self, session: ClientSession, rng: Random, call: ToolCall, expected: str) -> StepResult:
        """Play one step. Raises Lost if the answer is unexpected."""
        await asyncio.sleep(rng.uniform(0, THINK_S))
        begin = time.monotonic()
        try:
            async with self._site.within(PATIENCE_S):
                while True:
                    try:
                        result = await session.step(call)
                        break
                    except StateUnavailable:
                        await asyncio.sleep(0.5)
        except TimeoutError:
            raise Lost(f"a step was not answered within {PATIENCE_S:g} s") from None
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
        status = SessionStatus.COMPLETED if call.function.name == "finish" else SessionStatus.RUNNING
        text = result.messages[-1].content if result.messages else None
        if (result.status, text) != (status, expected):
            raise Lost(f"{result.status} {str(text)[:120]!r} in place of {status} {expected!r}")
        return result
