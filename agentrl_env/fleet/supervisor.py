"""Several serving processes on one machine: started, watched, started again when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from agentrl_env.errors import ServeError
from agentrl_env.fleet.controller import Fleet
from agentrl_env.server.admin import place_of

logger = logging.getLogger("agentrl_env")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STEADY_S = 30.0
"""A process that has lived so long starts again without delay when it dies."""
KILL_S = 10.0
"""How long a process may take to end, beyond its drain."""


class Workers:
    """``agentrl-env serve`` as child processes that dial the controller of this process.

    A child ends with its parent, even one that was killed: it reads a pipe that then closes.

    Args:
        number: how many.
        fleet: is told at once which server has died.
        arguments: of ``agentrl-env serve``, targets included.
        controller: the address to dial.
        token: what they show it, from ``link_token``.
        drain_s: seconds that open sessions get when the workers are stopped.
    """

    def __init__(
        self,
        number: int,
        fleet: Fleet,
        *,
        arguments: Sequence[str],
        controller: str,
        token: str,
        drain_s: float,
    ) -> None:
        self._number = number
        self._fleet = fleet
        options = ["--host", "none", "--controller", controller, "--drain", str(drain_s), "--stop-with-stdin"]
        self._command = [sys.executable, "-m", "agentrl_env", "serve", *options, *arguments]
        self._environment = {**os.environ, "AGENTRL_TOKEN": token}
        self._drain_s = drain_s
        self._processes: set[asyncio.subprocess.Process] = set()
        self._keeping: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Return once all serve. Raises ServeError where one ends at once."""
        processes = [await self._begin() for _ in range(self._number)]
        ready = await asyncio.gather(*map(_is_ready, processes))
        if not all(ready):
            await self.stop(0.0)
            raise ServeError("a worker ended at once; its last words are above")
        self._keeping = [asyncio.create_task(self._keep(process)) for process in processes]

    async def stop(self, drain_s: float) -> None:
        """Let open sessions end within the drain, then stop all; idempotent."""
        self._stopping = True
        for process in self._processes:
            _signal(process, signal.SIGTERM)
            if drain_s <= 0:
                _signal(process, signal.SIGTERM)  # a second one hurries
        ending = [asyncio.create_task(process.wait()) for process in self._processes]
        if ending:
            await asyncio.wait(ending, timeout=drain_s + KILL_S)
        for process in self._processes:
            _kill_group(process)
        if ending:
            await asyncio.wait(ending)
        for task in self._keeping:
            task.cancel()

    def hurry(self) -> None:
        """Let a ``stop`` under way wait no longer for open sessions."""
        for process in self._processes:
            _signal(process, signal.SIGTERM)

    async def _begin(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )
        self._processes.add(process)
        return process

    async def _keep(self, first: asyncio.subprocess.Process) -> None:
        """Start a process again whenever it dies, at growing intervals where it dies young."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        process: asyncio.subprocess.Process | None = first
        while not self._stopping:
            begin = loop.time()
            try:
                process = process or await self._begin()
                await self._see_out(process)
            except Exception as error:  # whatever it is: nobody else would start a worker in its place
                logger.warning(
                    "no worker could be started: %s; trying again", str(error) or type(error).__name__
                )
            process = None
            pause = FIRST_PAUSE_S if loop.time() - begin > STEADY_S else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _see_out(self, process: asyncio.subprocess.Process) -> None:
        """Return once a process has ended, and the fleet has been told."""
        try:
            await asyncio.gather(_drop_output(process), process.wait())
        finally:
            self._processes.discard(process)
            _kill_group(process)
        if not self._stopping:
            logger.warning("worker %d ended (%s); starting another", process.pid, process.returncode)
            await self._lose(process.pid)

    async def _lose(self, pid: int) -> None:
        place = place_of(pid)
        for member in list(self._fleet.members.values()):
            if member.place == place:
                await self._fleet.roster.lose(member.server_id, "its process ended")


async def _is_ready(process: asyncio.subprocess.Process) -> bool:
    """Return whether a worker says that it serves, before it ends."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"serving "):
            return True
    return False


async def _drop_output(process: asyncio.subprocess.Process) -> None:
    """Read what authors' code prints, so that it never blocks, even where nobody takes it any more."""
    assert process.stdout is not None
    while chunk := await process.stdout.read(65536):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(chunk.decode(errors="replace"))
            sys.stdout.flush()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of a worker and of what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
