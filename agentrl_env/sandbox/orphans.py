"""Process identity that survives pid reuse, to find orphans."""

from __future__ import annotations

import os
import re
import secrets
from functools import cache
from hashlib import sha256
from pathlib import Path

PREFIX = "agentrl-sandbox-"
"""Prefix of the names that ``resource_name`` makes."""
_NAME = re.compile(re.escape(PREFIX) + r"([0-9a-f]+-\d+-\d+)-[0-9a-f]+")


def process_identity(pid: int | None = None) -> str:
    """Return an identity that no later process gets. Empty on platforms without ``/proc``.

    The format is ``HOST-PID-START``: a hash of the boot id and the pid namespace (12 hexadecimal digits),
    the process id, and the start time in clock ticks. It is valid in labels and file names.

    Args:
        pid: id of the process. By default this process.
    """
    pid = os.getpid() if pid is None else pid
    start = _start_time(pid)
    return f"{_host()}-{pid}-{start}" if start else ""


def is_dead(identity: str) -> bool | None:
    """Return True if the process with this identity has ended. Zombies count as ended.

    Returns None for identities of another machine, boot or pid namespace, and for malformed ones.
    """
    host, _, rest = identity.partition("-")
    pid, _, start = rest.partition("-")
    if not host or host != _host() or not pid.isdecimal():
        return None
    return _start_time(int(pid)) != start


def resource_name() -> str:
    """Return a unique name, including the process identity, for a folder or cgroup of this process."""
    return f"{PREFIX}{process_identity() or 'unknown'}-{secrets.token_hex(8)}"


def is_orphan(name: str) -> bool:
    """Return True if ``name`` comes from ``resource_name`` in a process that is known to have ended."""
    match = _NAME.fullmatch(name)
    return match is not None and is_dead(match[1]) is True


@cache
def _host() -> str:
    """Return a hash that identifies this boot of this machine and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return a process's start time in clock ticks since boot, or "" if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]
