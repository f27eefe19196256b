"""Sequence parallelism (Ulysses, arXiv 2309.14509): every rank of a group holds a slice of each row.

All layers but attention work token by token. Around attention the ranks exchange tokens for heads: each
computes all tokens of some heads, then the exchange is reversed::

    [rows, heads, length / n, d]  ->  [rows, heads / n, length, d]  ->  [rows, heads, length / n, d]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface

from agentrl_train.learner.logprobs import ATTENTION, Branch, segment_attention
from agentrl_train.models.architecture import FULL, layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = f"{ATTENTION}_ulysses"


def use_sequence_parallel(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Make the attention of a model exchange tokens for heads within ``group``.

    Raises:
        ValueError: the heads cannot be divided evenly, or a layer does not have full attention.
    """
    size = dist.get_world_size(group)
    heads = model.config.num_attention_heads
    if heads % size:
        raise ValueError(
            f"train.sequence_parallel = {size} does not divide the model's {heads} attention heads; "
            "use a number that does."
        )
    if layer_kinds(model) != {FULL} or not model._supports_sdpa:
        raise ValueError(
            "train.sequence_parallel needs a model with full attention in every layer, without attention "
            "sinks or capped scores; set it to 1."
        )

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        branches: Sequence[Branch] | None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if branches is None:
            raise ValueError(
                f"train.sequence_parallel does not support {type(module).__name__}, which is not told where "
                "sequences begin; set it to 1."
            )
        return _attend(module, query, key, value, branches, scaling=scaling, group=group), None

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: Sequence[Branch],
    *,
    scaling: float | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the attention of this rank's tokens, [rows, length / n, heads, d]."""
    if key.shape[1] % dist.get_world_size(group):
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
    query, key, value = (_Exchange.apply(tensor, 1, 2, group) for tensor in (query, key, value))
    seen, _ = segment_attention(module, query, key, value, branches=branches, scaling=scaling)
    back: Tensor = _Exchange.apply(seen, 1, 2, group)
    return back


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all: split along one dimension, concatenate along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = join, split, group
        return _exchange(tensor, split, join, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.back), None, None, None


def _exchange(tensor: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)
