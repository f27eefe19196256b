"""No isolation: commands run in a temporary folder as this process's user. It must be allowed explicitly."""

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
import weakref
from pathlib import Path

from agentrl_env.errors import SandboxFailed
from agentrl_env.sandbox.orphans import PREFIX, is_orphan, resource_name
from agentrl_env.sandbox.sandbox import (
    BASE_ENVIRONMENT,
    HOME,
    MAX_FILE,
    Execution,
    ExitState,
    Sandbox,
    SandboxLimits,
    Stream,
    absolute,
    as_bytes,
    collect,
)


class UnsafeSandbox(Sandbox):
    """A plain folder without isolation. Time, output and the memory of each process are limited.

    ``HOME`` stands for the folder. ``read`` and ``write`` refuse paths outside it, but commands can use them.
    """

    def __init__(self, limits: SandboxLimits) -> None:
        super().__init__(limits)
        _remove_orphans()
        self._folder = Path(tempfile.gettempdir()).resolve() / resource_name()
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise SandboxFailed(f"cannot create a folder for the sandbox: {error}") from None
        self._running: list[subprocess.Popen[bytes]] = []
        self._finish = weakref.finalize(self, _end, os.getpid(), self._folder, self._running)

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file. See ``Sandbox.write``."""
        with self._lock:
            file = self._inside(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(as_bytes(data))

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content. See ``Sandbox.read``."""
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
        """Extract a snapshot into the folder."""
        with self._lock, tarfile.open(fileobj=io.BytesIO(state)) as tar:
            tar.extractall(self._inside("."), filter="data")

    def _fresh(self, limits: SandboxLimits) -> UnsafeSandbox:
        return UnsafeSandbox(limits)

    def _execute(self, execution: Execution) -> ExitState:
        try:
            with contextlib.ExitStack() as stack:
                process, outputs, ended = self._start(execution, stack)
                killed_by = collect(outputs, ended, timeout=execution.timeout, kill=lambda: _kill(process))
                code = process.wait()
                if killed_by or not self.limits.background:
                    _kill(process)
        except (OSError, ValueError) as error:
            return ExitState(failed=f"cannot run it: {error}")
        return ExitState(
            code=code if code >= 0 else None, signal=-code if code < 0 else None, killed_by=killed_by
        )

    def _start(
        self, execution: Execution, stack: contextlib.ExitStack
    ) -> tuple[subprocess.Popen[bytes], dict[int, Stream], int]:
        """Start a command. Return it, its outputs, and a descriptor that becomes readable when it ends."""
        folder = self._inside(execution.cwd)
        ended, writable = os.pipe()
        stack.callback(os.close, ended)
        last = stack.enter_context(os.fdopen(writable, "wb"))
        limited = f'ulimit -c 0; ulimit -v {self.limits.memory >> 10}; exec "$@"'
        with tempfile.TemporaryFile() as source:
            source.write(execution.stdin)
            source.seek(0)
            process = subprocess.Popen(
                ["/bin/sh", "-c", limited, "sh", *execution.arguments],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={**BASE_ENVIRONMENT, "HOME": str(self._folder), **execution.env},
                start_new_session=True,
            )
        self._running.append(process)

        def watch() -> None:
            process.wait()
            last.close()

        def clean_up() -> None:
            background = self.limits.background
            if process.poll() is None or not background:
                _kill(process)
            watcher.join()
            self._running[:] = [old for old in self._running if background and _lives(old)]

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        stack.callback(clean_up)
        outputs = {}
        for pipe, stream in ((process.stdout, execution.out), (process.stderr, execution.err)):
            assert pipe is not None
            stack.enter_context(pipe)
            os.set_blocking(pipe.fileno(), False)
            outputs[pipe.fileno()] = stream
        return process, outputs, ended

    def _inside(self, path: str) -> Path:
        """Return a path on this machine. Raises PermissionError if it is outside the folder."""
        self._check_open()
        inner = os.path.relpath(absolute(path), HOME)
        file = (self._folder / inner).resolve()
        if file != self._folder and self._folder not in file.parents:
            raise PermissionError(f"{path} is not below {HOME}")
        return file


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a process of a command's group runs. While one runs, the group id is not reused."""
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


def _remove_orphans() -> None:
    """Delete the folders of processes that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if is_orphan(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
