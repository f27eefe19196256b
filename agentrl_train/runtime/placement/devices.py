"""Which GPUs each process of a run gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.config import RunConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs by their names in ``CUDA_VISIBLE_DEVICES``; none at all where a run is on the CPU."""

    learner: tuple[str, ...] = ()
    """One for each of the learner's processes on this node."""
    engine: tuple[str, ...] = ()
    """For all replicas, one after another."""

    @property
    def of_the_first_rank(self) -> tuple[str, ...]:
        """What the process sees that runs the loop, and the torch engine with it."""
        return tuple(dict.fromkeys((*self.learner[:1], *self.engine[:1])))

    @property
    def of_the_torch_engine(self) -> str | None:
        """The torch engine's device, as the process that runs the loop counts what it sees."""
        return f"cuda:{self.of_the_first_rank.index(self.engine[0])}" if self.engine else None


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use; CUDA is not started by it."""
    count = torch.cuda.device_count()
    given = os.environ.get(VISIBLE)
    names = tuple(name.strip() for name in given.split(",")) if given else tuple(map(str, range(count)))
    return names[:count]


def assign(config: RunConfig, *, gpus: Sequence[str], ranks: int, with_engine: bool = True) -> Devices:
    """Return which GPUs learner and engine get.

    Args:
        config: of the run.
        gpus: those of this node, as ``CUDA_VISIBLE_DEVICES`` names them.
        ranks: the learner's processes on this node.
        with_engine: whether the engine is on this node.

    Raises:
        ConfigError: the placement does not fit the machine, or the processes.
    """
    place = config.placement
    if config.engine.device != "cuda":
        return Devices()
    if not gpus:
        raise ConfigError("engine.device is 'cuda' and no GPU can be seen here: set it to 'cpu'")
    learner = place.learner or _free(ranks, but=place.engine if place.layout == "separated" else ())
    needed = config.engine_gpus if with_engine else 0
    engine = (place.engine or _default_engine(config, learner, len(gpus))) if with_engine else ()
    if len(learner) != ranks:
        raise ConfigError(
            f"placement.learner names {_gpus(len(learner))} for {ranks} processes of the learner on this "
            "machine: name one each"
        )
    if len(engine) != needed:
        raise ConfigError(
            f"the engine takes {_gpus(needed)} and gets {len(engine)} by the placement: change "
            "placement.engine, engine.vllm.replicas or engine.vllm.tensor_parallel"
        )
    if max(*learner, *engine) >= len(gpus):
        raise ConfigError(
            f"the {place.layout} layout places the learner on GPU {_list(learner)} and the engine on GPU "
            f"{_list(engine)}, and {_gpus(len(gpus))} can be seen here: use fewer processes"
            + ("" if place.layout == "colocated" else ", or layout = 'colocated'")
        )
    return Devices(learner=tuple(gpus[i] for i in learner), engine=tuple(gpus[i] for i in engine))


def _default_engine(config: RunConfig, learner: Sequence[int], count: int) -> tuple[int, ...]:
    needed = config.engine_gpus
    inside = config.engine.kind == "torch" and len(learner) >= count
    if config.placement.layout == "colocated" or inside:
        return tuple(learner[:needed])
    return _free(needed, but=learner)


def _free(count: int, *, but: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(count + len(but)) if i not in but)[:count]


def _gpus(count: int) -> str:
    return "no GPU" if count == 0 else f"{count} GPU{'s' * (count > 1)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
