"""A server as a child process: started, waited for, stopped whole, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import httpx

from agentrl_env.errors import ServeError

_READY = re.compile(rb"^serving .* at (http://\S+)$", flags=re.MULTILINE)
_DIALLED = re.compile(rb"^serving ", flags=re.MULTILINE)
_POLL_S = 0.02
_READ_BYTES = 1 << 20


class ServerProcess:
    """``agentrl-env serve`` as a child of this process, on a free port unless one is given.

    Example::

        with ServerProcess("environments/shop", oracle=True) as server:
            client = EnvClient.connect(server.url, token=server.token)

    The child holds the read end of a pipe from this process and ends when it closes, so it does
    not outlive its parent, not even one that was killed. It leads its own process group: Ctrl-C
    does not reach it, and ``stop`` ends whatever it has started.

    Args:
        targets: what to serve, as on the command line.
        host: the address to bind.
        port: 0 takes a free one.
        token: what callers must show; with a controller, what the server shows it.
        max_sessions: how many sessions may be open at once.
        lease: seconds a session may be idle.
        drain: seconds that open sessions get to end when the server stops.
        oracle: whether ``expert`` may be called.
        start_timeout: seconds until the server must answer.
        log: file that the server's output is appended to; a temporary one by default.
        controller: the address of one to dial; then the server has no address of its own.
        environment: variables for the server, beside those of this process.
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
        controller: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.token = token
        self.url = ""
        """Where the server answers, once it is started."""
        self._dials = controller is not None
        place = ["--host", host, "--port", str(port)]
        place = ["--host", "none", "--controller", controller] if controller is not None else place
        self._options = [*place, "--max-sessions", str(max_sessions)]
        self._options += ["--lease", str(lease), "--drain", str(drain), "--stop-with-stdin"]
        self._options += ["--oracle"] if oracle else []
        self._targets: Sequence[str] = targets
        self._environment = dict(environment or {})
        self._start_timeout, self._drain, self._log_path = start_timeout, drain, log
        self._log: IO[Any] | None = None
        self._log_begin = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server and return once it answers ``/health``.

        Raises:
            ServeError: it ended, or did not answer in time; the message has its last words.
        """
        if self.running:
            return self
        self._log = self._open_log()
        environment = {**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"}
        environment.pop("AGENTRL_TOKEN", None)
        if self.token is not None:
            environment["AGENTRL_TOKEN"] = self.token
        command = [sys.executable, "-m", "agentrl_env", "serve", *self._options, "--", *self._targets]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            self._wait_until_ready(time.monotonic() + self._start_timeout)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server and everything it started; idempotent.

        Args:
            timeout: seconds, after the drain, until it is killed.
        """
        process, self._process = self._process, None
        if process is not None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                process.wait(self._drain + timeout)
            _kill_group(process)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def output(self) -> str:
        """Return what the server has printed since it was started; of much, the last megabyte."""
        if self._log is None:
            return ""
        begin = max(self._log_begin, os.fstat(self._log.fileno()).st_size - _READ_BYTES)
        return os.pread(self._log.fileno(), _READ_BYTES, begin).decode(errors="replace")

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
            found, position = self._find_announcement(position)
            if found is not None and self._dials:
                return
            if found is not None:
                self.url = found[1].decode()
                if _healthy(self.url):
                    return
            if ended:
                raise ServeError(f"the server ended at once: {_last_line(self.output())}")
            if time.monotonic() > deadline:
                last = _last_line(self.output())
                raise ServeError(f"the server did not answer within {self._start_timeout:g} s: {last}")
            time.sleep(_POLL_S)

    def _find_announcement(self, begin: int) -> tuple[re.Match[bytes] | None, int]:
        """Return the line that says that the server serves, and where in the log to look the next time."""
        pattern = _DIALLED if self._dials else _READY
        while self._log is not None and (chunk := os.pread(self._log.fileno(), _READ_BYTES, begin)):
            whole_lines = chunk.rfind(b"\n") + 1
            if not whole_lines and len(chunk) < _READ_BYTES:
                break  # the line is still being written
            end = whole_lines or len(chunk)
            if found := pattern.search(chunk, 0, end):
                return found, begin
            begin += end
        return None, begin


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group: itself, and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # nothing is left
