"""Options of an engine process, and the context-length check that all engines share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Transfer = Literal["memory", "nccl"]
VLLM_SERVING = "agentrl_train.engine.vllm"
"""Module of the process of a vLLM engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Options of one engine process. They are sent as JSON, so they hold plain values only."""

    model: str
    """Folder or hub name of the initial model."""
    stop_token_ids: Sequence[int]
    max_sessions: int
    max_context: int
    revision: str | None = None
    """Revision of a model on the hub."""
    dtype: str = "float32"
    device: str = "cpu"
    args: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of vLLM's engine."""
    devices: Sequence[str] = ()
    """GPUs for ``CUDA_VISIBLE_DEVICES``; empty inherits the GPUs of the parent process."""
    threads: int = 1
    """OpenMP threads on a CPU. Too many would compete with the trainer for the cores."""
    transfer: Transfer = "memory"
    """Transport of weights: shared memory, or vLLM's own NCCL transfer."""
    policy_version: int = 0
    sleeps: bool = False
    """True if the engine releases GPU memory while the learner works."""
    deterministic: bool = False
    """See ``TorchEngine``."""
    deadline_s: float = 600.0
    """Deadline of one completion."""
    module: str = VLLM_SERVING
    """Module that the process runs."""

    @property
    def tensor_parallel(self) -> int:
        """GPUs that the model is sharded over."""
        return int(self.args.get("tensor_parallel_size", 1))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the process, which must be set before its imports."""
        variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        variables["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        if self.device == "cpu":
            variables |= {
                "OMP_NUM_THREADS": str(self.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the worker inside the engine
                # Compiling the kernel that ranks log-probabilities blocks the engine for more than 10 s.
                "TORCHDYNAMO_DISABLE": "1",
            }
        elif self.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return variables
