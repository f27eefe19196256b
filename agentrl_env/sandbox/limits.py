"""What a sandbox may use at most."""

from __future__ import annotations

from dataclasses import dataclass

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
