"""Memory that a run has freed."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires the allocator of glibc")

ARENAS = """
import ctypes, sys, threading, torch
from agentrl_train.models.architecture import share_freed_memory

if sys.argv[1] == "shared":
    share_freed_memory()
allocated = threading.Barrier(5)

def allocate():
    held = [bytes(5000) for _ in range(100)]
    allocated.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
allocated.wait()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""
"""A script that prints the arenas of a process with four threads, as XML."""
FAULTS = """
import resource, torch
from agentrl_train.models.architecture import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
for _ in range(40):
    before = faults()
    torch.ones(2**26, dtype=torch.uint8)
    print(faults() - before)
"""
"""A script that prints the page faults of tensors, each freed before the next.

PyTorch aligns tensors, so glibc looks for a chunk that is larger than the tensor: the one that was just freed
is too small until it has merged with a neighbour. The first few tensors can therefore use new pages.
"""
RETURNS = """
import sys, torch
from pathlib import Path
from agentrl_train.models.architecture import keep_freed_memory
from agentrl_train.training.step_trainer import FreedMemory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

keep_freed_memory()
now = 0.0
freed = FreedMemory(clock=lambda: now)
held = [torch.ones(2**22, dtype=torch.uint8) for _ in range(int(sys.argv[1]))]
for now in map(float, sys.argv[2:]):
    tensors = [torch.ones(2**22, dtype=torch.uint8) for _ in range(100)]
    del tensors
    before = resident()
    freed.return_excess()
    print(before - resident())
"""
"""A script that holds so many tensors of 4 MB, and frees 100 in each step.

It prints how many MB are returned after the steps, which end at the given seconds.
"""


def arenas(how: str, **environment: str) -> int:
    """Return the number of arenas, with "shared" or "separate" freed memory."""
    text = subprocess.check_output(
        [sys.executable, "-c", ARENAS, how], env=os.environ | environment, text=True
    )
    return text.count("<heap nr=")


def test_threads_share_one_arena():
    assert arenas("separate") > 1
    assert arenas("shared") == 1


def test_a_number_of_arenas_in_the_environment_is_kept():
    assert arenas("shared", MALLOC_ARENA_MAX="2") == 2


def test_memory_of_freed_tensors_is_reused():
    faults = [int(one) for one in subprocess.check_output([sys.executable, "-c", FAULTS]).split()]
    assert median(faults) < faults[0] // 4


@pytest.mark.parametrize(
    ("held", "returned"), [(20, [True, False, False, True]), (200, [False, False, False, False])]
)
def test_freed_memory_is_returned_from_time_to_time_if_it_exceeds_the_memory_in_use(held, returned):
    command = [sys.executable, "-c", RETURNS, str(held), *("0", "5", "19", "20")]
    assert [int(one) > 200 for one in subprocess.check_output(command).split()] == returned
