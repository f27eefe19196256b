"""Wait for processes started by tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_train.engine.pool import EnginePool


def alive(pid: int) -> bool:
    """Return True if a process is running. A zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], what: str = "a condition holds", seconds: float = 60.0) -> Any:
    """Wait until a condition is true and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.02)
    return found


def until_dead(*pids: int) -> None:
    """Wait until processes have ended."""
    until(lambda: not any(map(alive, pids)), f"the processes {pids} have ended")


def process_ids(pool: EnginePool) -> list[int]:
    """Return the pids of the running engines. Each engine leads its own process group."""
    return [replica.process_id for replica in pool._all if replica.process_id is not None]
