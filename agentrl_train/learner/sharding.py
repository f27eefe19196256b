"""Sharding of parameters and work over ranks (FSDP2).

Every rank holds a shard of every parameter and processes its own micro-batches. All ranks make the same calls
in the same order. Loss weights include the global denominator (``batch.py``), so gradients are summed, not
averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl_train.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Device of a learner process, and the ranks that share its work."""

    device: torch.device
    mesh: DeviceMesh | None = None
    """Ranks by ``data`` and ``sequence``: parameters are sharded over all of them, micro-batches over
    ``data``, the tokens of each row over ``sequence``."""
    storage: dist.ProcessGroup | None = None
    """CPU group of the same ranks, for writing snapshots in the background."""


def shard(scorer: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, *, precision: str) -> None:
    """Shard ``scorer`` over all ranks of the mesh, gathered block by block.

    With ``bfloat16``, blocks are gathered and computed in it; shards and gradient sums stay in float32.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    flat = mesh._flatten() if mesh.ndim > 1 else mesh
    for part in (*_blocks(model), scorer):
        fully_shard(part, mesh=flat, mp_policy=policy, reshard_after_forward=True)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def deal(micro_batches: Sequence[MicroBatch], index: int, count: int) -> list[MicroBatch]:
    """Return the share of rank ``index`` of ``count``. All shares have equal length.

    Micro-batches are dealt round-robin, and the remainder is split by rows. A rank without work gets an idle
    micro-batch, because gradient reduction involves every rank.
    """
    whole = len(micro_batches) // count * count
    share = list(micro_batches[index:whole:count])
    if rest := micro_batches[whole:]:
        sharers = len(range(index % len(rest), count, len(rest)))
        share.append(_rows(rest[index % len(rest)], index // len(rest), sharers))
    return share


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor. For a sharded tensor every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's slice of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GatheredWeights(Mapping[str, Tensor]):
    """Lazy mapping of name -> full parameter, gathered one bucket at a time; one bucket is kept."""

    def __init__(
        self, buckets: Sequence[Sequence[str]], gather: Callable[[Sequence[str]], Mapping[str, Tensor]]
    ) -> None:
        """Initialize with the bucketed names and the function that gathers one bucket."""
        self._buckets = {name: bucket for bucket in buckets for name in bucket}
        self._gather = gather
        self._held: Mapping[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return one full parameter."""
        if name not in self._held:
            self._held = {}
            self._held = self._gather(self._buckets[name])
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in bucket order."""
        return iter(self._buckets)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._buckets)


def buckets(sizes: Mapping[str, int], *, limit: int = BUCKET_BYTES) -> list[list[str]]:
    """Split names, in order, into buckets of at most ``limit`` bytes. A larger tensor gets its own bucket."""
    runs: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += size
    return runs


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _rows(micro: MicroBatch, index: int, count: int) -> MicroBatch:
    """Return every ``count``-th row of a micro-batch, or an idle micro-batch if there is none."""
    if index >= len(micro.token_ids):
        idle = micro.each(lambda values: torch.zeros(1, 2, dtype=values.dtype))
        return replace(idle, segment_ids=torch.ones_like(idle.segment_ids))
    return micro.each(lambda values: values[index::count])
