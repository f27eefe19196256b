"""The seam: what a task may ask of a sandbox, whatever it is made of."""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from agentrl_env.sandbox.limits import Limits

HOME = "/home/agent"
"""The folder that commands start in, and that relative paths start from."""
PATH = "/usr/local/bin:/usr/bin:/bin"
BASE_ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "USER": "agent", "TMPDIR": "/tmp"}
"""All that a command's environment holds, but what it is given."""
MAX_FILE = 16 << 20
"""Bytes that ``read`` returns at most, unless told otherwise."""

KilledBy = Literal["timeout", "memory", "pids", "output", "signal"]
Command = str | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What came of one command."""

    code: int | None
    """The exit status; None where the command was killed."""
    stdout: str
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """Whether output beyond ``max_output`` was dropped."""
    killed_by: KilledBy | None = None
    seconds: float = 0.0
    """How long it ran."""
    note: str = ""
    """One sentence on what is not the command's own output: why it was killed, or not started."""

    @property
    def text(self) -> str:
        """All of it as a model should read it: output, errors, and what happened if it went wrong."""
        parts = [part.rstrip("\n") for part in (self.stdout, self.stderr) if part.strip()]
        notes = [self.note] if self.note else []
        notes += [f"exit code {self.code}"] if self.code and not self.killed_by else []
        if notes:
            parts.append(f"({'; '.join(notes)})")
        return "\n".join(parts) or "(no output)"


class Sandbox(Protocol):
    """A closed room for one episode: its own files, processes and limits, nothing of the host's.

    One command runs at a time; a second thread waits for its turn. What a command does wrong, and a
    limit that it hits, is in its ``ExecResult``. An exception is an infrastructure failure.
    """

    limits: Limits

    @property
    def alive(self) -> bool:
        """Whether commands can still be run."""

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
        """Run a command and wait for its end.

        Args:
            command: text for ``/bin/sh``, or a list of arguments that no shell sees.
            timeout: seconds until everything in the sandbox is killed; the sandbox's by default.
            stdin: what the command reads.
            cwd: the folder to start in; ``HOME`` by default.
            env: added to the environment.
            max_output: bytes kept of each stream; the sandbox's by default.

        Raises:
            SandboxFailed: the sandbox is closed or dead, or what it is made of does not answer.
        """

    async def arun(self, command: Command, **options: object) -> ExecResult:
        """Run a command without blocking the event loop; same arguments as ``run``."""

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file as the sandbox's user, folders included.

        Raises:
            OSError: it cannot be written: a folder of this name, no room, no right.
            SandboxFailed: see ``run``.
        """

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files at once, path -> content; quicker than one by one. Raises as ``write``."""

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return at most ``limit`` bytes of a regular file, read as the sandbox's user.

        Raises:
            OSError: it cannot be read: no such file, not a regular one.
            SandboxFailed: see ``run``.
        """

    def snapshot(self) -> bytes:
        """Return all that was written, as a tar archive; no processes. Raises SandboxFailed."""

    def restore(self, state: bytes) -> None:
        """Put the files of ``snapshot`` into a fresh sandbox of the same kind. Raises SandboxFailed."""

    def close(self) -> None:
        """End every process and delete every file. Idempotent, from any thread."""


class SandboxBase(ABC):
    """What all sandboxes share: the convenience around ``run``, and how they end."""

    limits: Limits

    @abstractmethod
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

    @abstractmethod
    def close(self) -> None:
        """End it; see ``Sandbox.close``."""

    async def arun(self, command: Command, **options: object) -> ExecResult:
        """Run a command on a thread."""
        return await asyncio.to_thread(self.run, command, **options)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def words(command: Command, shell: str) -> list[str]:
    """Return a command's argument list; text goes to the shell. No lone surrogates, which no pipe carries."""
    listed = [shell, "-c", command] if isinstance(command, str) else list(command)
    return [word.encode("utf-8", "replace").decode() for word in listed]


def absolute(path: str) -> str:
    """Return where ``path`` lies in a sandbox: relative ones start at ``HOME``. Purely of text.

    Raises:
        ValueError: it is empty or holds a NUL.
    """
    if not path or "\0" in path:
        raise ValueError(f"path {path!r} names no file")
    return posixpath.normpath(posixpath.join(HOME, path)).replace("//", "/", 1)


def packed(files: Mapping[str, str | bytes]) -> bytes:
    """Return a tar archive of files, path -> content, from the root folder on. Raises ValueError."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            data, entry = as_bytes(content), tarfile.TarInfo(absolute(path).lstrip("/"))
            entry.size, entry.mtime = len(data), time.time()
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def as_bytes(data: str | bytes) -> bytes:
    """Return text in UTF-8; what it cannot carry becomes a question mark."""
    return data.encode("utf-8", "replace") if isinstance(data, str) else data


def as_text(data: bytes) -> str:
    """Return output as text that can be sent: undecodable bytes become U+FFFD, NULs too."""
    return data.decode("utf-8", "replace").replace("\0", "�")


class Stream:
    """The first bytes of an output, and whether there were more; never holds more than its limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = io.BytesIO()
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take a piece."""
        self.total += len(data)
        self._kept.write(data[: max(0, self._limit - self._kept.tell())])

    @property
    def dropped(self) -> int:
        """How many bytes were not kept."""
        return max(0, self.total - self._limit)

    @property
    def data(self) -> bytes:
        """What was kept."""
        return self._kept.getvalue()


def result(
    limits: Limits,
    out: Stream,
    err: Stream,
    *,
    code: int | None,
    signal: int | None,
    killed_by: KilledBy | None,
    seconds: float,
    timeout: float,
    max_output: int,
    failed: str = "",
) -> ExecResult:
    """Put together what came of a command.

    Args:
        limits: of the sandbox.
        out: its stdout.
        err: its stderr.
        code: its exit status, where it had one.
        signal: what it was killed by, where it was.
        killed_by: which limit ended it, where one did.
        seconds: how long it ran.
        timeout: how long it could have run.
        max_output: bytes kept of each stream.
        failed: why it was not even started.
    """
    killed_by = killed_by or ("signal" if signal else None)
    truncated = bool(out.dropped or err.dropped)
    note = {
        "timeout": f"killed: it ran longer than {timeout:g} s",
        "memory": f"killed: out of memory, the limit is {limits.memory >> 20} MiB, files included",
        "pids": f"killed: too many processes, the limit is {limits.pids}",
        "output": f"killed: endless output, the first {max_output} bytes are shown",
        "signal": f"killed by signal {signal}",
        None: f"output cut off: the first {max_output} bytes are shown" if truncated else failed,
    }[killed_by]
    return ExecResult(
        code=code,
        stdout=as_text(out.data),
        stderr=as_text(err.data),
        timed_out=killed_by == "timeout",
        truncated=truncated,
        killed_by=killed_by,
        seconds=seconds,
        note=note,
    )
