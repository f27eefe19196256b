"""Process 1 of a bubblewrap sandbox: runs commands one at a time, on request over a socket on stdin.

The module uses only the standard library of the Python in the sandbox, and has no more privileges than
commands. Commands cannot kill or stop it, because it is process 1 of its pid namespace. When the socket
closes, it exits and the kernel kills all other processes.

A request is a JSON line with three descriptors (stdin, stdout, stderr). ``{"op": "kill"}`` has none. A
response is a JSON line: ``{"code"}``, ``{"signal"}`` or ``{"failed"}``, with ``"pids": true`` if the process
limit was hit, and ``"memory": true`` if memory ran out.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from typing import Any

CHUNK = 1 << 16
PR_SET_DUMPABLE = 4
TICK_MS = 50
"""Milliseconds between two measurements of the memory in use, if no cgroup limits it."""
LAYERS = int(sys.argv[1])
"""Descriptor of the folder with the writable layers, which has no path in the sandbox."""
OPAQUE = "AGENTRL.opaque"
"""Marks a folder that hides the lower folder of the same name."""


def main() -> None:
    """Serve requests until the socket closes."""
    control = socket.socket(fileno=os.dup(0))
    os.set_inheritable(LAYERS, False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _send(control, {"ready": True})
    _, (oom,) = _receive(control)  # this process's oom_score_adj, which cannot be opened in the sandbox
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    memory = 0
    while True:
        while memory and not select.select([control], [], [], TICK_MS / 1000)[0]:
            if _used_bytes() > memory:
                _kill_all()
        request, descriptors = _receive(control)
        memory = request.get("memory", 0) if request.get("background") else 0
        if request.get("op") != "kill":
            _send(control, _serve(control, awake, oom, request, descriptors))
        for descriptor in descriptors:
            os.close(descriptor)


def _serve(
    control: socket.socket, awake: int, oom: int, request: dict[str, Any], descriptors: list[int]
) -> dict[str, Any]:
    """Run one command until it ends and return the response."""
    _reap()
    try:
        # The child inherits this score: when memory runs out, the kernel kills commands before process 1.
        os.write(oom, b"1000")
        child = os.fork()
    except OSError as error:
        _kill_all()
        return {"pids": error.errno == errno.EAGAIN, "memory": error.errno == errno.ENOMEM}
    if child == 0:
        _child(request, descriptors)
    os.write(oom, b"0")
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
    ended = _wait(control, awake, child, request.get("memory", 0))
    if not request.get("background") or isinstance(ended, str):
        _kill_all()
    if isinstance(ended, str):
        return {"signal": int(signal.SIGKILL), "memory": ended == "memory"}
    if os.WIFSIGNALED(ended):
        return {"signal": os.WTERMSIG(ended)}
    return {"code": os.WEXITSTATUS(ended)}


def _wait(control: socket.socket, awake: int, child: int, memory: int) -> int | str:
    """Wait for the child. Return its status, or the reason to kill it: "kill" or "memory"."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(awake, select.POLLIN)
    while True:
        ended = _reap()
        if child in ended:
            return ended[child]
        if memory and _used_bytes() > memory:
            return "memory"
        for descriptor, _ in poll.poll(TICK_MS if memory else None):
            if descriptor == awake:
                os.read(awake, CHUNK)
            elif _receive(control)[0].get("op") == "kill":
                return "kill"


def _used_bytes() -> int:
    """Return the bytes that all commands and files use. Shared memory counts for each process."""
    files = os.fstatvfs(LAYERS)
    total = (files.f_blocks - files.f_bfree) * files.f_frsize
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != "1":
            with contextlib.suppress(OSError):
                last = max(os.listdir(f"/proc/{pid}/task"), key=int)  # the first one might have ended
                with open(f"/proc/{pid}/task/{last}/status", "rb") as status:
                    for line in status:
                        if line.startswith((b"RssAnon:", b"RssShmem:")):
                            total += int(line.split()[1]) << 10
    return total


def _reap() -> dict[int, int]:
    """Reap all ended children, including adopted ones, and return their statuses."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _kill_all() -> None:
    """Kill every other process of the namespace and wait until all have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # this is atomic, so no process can fork meanwhile
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _child(request: dict[str, Any], descriptors: list[int]) -> None:
    """Run the command in the forked child. Never returns."""
    status = 126
    try:
        os.setsid()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        for name, value in request["rlimits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        status = _FILE_OPERATIONS.get(request["op"], _run)(request)
    except BaseException as error:  # a forked copy of process 1 must never continue
        os.write(2, _error_text(error, request).encode("utf-8", "replace"))
        status = 127 if isinstance(error, FileNotFoundError) else status
    finally:
        os._exit(status)


def _error_text(error: BaseException, request: dict[str, Any]) -> str:
    number = getattr(error, "errno", None) or 0
    reason = os.strerror(number) if number else str(error)
    if request["op"] != "run":
        return f"{number}:{reason}"
    return f"cannot run {request['argv'][0][:200] if request['argv'] else 'nothing'}: {reason}\n"


def _run(request: dict[str, Any]) -> int:
    os.chdir(request["cwd"])
    os.execvpe(request["argv"][0], request["argv"], request["env"])


def _write(request: dict[str, Any]) -> int:
    """Write stdin to a file."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    _copy(0, _regular(os.open(path, flags, 0o644)))
    return 0


def _read(request: dict[str, Any]) -> int:
    """Write a file to stdout."""
    _copy(_regular(os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK)), 1, request["limit"])
    return 0


def _snapshot(request: dict[str, Any]) -> int:
    """Write all changes to stdout as a tar archive of the layers."""
    import tarfile

    def recorded(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.isdir() and "user.overlay.opaque" in os.listxattr(entry.name):
            entry.pax_headers = {OPAQUE: "y"}
        return None if entry.isfifo() else entry

    os.fchdir(LAYERS)
    with os.fdopen(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for layer in os.listdir():
            tar.add(layer, filter=recorded)
    return 0


def _restore(request: dict[str, Any]) -> int:
    """Apply the archive on stdin to the mounted files."""
    import tarfile

    modes = {}
    with os.fdopen(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r|") as tar:
        for entry in tar:
            path = _place(entry.name, request["layers"])
            try:
                _apply(tar, entry, path, request["layers"])
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EROFS):  # mount points of the sandbox itself
                    raise
            else:
                modes[path] = entry.mode if entry.isdir() or entry.isreg() else None
    for path, mode in modes.items():
        if mode is not None and os.stat(path).st_uid == os.getuid() and os.access(path, os.W_OK):
            os.chmod(path, mode)
    return 0


def _place(name: str, layers: dict[str, str]) -> str:
    layer, _, rest = name.partition("/") if "" not in layers else ("", "", name)
    return os.path.join(layers[layer], rest) if rest else layers[layer]


def _apply(tar: Any, entry: Any, path: str, layers: dict[str, str]) -> None:
    """Apply one archive entry. A device marks a deletion in an overlay."""
    import shutil

    folder = os.path.isdir(path) and not os.path.islink(path)
    if entry.isdir():
        if OPAQUE in entry.pax_headers and folder:
            shutil.rmtree(path)
        return os.makedirs(path, exist_ok=True)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        shutil.rmtree(path) if folder else os.unlink(path)
    if entry.issym():
        os.symlink(entry.linkname, path)
    elif entry.islnk():
        os.link(_place(entry.linkname, layers), path)
    elif entry.isreg():
        with open(path, "wb") as target:
            shutil.copyfileobj(tar.extractfile(entry), target)
        os.utime(path, (entry.mtime, entry.mtime))


_FILE_OPERATIONS = {"write": _write, "read": _read, "snapshot": _snapshot, "restore": _restore}


def _regular(descriptor: int) -> int:
    """Return the descriptor if it is a regular file. Raise OSError for files that could block."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a regular file")
    return descriptor


def _copy(source: int, target: int, limit: int = sys.maxsize) -> None:
    while limit > 0 and (data := os.read(source, min(CHUNK, limit))):
        limit -= len(data)
        while data:
            data = data[os.write(target, data) :]


def _send(control: socket.socket, response: dict[str, Any]) -> None:
    control.sendall(json.dumps(response).encode() + b"\n")


def _receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next request and its descriptors. Exit if the socket is closed."""
    data, descriptors = b"", array.array("i")
    while not data.endswith(b"\n"):
        piece, ancillary, _, _ = control.recvmsg(
            CHUNK, socket.CMSG_SPACE(3 * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        if not piece:
            os._exit(0)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content)
        data += piece
    return json.loads(data), list(descriptors)


if __name__ == "__main__":
    main()
