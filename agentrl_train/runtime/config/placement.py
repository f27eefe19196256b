"""The ``[placement]`` section of a configuration: which processes run where."""

from __future__ import annotations

from typing import Literal

from agentrl_train.runtime.config.section import Positive, Section


class PlacementSection(Section):
    """Which processes run where, and who starts them."""

    layout: Literal["separated", "colocated"] = "separated"
    """GPUs of their own for learner and engine, or the same ones in turns: the engine sleeps while the
    learner works."""
    launcher: Literal["local", "torchrun", "ray"] = "local"
    """Processes of this machine; the learner's by torchrun, on one node or many; or all by Ray."""
    learner: tuple[int, ...] = ()
    """GPUs of the learner, one for each of its processes on a node; left out, the first ones."""
    engine: tuple[int, ...] = ()
    """GPUs of the engine, ``tensor_parallel`` for each replica; left out, those after the learner's, or the
    learner's where colocated."""
    ray_address: str | None = None
    """Address of a Ray cluster; left out, ``RAY_ADDRESS``, else one of this machine for this run alone."""
    ray_seconds: Positive = 300.0
    """Longest wait for room in the Ray cluster."""

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        found = []
        for name, gpus in (("learner", self.learner), ("engine", self.engine)):
            if len(set(gpus)) < len(gpus) or any(gpu < 0 for gpu in gpus):
                found.append(f"{name} = {list(gpus)} must name different GPUs, counted from 0")
        if self.layout == "separated" and (shared := set(self.learner) & set(self.engine)):
            found.append(
                f"GPU {min(shared)} is given to learner and engine: use others, or layout = 'colocated', "
                "where they take turns"
            )
        if self.launcher == "ray" and (self.learner or self.engine):
            found.append("Ray chooses the GPUs itself: leave learner and engine out, or use another launcher")
        if self.launcher != "ray" and self.ray_address is not None:
            found.append("ray_address is for launcher = 'ray'")
        return found

    def problems_with(
        self, *, device: str, processes: int, max_staleness: int, transfer: str, engine_gpus: int
    ) -> list[str]:
        """Return what is wrong between this section and others, one sentence each."""
        found = []
        shared = self.layout == "colocated" and self.launcher != "torchrun" and processes == engine_gpus == 1
        if transfer == "ipc" and not shared:
            found.append(
                "engine.vllm.transfer = 'ipc' hands over memory of one GPU: it needs placement.layout = "
                "'colocated', one process of the learner and one GPU of the engine; use 'nccl' or 'memory'"
            )
        if transfer == "nccl" and (self.layout == "colocated" or self.launcher == "ray"):
            found.append(
                "engine.vllm.transfer = 'nccl' needs GPUs of the engine's own on this machine: use "
                "placement.layout = 'separated' and another launcher than Ray, or transfer = 'memory'"
            )
        if (self.learner or self.engine) and device != "cuda":
            found.append(
                "placement.learner and placement.engine name GPUs, and engine.device is "
                f"{device!r}: set it to 'cuda'"
            )
        if self.layout == "colocated" and max_staleness > 0:
            found.append(
                "placement.layout = 'colocated' lets learner and engine take turns, so nothing is played "
                f"while the learner works: set rollout.max_staleness to 0, not {max_staleness}"
            )
        if self.launcher == "torchrun" and processes > 1:
            found.append(
                "with placement.launcher = 'torchrun' the number of processes is torchrun's "
                "--nproc-per-node: leave train.processes out"
            )
        return found
