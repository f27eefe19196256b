"""Assignment of GPUs to the processes of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl_train.config import EngineSection, TrainSection
from agentrl_train.config.sections import PlacementSection
from agentrl_train.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs as named in ``CUDA_VISIBLE_DEVICES``. Empty if the run uses the CPU."""

    learner: tuple[str, ...] = ()
    """GPUs of the learner, one per process on this node."""
    engine: tuple[str, ...] = ()
    """GPUs of the engine, for all replicas in order."""

    @property
    def rank_0(self) -> tuple[str, ...]:
        """GPUs visible to rank 0, which runs the loop and the torch engine."""
        return tuple(dict.fromkeys((*self.learner[:1], *self.engine[:1])))

    @property
    def torch_engine_device(self) -> str | None:
        """Device of the torch engine, numbered as in the process of rank 0."""
        return f"cuda:{self.rank_0.index(self.engine[0])}" if self.engine else None


def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that this process can use, without initializing CUDA."""
    count = torch.cuda.device_count()
    visible = os.environ.get(VISIBLE)
    names = tuple(name.strip() for name in visible.split(",")) if visible else tuple(map(str, range(count)))
    return names[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The learner ranks and engines of a run, as configured."""

    placement: PlacementSection
    engine: EngineSection
    train: TrainSection
    replicas: Mapping[str, int]
    """Number of engines of each sampling policy."""

    @property
    def on_gpus(self) -> bool:
        """Return True if learner and engine run on GPUs."""
        return self.engine.device == "cuda"

    @property
    def num_engines(self) -> int:
        """Return the number of engine processes, of all policies."""
        return sum(self.replicas.values())

    @property
    def engine_gpus(self) -> int:
        """Return the number of GPUs of the engine, if it runs on GPUs."""
        return 1 if self.engine.kind == "torch" else self.num_engines * self.engine.vllm.tensor_parallel


def assign(processes: Processes, *, gpus: Sequence[str], ranks: int, with_engine: bool = True) -> Devices:
    """Return the GPUs of learner and engine.

    Args:
        processes: the processes of the run.
        gpus: GPUs of this node, as named in ``CUDA_VISIBLE_DEVICES``.
        ranks: number of learner processes on this node.
        with_engine: True if the engine runs on this node.

    Raises:
        ConfigError: the placement does not fit the machine or the number of processes.
    """
    place = processes.placement
    if not processes.on_gpus:
        return Devices()
    if not gpus:
        raise ConfigError("engine.device is 'cuda', but no GPU is visible: set it to 'cpu'")
    learner = place.learner or _free(ranks, used=place.engine if place.layout == "separated" else ())
    needed = processes.engine_gpus if with_engine else 0
    engine = (place.engine or _default_engine(processes, learner, len(gpus))) if with_engine else ()
    if len(learner) != ranks:
        raise ConfigError(
            f"placement.learner lists {_gpus(len(learner))} for {ranks} learner processes on this machine: "
            "list one per process"
        )
    evaluating = "evaluation" in processes.replicas
    if len(engine) != needed:
        raise ConfigError(
            f"the engine needs {_gpus(needed)}, but the placement gives it {len(engine)}: change "
            "placement.engine, engine.vllm.replicas or engine.vllm.args.tensor_parallel_size"
            + ", or set eval.concurrent = false, because concurrent evaluation has its own replicas"
            * evaluating
        )
    if max(*learner, *engine) >= len(gpus):
        raise ConfigError(
            f"the {place.layout} layout places the learner on GPU {_list(learner)} and the engine on GPU "
            f"{_list(engine)}, but this process sees {_gpus(len(gpus))}: use fewer processes"
            + (", or layout = 'colocated'" if place.layout == "separated" else "")
        )
    return Devices(learner=tuple(gpus[i] for i in learner), engine=tuple(gpus[i] for i in engine))


def _default_engine(processes: Processes, learner: Sequence[int], count: int) -> tuple[int, ...]:
    needed = processes.engine_gpus
    shared = processes.engine.kind == "torch" and len(learner) >= count
    if processes.placement.layout != "separated" or shared:
        return tuple(learner[:needed])
    return _free(needed, used=learner)


def _free(count: int, *, used: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(count + len(used)) if i not in used)[:count]


def _gpus(count: int) -> str:
    return "no GPU" if count == 0 else f"{count} GPU{'s' * (count > 1)}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
