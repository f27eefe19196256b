"""Servers started from Python as child processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

import httpx

from agentrl_env.errors import ServeError
from agentrl_env.server.watchdog import KILLED, STUCK_S
from agentrl_env.session.pool import place_of

logger = logging.getLogger("agentrl_env")

_LISTENING = re.compile(rb"serving .* at (https?://\S+)(?: with \d+ workers)?$")
_CONNECTED = re.compile(rb"serving ")
_POLL_S = 0.05
_LATE_S = 30.0
"""Log a warning when a start takes longer than this many seconds."""
_READ_BYTES = 1 << 20
_VERDICT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options that ``ServerProcess`` and ``DockerServer`` share.

    Args:
        token: the token that callers present. With controllers, the token that the server presents to them,
            for which the result of ``link_token`` is enough.
        max_sessions: maximum number of open sessions.
        lease: seconds that a session may be idle.
        drain: seconds that open sessions get to end when the server stops.
        oracle: allow clients to call ``expert``.
        stuck_after: seconds after which the server is killed if its event loop does not run. 0 disables this.
        start_timeout: seconds within which the server must answer. The server ends earlier if ``startup`` or
            ``samples`` takes longer than its task's ``reset_timeout``.
        controllers: ``http://HOST:PORT`` of controllers to connect to. The server then has no address.
        environment: environment variables of the server.
        arguments: further options of ``agentrl-env serve``.
    """

    token: str | None = None
    max_sessions: int = 1024
    lease: float = 900.0
    drain: float = 0.0
    oracle: bool = False
    stuck_after: float = STUCK_S
    start_timeout: float = 600.0
    controllers: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()

    def command_line(self, host: str, port: int, controllers: Sequence[str]) -> list[str]:
        """Return the options of ``agentrl-env serve``: an address or controllers, but not the token."""
        options = ["--host", "none"] if controllers else ["--host", host, "--port", str(port)]
        for controller in controllers:
            options += ["--controller", controller]
        return [*options, *self.session_arguments(), *self.arguments]

    def session_arguments(self) -> list[str]:
        """Return the options of ``agentrl-env serve`` that concern sessions."""
        options = ["--max-sessions", str(self.max_sessions), "--lease", str(self.lease)]
        options += ["--drain", str(self.drain), *(["--oracle"] if self.oracle else [])]
        if self.stuck_after != STUCK_S:
            options += ["--stuck-after", str(self.stuck_after)]
        return options


class ServerHandle(ABC):
    """A server that this process starts, observes and stops. It can be used in a ``with`` block."""

    token: str | None
    url: str = ""
    """URL of the started server. Empty if only controllers reach it."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """True if the server runs."""

    @abstractmethod
    def start(self) -> Self:
        """Start the server, unless it runs, and return once it answers.

        Raises:
            TargetError: the task does not exist.
            ServeError: the server ended or did not answer in time. The message has the end of its output.
        """

    @abstractmethod
    def stop(self) -> None:
        """Drain and stop the server and its child processes. Idempotent."""

    @abstractmethod
    def stop_waiting(self) -> None:
        """End the drain of a concurrent ``stop`` early."""

    @abstractmethod
    def is_at(self, place: str) -> bool:
        """Return True if this running server reports ``place`` as its host and process."""

    def output(self) -> str:
        """Return the server's output since it started. Empty if this process prints the output."""
        return ""

    @abstractmethod
    def end_reason(self) -> str:
        """Return why the server ended: the end of its output, and its exit code."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class ServerProcess(ServerHandle):
    """``agentrl-env serve`` as a child process, on a free port by default.

    Example::

        with ServerProcess("environments/shop", oracle=True) as server:
            client = EnvClient.connect(server.url, token=server.token)

    The child reads a socket from this process and exits when it closes, so it never outlives its parent, even
    if the parent is killed. If the watchdog kills the child, it first writes the sessions that got the child
    stuck to this socket. The child leads its own process group: Ctrl-C does not reach it, and ``stop`` ends
    all its child processes.

    Args:
        targets: targets to serve, as on the command line.
        host: the address to bind.
        port: the port to bind. 0 selects a free port.
        log: file to which the server's output is appended. By default a temporary file.
        forward_output: forward the server's output to this process's standard output and standard error,
            instead of logging it. Output that cannot be written is dropped.
        options: options of ``ServeOptions``. ``environment`` is added to this process's environment.
    """

    def __init__(
        self,
        *targets: str,
        host: str = "127.0.0.1",
        port: int = 0,
        log: Path | None = None,
        forward_output: bool = False,
        **options: Any,
    ) -> None:
        self._options = ServeOptions(**options)
        self.token, controllers = self._options.token, self._options.controllers
        self._arguments = ["--stop-with-stdin", *self._options.command_line(host, port, controllers)]
        self._arguments += ["--", *targets] if targets else []
        self._pattern = _CONNECTED if controllers else _LISTENING
        self._log_path, self._forward_output = log, forward_output
        self._log: IO[Any] | None = None
        self._log_begin = self._log_end = 0
        self._partial_line = b""
        self._announced: re.Match[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id. None after ``stop``."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """True if the child runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server. See ``ServerHandle.start``."""
        if self.running:
            return self
        self._announced, self._partial_line = None, b""
        if not self._forward_output:
            self._log = self._log_path.open("a+b") if self._log_path else tempfile.TemporaryFile()  # noqa: SIM115
            self._log_begin = self._log_end = self._log.seek(0, os.SEEK_END)
        environment = {**os.environ, **self._options.environment, "PYTHONUNBUFFERED": "1"}
        environment.pop("AGENTRL_TOKEN", None)
        if self.token is not None:
            environment["AGENTRL_TOKEN"] = self.token
        self._socket, stdin = socket.socketpair()
        self._socket.setblocking(False)
        with stdin:
            self._process = subprocess.Popen(
                # -P, because a random.py in the working directory would replace Python's own
                [sys.executable, "-P", "-m", "agentrl_env", "serve", *self._arguments],
                stdin=stdin.fileno(),
                stdout=self._log or subprocess.PIPE,
                stderr=subprocess.STDOUT if self._log else None,
                env=environment,
                start_new_session=True,
            )
        if self._process.stdout is not None:
            threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True).start()
        try:
            wait_until_ready(self, self._answers, self._options.start_timeout, "the server")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server and its child processes. Idempotent.

        Args:
            timeout: seconds after the drain until the server is killed.
        """
        if (process := self._process) is not None:
            self.stop_waiting()  # the first signal starts the drain
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed below
                process.wait(self._options.drain + timeout)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def stop_waiting(self) -> None:
        """End the drain of a concurrent ``stop`` early."""
        if (process := self._process) is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def is_at(self, place: str) -> bool:
        """Return True if ``place`` is the child's host name and process id."""
        return self._process is not None and place == place_of(self._process.pid)

    def blocking_sessions(self) -> list[str]:
        """Return, only once, the sessions that might have got a server stuck that its watchdog killed."""
        if self._socket is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                sessions = json.loads(self._socket.recv(_VERDICT_BYTES))
                if isinstance(sessions, list):
                    return [session for session in sessions if isinstance(session, str)]
        return []

    def output(self) -> str:
        """Return at most the last megabyte of the server's output since it started."""
        if self._log is None:
            return ""
        begin = max(self._log_begin, os.fstat(self._log.fileno()).st_size - _READ_BYTES)
        return os.pread(self._log.fileno(), _READ_BYTES, begin).decode(errors="replace")

    def end_reason(self) -> str:
        """Return the server's last output line, and its exit code if it has ended."""
        code = self._process.poll() if self._process is not None else None
        lines = [line for line in self.output().splitlines() if line.strip()] or ["it printed nothing"]
        last = next((line for line in lines if KILLED in line), lines[-1])
        reason = [] if self._forward_output else [last.removeprefix("error: ")]
        return "; ".join([*reason, *([] if code is None else [f"exit code {code}"])])

    def _answers(self) -> bool:
        """Return True if the server has announced itself and answers."""
        while self._log is not None and (chunk := os.pread(self._log.fileno(), _READ_BYTES, self._log_end)):
            self._log_end += len(chunk)
            *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
            for line in lines:
                self._announced = self._announced or self._pattern.match(line)
        if self._announced is None or self._options.controllers:
            return self._announced is not None
        self.url = self._announced[1].decode()
        return healthy(self.url)

    def _forward(self, output: IO[bytes]) -> None:
        """Print the server's output, except its announcement."""
        with output:
            for line in iter(partial(output.readline, 1 << 16), b""):
                if self._announced is None and (found := self._pattern.match(line)):
                    self._announced = found
                    continue
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()


def wait_until_ready(server: ServerHandle, answers: Callable[[], bool], timeout: float, name: str) -> None:
    """Return once ``answers()`` is true. Raises ServeError if the server ends, or at the timeout."""
    begin, told = time.monotonic(), False
    while not answers():
        if not server.running:
            raise ServeError(f"{name} ended: {server.end_reason()}")
        passed = time.monotonic() - begin
        if passed > timeout:
            raise ServeError(
                f"{name} did not answer within {timeout:g} s: {server.end_reason()}; "
                "start_timeout=SECONDS in Python, or environments.start_timeout_s in a training "
                "configuration, waits longer"
            )
        if passed > _LATE_S and not told:
            told = True
            logger.warning("%s has not started after %g s; still waiting", name, _LATE_S)
        time.sleep(_POLL_S)


def healthy(url: str) -> bool:
    """Return True if a server answers ``/health``. Its certificate is not verified."""
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False
