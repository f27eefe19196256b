"""Supervision of servers on this machine: restart with growing pauses, rolling replacement, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from agentrl_env.errors import AgentRLError
from agentrl_env.launch.process import ServerHandle
from agentrl_env.server.telemetry.logs import escaped

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STEADY_S = 10.0
"""A server that ran for this long restarts after the first pause; earlier ends double the pause."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """One supervised place, and the server that currently fills it.

    Args:
        name: what reports call it.
        make: returns a new server that has not been started.
    """

    name: str
    make: Callable[[], ServerHandle]
    server: ServerHandle | None = None
    state: Literal["starting", "serving", "dead", "stopping"] = "starting"
    restarts: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisor:
    """Starts servers, restarts those that end, and stops all of them.

    Args:
        replicas: the places to fill.
        report: called with one line per event; errors of writing it are ignored.
        on_end: awaited with each server that has ended, before it is replaced.
        poll_s: seconds between checks of a server.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        report: Callable[[str], None],
        on_end: Callable[[ServerHandle], Awaitable[None]] | None = None,
        poll_s: float = 0.5,
    ) -> None:
        self.replicas = replicas
        self._write, self._on_end, self._poll_s = report, on_end, poll_s
        self._threads = ThreadPoolExecutor(max_workers=len(replicas), thread_name_prefix="supervisor")
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once every server serves. Raises AgentRLError if one cannot start; then call ``stop``."""
        filling = [asyncio.create_task(self._fill(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*filling)
        except BaseException:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)
            raise
        self._watching = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def stop(self) -> None:
        """Drain and stop every server; idempotent. Raises the first error."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        servers = [replica.server for replica in self.replicas if replica.server is not None]
        for replica in self.replicas:
            replica.state = "stopping"
        ended = await asyncio.gather(*(self._run(server.stop) for server in servers), return_exceptions=True)
        for replica in self.replicas:
            replica.server = None
        self._threads.shutdown(wait=False)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""
        for replica in self.replicas:
            if replica.server is not None:  # the supervisor's own threads are busy with stop()
                asyncio.get_running_loop().run_in_executor(None, replica.server.stop_waiting)

    async def roll(self) -> None:
        """Replace the servers one by one; each new server serves before the old one drains."""
        for replica in self.replicas:
            async with replica.lock:
                old = replica.server
                await self._fill(replica)
                if old is not None:
                    await self._run(old.stop)
            self.report(f"{replica.name} was replaced")

    def report(self, line: str) -> None:
        """Report an event on one line; errors of writing it are ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._write(escaped(line))

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _fill(self, replica: Replica) -> None:
        """Start a new server for a replica; the caller stops the previous one."""
        server = replica.make()
        try:
            await self._run(server.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(server.stop)  # the executor's thread still runs start()
            raise
        replica.server, replica.state = server, "serving"

    async def _watch(self, replica: Replica) -> None:
        """Restart a replica's server whenever it ends."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        begin = loop.time()
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                async with replica.lock:
                    server = replica.server
                    if server is not None and await self._run(partial(_is_running, server)):
                        continue
                    if server is not None:
                        await self._clear(replica, server)
                    steady = loop.time() - begin > STEADY_S
                    pause = FIRST_PAUSE_S if steady else min(2 * pause, LONGEST_PAUSE_S)
                    await asyncio.sleep(pause)
                    begin, replica.restarts, replica.state = loop.time(), replica.restarts + 1, "starting"
                    await self._fill(replica)
                    self.report(f"{replica.name} serves again")
            except Exception as error:  # nothing else would restart the server
                self.report(f"{replica.name} does not start: {str(error) or type(error).__name__}")

    async def _clear(self, replica: Replica, server: ServerHandle) -> None:
        """Report that a server has ended, and release its resources."""
        replica.state = "dead"
        if self._on_end is not None:
            await self._on_end(server)
        reason = ""
        with contextlib.suppress(AgentRLError):
            reason = f" ({(await self._run(server.end_reason)).splitlines()[0]})"
        self.report(f"{replica.name} ended{reason}; starting another")
        await self._run(server.stop)
        replica.server = None


def _is_running(server: ServerHandle) -> bool:
    return server.running
