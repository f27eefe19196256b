"""Launchers start the learner ranks and engine processes of a run: locally, under torchrun, or on Ray."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch._C._distributed_c10d import TCPStore

from agentrl_env.errors import install_extra
from agentrl_train.engine.process import EngineProcess, Spawn
from agentrl_train.errors import ConfigError, RanksLost
from agentrl_train.placement.devices import VISIBLE, Devices, Processes, assign, visible_gpus
from agentrl_train.placement.ranks import require_whole_shares, world_size

POLL_INTERVAL_S = 0.25
"""Interval of liveness checks of the ranks."""
EXIT_TIMEOUT_S = 10.0
"""Time for the ranks to exit before they are killed."""


class Launcher(Protocol):
    """Interface: starts the processes of a run. The calling process is rank 0 and runs the loop."""

    @property
    def devices(self) -> Devices:
        """Return the GPUs of the run on this node."""
        ...

    @property
    def separate_engines(self) -> bool:
        """Return True if the torch engine also runs in separate processes."""
        ...

    @property
    def spawn(self) -> Spawn:
        """Return the function that creates an engine process."""
        ...

    async def wait_lost(self) -> None:
        """Wait until a rank is lost, then raise ``RanksLost``."""
        ...

    def single(self) -> AbstractContextManager[None]:
        """Restrict this process to the GPUs of rank 0 for the block, without starting other ranks."""
        ...

    def ranks(self) -> AbstractContextManager[None]:
        """Start the other ranks for the block and set torchrun's environment variables.

        Raises:
            RanksLost: the ranks could not be started.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The work of a rank other than 0, in the two forms that launchers need."""

    command: Sequence[str]
    """Command line, to which the path of a file with ``config`` is appended."""
    config: str
    run: Callable[[], None]
    """The same work as a function that can be sent to another process."""


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the block."""
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
    """A rendezvous store and the environment variables that torchrun would set for it.

    Keep the object until all ranks have connected.
    """

    def __init__(self, count: int, *, host: str = "127.0.0.1") -> None:
        """Open a store on this machine, which the other ranks reach as ``host``."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._shared = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(count),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 must not open another store
        }

    def variables(self, rank: int, *, gpus: Sequence[str] = ()) -> dict[str, str]:
        """Return the variables of one rank, which sees only the given GPUs and uses the first."""
        own = {"RANK": str(rank), "LOCAL_RANK": "0" if gpus else str(rank)}
        return {**self._shared, **own, **visible_devices(gpus)}


def visible_devices(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that restrict a process to these GPUs; empty if none are given."""
    return {VISIBLE: ",".join(gpus)} if gpus else {}


class Local:
    """Starts ranks and engines on this machine; implements ``Launcher``."""

    separate_engines = False
    spawn: Spawn = EngineProcess

    def __init__(self, processes: Processes, follower: Follower) -> None:
        """Assign the GPUs; raises ``ConfigError``."""
        self._count = processes.train.processes
        self._follower = follower
        self.devices = assign(processes, gpus=visible_gpus(), ranks=self._count)
        self._others: Sequence[subprocess.Popen[bytes]] = ()

    async def wait_lost(self) -> None:
        """Wait until a rank exits.

        Raises:
            RanksLost: a rank exited. The message has its number and exit status.
        """
        while True:
            for number, process in enumerate(self._others, start=1):
                if (status := process.poll()) is not None:
                    raise RanksLost(
                        f"rank {number} of the learner exited with status {status}: check its output, then "
                        "continue with --resume"
                    )
            await asyncio.sleep(POLL_INTERVAL_S)

    def single(self) -> AbstractContextManager[None]:
        """Restrict this process to the GPUs of rank 0."""
        return environment(visible_devices(self.devices.rank_0))

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Start all ranks but rank 0, and stop them on exit."""
        count, gpus = self._count, self.devices.learner
        if count == 1:
            with self.single():
                yield
            return
        rendezvous = Rendezvous(count)
        others = [rendezvous.variables(rank, gpus=gpus[rank : rank + 1]) for rank in range(1, count)]
        with (
            environment(rendezvous.variables(0, gpus=self.devices.rank_0)),
            _processes(others, self._follower) as self._others,
        ):
            yield
            self._others = ()


@contextmanager
def _processes(
    environments: Sequence[dict[str, str]], follower: Follower
) -> Iterator[list[subprocess.Popen[bytes]]]:
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(follower.config)
        command = [*follower.command, str(path)]
        processes = [subprocess.Popen(command, env=os.environ | one) for one in environments]
        try:
            yield processes
        finally:
            deadline = time.monotonic() + EXIT_TIMEOUT_S
            for process in processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Number of ranks on this node; set only by torchrun."""


class Torchrun:
    """Starts engines on the node of rank 0. torchrun starts the ranks. Implements ``Launcher``."""

    separate_engines = False
    spawn: Spawn = EngineProcess

    def __init__(self, processes: Processes) -> None:
        """Assign the GPUs of this node.

        Raises:
            ConfigError: torchrun did not start this process, or the placement does not fit the node.
        """
        if "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                "placement.launcher = 'torchrun' needs processes started by torchrun: "
                "torchrun --nproc-per-node N -m agentrl_train run CONFIG.toml"
            )
        local_ranks = int(os.environ.get(LOCAL_WORLD_SIZE, os.environ["WORLD_SIZE"]))
        first_node = os.environ.get("GROUP_RANK", "0") == "0"
        self.devices = assign(processes, gpus=visible_gpus(), ranks=local_ranks, with_engine=first_node)

    async def wait_lost(self) -> None:
        """Wait forever: torchrun stops all ranks when one fails."""
        await asyncio.get_running_loop().create_future()

    def single(self) -> AbstractContextManager[None]:
        """Restrict this process to its GPUs."""
        return self.ranks()

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """Restrict this process to its GPUs."""
        number = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = self.devices.learner[number : number + 1]
        if int(os.environ["RANK"]) == 0:
            gpus = self.devices.rank_0
        with environment({**visible_devices(gpus), **({"LOCAL_RANK": "0"} if gpus else {})}):
            yield


@contextmanager
def make_launcher(processes: Processes, follower: Follower) -> Iterator[Launcher]:
    """Yield the launcher of a run, and release its resources on exit.

    A process started by torchrun uses ``Torchrun`` regardless of ``placement.launcher``.

    Raises:
        ConfigError: the placement does not fit the machine or the launcher of this process.
    """
    if world_size() == 1:
        require_whole_shares(processes.train.processes, processes.train.sequence_parallel)
    with ExitStack() as stack:
        if processes.placement.launcher.name == "ray":
            if world_size() > 1:
                raise ConfigError(
                    "placement.launcher = 'ray' starts the processes itself: start the run without torchrun"
                )
            yield stack.enter_context(_ray(processes, follower))
        elif processes.placement.launcher.name == "torchrun" or world_size() > 1:
            yield Torchrun(processes)
        else:
            yield Local(processes, follower)


def follower_devices(processes: Processes) -> AbstractContextManager[None]:
    """Restrict a rank other than 0 to its GPU. Only torchrun leaves this to the process itself.

    Raises:
        ConfigError: the placement does not fit this node.
    """
    return Torchrun(processes).ranks() if LOCAL_WORLD_SIZE in os.environ else nullcontext()


def _ray(processes: Processes, follower: Follower) -> AbstractContextManager[Launcher]:
    try:
        from agentrl_train.placement.ray import cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"placement.launcher = 'ray' needs Ray: {install_extra('ray')}") from error
    launcher: AbstractContextManager[Launcher] = cluster(processes, follower)
    return launcher
