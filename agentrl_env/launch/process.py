"""Servers started from Python: as a child process, or on a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

import httpx

from agentrl_env.errors import ServeError

if TYPE_CHECKING:
    from agentrl_env.environment import Environment
    from agentrl_env.server.serve import EnvServer

_LISTENING = re.compile(rb"^serving .* at (http://\S+)$", flags=re.MULTILINE)
_CONNECTED = re.compile(rb"^serving ", flags=re.MULTILINE)
_POLL_S = 0.02
_READ_BYTES = 1 << 20


class ServerHandle(Protocol):
    """A server that can be started, observed and stopped.

    ``ServerProcess``, ``ServerThread`` and ``DockerServer`` implement it.
    """

    token: str | None
    url: str

    @property
    def running(self) -> bool:
        """True if the server runs."""

    def start(self) -> Self:
        """Return once the server answers. Raises ServeError with the end of its output otherwise."""

    def stop(self) -> None:
        """Drain and stop the server and its child processes; idempotent."""

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""

    def output(self) -> str:
        """Return what the server has printed."""

    def end_reason(self) -> str:
        """Return why the server ended: the end of its output, and its exit code."""

    def __enter__(self) -> Self:
        """Start the server."""

    def __exit__(self, *exc: object) -> None:
        """Stop the server."""


class ServerProcess:
    """``agentrl-env serve`` as a child process, on a free port by default.

    Example::

        with ServerProcess("environments/shop", oracle=True) as server:
            client = EnvClient.connect(server.url, token=server.token)

    The child reads a pipe from this process and exits when it closes, so it never outlives its parent, not
    even a killed one. It leads its own process group: Ctrl-C does not reach it, and ``stop`` ends all its
    child processes.

    Args:
        targets: what to serve, as on the command line.
        host: the address to bind.
        port: the port to bind; 0 selects a free one.
        token: the token of callers; with controllers, the server's token for them.
        max_sessions: maximum number of open sessions.
        lease: seconds a session may be idle.
        drain: seconds that open sessions get to end when the server stops.
        oracle: whether clients may call ``expert``.
        start_timeout: seconds until the server must answer.
        log: file that the server's output is appended to; a temporary one by default.
        forward_output: print the server's standard output on this process's and share its standard error,
            instead of logging them; output that cannot be written is dropped.
        controllers: URLs of controllers to connect to; the server then has no address of its own.
        environment: additional environment variables of the server.
        arguments: further options of ``agentrl-env serve``.
    """

    def __init__(
        self,
        *targets: str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_sessions: int = 1024,
        lease: float = 900.0,
        drain: float = 0.0,
        oracle: bool = False,
        start_timeout: float = 60.0,
        log: Path | None = None,
        forward_output: bool = False,
        controllers: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.token = token
        self.url = ""
        """URL of the server, once it is started."""
        address = ["--host", "none"] if controllers else ["--host", host, "--port", str(port)]
        for controller in controllers:
            address += ["--controller", controller]
        options = [*address, "--max-sessions", str(max_sessions), "--lease", str(lease)]
        options += ["--drain", str(drain), "--stop-with-stdin", *(["--oracle"] if oracle else []), *arguments]
        self._arguments = [*options, *(["--", *targets] if targets else [])]
        self._pattern = _CONNECTED if controllers else _LISTENING
        self._environment = dict(environment or {})
        self._start_timeout, self._drain = start_timeout, drain
        self._log_path, self._forward_output = log, forward_output
        self._log: IO[Any] | None = None
        self._log_begin = 0
        self._announced: re.Match[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, until ``stop``."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """True if the child runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server and return once it answers ``/health``.

        Raises:
            ServeError: the server ended or did not answer in time; the message has its last output line.
        """
        if self.running:
            return self
        self._announced = None
        self._log = None if self._forward_output else self._open_log()
        environment = {**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"}
        environment.pop("AGENTRL_TOKEN", None)
        if self.token is not None:
            environment["AGENTRL_TOKEN"] = self.token
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl_env", "serve", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=self._log or subprocess.PIPE,
            stderr=subprocess.STDOUT if self._log else None,
            env=environment,
            start_new_session=True,
        )
        if self._process.stdout is not None:
            threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True).start()
        try:
            self._wait_until_ready(time.monotonic() + self._start_timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server and its child processes; idempotent.

        Args:
            timeout: seconds after the drain until the server is killed.
        """
        process = self._process
        if process is not None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed below
                process.wait(self._drain + timeout)
            _kill_group(process)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""
        if (process := self._process) is not None:
            _signal(process, signal.SIGTERM)  # the second one

    def output(self) -> str:
        """Return what the server has printed since it started, at most the last megabyte."""
        if self._log is None:
            return ""
        begin = max(self._log_begin, os.fstat(self._log.fileno()).st_size - _READ_BYTES)
        return os.pread(self._log.fileno(), _READ_BYTES, begin).decode(errors="replace")

    def end_reason(self) -> str:
        """Return the server's last output line and its exit code."""
        code = self._process.poll() if self._process is not None else None
        printed = "" if self._forward_output else f"{last_line(self.output())}; "
        return f"{printed}exit code {code}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _open_log(self) -> IO[Any]:
        if self._log_path is None:
            self._log_begin = 0
            return tempfile.TemporaryFile()
        file = self._log_path.open("a+b")
        self._log_begin = file.seek(0, os.SEEK_END)
        return file

    def _wait_until_ready(self, deadline: float) -> None:
        position = self._log_begin
        while True:
            ended = not self.running
            position = self._scan_log(position)
            if self._announced is not None:
                if self._pattern is _CONNECTED:
                    return
                self.url = self._announced[1].decode()
                if healthy(self.url):
                    return
            if ended:
                raise ServeError(f"the server ended at once: {last_line(self.output())}")
            if time.monotonic() > deadline:
                last = last_line(self.output())
                raise ServeError(f"the server did not answer within {self._start_timeout:g} s: {last}")
            time.sleep(_POLL_S)

    def _scan_log(self, begin: int) -> int:
        """Search the log for the line that announces the server; return where to continue next time."""
        while self._log is not None and (chunk := os.pread(self._log.fileno(), _READ_BYTES, begin)):
            whole_lines = chunk.rfind(b"\n") + 1
            if not whole_lines and len(chunk) < _READ_BYTES:
                break  # the line is incomplete
            end = whole_lines or len(chunk)
            if found := self._pattern.search(chunk, 0, end):
                self._announced = found
                return begin
            begin += end
        return begin

    def _forward(self, output: IO[bytes]) -> None:
        """Print the server's output, apart from its announcement."""
        with output:
            for line in iter(partial(output.readline, 1 << 16), b""):
                if self._announced is None and (found := self._pattern.match(line)):
                    self._announced = found
                    continue
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()


class ServerThread:
    """A server on a thread of this process, without isolation; targets may be classes.

    ``Environment.local()`` runs the same code path without HTTP.

    Args:
        targets: as for ``EnvServer``.
        token: the token of callers.
        drain: seconds that open sessions get to end when the server stops.
        options: further options of ``EnvServer``.
    """

    def __init__(
        self,
        *targets: str | type[Environment],
        token: str | None = None,
        drain: float = 0.0,
        **options: Any,
    ) -> None:
        self.token = token
        self.url = ""
        """URL of the server, once it is started."""
        self._targets = targets
        self._options = {"port": 0, "token": token, "drain_s": drain, **options}
        self._thread: threading.Thread | None = None
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event, EnvServer] | None = None

    @property
    def running(self) -> bool:
        """True if the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Return once the server answers. Raises TargetError, ServeError."""
        if not self.running:
            ready: Future[str] = Future()
            self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
            self._thread.start()
            self.url = ready.result()
        return self

    def stop(self) -> None:
        """Drain and stop the server; idempotent."""
        if self._running is not None:
            loop, stop, _ = self._running
            loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join()
        self._thread = self._running = None

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""
        if self._running is not None:
            loop, _, server = self._running
            loop.call_soon_threadsafe(server.stop_waiting)

    def output(self) -> str:
        """Return nothing: this process prints the server's output."""
        return ""

    def end_reason(self) -> str:
        """Return that the thread ended."""
        return "its thread ended"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, ready: Future[str]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error if isinstance(error, Exception) else ServeError(str(error)))

    async def _serve(self, ready: Future[str]) -> None:
        from agentrl_env.server.serve import EnvServer  # users of ServerProcess need no web framework

        server, stop = EnvServer(self._targets, **self._options), asyncio.Event()
        try:
            await server.start()
            self._running = (asyncio.get_running_loop(), stop, server)
            ready.set_result(server.url)
            await stop.wait()
        finally:
            await server.stop()


def healthy(url: str) -> bool:
    """Return whether a server answers ``/health``."""
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def last_line(output: str) -> str:
    """Return the last line of a server's output, without ``error: ``."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the remaining processes of the child's process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
