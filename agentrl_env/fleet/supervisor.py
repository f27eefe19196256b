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
from agentrl_env.server.telemetry.logs import escape

T = TypeVar("T")

MAX_THREADS = 1024
"""Maximum number of servers that start or stop at the same time, each on its own thread."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STEADY_S = 10.0
"""A server that ran for this many seconds restarts after the shortest pause. Earlier ends double it."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """A supervised server, which is replaced by a new one when it ends.

    Args:
        name: name in reports.
        make: returns a new server that has not been started.
    """

    name: str
    make: Callable[[], ServerHandle]
    server: ServerHandle | None = None
    state: Literal["starting", "serving", "dead", "stopping"] = "starting"
    restarts: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Supervisor:
    """Starts servers, restarts any that end, and stops all of them.

    Args:
        replicas: the servers to run.
        report: called with one line per event. Errors in writing it are ignored.
        on_end: awaited with each server that has ended, before it is replaced.
        retire: stops placing sessions on a replaced server and returns the number of its open sessions, which
            the supervisor waits for. By default the server is stopped immediately.
        poll_s: seconds between checks of a server.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        report: Callable[[str], None],
        on_end: Callable[[ServerHandle], Awaitable[None]] | None = None,
        retire: Callable[[ServerHandle], int] = lambda server: 0,
        poll_s: float = 0.5,
    ) -> None:
        self.replicas = list(replicas)
        self._write, self._on_end, self._retire, self._poll_s = report, on_end, retire, poll_s
        self._threads = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="supervisor")
        self._watching: dict[str, asyncio.Task[None]] = {}
        """The task that restarts each replica, by its name."""
        self._retiring: dict[asyncio.Task[None], ServerHandle] = {}
        """Servers that were replaced or removed and are finishing their sessions."""

    async def start(self) -> None:
        """Return once every server serves. Raises AgentRLError if one cannot start. Then call ``stop``."""
        filling = [asyncio.create_task(self._fill(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*filling)
        except BaseException:
            for task in filling:
                task.cancel()
            await asyncio.gather(*filling, return_exceptions=True)
            raise
        for replica in self.replicas:
            self._start_watching(replica)

    async def stop(self) -> None:
        """Drain and stop every server. Idempotent. Raises the first error."""
        servers = self._servers()
        tasks = [*self._watching.values(), *self._retiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        servers = list({*servers, *self._servers()})
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
        """End the drain of a concurrent ``stop`` early."""
        for server in self._servers():  # the supervisor's own threads are busy with stop()
            asyncio.get_running_loop().run_in_executor(None, server.stop_waiting)

    async def roll(self, replicas: Sequence[Replica] | None = None) -> None:
        """Replace servers one after another, by default all of them.

        The old server gets new sessions until the new one serves. It is stopped once its sessions have
        ended.
        """
        for replica in list(self.replicas) if replicas is None else replicas:
            async with replica.lock:
                old = replica.server
                await self._fill(replica)
                if old is not None:
                    self._start_retiring(replica.name, old)
            self.report(f"{replica.name} was replaced")

    async def add(self, replica: Replica) -> None:
        """Start another server. A failed start is repeated, like the restart of a server that ended."""
        self.replicas.append(replica)
        try:
            await self._fill(replica)
        except AgentRLError as error:
            self.report(f"{replica.name} does not start: {error}")
        else:
            self.report(f"{replica.name} was added")
        self._start_watching(replica)

    async def remove(self, replica: Replica) -> None:
        """Remove a server. It is stopped once its sessions have ended."""
        watching = self._watching.pop(replica.name)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self.replicas.remove(replica)
        if replica.server is not None:
            self._start_retiring(replica.name, replica.server)
        self.report(f"{replica.name} was removed")

    def report(self, line: str) -> None:
        """Report an event on one line. Errors in writing it are ignored."""
        with contextlib.suppress(OSError, ValueError):
            self._write(escape(line))

    def _servers(self) -> list[ServerHandle]:
        """Return all running servers, including the replaced ones that are finishing their sessions."""
        filled = [replica.server for replica in self.replicas if replica.server is not None]
        return [*filled, *self._retiring.values()]

    def _start_watching(self, replica: Replica) -> None:
        self._watching[replica.name] = asyncio.create_task(self._watch(replica))

    def _start_retiring(self, name: str, server: ServerHandle) -> None:
        open_sessions = self._retire(server)
        if open_sessions:
            self.report(f"the previous server of {name} finishes {open_sessions} sessions")
        task = asyncio.create_task(self._finish(server))
        self._retiring[task] = server
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def _finish(self, server: ServerHandle) -> None:
        """Stop a server once it or all of its sessions have ended."""
        while self._retire(server):
            await asyncio.sleep(self._poll_s)
            if not await self._run(partial(_is_running, server)):
                if self._on_end is not None:
                    await self._on_end(server)
                break
        await self._run(server.stop)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _fill(self, replica: Replica) -> None:
        """Start a new server for a replica. The caller stops the previous one."""
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
