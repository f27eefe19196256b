"""Waiting for a command: its output is kept up to a limit, its end comes in time or is brought about."""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections.abc import Callable, Mapping

from agentrl_env.errors import SandboxFailed
from agentrl_env.sandbox.sandbox import KilledBy, Stream

DRAIN = 16 << 20
"""Bytes of output that are read and dropped before a command is killed for never ending."""
GRACE_S = 10.0
"""Seconds that the end may take once everything was killed."""
_CHUNK = 1 << 16


def collect(
    outputs: Mapping[int, Stream], ended: int, *, timeout: float, kill: Callable[[], None]
) -> KilledBy | None:
    """Read the outputs until ``ended`` becomes readable, and say why it had to be killed, if it had.

    Args:
        outputs: non-blocking descriptor -> what takes its bytes.
        ended: descriptor that becomes readable when the command has ended.
        timeout: seconds until ``kill`` is called.
        kill: ends the command; called at most once.

    Raises:
        SandboxFailed: it does not end, not even killed.
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
        over = any(stream.dropped > DRAIN for stream in outputs.values())
        late = time.monotonic() >= deadline
        if killed_by is not None and late:
            raise SandboxFailed(f"the sandbox did not end a command within {GRACE_S:g} s of killing it")
        if killed_by is None and (over or late):
            killed_by = "output" if over else "timeout"
            deadline = time.monotonic() + GRACE_S
            kill()


def _read(descriptor: int, stream: Stream) -> bool:
    """Take one piece; False at the end."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    stream.feed(data)
    return bool(data)


def _drain(descriptor: int, stream: Stream) -> None:
    """Take what is there by now; a process left in the background may still hold the other end."""
    limit = stream.total + DRAIN
    while stream.total < limit:
        before = stream.total
        if not _read(descriptor, stream) or stream.total == before:
            return


def in_memory(name: str, data: bytes) -> int:
    """Return a descriptor at the beginning of ``data``, which is in no file system and cannot be changed."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(file, 0, os.SEEK_SET)
    return file
