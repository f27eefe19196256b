"""Whose a leftover is: the name of a process that no later one gets, and whether it is gone."""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path


def owner(pid: int | None = None) -> str:
    """Return the name of a process that no later process gets; empty where the platform has no /proc.

    It is ``PLACE-NUMBER-BEGIN``: the boot and its namespace of process numbers, as 12 hexadecimal digits,
    the number, and when the process began. It is fit for a label and for the name of a file.

    Args:
        pid: its number; this process's by default.
    """
    pid = os.getpid() if pid is None else pid
    began = _began(pid)
    return f"{_place()}-{pid}-{began}" if began else ""


def owner_is_dead(name: str) -> bool | None:
    """Return whether the process that ``owner`` named is gone; one that is only to be reaped is.

    None where that cannot be told here: it is of another machine, boot or namespace, or no such name.
    """
    place, _, rest = name.partition("-")
    pid, _, began = rest.partition("-")
    if not place or place != _place() or not pid.isdecimal():
        return None
    return _began(int(pid)) != began


@cache
def _place() -> str:
    """Return what tells this boot of this machine, and the namespace of its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return when a process began, in clock ticks since the boot; empty where none runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]
