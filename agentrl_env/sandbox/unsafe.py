"""No sandbox: commands run as this process's own user, in a temporary folder. Only where that is allowed."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from agentrl_env.errors import SandboxFailed
from agentrl_env.sandbox import leftovers
from agentrl_env.sandbox.limits import Limits
from agentrl_env.sandbox.output import collect
from agentrl_env.sandbox.sandbox import (
    BASE_ENVIRONMENT,
    HOME,
    MAX_FILE,
    Command,
    ExecResult,
    KilledBy,
    SandboxBase,
    Stream,
    absolute,
    as_bytes,
    result,
    words,
)


class UnsafeSandbox(SandboxBase):
    """A folder, not a sandbox: it limits time, output and the memory of one process, and hides nothing.

    Paths below ``HOME`` mean this folder; files elsewhere are refused by ``read`` and ``write``, but not to
    commands.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        _sweep()
        self._folder = Path(tempfile.gettempdir()).resolve() / leftovers.new_name()
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise SandboxFailed(f"no folder for a sandbox: {error}") from None
        self._running: list[subprocess.Popen[bytes]] = []
        self._finish = weakref.finalize(self, _end, os.getpid(), self._folder, self._running)
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether commands can still be run."""
        return self._finish.alive

    def run(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int | None = None,
    ) -> ExecResult:
        """Run a command; see ``Sandbox.run``."""
        timeout, max_output = timeout or self.limits.timeout, max_output or self.limits.max_output
        out, err = Stream(max_output), Stream(max_output)
        begin, code, failed = time.monotonic(), None, ""
        killed_by: KilledBy | None = None
        with self._lock:
            try:
                limited = f'ulimit -c 0; ulimit -v {self.limits.memory >> 10}; exec "$@"'
                arguments = ["/bin/sh", "-c", limited, "sh", *words(command, "/bin/sh")]
                environment = {**BASE_ENVIRONMENT, "HOME": str(self._folder), **(env or {})}
                folder = self._inside(cwd or ".")
                with self._started(arguments, as_bytes(stdin), folder, environment) as (process, ended):
                    outputs = {process.stdout.fileno(): out, process.stderr.fileno(): err}
                    killed_by = collect(outputs, ended, timeout=timeout, kill=lambda: _kill(process))
                    code = process.wait()
                    if killed_by or not self.limits.background:
                        _kill(process)
            except (OSError, ValueError) as error:
                failed = f"cannot run it: {error}"
        return result(
            self.limits,
            out,
            err,
            code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            killed_by=killed_by,
            seconds=time.monotonic() - begin,
            timeout=timeout,
            max_output=max_output,
            failed=failed,
        )

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file; see ``Sandbox.write``."""
        with self._lock:
            file = self._inside(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(as_bytes(data))

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files; see ``Sandbox.write_all``."""
        for path, data in files.items():
            self.write(path, data)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content; see ``Sandbox.read``."""
        with self._lock:
            file = self._inside(path)
            if file.exists() and not file.is_file():
                raise OSError(f"{path}: not a regular file")
            with file.open("rb") as source:
                return source.read(limit)

    def snapshot(self) -> bytes:
        """Return the folder as a tar archive."""
        target = io.BytesIO()
        with self._lock, tarfile.open(fileobj=target, mode="w") as tar:
            tar.add(self._inside("."), arcname=".")
        return target.getvalue()

    def restore(self, state: bytes) -> None:
        """Put the files of ``snapshot`` into this folder."""
        with self._lock, tarfile.open(fileobj=io.BytesIO(state)) as tar:
            tar.extractall(self._inside("."), filter="data")

    def close(self) -> None:
        """Kill what runs and delete the folder; see ``Sandbox.close``."""
        self._finish()

    def _inside(self, path: str) -> Path:
        """Return where a path lies on this machine. Raises PermissionError where it leads out."""
        if not self._finish.alive:
            raise SandboxFailed("the sandbox is closed")
        inner = os.path.relpath(absolute(path), HOME)
        file = (self._folder / inner).resolve()
        if file != self._folder and self._folder not in file.parents:
            raise PermissionError(f"{path} is not below {HOME}")
        return file

    @contextlib.contextmanager
    def _started(self, arguments, stdin, folder, environment):  # type: ignore[no-untyped-def]
        """Give a started process, and a descriptor that becomes readable when it ends."""
        ended, last = os.pipe()
        try:
            with tempfile.TemporaryFile() as source:
                source.write(stdin)
                source.seek(0)
                process = subprocess.Popen(
                    arguments,
                    stdin=source,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            os.close(ended)
            os.close(last)
            raise
        self._running.append(process)

        def watch() -> None:
            process.wait()
            os.close(last)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            with process.stdout, process.stderr:  # type: ignore[union-attr]
                for stream in (process.stdout, process.stderr):
                    os.set_blocking(stream.fileno(), False)  # type: ignore[union-attr]
                yield process, ended
        finally:
            if process.poll() is None or not self.limits.background:
                _kill(process)
            watcher.join()
            os.close(ended)
            background = self.limits.background
            self._running[:] = [old for old in self._running if background and _lives(old)]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Return whether anything runs that a command has started; as long as it does, its number is taken."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end(pid: int, folder: Path, running: list[subprocess.Popen[bytes]]) -> None:
    if os.getpid() == pid:
        for process in running:
            _kill(process)
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Delete the folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{leftovers.PREFIX}*"):
        if leftovers.abandoned(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
