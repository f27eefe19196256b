"""The seam between a run and whoever starts its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from agentrl_train.engine.process import Spawn
from agentrl_train.runtime.placement.devices import VISIBLE, Devices

LOOK_S = 0.25
"""Time between two looks at whether a process still lives."""


class Launcher(Protocol):
    """Starts the processes of a run, of which this one is rank 0 of the learner and runs the loop."""

    @property
    def devices(self) -> Devices:
        """Return the GPUs of this node that were given to the run."""
        ...

    @property
    def engines_apart(self) -> bool:
        """Return whether the torch engine, too, has processes of its own."""
        ...

    @property
    def spawn(self) -> Spawn:
        """Return what starts an engine's process."""
        ...

    async def lost(self) -> None:
        """Wait for a rank to be lost; raises ``RanksLost`` then."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Have this process see the GPUs of rank 0 for the length of the block, and start no rank."""
        ...

    def ranks(self) -> AbstractContextManager[None]:
        """Have the learner's other processes for the length of the block, by torchrun's variables.

        Raises:
            RanksLost: they cannot be had.
        """
        ...


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the length of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Meeting:
    """Where ranks find one another, by the variables that torchrun would set; to be kept while they do."""

    def __init__(self, count: int, *, host: str = "127.0.0.1") -> None:
        """Open a store on this machine, which the others reach as ``host``."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._shared = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(count),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above: no rank opens its own
        }

    def variables(self, rank: int, *, gpus: Sequence[str] = ()) -> dict[str, str]:
        """Return the variables of one rank, which sees the given GPUs alone and takes the first."""
        own = {"RANK": str(rank), "LOCAL_RANK": "0" if gpus else str(rank)}
        return {**self._shared, **own, **seeing(gpus)}


def seeing(gpus: Sequence[str]) -> dict[str, str]:
    """Return what makes a process see these GPUs alone; nothing is changed where none are given."""
    return {VISIBLE: ",".join(gpus)} if gpus else {}
