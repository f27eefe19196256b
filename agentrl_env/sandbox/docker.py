"""A sandbox that is a container of the local Docker daemon."""

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
from agentrl_env.sandbox import docker_daemon, seccomp
from agentrl_env.sandbox.orphans import process_identity
from agentrl_env.sandbox.sandbox import (
    BASE_ENVIRONMENT,
    DISCARD_LIMIT,
    GRACE_S,
    HOME,
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
    tar_archive,
)

USER = "1000:1000"
_COUNT = """count() {
    kills=0
    for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
        [ -r $file ] && while read -r name number; do [ "$name" = oom_kill ] && kills=$number; done <$file
    done
}
count
"""
"""Shell function that counts the processes that the kernel has killed for lack of memory."""
_WRAPPED = f"""read -r _; keep=$1; shift
{_COUNT}
before=$kills
(echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@")
code=$?
[ -n "$keep" ] || kill -9 -1 2>/dev/null
count
[ $kills = $before ] || code=137
exit $code"""
"""Shell wrapper of a command: waits for a line on stdin, and kills leftover processes of the command.

The wait is needed because the SDK loses output that arrives before it has read the daemon's headers. The
builtin ``kill -1`` spares its own shell and starts no process. With the score 1000, the kernel kills the
command before the container's first process. The exit code is 137 if memory ran out.
"""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && [ ! -d "$1" ] && [ ! -p "$1" ] && cat >"$1"'
_READ = """[ -e "$1" ] || exit 102
[ -f "$1" ] || exit 122
[ -r "$1" ] || exit 113
exec head -c "$2" -- "$1" """
_PACK = """cd / && set -- home/agent
for file in tmp/* tmp/.[!.]*; do [ -e "$file" ] && set -- "$@" "$file"; done
exec tar -cf - "$@" """
_SYSCTLS = {"kernel.shmall": "1024", "kernel.msgmni": "16", "kernel.sem": "32 512 32 16"}
"""Limits of System V IPC objects, which outlive commands: 4 MiB, 256 KiB and 512 semaphores."""
_CAPABILITIES = [
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
]
"""Capabilities of a sandbox with commands as root: the ones needed to install software."""
_KILL = "kill -9 -1"
_KILL_ROOT = """read -r first rest </proc/1/task/1/children
for process in /proc/[0-9]*; do
    case ${process#/proc/} in 1|$first|$$) ;; *) kill -9 ${process#/proc/} 2>/dev/null ;; esac
done"""
"""Shell commands that kill all processes except the container's first ones, which root could signal."""
_TICK_S = 0.05
_FILE_S = 30.0
_ENDING_S = 1.0
"""The daemon can report a container as running for a moment after its processes were killed."""


class DockerSandbox(Sandbox):
    """A ``Sandbox`` in a container without network or capabilities, writable only in ``HOME`` and ``/tmp``.

    With ``limits.root``, commands run as root, in the image's environment and working folder, with all files
    writable. The container's first process reads a stream that this process holds open, so the container
    ends with this process and removes itself. ``HOME`` and ``/tmp`` get half of ``disk`` each. ``image`` is
    the name of a local image with a shell. ``temporary`` removes the image with the container. Raises
    SandboxUnavailable if no daemon answers or the image is missing, and SandboxFailed if the container does
    not start.
    """

    def __init__(self, limits: SandboxLimits, *, image: str, temporary: bool = False) -> None:
        super().__init__(limits)
        try:
            client = docker_daemon.connect(timeout=_FILE_S)
        except LaunchError as error:
            raise SandboxUnavailable(str(error)) from error
        self._api = client.api
        self._began = int(time.time())
        self._image = image
        self._user = "0:0" if limits.root else USER
        self._oom_kills = 0
        try:
            with _failures("the sandbox's container does not start"):
                docker_daemon.remove_orphans(client)
                self._id = _create(client, image, limits)
                if limits.root:
                    self._home = self._api.inspect_container(self._id)["Config"]["WorkingDir"] or "/"
        except BaseException:
            client.close()
            raise
        lifelines: list[Any] = []
        images = [image] if temporary else []
        self._finish = weakref.finalize(self, _end, os.getpid(), client, self._id, images, lifelines)
        try:
            with _failures("the sandbox's container does not start"):
                lifelines.append(self._api.attach_socket(self._id, {"stdin": 1, "stream": 1}))
                self._api.start(self._id)
        except BaseException:
            self._finish()
            raise

    @property
    def alive(self) -> bool:
        """See ``Sandbox.alive``."""
        if not super().alive:
            return False
        with _failures("the Docker daemon fails"):
            return self._state() is not None

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file. See ``Sandbox.write``."""
        path = absolute(path, self._home)
        self._file(["/bin/sh", "-c", _WRITE, "sh", path], path, as_bytes(data), 0)

    def write_all(self, files: Mapping[str, str | bytes]) -> None:
        """Write many files. The image needs tar."""
        self._file(["tar", "-xf", "-", "-C", "/"], self._home, tar_archive(files, self._home), 0)

    def read(self, path: str, limit: int = MAX_FILE) -> bytes:
        """Return a file's content. See ``Sandbox.read``."""
        path = absolute(path, self._home)
        return self._file(["/bin/sh", "-c", _READ, "sh", path, str(limit)], path, b"", limit)

    def snapshot(self) -> bytes:
        """Return the files of ``HOME`` and ``/tmp`` as a tar archive. The image needs tar."""
        return self._copy(["/bin/sh", "-c", _PACK], b"", 4 * self.limits.disk)

    def restore(self, state: bytes) -> None:
        """Extract a snapshot in this fresh sandbox."""
        self._copy(["tar", "-xf", "-", "-C", "/"], state, 0)

    def copy(self, *, network: bool | None = None) -> Sandbox:
        """See ``Sandbox.copy``. With ``limits.root``, an image is created and removed with the copy."""
        if not self.limits.root:
            return super().copy(network=network)
        with _failures("the sandbox's files cannot be copied"):
            image = self._api.commit(self._id)["Id"]
        return DockerSandbox(self._limits_with(network), image=image, temporary=True)

    def _fresh(self, limits: SandboxLimits) -> DockerSandbox:
        return DockerSandbox(limits, image=self._image)

    def _execute(self, execution: Execution) -> ExitState:
        if any("\0" in argument for argument in execution.arguments):
            return ExitState(code=126, failed="cannot run it: embedded null byte")
        ended = self._exec(execution)
        if self.limits.root and ended.killed_by is None and self._written_bytes() > self.limits.disk:
            self._kill_container("disk")
            return ExitState(killed_by="disk")
        return ended

    def _copy(self, command: list[str], stdin: bytes, limit: int) -> bytes:
        try:
            return self._file(command, self._home, stdin, limit)
        except OSError as error:
            raise SandboxFailed(f"the sandbox's files cannot be copied: {error}") from None

    def _file(self, command: list[str], path: str, stdin: bytes, limit: int) -> bytes:
        """Run an internal command and return its output. Raises OSError if it fails."""
        out, err = Stream(limit), Stream(4096)
        execution = Execution(arguments=command, stdin=stdin, out=out, err=err, timeout=_FILE_S)
        with self._lock:
            code = self._exec(execution).code
        if code != 0:
            numbers = {102: errno.ENOENT, 113: errno.EACCES, 122: errno.EINVAL}
            number = numbers.get(code or 0, errno.EIO)
            raise OSError(number, as_text(err.data).strip() or os.strerror(number), path)
        return out.data

    def _exec(self, execution: Execution) -> ExitState:
        """Run a command until it ends or exceeds a limit."""
        self._check_open()
        try:
            return self._exec_in_container(execution)
        except SandboxFailed:
            if self._finish.alive and not self._ended_by and self._ended_for_memory():
                self._ended_by = "memory"
            if self._ended_by is None:
                raise
            return ExitState(killed_by=self._ended_by)

    def _exec_in_container(self, execution: Execution) -> ExitState:
        keep = "yes" if self.limits.background else ""
        with _failures("the sandbox does not run a command"):
            made = self._api.exec_create(
                self._id,
                ["/bin/sh", "-c", _WRAPPED, "sh", keep, *execution.arguments],
                stdin=True,
                user=execution.user or self._user,
                workdir=execution.cwd,
                environment={**({} if self.limits.root else BASE_ENVIRONMENT), **execution.env},
            )["Id"]
            with _closing(self._api.exec_start(made, socket=True)) as connection:
                threading.Thread(
                    target=_feed, args=(connection, b"\n" + execution.stdin), daemon=True
                ).start()
                killed_by = self._follow(connection, made, execution)
            state = self._api.exec_inspect(made)
            code = state["ExitCode"]
            if code == 126 and not state["Pid"]:  # it has not started: the output is Docker's
                self._check_running()
            if killed_by is None and code == 137 and self._count_oom_kills():
                killed_by = "memory"
        return ExitState(code=None if killed_by in ("timeout", "output") else code, killed_by=killed_by)

    def _follow(self, connection: socket.socket, made: str, execution: Execution) -> KilledBy | None:
        """Read the output until the command ends. Return the limit for which it was killed, if any."""
        frames = _Frames(execution.out, execution.err)
        connection.settimeout(_TICK_S)
        deadline = time.monotonic() + execution.timeout
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
                    return killed_by  # background processes keep the connection open
                ended = not self._api.exec_inspect(made)["Running"]  # its last output might be in transit
            late = time.monotonic() >= deadline
            if killed_by is not None and late:
                self._kill_container(killed_by)
                return killed_by
            if killed_by is None and (late or frames.dropped > DISCARD_LIMIT):
                killed_by = "timeout" if late else "output"
                deadline = time.monotonic() + GRACE_S / 2
                self._kill_all(killed_by, execution.user)

    def _kill_all(self, reason: KilledBy, user: str | None) -> None:
        """Kill every process of a command's user. If no process can be started, kill the container."""
        import docker

        try:
            kill = _KILL if user or not self.limits.root else _KILL_ROOT
            made = self._api.exec_create(self._id, ["/bin/sh", "-c", kill], user=user or self._user)["Id"]
            self._api.exec_start(made, detach=True)
        except docker.errors.APIError:
            self._kill_container(reason)

    def _kill_container(self, reason: KilledBy) -> None:
        self._ended_by = reason
        self._api.kill(self._id)

    def _count_oom_kills(self) -> bool:
        """Return True if the kernel has killed a process for lack of memory since the last count."""
        made = self._api.exec_create(self._id, ["/bin/sh", "-c", f"{_COUNT}echo $kills"], user=self._user)[
            "Id"
        ]
        output = self._api.exec_start(made)
        if self._api.exec_inspect(made)["ExitCode"] != 0:
            self._check_running()
            return False
        before, self._oom_kills = self._oom_kills, int(output)
        return self._oom_kills > before

    def _check_running(self) -> None:
        """Raise SandboxFailed if the container has ended or is about to end."""
        import requests

        with contextlib.suppress(requests.ReadTimeout, requests.ConnectionError):
            self._api.wait(self._id, timeout=_ENDING_S)
            raise SandboxFailed("the sandbox's container has ended")

    def _written_bytes(self) -> int:
        """Return the size in bytes of the files that commands have written outside mounts."""
        with _failures("the Docker daemon fails"):
            return sum(
                one.get("SizeRw", 0) for one in self._api.containers(size=True, filters={"id": self._id})
            )

    def _ended_for_memory(self) -> bool:
        """Return True if the container has ended and the daemon saw its memory run out."""
        with _failures("the Docker daemon fails"):
            if self._state() is not None:
                return False
            span = {"since": self._began, "until": int(time.time()) + 1}
            seen = list(self._api.events(**span, filters={"container": self._id, "event": "oom"}))
        return bool(seen)

    def _state(self) -> dict[str, Any] | None:
        """Return the container's state, or None if it does not run."""
        import docker

        try:
            state: dict[str, Any] = self._api.inspect_container(self._id)["State"]
        except docker.errors.NotFound:
            return None
        return state if state["Running"] else None


class _Frames:
    """Docker's multiplexed output: frames with an eight-byte header of stream number and length."""

    def __init__(self, out: Stream, err: Stream) -> None:
        self._streams = {1: out, 2: err}
        self._header = b""
        self._left = 0
        self._stream = out

    @property
    def dropped(self) -> int:
        """Number of bytes that were dropped."""
        return sum(stream.dropped for stream in self._streams.values())

    def feed(self, data: bytes) -> None:
        """Append received bytes, which can split frames anywhere."""
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


def _create(client: Any, image: str, limits: SandboxLimits) -> str:
    """Create the container and return its id. Raises SandboxUnavailable if the image is missing."""
    import docker

    disk = f"rw,exec,nosuid,nodev,size={limits.disk // 2}"
    seal: dict[str, Any] = {
        "read_only": True,
        "tmpfs": {HOME: f"{disk},mode=0755,uid=1000,gid=1000", "/tmp": f"{disk},mode=1777"},
        "security_opt": ["no-new-privileges", f"seccomp={seccomp.docker_profile()}"],
    }
    if limits.root:
        seal = {"cap_add": _CAPABILITIES}
    host = client.api.create_host_config(
        auto_remove=True,
        network_mode=None if limits.network else "none",
        **seal,
        mem_limit=limits.memory,
        memswap_limit=limits.memory,
        pids_limit=limits.pids + 3,  # its init, its first process, and the shell around a command
        nano_cpus=int(limits.cpus * 1e9),
        cap_drop=["ALL"],
        sysctls=_SYSCTLS,
        init=True,
        ipc_mode="private",
        shm_size=64 << 20 if limits.root else 1 << 20,
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
            labels={docker_daemon.OWNER: process_identity()},
            host_config=host,
        )
    except docker.errors.ImageNotFound:
        raise SandboxUnavailable(
            f"there is no image {image!r} on this machine; build it, or docker pull {image}"
        ) from None
    discarded = docker_daemon.discarded_limits(client.api.inspect_container(made["Id"])["HostConfig"])
    if discarded and not limits.best_effort:
        client.api.remove_container(made["Id"], force=True, v=True)
        raise SandboxFailed(
            f"the Docker daemon does not enforce a sandbox's limits of {discarded}; start it with cgroups, "
            "or accept that with open_sandbox(limits='best_effort') or AGENTRL_SANDBOX_LIMITS=best_effort"
        )
    if discarded:
        announce(f"sandbox limits are best effort: the Docker daemon does not enforce those of {discarded}")
    return str(made["Id"])


def _feed(connection: socket.socket, data: bytes) -> None:
    """Write a command's stdin and close it. Runs concurrently with reading its output."""
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            with contextlib.suppress(TimeoutError):
                view = view[connection.send(view) :]
        connection.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _closing(stream: Any) -> Iterator[socket.socket]:
    """Yield the socket of the SDK's stream, and close both, since closing the stream leaves it open."""
    connection = getattr(stream, "_sock", stream)
    try:
        yield connection
    finally:
        stream.close()
        connection.close()


def _end(pid: int, client: Any, container: str, images: list[str], lifelines: list[Any]) -> None:
    """Remove the container and the images. A forked copy of the server only closes its connections."""
    import docker
    import requests

    if os.getpid() == pid:
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            client.api.remove_container(container, force=True, v=True)
            for image in images:
                client.api.remove_image(image, force=True)
    for lifeline in lifelines:
        with _closing(lifeline):
            pass
    client.close()


@contextlib.contextmanager
def _failures(action: str) -> Any:
    """Convert the daemon's errors and timeouts to SandboxFailed."""
    try:
        with docker_daemon.daemon_errors(action):
            yield
    except LaunchError as error:
        raise SandboxFailed(str(error)) from error
    except OSError as error:
        raise SandboxFailed(f"{action}: {error}") from error
