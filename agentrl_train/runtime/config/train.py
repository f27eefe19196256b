"""The sections that say how a policy learns: ``[advantage]``, ``[train]``, ``[sft]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl_train.runtime.config.section import (
    Count,
    CountOrOff,
    Fraction,
    NonNegative,
    Positive,
    Section,
)


class AdvantageSection(Section):
    """How rewards become advantages."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What a trajectory is compared with: its group, the others of its group, or nothing."""
    scale: Literal["std", "none"] = "std"
    """What advantages are divided by: the spread of their group, or nothing."""
    task_normalization: bool = True
    """Bring the advantages of each task to one scale (AgentRL)."""
    invalid_call_penalty: NonNegative = 0.0
    """Taken off the reward once when any tool call of the episode was invalid."""
    truncation_penalty: NonNegative = 0.0
    """Taken off the reward once when a limit ended the episode."""


class LoraSection(Section):
    """Adapters that are trained in place of the model (``[train.lora]``)."""

    rank: Count
    """Width of each adapter."""
    alpha: Positive
    """Scale of what the adapters add, times ``rank``."""
    targets: tuple[str, ...] = ()
    """Names of linear layers that get one, such as "q_proj"; left out, all but the head."""


class TrainSection(Section):
    """The optimizer and the loss."""

    learning_rate: Positive = 1e-5
    """Of AdamW, at its highest."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    """Of AdamW."""
    weight_decay: NonNegative = 0.0
    """Of AdamW, for matrices."""
    warmup_steps: CountOrOff = 0
    """Updates over which the learning rate rises."""
    final_lr_fraction: Fraction = 1.0
    """The learning rate falls linearly to this share of itself over the run."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger norm are scaled down to it."""
    minibatches: Count = 1
    """Optimizer steps that one batch is split into."""
    aggregation: Literal["token_mean", "sequence_mean", "group_mean", "task_mean", "constant"] = (
        "sequence_mean"
    )
    """What shares the loss equally: tokens, sequences, groups, tasks, or a constant number of tokens."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low and 1 + clip_high."""
    clip_high: Positive = 0.28
    """See clip_low."""
    dual_clip: NonNegative = 3.0
    """Bound on the ratio of tokens with a negative advantage; 0 is off."""
    micro_batch_tokens: Count = 8192
    """Tokens that go through the model together."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What the learner computes in; its parameters stay in float32."""
    kl_coef: NonNegative = 0.0
    """Weight of the divergence from the starting policy; 0 is off."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it computed."""
    attention: Literal["sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """PyTorch's attention, or flash-attn where it is installed (CUDA): rows without padding or mask."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, and a copy of the parameters that it updates, in host memory."""
    lora: LoraSection | None = None
    """Train adapters instead of the whole model; left out, it is off."""
    processes: Count = 1
    """Processes on this machine that share the learner, started by ``agentrl-train run`` itself."""
    sequence_parallel: Count = 1
    """Ranks that share each row of tokens, for long contexts; divides the processes and attention heads."""
    rank_seconds: Positive = 600.0
    """Longest that one process of the learner waits for another."""
    on_bad_update: Literal["stop", "skip"] = "stop"
    """What happens to a step whose loss or gradient is no number, or spikes; its groups are written out."""
    spike_factor: NonNegative = 0.0
    """A gradient norm over this many times the median of the last 50 makes a bad update; 0 is off."""
    step_seconds: Positive = 3600.0
    """Deadline of one training step, its publishing included."""

    def problems(self) -> list[str]:
        """Return what is wrong between the fields of this section, one sentence each."""
        found = []
        if 0.0 < self.dual_clip <= 1.0 + self.clip_high:
            found.append(
                f"dual_clip ({self.dual_clip}) must be above 1 + clip_high "
                f"({1.0 + self.clip_high:g}), or 0 to leave it out"
            )
        if 1.0 in self.betas:
            found.append("betas must be below 1, or the optimizer never forgets")
        return found


class SftSection(Section):
    """The warm start on expert traces (``agentrl-train sft``)."""

    traces: Count = 1000
    """Expert episodes of each task."""
    steps: Count = 500
    """Updates."""
    batch_size: Count = 16
    """Episodes of one optimizer step."""
    learning_rate: Positive = 1e-5
    """Of AdamW, at its highest."""
    weight_decay: NonNegative = 0.01
    """Of AdamW, for matrices."""
    warmup_steps: CountOrOff = 20
    """Updates over which the learning rate rises."""
    decay_fraction: Fraction = 0.4
    """The learning rate falls over this last share of the steps."""
