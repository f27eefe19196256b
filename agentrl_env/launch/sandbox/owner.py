"""Names that tell whose a leftover is: of this process, of another that lives, or of one that is dead."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

PREFIX = "agentrl-sandbox-"
_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-(\d+)-[0-9a-f]+")


def new_name() -> str:
    """Return a name for something of this process: unique, and saying so."""
    pid = os.getpid()
    return f"{PREFIX}{_namespace()}-{pid}-{_began(pid)}-{secrets.token_hex(8)}"


def abandoned(name: str) -> bool:
    """Return whether ``name`` is one of ``new_name`` whose process is gone.

    False where that cannot be told: the numbers of processes are those of another namespace.
    """
    match = _NAME.fullmatch(name)
    return match is not None and int(match[1]) == _namespace() and _began(int(match[2])) != int(match[3])


def _namespace() -> int:
    """Return the namespace that this process's number belongs to."""
    return os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0


def _began(pid: int) -> int:
    """Return when a process began, in ticks since boot: numbers are used again, this is not. 0: never."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
