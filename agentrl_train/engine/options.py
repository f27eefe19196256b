"""What an engine's process is told when it starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Transfer = Literal["memory", "nccl", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """One vLLM engine. Crosses to its process as JSON, so it holds plain values alone."""

    model: str
    """Folder or hub name of the model that it starts with."""
    stop_token_ids: Sequence[int]
    max_sessions: int
    max_context: int
    dtype: str = "float32"
    device: str = "cpu"
    kv_gib: float | None = None
    """Memory of the KV cache in GiB; None leaves it to vLLM."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory that vLLM may fill."""
    tensor_parallel: int = 1
    """GPUs that the model is cut over."""
    devices: Sequence[str] = ()
    """GPUs it may use, as ``CUDA_VISIBLE_DEVICES`` names them; none given, it sees what its parent sees."""
    threads: int = 1
    """OpenMP threads on a CPU: more fight with the trainer's for the cores."""
    transfer: Transfer = "memory"
    """How weights come: shared memory, or vLLM's own NCCL or CUDA IPC transfer."""
    policy_version: int = 0
    sleeps: bool = False
    """Whether it gives its GPUs' memory back while the learner works."""
    deterministic: bool = False
    """See ``TorchEngine``."""
    deadline_s: float = 600.0
    """Longest time that one completion may take."""
    module: str = "agentrl_train.engine.vllm"
    """What runs in its process."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the engine's process that must be set before anything is imported there."""
        variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        variables["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        if self.device == "cpu":
            variables |= {
                "OMP_NUM_THREADS": str(self.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker inside the engine: one import less
            }
        elif self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.transfer == "ipc":
            variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles are pickled, by our own trainer
        return variables
