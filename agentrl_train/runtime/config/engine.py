"""The ``[engine]`` section of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl_train.runtime.config.section import Count, NonNegative, Positive, Section


class VllmSection(Section):
    """What ``engine.kind = "vllm"`` takes beside the rest of ``[engine]``."""

    python: str | None = None
    """Interpreter of the engines' processes, where vLLM is installed; left out, the trainer's own."""
    replicas: Count = 1
    """Engines of each policy."""
    push: Literal["in_flight", "drained"] = "in_flight"
    """New weights in the middle of completions, or after those under way have ended."""
    transfer: Literal["memory", "nccl", "ipc"] = "memory"
    """How weights travel: shared memory, or GPU to GPU by vLLM's own NCCL or CUDA IPC transfer."""
    kv_gib: Positive | None = None
    """Memory of each engine's KV cache in GiB; left out, 1 on a CPU and what is free on a GPU."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory that an engine may fill."""
    tensor_parallel: Count = 1
    """GPUs that one engine's model is cut over."""
    start_seconds: Positive = 300.0
    """Deadline of an engine's start."""
    silent_seconds: Positive = 60.0
    """Longest silence of an engine before it is killed and started again."""

    @property
    def on_gpus(self) -> str | None:
        """Return a setting that makes sense on GPUs alone, if there is one."""
        chosen = {
            f"vllm.transfer = {self.transfer!r}": self.transfer != "memory",
            f"vllm.tensor_parallel = {self.tensor_parallel}": self.tensor_parallel > 1,
        }
        return next((name for name, given in chosen.items() if given), None)


class EngineSection(Section):
    """How completions are sampled."""

    kind: Literal["torch", "vllm"] = "torch"
    """An engine in this process, or vLLM in processes of its own."""
    device: str = "cpu"
    """Where engine and learner compute, as PyTorch names it: "cpu", "cuda"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that sample; the trainer keeps its own in float32."""
    max_sessions: Count = 64
    """Episodes in flight at once."""
    max_context: Annotated[int, Field(ge=16)] = 2048
    """Tokens of one episode, prompt and replies included."""
    max_new_tokens: Count = 256
    """Tokens of one turn."""
    temperature: NonNegative = 1.0
    """Divides the logits, at sampling and in the loss."""
    deterministic: bool = False
    """Repeat a synchronous run bit for bit, also one that was killed and resumed, on one machine; slower."""
    vllm: VllmSection = VllmSection()

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        found = []
        if self.max_new_tokens >= self.max_context:
            found.append(
                f"max_new_tokens ({self.max_new_tokens}) must be below max_context "
                f"({self.max_context}), or no room is left for the prompt"
            )
        if self.kind == "torch" and self.vllm != VllmSection():
            found.append("the settings of [engine.vllm] are for kind = 'vllm'")
        if self.kind == "vllm" and self.deterministic:
            found.append("deterministic needs kind = 'torch': vLLM's sums depend on what is batched together")
        if self.device == "cpu" and self.vllm.on_gpus:
            found.append(f"{self.vllm.on_gpus} is for device = 'cuda'")
        return found
