"""A sandbox made of Linux namespaces, without a daemon: ``unshare`` and ``bwrap``.

A setup script in its own mount namespace mounts a tmpfs of size ``disk`` with an overlay of the host's
``/usr/local`` (or of a whole root folder). It then executes bubblewrap, which runs ``supervisor.py`` as its
only process. The host has a socket to the supervisor, but no mounts or files. If the server runs as root,
the sandbox runs under a separate user id.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import random
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl_env.errors import SandboxFailed, SandboxUnavailable
from agentrl_env.sandbox import cgroups, mounts, seccomp
from agentrl_env.sandbox.sandbox import (
    BASE_ENVIRONMENT,
    GRACE_S,
    MAX_FILE,
    Execution,
    ExitState,
    KilledBy,
    Sandbox,
    SandboxLimits,
    Stream,
    absolute,
    announce,
    as_bytes,
    as_text,
    collect,
    tar_archive,
)

START_S = 20.0
"""Seconds for a sandbox to start, or to read or write files."""
_END_S = 1.0
"""Seconds for a sandbox to end after its socket closes, before it is killed."""
_MAX_ANSWER = 1 << 16
_EXTRA_PIDS = 2
"""Processes in addition to the task's: bubblewrap's outer monitor and the supervisor."""
NO_CGROUPS = (
    "this process may not create cgroups, so nothing can enforce a sandbox's limit of memory. Run it as "
    "root, in a container with a writable cgroup, or with systemd-run --user --scope -p Delegate=yes; or "
    "accept limits that are measured and not enforced: open_sandbox(limits='best_effort') in the task, or "
    "AGENTRL_SANDBOX_LIMITS=best_effort for all tasks"
)
BEST_EFFORT = (
    "sandbox limits are best effort, as this process may not create cgroups: memory is limited for each "
    "process, and measured for all together, so that commands can exceed it for moments"
)
_SUPERVISOR = Path(__file__).with_name("supervisor.py").read_bytes()
"""The supervisor's code. A server that drops its privileges later might not be able to read the file."""


class BubblewrapSandbox(Sandbox):
    """A ``Sandbox`` made of Linux namespaces.

    ``image`` is a folder that becomes the root file system. By default the host's ``/usr`` is visible.
    Raises SandboxFailed, with the error output in the message, if the sandbox does not start. Without cgroups
    it starts only with ``limits.best_effort``.
    """

    def __init__(self, limits: SandboxLimits, *, image: Path | None = None) -> None:
        super().__init__(limits)
        self._image = image
        self._shell = mounts.shell(image)
        self._group = _group(limits)
        self._oom_kills = 0
        ours, theirs = socket.socketpair()
        ours.settimeout(GRACE_S)
        self._control = ours
        try:
            with theirs:
                self._process = _spawn(limits, image, theirs, limited=self._group is not None)
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
        """See ``Sandbox.alive``."""
        return super().alive and self._process.poll() is None

    def write(self, path: str, data: str | bytes) -> None:
        """See ``Sandbox.write``."""
        self._operate({"op": "write", "path": absolute(path)}, as_bytes(data), 0)

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files. See ``Sandbox.write_all``."""
        self._operate({"op": "restore", "layers": {"": "/"}}, tar_archive(files), 0)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content. See ``Sandbox.read``."""
        return self._operate({"op": "read", "path": absolute(path), "limit": limit}, b"", limit)

    def snapshot(self) -> bytes:
        """Return all changes, including deletions, as a tar archive."""
        try:
            return self._operate({"op": "snapshot"}, b"", 4 * self.limits.disk)
        except OSError as error:
            raise SandboxFailed(f"no snapshot: {error}") from None

    def restore(self, state: bytes) -> None:
        """Apply a snapshot to this fresh sandbox."""
        try:
            self._operate({"op": "restore", "layers": mounts.layers(self._image)}, state, 0)
        except OSError as error:
            raise SandboxFailed(f"the snapshot cannot be restored: {error}") from None

    def _fresh(self, limits: SandboxLimits) -> BubblewrapSandbox:
        return BubblewrapSandbox(limits, image=self._image)

    def close(self) -> None:
        """See ``Sandbox.close``."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # unblock a thread that waits for an answer
        with self._lock:
            self._finish()

    def _execute(self, execution: Execution) -> ExitState:
        request = {
            "op": "run",
            "argv": execution.arguments,
            "cwd": execution.cwd,
            "env": {**BASE_ENVIRONMENT, **execution.env},
            "background": self.limits.background,
        }
        oom_kills = self._group.oom_kills() if self._group else 0
        killed_by, answer = self._exchange(
            request, execution.stdin, execution.out, execution.err, execution.timeout
        )
        if not answer and not self._ended_by:
            raise SandboxFailed("the sandbox ended while it ran a command")
        if answer.get("memory") or self._oom_kills > oom_kills or self._ended_by:
            killed_by = killed_by or "memory"
        return ExitState(
            code=answer.get("code"),
            signal=answer.get("signal"),
            killed_by="pids" if answer.get("pids") else killed_by,
        )

    def _start(self) -> None:
        """Let the setup script continue and wait until the supervisor is ready."""
        try:
            if self._group:
                self._group.add(self._process.pid)
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._control.sendall(b"go\n")
            self._control.settimeout(START_S)
            ready = _sender(self._control)
            self._control.settimeout(GRACE_S)
            if ready:
                # Commands have the score 1000, so the kernel kills all of them before the supervisor.
                with open(f"/proc/{ready}/oom_score_adj", "wb", buffering=0) as score:
                    socket.send_fds(self._control, [b"{}\n"], [score.fileno()])
        except OSError as error:
            raise SandboxFailed(f"the sandbox did not start: {error}") from None
        if not ready:
            self._process.kill()
            output = self._process.stderr.read(4096) if self._process.stderr else b""
            raise SandboxFailed(f"the sandbox did not start: {as_text(output).strip() or 'it ended at once'}")
        if self._process.stderr:
            self._process.stderr.close()  # save a descriptor, since there can be thousands of sandboxes

    def _operate(self, request: dict[str, Any], stdin: bytes, limit: int) -> bytes:
        """Run a file operation in the supervisor and return its output."""
        request["background"] = self.limits.background
        with self._lock:
            for _ in range(2):  # the first attempt can hit the process limit, which kills all processes
                out, err = Stream(limit), Stream(4096)
                _, answer = self._exchange(request, stdin, out, err, START_S)
                if not answer.get("pids"):
                    break
        if not answer:
            self._check_open()
            raise SandboxFailed("the sandbox ended while it handled a file")
        if answer.get("code") != 0:
            number, _, text = as_text(err.data).partition(":")
            reason = text or f"it was cut short: {answer}"
            raise OSError(int(number) if number.isdigit() else 0, reason, request.get("path"))
        return out.data

    def _exchange(
        self, request: dict[str, Any], stdin: bytes, out: Stream, err: Stream, timeout: float
    ) -> tuple[KilledBy | None, dict[str, Any]]:
        """Send a request and return its answer, which is empty if the sandbox has died."""
        self._check_open()
        request["rlimits"] = self._rlimits()
        if not self._group:
            request["memory"] = self.limits.memory
        killed_by: KilledBy | None = None
        with contextlib.ExitStack() as stack:
            read_out, write_out = os.pipe()
            read_err, write_err = os.pipe()
            for descriptor in (read_out, read_err):
                stack.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            source = _memory_file("stdin", stdin) if stdin else os.open(os.devnull, os.O_RDONLY)
            given = [source, write_out, write_err]
            try:
                data = json.dumps(request).encode() + b"\n"
                self._control.sendall(data[socket.send_fds(self._control, [data], given) :])
                sent = True
            except OSError:  # the supervisor has ended
                sent = False
            finally:
                for descriptor in given:
                    os.close(descriptor)
            if sent:
                killed_by = collect(
                    {read_out: out, read_err: err}, self._control.fileno(), timeout=timeout, kill=self._kill
                )
        answer = _line(self._control) if sent else {}
        oom_kills = self._group.oom_kills() if self._group else 0
        if not answer and oom_kills > self._oom_kills:
            self._ended_by = "memory"
        self._oom_kills = oom_kills
        return killed_by, answer

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(b'{"op": "kill"}\n')

    def _rlimits(self) -> dict[str, int]:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 1024, "RLIMIT_NPROC": self.limits.pids + 1}
        return limits if self._group else {**limits, "RLIMIT_AS": self.limits.memory}


def check_available() -> None:
    """Start a trial sandbox, once per process. Raises SandboxUnavailable."""
    if reason := _unavailable():
        raise SandboxUnavailable(f"bubblewrap cannot be used: {reason}")


def announce_limits() -> None:
    """Log, once per process, which limits cannot be enforced."""
    if not _groups():
        announce(BEST_EFFORT)
    if "cpu" not in _groups():
        announce("no cpu cgroup can be created: sandboxes use whole processors, the share is not limited")


@functools.cache
def _unavailable() -> str:
    if sys.platform != "linux":
        return "it needs Linux"
    for name, package in (("bwrap", "bubblewrap"), ("unshare", "util-linux")):
        if shutil.which(name) is None:
            return f"{name} is not installed; install the package {package}"
    try:
        BubblewrapSandbox(SandboxLimits(memory=64 << 20, disk=1 << 20, pids=8, best_effort=True)).close()
    except (SandboxFailed, OSError) as error:
        return str(error)
    return ""


@functools.cache
def _groups() -> dict[str, Path]:
    """Return the folders for new cgroups, after removing orphaned ones."""
    bases = cgroups.find()
    cgroups.remove_orphans(bases)
    return bases


def _group(limits: SandboxLimits) -> cgroups.Group | None:
    """Create a sandbox's cgroup. With ``best_effort``, return None if this process cannot create one."""
    bases = _groups()
    if not bases and not limits.best_effort:
        raise SandboxFailed(NO_CGROUPS)
    try:
        return cgroups.Group(bases, limits, extra_pids=_EXTRA_PIDS) if bases else None
    except OSError as error:
        raise SandboxFailed(f"the sandbox's cgroup cannot be created: {error}") from None


def _start_on_processors(cpus: float, start: Callable[[], Any]) -> Any:
    """Start a process on ``cpus`` processors, rounded up. It inherits the processors of this thread."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, random.SystemRandom().sample(sorted(usable), min(len(usable), math.ceil(cpus))))
    try:
        return start()
    finally:
        os.sched_setaffinity(0, usable)


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return this process's thread for starting sandboxes.

    ``--die-with-parent`` ends a sandbox when its parent thread ends, so this thread must live as long as the
    process.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"agentrl-sandbox-{pid}")


def _spawn(
    limits: SandboxLimits, image: Path | None, control: socket.socket, *, limited: bool
) -> subprocess.Popen[bytes]:
    """Start the setup script, which waits for a line on ``control``. ``limited`` is True with a cgroup."""
    source = _memory_file("supervisor", _SUPERVISOR)
    uncounted = [
        *([] if limited else ["memfd_create"]),
        *([] if "cpu" in _groups() else ["sched_setaffinity"]),
    ]
    program = seccomp.program(uncounted=uncounted)
    code = None if program is None else _memory_file("seccomp", program)
    passed = [source] if code is None else [source, code]
    start: Any = functools.partial(
        subprocess.Popen,
        mounts.command(limits, image, seccomp=code, source=source),
        stdin=control,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=passed,
        cwd="/",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        start_new_session=True,
        **_other_user(),
    )
    if "cpu" not in _groups():
        start = functools.partial(_start_on_processors, limits.cpus, start)
    try:
        process: subprocess.Popen[bytes] = _spawner(os.getpid()).submit(start).result()
        return process
    except OSError as error:
        raise SandboxFailed(f"the sandbox did not start: {error}") from None
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _other_user() -> dict[str, Any]:
    """Return Popen arguments for an unused user id, if this process can change its user."""
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
    """End a sandbox. A forked copy of the server only closes its descriptors."""
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


def _memory_file(name: str, data: bytes) -> int:
    """Return a descriptor for a sealed anonymous file that holds ``data``."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _sender(control: socket.socket) -> int:
    """Wait for the supervisor's first message. Return its process id on the host, or 0 if it has ended."""
    data, ancillary, *_ = control.recvmsg(_MAX_ANSWER, socket.CMSG_SPACE(struct.calcsize("3i")))
    found = [content for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS]
    return int(struct.unpack("3i", found[0])[0]) if data and found else 0


def _line(control: socket.socket) -> dict[str, Any]:
    """Return the next answer, or an empty dict if the sandbox has ended or the answer is malformed."""
    try:
        with control.makefile("rb") as file:
            answer = json.loads(file.readline(_MAX_ANSWER))
    except (OSError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
