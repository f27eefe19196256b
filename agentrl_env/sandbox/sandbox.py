"""The sandbox interface: limits, commands and their results, files, snapshots."""

from __future__ import annotations

import asyncio
import errno
import functools
import io
import logging
import os
import posixpath
import re
import select
import tarfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from agentrl_env.errors import SandboxFailed

logger = logging.getLogger("agentrl_env")
HOME = "/home/agent"
"""The working folder of commands. Relative paths start here."""
PATH = "/usr/local/bin:/usr/bin:/bin"
BASE_ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "USER": "agent", "TMPDIR": "/tmp"}
"""The whole environment of a command, apart from variables that ``run`` adds."""
MAX_FILE = 16 << 20
"""Default maximum of bytes that ``read`` returns."""
OVERHEAD = 24 << 20
"""Bytes of memory reserved for the processes that run commands. Files may fill the rest."""
DISCARD_LIMIT = 16 << 20
"""Bytes of output that are read and dropped before a command is killed for endless output."""
GRACE_S = 10.0
"""Seconds for a killed command to end."""
_CHUNK = 1 << 16
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}

KilledBy = Literal["timeout", "memory", "pids", "output", "disk", "signal"]
Command = str | Sequence[str]


def parse_size(size: int | str) -> int:
    """Return a size in bytes: a number, or text such as "64m", "1.5 GiB" or "2gb".

    Units are powers of 1024, in upper or lower case.

    Raises ValueError if the text is not a size.
    """
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", size.strip().lower(), flags=re.ASCII)
    if found is None:
        raise ValueError(f"{size!r} is not a size; write bytes, or a number with k, m, g or t, as in '512m'")
    return int(float(found[1]) * (1 << _UNITS[found[2]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one sandbox. The fields are arguments of ``open_sandbox``."""

    memory: int
    disk: int
    pids: int
    cpus: float = 1.0
    timeout: float = 20.0
    max_output: int = 16_384
    network: bool = False
    background: bool = False
    root: bool = False
    best_effort: bool = False
    """Start the sandbox even if cgroups cannot enforce the limits."""

    def __post_init__(self) -> None:
        if self.disk <= 0 or (self.disk + OVERHEAD > self.memory and not self.root):
            raise ValueError(
                f"disk={self.disk} must be positive and leave {OVERHEAD >> 20} MiB of memory={self.memory}: "
                "a sandbox's files lie in its memory"
            )
        for name in ("pids", "cpus", "timeout", "max_output"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of one command."""

    code: int | None
    """The exit status, or None if the command was killed."""
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """True if output beyond ``max_output`` was dropped."""
    killed_by: KilledBy | None = None
    seconds: float = 0.0
    """Duration of the command in seconds."""
    note: str = ""
    """A sentence about why the command was killed or did not start."""

    @property
    def text(self) -> str:
        """The result as text for a model: output, errors, and the reason for a failure."""
        parts = [part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip()]
        notes = [self.note] if self.note else []
        notes += [f"exit code {self.code}"] if self.code and not self.killed_by else []
        if notes:
            parts.append(f"({'; '.join(notes)})")
        return "\n".join(parts) or "(no output)"


class Stream:
    """The first ``limit`` bytes of an output, and a count of all bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = io.BytesIO()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Append bytes. Bytes beyond the limit are counted and dropped."""
        self.total += len(data)
        self._kept.write(data[: max(0, self._limit - self._kept.tell())])

    @property
    def dropped(self) -> int:
        """Number of bytes that were dropped."""
        return max(0, self.total - self._limit)

    @property
    def data(self) -> bytes:
        """The bytes that were kept."""
        return self._kept.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A command to execute, with the streams that receive its output."""

    arguments: list[str]
    stdin: bytes
    out: Stream
    err: Stream
    timeout: float
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """Name or number of a user of the image. None for the sandbox's user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitState:
    """How a command ended: its exit status or signal, the limit that killed it, or why it did not start."""

    code: int | None = None
    signal: int | None = None
    killed_by: KilledBy | None = None
    failed: str = ""


class Sandbox(ABC):
    """An isolated environment for one episode, with its own files, processes and limits.

    One command runs at a time. Concurrent calls wait. Errors of a command, and limits that it exceeds,
    are part of its ``ExecResult``. An exception means an infrastructure failure.
    """

    _shell = "/bin/sh"
    _home = HOME
    """The working folder of commands. Relative paths start here."""
    _finish: weakref.finalize[..., Sandbox]
    """Releases everything when the sandbox is closed or collected, or at exit."""
    _ended_by: KilledBy | None = None
    """The limit that commands exceeded by so much that the sandbox itself ended. This is a failure of the
    commands, not of the infrastructure: further commands return results, and file calls raise OSError."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True if the sandbox can run commands."""
        return self._finish.alive and self._ended_by is None

    def run(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output: int | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command and wait for its end.

        Args:
            command: text for a shell, or a list of arguments that is run without a shell.
            timeout: seconds until all processes are killed. By default the sandbox's limit.
            stdin: the command's standard input.
            cwd: the working folder. By default ``HOME``, or the image's folder with ``root``.
            env: additional environment variables.
            max_output: bytes kept of each stream. By default the sandbox's limit.
            user: with ``root``, another user of the image. Only its processes are killed with the command.

        Raises SandboxFailed if the sandbox is closed or dead, or its backend does not answer.
        """
        if user is not None and not self.limits.root:
            raise ValueError("user: only a sandbox with root=True has other users")
        timeout, max_output = timeout or self.limits.timeout, max_output or self.limits.max_output
        out, err = Stream(max_output), Stream(max_output)
        execution = Execution(
            arguments=argument_list(command, self._shell),
            stdin=as_bytes(stdin),
            out=out,
            err=err,
            timeout=timeout,
            cwd=cwd or ".",
            env=env or {},
            user=user,
        )
        with self._lock:
            begin = time.monotonic()
            end = self._end_state(execution)
            seconds = time.monotonic() - begin
        killed_by = end.killed_by or ("signal" if end.signal else None)
        truncated = bool(out.dropped or err.dropped)
        note = {
            "timeout": f"killed: it ran longer than {timeout:g} s",
            "memory": f"killed: out of memory, the limit is {self.limits.memory >> 20} MiB, files included",
            "pids": f"killed: too many processes, the limit is {self.limits.pids}",
            "output": f"killed: endless output, the first {max_output} bytes are shown",
            "disk": f"it wrote more than the disk's {self.limits.disk >> 20} MiB",
            "signal": f"killed by signal {end.signal}",
            None: f"output cut off: the first {max_output} bytes are shown" if truncated else end.failed,
        }[killed_by]
        note += "; the sandbox has ended" if self._ended_by else ""
        return ExecResult(
            code=end.code,
            stdout=as_text(out.data),
            stderr=as_text(err.data),
            timed_out=killed_by == "timeout",
            truncated=truncated,
            killed_by=killed_by,
            seconds=seconds,
            note=note,
        )

    async def arun(self, command: Command, **options: object) -> ExecResult:
        """Run a command on a thread. Takes the arguments of ``run``."""
        return await asyncio.to_thread(self.run, command, **options)  # type: ignore[arg-type]

    @abstractmethod
    def write(self, path: str, data: str | bytes) -> None:
        """Write a file as the sandbox's user. Missing folders are created.

        Raises:
            OSError: the path is invalid or a folder, permission is denied, the disk is full, or commands
                exceeded a limit by so much that the sandbox ended.
            SandboxFailed: see ``run``.
        """

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files, path -> content, faster than single writes. Raises the errors of ``write``."""
        for path, data in files.items():
            self.write(path, data)

    @abstractmethod
    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return at most ``limit`` bytes of a regular file, read as the sandbox's user.

        Raises:
            OSError: the path is invalid, the file does not exist or is not a regular file, permission is
                denied, or commands exceeded a limit by so much that the sandbox ended.
            SandboxFailed: see ``run``.
        """

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return all changed files as a tar archive, without processes. Raises SandboxFailed."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Restore the files of ``snapshot`` in a fresh sandbox of the same kind. Raises SandboxFailed."""

    def copy(self, *, network: bool | None = None) -> Sandbox:
        """Open a sandbox of the same kind with the same files, without processes.

        Args:
            network: replaces ``network`` of the limits.

        Raises SandboxFailed.
        """
        other = self._fresh(self._limits_with(network))
        try:
            other.restore(self.snapshot())
        except BaseException:
            other.close()
            raise
        return other

    def _limits_with(self, network: bool | None) -> SandboxLimits:
        return self.limits if network is None else replace(self.limits, network=network)

    @abstractmethod
    def _fresh(self, limits: SandboxLimits) -> Sandbox:
        """Open a sandbox of the same kind without changed files."""

    def close(self) -> None:
        """Kill every process and delete every file. Idempotent and thread-safe."""
        self._finish()

    def _check_open(self) -> None:
        if not self._finish.alive:
            raise SandboxFailed("the sandbox is closed")
        if self._ended_by:
            raise OSError(errno.EIO, f"commands exceeded a limit ({self._ended_by}), which ended the sandbox")

    def _end_state(self, execution: Execution) -> ExitState:
        """Run a command. If it cannot run because of its arguments, this is a result too."""
        if self._finish.alive and self._ended_by:
            return ExitState(killed_by=self._ended_by)
        try:
            cwd = absolute(execution.cwd, self._home)
        except OSError as error:
            return ExitState(code=126, failed=f"cannot run it: {error.strerror}")
        return self._execute(replace(execution, cwd=cwd))

    @abstractmethod
    def _execute(self, execution: Execution) -> ExitState:
        """Run a command. The caller holds the lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def argument_list(command: Command, shell: str) -> list[str]:
    """Return a command's arguments. The shell runs a text. Lone surrogates become question marks."""
    listed = [shell, "-c", command] if isinstance(command, str) else list(command)
    return [word.encode("utf-8", "replace").decode() for word in listed]


def absolute(path: str, home: str = HOME) -> str:
    """Return the normalized absolute path in a sandbox. Relative paths start at ``home``.

    Raises OSError if the path is empty, contains a NUL or cannot be encoded.
    """
    if not path or "\0" in path or re.search("[\ud800-\udfff]", path):
        raise OSError(errno.EINVAL, f"the path {path!r} names no file")
    return posixpath.normpath(posixpath.join(home, path)).replace("//", "/", 1)


def tar_archive(files: Mapping[str, str | bytes], home: str = HOME) -> bytes:
    """Return a tar archive of files, path -> content, relative to the root folder. Raises OSError."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            data, entry = as_bytes(content), tarfile.TarInfo(absolute(path, home).lstrip("/"))
            entry.size, entry.mtime = len(data), time.time()
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


@functools.cache
def announce(text: str) -> None:
    """Log a warning once per process."""
    logger.warning(text)


def as_bytes(data: str | bytes) -> bytes:
    """Encode text as UTF-8. Lone surrogates become question marks."""
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def as_text(data: bytes) -> str:
    """Decode output as UTF-8. Undecodable bytes and NULs become U+FFFD."""
    return data.decode("utf-8", "replace").replace("\0", "�")


def collect(
    outputs: Mapping[int, Stream], ended: int, *, timeout: float, kill: Callable[[], None]
) -> KilledBy | None:
    """Read a command's outputs until it ends. Return the limit for which it was killed, if any.

    Args:
        outputs: non-blocking descriptor -> stream for its bytes.
        ended: descriptor that becomes readable when the command has ended.
        timeout: seconds until ``kill`` is called.
        kill: ends the command. It is called at most once.

    Raises SandboxFailed if the command does not end after it was killed.
    """
    poll, open_outputs = select.poll(), dict(outputs)
    for descriptor in (*outputs, ended):
        poll.register(descriptor, select.POLLIN)
    killed_by: KilledBy | None = None
    deadline = time.monotonic() + timeout
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
        for descriptor in set(ready) & open_outputs.keys():
            if not _read(descriptor, open_outputs[descriptor]):
                poll.unregister(descriptor)
                del open_outputs[descriptor]
        if ended in ready:
            for descriptor, stream in open_outputs.items():
                _drain(descriptor, stream)
            return killed_by
        over = any(stream.dropped > DISCARD_LIMIT for stream in outputs.values())
        late = time.monotonic() >= deadline
        if killed_by is not None and late:
            raise SandboxFailed(f"the sandbox did not end a command within {GRACE_S:g} s of killing it")
        if killed_by is None and (over or late):
            killed_by = "output" if over else "timeout"
            deadline = time.monotonic() + GRACE_S
            kill()


def _read(descriptor: int, stream: Stream) -> bool:
    """Read one chunk. Return False at the end of the output."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    stream.feed(data)
    return bool(data)


def _drain(descriptor: int, stream: Stream) -> None:
    """Read the available output without waiting, since a background process can hold the other end open."""
    limit = stream.total + DISCARD_LIMIT
    while stream.total < limit:
        before = stream.total
        if not _read(descriptor, stream) or stream.total == before:
            return
