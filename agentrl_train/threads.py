"""CPU threads of the parts of one process that compute."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SOFT_PAUSE = 1
"""OpenMP's ``omp_pause_soft``: keep the settings."""


class Threads:
    """Divides CPU threads among the parts that compute at the same time. A single part gets all threads.

    Args:
        count: number of threads; None does not change their number.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._working: set[object] = set()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the caller as computing for the duration of the block."""
        self._working.add(token := object())
        try:
            self.share()
            yield
        finally:
            self._working.discard(token)

    def share(self) -> None:
        """Set the number of threads for the caller's operations, which PyTorch keeps for each thread."""
        import torch  # here, because the command line starts without it

        if self._count is None:
            return
        share = max(1, self._count // max(1, len(self._working)))
        if share != torch.get_num_threads():
            torch.set_num_threads(share)
            if share == 1:
                release_idle_threads()


def release_idle_threads() -> None:
    """End the OpenMP threads that idle between two operations of the calling thread.

    Each thread that computes has its own. GNU OpenMP lets them wait actively for the next operation, but only
    while a process has no more of them than processors, so the threads of a part that has paused slow down
    the others: the prefill of a language model on two cores takes 1.3 times as long. Other implementations of
    OpenMP are not changed.
    """
    for library in _gnu_openmp():
        library.omp_pause_resource_all(SOFT_PAUSE)


@cache
def _gnu_openmp() -> tuple[ctypes.CDLL, ...]:
    """Return the copies of GNU OpenMP in this process. PyTorch and other packages bring their own."""
    if sys.platform != "linux":
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [ctypes.CDLL(path) for path in sorted(paths) if "libgomp" in path and Path(path).exists()]
    return tuple(library for library in libraries if hasattr(library, "omp_pause_resource_all"))
