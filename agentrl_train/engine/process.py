"""One engine in a separate process group: start, requests, liveness and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.rpc import Frame, receive, send
from agentrl_train.errors import ConstraintError, EngineError
from agentrl_train.telemetry.watchdog import searches_working_directory

STOP_S = 10.0
"""Grace period for an engine to exit."""
GROUP_S = 3.0
"""Timeout for killing the rest of its process group."""
LOG_TAIL = 8000
"""Number of characters of the engine's output to search for the error that ended it."""
ERROR_LENGTH = 500
_ERROR = re.compile(r"(\(.*\) )?[\w.]*(Error|Exception)\b(?!.*initialization failed)")


class EngineLink(Protocol):
    """Connection to an engine process, local or remote. It belongs to one event loop."""

    beat: Frame
    """The last heartbeat."""
    lost: asyncio.Future[str]
    """Resolves to the reason once the engine is lost."""

    @property
    def process_id(self) -> int:
        """Return the pid of the engine on its machine."""
        ...

    async def start(self, *, within_s: float) -> None:
        """Start the engine and wait until it is ready; raises ``EngineError``."""
        ...

    async def ask(self, operation: str, **fields: Any) -> Frame:
        """Return the answer to a request; raises ``EngineLost`` or ``EngineError``."""
        ...

    async def load(self, operation: str, **fields: Any) -> Frame:
        """Send a request that blocks the engine, and suspend the heartbeat timeout meanwhile."""
        ...

    def check(self) -> None:
        """Mark the engine as lost if it exceeded the heartbeat timeout."""
        ...

    async def stop(self) -> None:
        """Stop the engine and its child processes; idempotent."""
        ...


class Spawn(Protocol):
    """Interface: creates engine processes. ``EngineProcess`` itself creates local ones."""

    def __call__(self, options: ServingOptions, *, python: str, liveness_s: float) -> EngineLink:
        """Return an engine that has not been started."""
        ...


class EngineLost(Exception):
    """The engine process is lost, together with its requests in progress."""


class EngineProcess:
    """A local engine process. It belongs to one event loop.

    Args:
        options: options of the engine.
        python: interpreter of the process.
        liveness_s: heartbeat timeout; an engine sends four heartbeats a second.
    """

    def __init__(self, options: ServingOptions, *, python: str, liveness_s: float) -> None:
        self._options = options
        self._python = python
        self._liveness_s = liveness_s
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``stop``)
        self._last_heartbeat = time.monotonic()
        self._loading = False
        self._reading: asyncio.Task[None] | None = None
        self.beat: Frame = {}
        self.serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, *, within_s: float) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            EngineError: the engine did not start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (returns as soon as it has started)
                [
                    self._python,
                    "-m",
                    self._options.module,
                    str(theirs.fileno()),
                    json.dumps(asdict(self._options)),
                ],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**_own_environment(), **self._options.environment},
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))
        await asyncio.wait([self.lost, self.serving], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if self.lost.done():
            raise EngineError(f"the engine did not start: {self.lost.result()}")
        if not self.serving.done():
            raise EngineError(f"the engine did not start within {within_s:g} s: {self._last_error()}")

    @property
    def process_id(self) -> int:
        """Return the pid of the engine, the leader of its process group."""
        return self._process.pid

    async def ask(self, operation: str, **fields: Any) -> Frame:
        """Send a request and return its answer; cancellation aborts the request.

        Raises:
            EngineLost: the engine is lost.
            EngineError: the engine rejected the request.
        """
        if self.lost.done():
            raise EngineLost(self.lost.result())
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            send(self._writer, {"op": operation, "id": number, **fields})
            frame = await answer
        except asyncio.CancelledError:
            send(self._writer, {"op": "abort", "id": number})
            raise
        finally:
            self._answers.pop(number, None)
        if "error" in frame:
            kind = ConstraintError if frame.get("constraint") else EngineError
            raise kind(f"the engine rejected the request: {frame['error']}")
        return frame

    async def load(self, operation: str, **fields: Any) -> Frame:
        """Send a request that blocks the engine, and suspend the heartbeat timeout meanwhile."""
        self._loading = True
        try:
            return await self.ask(operation, **fields)
        finally:
            self._loading = False
            self._last_heartbeat = time.monotonic()

    def check(self) -> None:
        """Mark the engine as lost if it exceeded the heartbeat timeout."""
        silence = time.monotonic() - self._last_heartbeat
        if self.serving.done() and not self._loading and silence > self._liveness_s:
            self._lose(f"it sent no heartbeat for {silence:.0f} s")

    async def stop(self) -> None:
        """Stop the engine and its child processes; idempotent."""
        if self._log.closed:
            return
        if self._reading is not None:
            self._writer.close()  # the engine exits once the connection is closed
            self._reading.cancel()
            limit = STOP_S if not self.lost.done() else 0.0
            await asyncio.to_thread(_end, self._process, limit)
        self._lose("it was stopped")
        self._log.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await receive(reader)) is not None:
            self._last_heartbeat = time.monotonic()
            if frame.get("event") == "beat":
                self.beat = frame
                if not self.serving.done():
                    self.serving.set_result("")
            elif (answer := self._answers.get(frame["id"])) is not None and not answer.done():
                answer.set_result(frame)
        self._lose(self._last_error())

    def _lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineLost(reason))

    def _last_error(self) -> str:
        """Return the last error in the output of the engine."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL, max(0, size - LOG_TAIL)).decode(errors="replace")
        lines = [line.strip() for line in tail.splitlines()]
        errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
        return " ".join(lines[errors[-1] :])[:ERROR_LENGTH] if errors else "its process ended"


def _own_environment() -> dict[str, str]:
    """Return the environment without the rendezvous variables of torch.distributed.

    The engine and its child processes import modules from the same places as this process.
    """
    rendezvous = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
    own = {name: value for name, value in os.environ.items() if not rendezvous.fullmatch(name)}
    return own if searches_working_directory() else own | {"PYTHONSAFEPATH": "1"}


def _end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a process to exit, then kill the rest of its process group."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    # The resource tracker of multiprocessing cleans up after the others exit: it is killed last.
    for spared in ("resource_tracker", None):
        deadline = time.monotonic() + GROUP_S
        while (members := _members(process.pid)) and time.monotonic() < deadline:
            for number, command in members.items():
                if spared is None or spared not in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)
    process.wait()


def _members(group: int) -> dict[int, str]:
    """Return the processes of a group: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # the process exited meanwhile
                # Fields after the name, which may contain anything: state, parent, group.
                if (folder / "stat").read_text().rpartition(")")[2].split()[2] == str(group):
                    found[int(folder.name)] = (folder / "cmdline").read_text()
    return found
