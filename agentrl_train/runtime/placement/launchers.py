"""Which launcher a configuration means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.placement.launcher import Launcher
from agentrl_train.runtime.placement.local import Local
from agentrl_train.runtime.placement.torchrun import ON_THIS_NODE, Torchrun
from agentrl_train.runtime.ranks import require_whole_shares, world_size


@contextmanager
def launcher_of(config: RunConfig) -> Iterator[Launcher]:
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


def place_of_a_follower(config: RunConfig) -> AbstractContextManager[None]:
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
