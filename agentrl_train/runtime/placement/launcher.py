"""Launchers start the learner ranks and engine processes of a run: locally, under torchrun, or on Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from agentrl_train.engine.process import EngineProcess, Spawn
from agentrl_train.errors import ConfigError, RanksLost
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.distributed import require_whole_shares, world_size
from agentrl_train.runtime.placement.devices import VISIBLE, Devices, assign, visible_gpus

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


class Rendezvous:
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
        return {**self._shared, **own, **visible_devices(gpus)}


def visible_devices(gpus: Sequence[str]) -> dict[str, str]:
    """Return what makes a process see these GPUs alone; nothing is changed where none are given."""
    return {VISIBLE: ",".join(gpus)} if gpus else {}


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
        return environment(visible_devices(self.devices.of_the_first_rank))

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Start ranks 1 and up, and stop them at the end."""
        count, gpus = self._config.train.processes, self.devices.learner
        own = self.devices.of_the_first_rank
        if count == 1:
            with self.alone():
                yield
            return
        meeting = Rendezvous(count)
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


ON_THIS_NODE = "LOCAL_WORLD_SIZE"
"""Set by torchrun alone: how many ranks it has started on this node."""


class Torchrun:
    """Starts engines beside rank 0, and no ranks; see ``Launcher``."""

    engines_apart = False
    spawn: Spawn = EngineProcess

    def __init__(self, config: RunConfig) -> None:
        """Decide who gets which GPU of this node.

        Raises:
            ConfigError: torchrun did not start this process, or the placement does not fit the node.
        """
        if "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "placement.launcher = 'torchrun' is for processes that torchrun starts: "
                "torchrun --nproc-per-node N -m agentrl_train run CONFIG.toml"
            )
        here = int(os.environ.get(ON_THIS_NODE, os.environ["WORLD_SIZE"]))
        first = os.environ.get("GROUP_RANK", "0") == "0"
        self.devices = assign(config, gpus=visible_gpus(), ranks=here, with_engine=first)

    async def lost(self) -> None:
        """Wait for ever: torchrun ends all ranks when one fails."""
        await asyncio.get_running_loop().create_future()

    def alone(self) -> AbstractContextManager[None]:
        """Have this process see its own GPUs alone."""
        return self.ranks()

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Have this process see its own GPUs alone."""
        number = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = self.devices.learner[number : number + 1]
        if int(os.environ["RANK"]) == 0:
            gpus = self.devices.of_the_first_rank
        with environment({**visible_devices(gpus), **({"LOCAL_RANK": "0"} if gpus else {})}):
            yield


@contextmanager
def make_launcher(config: RunConfig) -> Iterator[Launcher]:
    """Return who starts the processes of a run; what it holds is given back at the end.

    A process that torchrun has started is one of its ranks, whatever the configuration says of launchers.

    Raises:
        ConfigError: the placement does not fit the machine, or how this process was started.
    """
    if world_size() == 1:
        require_whole_shares(config.train.processes, config.train.sequence_parallel)
    with ExitStack() as stack:
        if config.placement.launcher == "ray":
            if world_size() > 1:
                raise ConfigError(
                    "placement.launcher = 'ray' starts the processes itself: start it without torchrun"
                )
            yield stack.enter_context(_ray(config))
        elif config.placement.launcher == "torchrun" or world_size() > 1:
            yield Torchrun(config)
        else:
            yield Local(config)


def follower_devices(config: RunConfig) -> AbstractContextManager[None]:
    """Take the GPU of a rank other than 0; one that was not started by torchrun has it already.

    Raises:
        ConfigError: the placement does not fit this node.
    """
    return Torchrun(config).ranks() if ON_THIS_NODE in os.environ else nullcontext()


def _ray(config: RunConfig) -> AbstractContextManager[Launcher]:
    try:
        from agentrl_train.runtime.placement.ray import cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("placement.launcher = 'ray' needs Ray: pip install 'agentrl-kit[ray]'") from error
    launcher: AbstractContextManager[Launcher] = cluster(config)
    return launcher
