"""What a sandbox may use at most."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
OVERHEAD = 24 << 20
"""Bytes of memory kept for what runs the commands; the rest may fill up with files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one sandbox.

    Args:
        memory: bytes of RAM of all processes together, files included, as they lie in RAM.
        disk: bytes of all files together.
        pids: processes and threads at the same time.
        cpus: processors' worth of time.
        timeout: seconds that a command may run unless ``run`` is told otherwise.
        max_output: bytes kept of each of a command's stdout and stderr.
        network: whether there is one.
        background: whether what a command leaves running goes on after it; else it is killed.
    """

    memory: int
    disk: int
    pids: int
    cpus: float
    timeout: float
    max_output: int
    network: bool
    background: bool

    def __post_init__(self) -> None:
        if self.disk <= 0 or self.disk + OVERHEAD > self.memory:
            raise ValueError(
                f"disk={self.disk} must be positive and leave {OVERHEAD >> 20} MiB of memory={self.memory}: "
                "a sandbox's files lie in its memory"
            )
        for name in ("pids", "cpus", "timeout", "max_output"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")


def parse_size(size: int | str) -> int:
    """Return the bytes that ``size`` means: a number, or text such as "64m" or "2g" (powers of 1024).

    Raises:
        ValueError: it means nothing.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+)([kmg]?)b?", size.strip().lower())
    if match is None:
        raise ValueError(f"size {size!r} is not a number of bytes; write it like 65536 or '64m'")
    return int(match[1]) * _UNITS[match[2]]
