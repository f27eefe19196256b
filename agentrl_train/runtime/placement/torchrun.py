"""Ranks that torchrun has started, on one node or many; rank 0, on the first node, runs the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from agentrl_train.engine.process import EngineProcess, Spawn
from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.placement.devices import assign, visible_gpus
from agentrl_train.runtime.placement.launcher import environment, seeing

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
        with environment({**seeing(gpus), **({"LOCAL_RANK": "0"} if gpus else {})}):
            yield
