"""Processes of this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from agentrl_train.engine.process import EngineProcess, Spawn
from agentrl_train.errors import RanksLost
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.placement.devices import assign, visible_gpus
from agentrl_train.runtime.placement.launcher import LOOK_S, Meeting, environment, seeing

END_S = 10.0
"""How long ranks may take to end by themselves."""


class Local:
    """Starts ranks and engines beside this process; see ``Launcher``."""

    engines_apart = False
    spawn: Spawn = EngineProcess

    def __init__(self, config: RunConfig) -> None:
        """Decide who gets which GPU; raises ``ConfigError``."""
        self._config = config
        self.devices = assign(config, gpus=visible_gpus(), ranks=config.train.processes)
        self._others: Sequence[subprocess.Popen[bytes]] = ()

    async def lost(self) -> None:
        """Wait for a rank to be lost.

        Raises:
            RanksLost: says which, and how it ended.
        """
        while True:
            for number, process in enumerate(self._others, start=1):
                if (status := process.poll()) is not None:
                    raise RanksLost(
                        f"rank {number} of the learner ended with status {status}: look at what it has "
                        "printed, then go on with --resume"
                    )
            await asyncio.sleep(LOOK_S)

    def alone(self) -> AbstractContextManager[None]:
        """Have this process see the GPUs of rank 0."""
        return environment(seeing(self.devices.of_the_first_rank))

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Start ranks 1 and up, and stop them at the end."""
        count, gpus = self._config.train.processes, self.devices.learner
        own = self.devices.of_the_first_rank
        if count == 1:
            with self.alone():
                yield
            return
        meeting = Meeting(count)
        others = [meeting.variables(rank, gpus=gpus[rank : rank + 1]) for rank in range(1, count)]
        with (
            environment(meeting.variables(0, gpus=own)),
            _processes(others, config=self._config.to_toml()) as self._others,
        ):
            yield
            self._others = ()


@contextmanager
def _processes(
    environments: Sequence[dict[str, str]], *, config: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(config)
        command = [sys.executable, "-m", "agentrl_train", "run", str(path)]
        processes = [subprocess.Popen(command, env=os.environ | one) for one in environments]
        try:
            yield processes
        finally:
            deadline = time.monotonic() + END_S
            for process in processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
