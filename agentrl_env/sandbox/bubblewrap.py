"""A sandbox without a daemon: Linux namespaces, set up by ``unshare`` and ``bwrap``.

A stage in a mount namespace of its own puts a tmpfs of the size ``disk`` under an overlay of the host's
``/usr/local`` (or of a whole root folder) and becomes bubblewrap, whose one process is ``supervisor.py``. The
host keeps a socket to it and nothing else: no mount, no file. It runs as a user id of its own where the
server is root.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import cgroups, seccomp
from agentrl_env.sandbox import mounts as stage
from agentrl_env.sandbox.limits import Limits
from agentrl_env.sandbox.output import GRACE_S, collect, in_memory
from agentrl_env.sandbox.sandbox import (
    BASE_ENVIRONMENT,
    MAX_FILE,
    Command,
    ExecResult,
    KilledBy,
    SandboxBase,
    Stream,
    absolute,
    as_bytes,
    as_text,
    packed,
    result,
    words,
)

START_S = 20.0
"""Seconds that a sandbox may take to start."""
_END_S = 1.0
"""Seconds that a sandbox has to end by itself, once its socket is closed."""
_MAX_ANSWER = 1 << 16
_EXTRA_PIDS = 2
"""Processes that are not the task's: bubblewrap's monitor outside and the supervisor."""
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class BubblewrapSandbox(SandboxBase):
    """A sandbox of Linux namespaces; see ``Sandbox``.

    Args:
        limits: what it may use.
        image: a folder that is its root file system; by default it sees the host's ``/usr``.

    Raises:
        SandboxFailed: it does not start; the message has the last words of what failed.
    """

    def __init__(self, limits: Limits, *, image: Path | None = None) -> None:
        self.limits = limits
        self._image = image
        self._lock = threading.Lock()
        bases = _groups()
        self._group = cgroups.Group(bases, limits, extra_pids=_EXTRA_PIDS) if bases else None
        ours, theirs = socket.socketpair()
        ours.settimeout(GRACE_S)
        self._control = ours
        try:
            with theirs:
                self._process = _spawn(limits, image, theirs)
        except BaseException:
            ours.close()
            if self._group:
                self._group.remove()
            raise
        self._finish = weakref.finalize(self, _end, os.getpid(), self._process, ours, self._group)
        try:
            self._start()
        except BaseException:
            self._finish()
            raise

    @property
    def alive(self) -> bool:
        """Whether commands can still be run."""
        return self._finish.alive and self._process.poll() is None

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
        request = {
            "op": "run",
            "argv": words(command, stage.shell(self._image)),
            "cwd": absolute(cwd or "."),
            "env": {**BASE_ENVIRONMENT, **(env or {})},
            "background": self.limits.background,
        }
        with self._lock:
            begin = time.monotonic()
            oom = self._group.out_of_memory() if self._group else 0
            out, err = Stream(max_output), Stream(max_output)
            killed_by, answer = self._exchange(request, as_bytes(stdin), out, err, timeout)
            if self._group and self._group.out_of_memory() > oom:
                killed_by = killed_by or "memory"
            elif not answer:
                raise SandboxFailed("the sandbox ended while it ran a command")
        return result(
            self.limits,
            out,
            err,
            code=answer.get("code"),
            signal=answer.get("signal"),
            killed_by="pids" if answer.get("pids") else killed_by,
            seconds=time.monotonic() - begin,
            timeout=timeout,
            max_output=max_output,
        )

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file; see ``Sandbox.write``."""
        self._operate({"op": "write", "path": absolute(path)}, as_bytes(data), 0)

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files at once; see ``Sandbox.write_all``."""
        self._operate({"op": "restore", "layers": {"": "/"}}, packed(files), 0)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content; see ``Sandbox.read``."""
        return self._operate({"op": "read", "path": absolute(path), "limit": limit}, b"", limit)

    def snapshot(self) -> bytes:
        """Return all that was written, deletions included, as a tar archive."""
        try:
            return self._operate({"op": "snapshot"}, b"", 4 * self.limits.disk)
        except OSError as error:
            raise SandboxFailed(f"no snapshot: {error}") from None

    def restore(self, state: bytes) -> None:
        """Put the files of ``snapshot`` into this fresh sandbox."""
        try:
            self._operate({"op": "restore", "layers": stage.layers(self._image)}, state, 0)
        except OSError as error:
            raise SandboxFailed(f"the snapshot cannot be restored: {error}") from None

    def close(self) -> None:
        """End every process and delete every file; see ``Sandbox.close``."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer gives up
        with self._lock:
            self._finish()

    def _start(self) -> None:
        """Let the stage go and wait until the supervisor says that it is there."""
        try:
            if self._group:
                self._group.add(self._process.pid)
            self._control.sendall(b"go\n")
            self._control.settimeout(START_S)
            ready = _line(self._control)
            self._control.settimeout(GRACE_S)
        except OSError as error:
            raise SandboxFailed(f"the sandbox did not start: {error}") from None
        if not ready:
            self._process.kill()
            words = self._process.stderr.read(4096) if self._process.stderr else b""
            raise SandboxFailed(f"the sandbox did not start: {as_text(words).strip() or 'it ended at once'}")
        if self._process.stderr:
            self._process.stderr.close()  # thousands of sandboxes shall not take descriptors that say nothing

    def _operate(self, request: dict[str, Any], stdin: bytes, limit: int) -> bytes:
        """Let the supervisor do something with files, and return what it wrote."""
        request["background"] = self.limits.background
        with self._lock:
            for _ in range(2):  # the first may find all processes taken, and then ends them
                out, err = Stream(limit), Stream(4096)
                _, answer = self._exchange(request, stdin, out, err, START_S)
                if not answer.get("pids"):
                    break
        if not answer:
            raise SandboxFailed("the sandbox ended while it handled a file")
        if answer.get("code") != 0:
            number, _, text = as_text(err.data).partition(":")
            reason = text or f"it was cut short: {answer}"
            raise OSError(int(number) if number.isdigit() else 0, reason, request.get("path"))
        return out.data

    def _exchange(
        self, request: dict[str, Any], stdin: bytes, out: Stream, err: Stream, timeout: float
    ) -> tuple[KilledBy | None, dict[str, Any]]:
        """Send a request and return its answer, which is empty where the sandbox is dead by then."""
        if not self._finish.alive:
            raise SandboxFailed("the sandbox is closed")
        request["rlimits"] = self._rlimits()
        with contextlib.ExitStack() as stack:
            read_out, write_out = os.pipe()
            read_err, write_err = os.pipe()
            for descriptor in (read_out, read_err):
                stack.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            given = (_input(stdin), write_out, write_err)
            try:
                _send(self._control, request, given)
            except OSError as error:
                raise SandboxFailed(f"the sandbox is dead: {error}") from None
            finally:
                for descriptor in given:
                    os.close(descriptor)
            killed_by = collect(
                {read_out: out, read_err: err}, self._control.fileno(), timeout=timeout, kill=self._kill
            )
        return killed_by, _line(self._control)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(b'{"op": "kill"}\n')

    def _rlimits(self) -> dict[str, int]:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 1024, "RLIMIT_NPROC": self.limits.pids + 1}
        return limits if self._group else {**limits, "RLIMIT_AS": self.limits.memory}


def check_available() -> None:
    """Start a sandbox once, to see whether this machine can. Raises SandboxUnavailable."""
    if reason := _unavailable():
        raise SandboxUnavailable(f"bubblewrap cannot be used: {reason}")


@functools.cache
def _unavailable() -> str:
    if sys.platform != "linux":
        return "it needs Linux"
    for name, package in (("bwrap", "bubblewrap"), ("unshare", "util-linux")):
        if shutil.which(name) is None:
            return f"{name} is not installed; install the package {package}"
    trial = Limits(
        memory=64 << 20,
        disk=1 << 20,
        pids=8,
        cpus=1.0,
        timeout=1.0,
        max_output=1,
        network=False,
        background=False,
    )
    try:
        BubblewrapSandbox(trial).close()
    except (SandboxFailed, OSError) as error:
        return str(error)
    return ""


@functools.cache
def _groups() -> dict[str, Path]:
    """Return where cgroups can be made, after deleting what dead processes have left there."""
    bases = cgroups.find()
    cgroups.sweep(bases)
    return bases


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the one thread of this process that starts sandboxes.

    ``--die-with-parent`` means the thread, so it must be one that lives as long as the process.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"agentrl-sandbox-{pid}")


def _spawn(limits: Limits, image: Path | None, control: socket.socket) -> subprocess.Popen[bytes]:
    """Start the stage, which waits for a line on ``control``."""
    source = in_memory("supervisor", _SUPERVISOR.read_bytes())
    program = seccomp.program()
    code = None if program is None else in_memory("seccomp", program)
    passed = [source] if code is None else [source, code]
    start: Any = functools.partial(
        subprocess.Popen,
        stage.command(limits, image, seccomp=code, source=source),
        stdin=control,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=passed,
        cwd="/",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        start_new_session=True,
        **_other_user(),
    )
    try:
        process: subprocess.Popen[bytes] = _spawner(os.getpid()).submit(start).result()
        return process
    except OSError as error:
        raise SandboxFailed(f"the sandbox did not start: {error}") from None
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _other_user() -> dict[str, Any]:
    """Return whom to run as: nobody's user id, where this process may choose."""
    if os.geteuid() != 0:
        return {}
    *_, (first, _, count) = (
        map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
    )
    if count < 1024:
        return {}
    uid = first + count // 2 + secrets.randbelow(count // 2 - 2)
    return {"user": uid, "group": uid, "extra_groups": []}


def _end(
    pid: int, process: subprocess.Popen[bytes], control: socket.socket, group: cgroups.Group | None
) -> None:
    """End a sandbox whole; in a forked copy of the server it is not theirs to end."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if group:
            group.remove()
    if process.stderr:
        process.stderr.close()
    control.close()


def _input(data: bytes) -> int:
    """Return a descriptor to read ``data`` from."""
    return in_memory("stdin", data) if data else os.open(os.devnull, os.O_RDONLY)


def _send(control: socket.socket, request: dict[str, Any], descriptors: tuple[int, ...]) -> None:
    data = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(control, [data], list(descriptors))
    control.sendall(data[sent:])


def _line(control: socket.socket) -> dict[str, Any]:
    """Return the next answer; empty where the other side is gone. It is not trusted to make sense."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _MAX_ANSWER:
            piece = control.recv(4096)
            if not piece:
                return {}
            data += piece
        answer = json.loads(data)
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
