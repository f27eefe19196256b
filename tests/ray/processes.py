"""Find and kill the processes of a run by a marker in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.train.runs.processes import command

MARK = "AGENTRL_TEST_MARK"


@dataclass
class MarkedRun:
    """A run with a marker in the environment of all its processes, including its cluster."""

    config: Path
    overrides: tuple[str, ...]
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        """Start the run. Remaining processes are killed on exit."""
        process = subprocess.Popen(
            command(self.config, *self.overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: self.mark},
        )
        try:
            yield process
        finally:
            for number in self.processes():
                os.kill(number, signal.SIGKILL)
            process.communicate(timeout=30)

    def processes(self, title: str = "") -> list[int]:
        """Return the pids of the run's processes with command lines that start with ``title``."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                ours = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                if ours and (folder / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(int(folder.name))
            except OSError:  # not a process, or it has just exited
                continue
        return found

    def kill(self, title: str) -> None:
        """Kill the processes with a title. At least one must exist."""
        numbers = self.processes(title)
        assert numbers, f"no process is called {title}"
        for number in numbers:
            os.kill(number, signal.SIGKILL)

    def left_over(self, *, within_s: float = 20.0) -> list[int]:
        """Return the processes still running after ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left
