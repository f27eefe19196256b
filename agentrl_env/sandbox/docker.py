"""A sandbox that is a container of its own, by the Docker daemon of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_env.errors import LaunchError, SandboxFailed, SandboxUnavailable
from agentrl_env.launch import docker_daemon
from agentrl_env.launch.orphans import owner
from agentrl_env.sandbox.limits import Limits
from agentrl_env.sandbox.output import DRAIN, GRACE_S
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
    as_text,
    packed,
    result,
    words,
)

USER = "1000:1000"
_WRAPPED = 'read -r _; keep=$1; shift; "$@"; code=$?; [ -n "$keep" ] || kill -9 -1 2>/dev/null; exit $code'
"""Begins at a line of ours, and ends what a command leaves behind.

What a command says before the SDK has read the daemon's headers would be lost in the SDK's buffer, so
it waits until there is somebody to hear it. ``kill -1`` spares the shell that says it, and takes no process.
"""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && [ ! -d "$1" ] && [ ! -p "$1" ] && cat >"$1"'
_READ = """[ -e "$1" ] || exit 102
[ -f "$1" ] || exit 122
[ -r "$1" ] || exit 113
exec head -c "$2" -- "$1" """
_PACK = """cd / && set -- home/agent
for file in tmp/* tmp/.[!.]*; do [ -e "$file" ] && set -- "$@" "$file"; done
exec tar -cf - "$@" """
_TICK_S = 0.05
_FILE_S = 30.0


class DockerSandbox(SandboxBase):
    """A container without network, rights or writable files but in ``HOME`` and ``/tmp``; see ``Sandbox``.

    Its first process reads a stream that this process holds open, so the container ends with it and
    removes itself, however it ends. ``disk`` is shared by ``HOME`` and ``/tmp``, half each.

    Args:
        limits: what it may use.
        image: its name; it has to be on this machine and needs a shell.

    Raises:
        SandboxUnavailable: no daemon answers, or it lacks the image.
        SandboxFailed: the container does not start.
    """

    def __init__(self, limits: Limits, *, image: str) -> None:
        self.limits = limits
        try:
            client = docker_daemon.connect(timeout=_FILE_S)
        except LaunchError as error:
            raise SandboxUnavailable(str(error)) from error
        self._api = client.api
        self._lock = threading.Lock()
        try:
            with _failures("the sandbox's container does not start"):
                docker_daemon.sweep(client)
                self._id = _create(client, image, limits)
        except BaseException:
            client.close()
            raise
        lifelines: list[Any] = []
        self._finish = weakref.finalize(self, _end, os.getpid(), client, self._id, lifelines)
        try:
            with _failures("the sandbox's container does not start"):
                lifelines.append(self._api.attach_socket(self._id, {"stdin": 1, "stream": 1}))
                self._api.start(self._id)
        except BaseException:
            self._finish()
            raise

    @property
    def alive(self) -> bool:
        """Whether commands can still be run."""
        if not self._finish.alive:
            return False
        with _failures("the Docker daemon fails"):
            return self._state() is not None

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
        out, err, begin = Stream(max_output), Stream(max_output), time.monotonic()
        listed = words(command, "/bin/sh")
        if any("\0" in word for word in listed):
            failed = "cannot run it: embedded null byte"
            return self._result(out, err, 126, None, begin, timeout, max_output, failed)
        with self._lock:
            code, killed_by = self._execute(
                listed, as_bytes(stdin), out, err, timeout, cwd=absolute(cwd or "."), env=env or {}
            )
        return self._result(out, err, code, killed_by, begin, timeout, max_output)

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file; see ``Sandbox.write``."""
        path = absolute(path)
        self._file(["/bin/sh", "-c", _WRITE, "sh", path], path, as_bytes(data), 0)

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files at once; the image needs tar."""
        self._file(["tar", "-xf", "-", "-C", "/"], HOME, packed(files), 0)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content; see ``Sandbox.read``."""
        path = absolute(path)
        return self._file(["/bin/sh", "-c", _READ, "sh", path, str(limit)], path, b"", limit)

    def snapshot(self) -> bytes:
        """Return the files of ``HOME`` and ``/tmp`` as a tar archive; the image needs tar."""
        return self._whole(["/bin/sh", "-c", _PACK], b"", 4 * self.limits.disk)

    def restore(self, state: bytes) -> None:
        """Put the files of ``snapshot`` into this fresh sandbox."""
        self._whole(["tar", "-xf", "-", "-C", "/"], state, 0)

    def close(self) -> None:
        """Remove the container; see ``Sandbox.close``."""
        self._finish()

    def _result(
        self,
        out: Stream,
        err: Stream,
        code: int | None,
        killed_by: KilledBy | None,
        begin: float,
        timeout: float,
        max_output: int,
        failed: str = "",
    ) -> ExecResult:
        return result(
            self.limits,
            out,
            err,
            code=code,
            signal=None,
            killed_by=killed_by,
            seconds=time.monotonic() - begin,
            timeout=timeout,
            max_output=max_output,
            failed=failed,
        )

    def _whole(self, command: list[str], stdin: bytes, limit: int) -> bytes:
        try:
            return self._file(command, HOME, stdin, limit)
        except OSError as error:
            raise SandboxFailed(f"the sandbox's files cannot be copied: {error}") from None

    def _file(self, command: list[str], path: str, stdin: bytes, limit: int) -> bytes:
        """Run a command of our own and return its output. Raises OSError where it fails."""
        out, err = Stream(limit), Stream(4096)
        with self._lock:
            code, _ = self._execute(command, stdin, out, err, _FILE_S, cwd="/", env={})
        if code != 0:
            numbers = {102: errno.ENOENT, 113: errno.EACCES, 122: errno.EINVAL}
            number = numbers.get(code or 0, errno.EIO)
            raise OSError(number, as_text(err.data).strip() or os.strerror(number), path)
        return out.data

    def _execute(
        self,
        command: list[str],
        stdin: bytes,
        out: Stream,
        err: Stream,
        timeout: float,
        *,
        cwd: str,
        env: Mapping[str, str],
    ) -> tuple[int | None, KilledBy | None]:
        """Run a command to its end, or to the end that a limit sets it."""
        if not self._finish.alive:
            raise SandboxFailed("the sandbox is closed")
        keep = "yes" if self.limits.background else ""
        with _failures("the sandbox does not run a command"):
            made = self._api.exec_create(
                self._id,
                ["/bin/sh", "-c", _WRAPPED, "sh", keep, *command],
                stdin=True,
                user=USER,
                workdir=cwd,
                environment={**BASE_ENVIRONMENT, **env},
            )["Id"]
            with _closing(self._api.exec_start(made, socket=True)) as connection:
                threading.Thread(target=_feed, args=(connection, b"\n" + stdin), daemon=True).start()
                killed_by = self._follow(connection, made, _Frames(out, err), timeout)
            code = self._api.exec_inspect(made)["ExitCode"]
            if killed_by is None and code == 137 and (self._state() or {}).get("OOMKilled"):
                killed_by = "memory"
        return (None if killed_by in ("timeout", "output") else code), killed_by

    def _follow(
        self, connection: socket.socket, made: str, frames: _Frames, timeout: float
    ) -> KilledBy | None:
        """Take the output until the command ends, and say which limit ended it, if one did."""
        connection.settimeout(_TICK_S)
        deadline = time.monotonic() + timeout
        killed_by: KilledBy | None = None
        ended = False
        while True:
            try:
                data = connection.recv(1 << 16)
                if not data:
                    return killed_by
                frames.feed(data)
            except TimeoutError:
                if ended:
                    return killed_by  # what runs on in the background keeps the connection open
                ended = not self._api.exec_inspect(made)["Running"]  # its last words may be on their way
            late = time.monotonic() >= deadline
            if killed_by is not None and late:
                self._api.kill(self._id)
                return killed_by
            if killed_by is None and (late or frames.dropped > DRAIN):
                killed_by = "timeout" if late else "output"
                deadline = time.monotonic() + GRACE_S / 2
                self._kill_all()

    def _kill_all(self) -> None:
        """End every process of the sandbox's user; where none more can be started, the container."""
        import docker

        try:
            made = self._api.exec_create(self._id, ["/bin/sh", "-c", "kill -9 -1"], user=USER)["Id"]
            self._api.exec_start(made, detach=True)
        except docker.errors.APIError:
            self._api.kill(self._id)

    def _state(self) -> dict[str, Any] | None:
        """Return how the container stands; None where it does not run any more."""
        import docker

        try:
            state: dict[str, Any] = self._api.inspect_container(self._id)["State"]
        except docker.errors.NotFound:
            return None
        return state if state["Running"] else None


class _Frames:
    """Docker's stream of both outputs: pieces with a header of eight bytes that says whose and how long."""

    def __init__(self, out: Stream, err: Stream) -> None:
        self._streams = {1: out, 2: err}
        self._header = b""
        self._left = 0
        self._stream = out

    @property
    def dropped(self) -> int:
        """How many bytes were not kept."""
        return sum(stream.dropped for stream in self._streams.values())

    def feed(self, data: bytes) -> None:
        """Take what has arrived, wherever it was cut."""
        while data:
            if self._left == 0:
                missing = 8 - len(self._header)
                self._header, data = self._header + data[:missing], data[missing:]
                if len(self._header) == 8:
                    self._stream = self._streams.get(self._header[0], self._stream)
                    self._left, self._header = int.from_bytes(self._header[4:], "big"), b""
                continue
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            self._stream.feed(piece)


def _create(client: Any, image: str, limits: Limits) -> str:
    """Make the container and return its id. Raises SandboxUnavailable where the image is missing."""
    import docker

    disk = f"rw,exec,nosuid,nodev,size={limits.disk // 2}"
    host = client.api.create_host_config(
        auto_remove=True,
        network_mode=None if limits.network else "none",
        read_only=True,
        tmpfs={HOME: f"{disk},mode=0755,uid=1000,gid=1000", "/tmp": f"{disk},mode=1777"},
        mem_limit=limits.memory,
        memswap_limit=limits.memory,
        pids_limit=limits.pids + 3,  # its init, its first process, and the shell around a command
        nano_cpus=int(limits.cpus * 1e9),
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        init=True,
        ipc_mode="private",
        shm_size=1 << 20,
        ulimits=[docker.types.Ulimit(name="core", soft=0, hard=0)],
        log_config=docker.types.LogConfig(type="none"),
    )
    try:
        made = client.api.create_container(
            image,
            entrypoint=["/bin/sh", "-c", "read -r _"],
            command=[],
            stdin_open=True,
            user="0:0",
            hostname="sandbox",
            environment=[],
            labels={docker_daemon.OWNER: owner()},
            host_config=host,
        )
    except docker.errors.ImageNotFound:
        raise SandboxUnavailable(
            f"there is no image {image!r} on this machine; build it, or docker pull {image}"
        ) from None
    return str(made["Id"])


def _feed(connection: socket.socket, data: bytes) -> None:
    """Write a command's stdin beside the reading of its output, and end it."""
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            with contextlib.suppress(TimeoutError):
                view = view[connection.send(view) :]
        connection.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _closing(stream: Any) -> Iterator[socket.socket]:
    """Give the connection below what the SDK returns; closing only the upper one would leave it open."""
    connection = getattr(stream, "_sock", stream)
    try:
        yield connection
    finally:
        stream.close()
        connection.close()


def _end(pid: int, client: Any, container: str, lifelines: list[Any]) -> None:
    """Remove the container; in a forked copy of the server it is not theirs to remove."""
    import docker
    import requests

    if os.getpid() == pid:
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            client.api.remove_container(container, force=True, v=True)
    for lifeline in lifelines:
        with _closing(lifeline):
            pass
    client.close()


@contextlib.contextmanager
def _failures(doing: str) -> Any:
    """Turn what the daemon refuses, or its silence, into SandboxFailed."""
    import docker
    import requests

    try:
        yield
    except LaunchError as error:
        raise SandboxFailed(f"{doing}: {error}") from error
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise SandboxFailed(
            f"{doing}: Docker says: {getattr(error, 'explanation', None) or error}"
        ) from error
