"""Sharded tensors on disk: a safetensors file of each rank, read by any number of ranks.

A file holds the rank's part of each tensor. Its header has the position of each part in the whole tensor.
Tensors that are not sharded are in the file of rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from agentrl_train.errors import CheckpointError

ORIGINS = "origins"
"""Key of the header: tensor -> index of its first element in the whole tensor."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> None:
    """Write this rank's parts of tensors. Raises OSError, SafetensorError."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: part_of(value) for name, value in tensors.items()}
    kept = {name: part for name, part in parts.items() if rank == 0 or isinstance(tensors[name], DTensor)}
    origins = json.dumps({name: origin for name, (_, origin) in kept.items()})
    values = {name: value.contiguous() for name, (value, _) in kept.items()}
    save_file(values, folder / f"rank-{rank:05d}.safetensors", metadata={ORIGINS: origins})


class Shards:
    """The tensors that all ranks have written into a folder."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._parts: dict[str, list[tuple[Any, list[int]]]] = {}
        for file in files.values():
            for name, origin in json.loads((file.metadata() or {})[ORIGINS]).items():
                self._parts.setdefault(name, []).append((file, origin))

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._parts)

    @torch.no_grad()
    def fill(self, name: str, like: Tensor) -> None:
        """Copy a tensor into ``like``, which may be sharded. Raises CheckpointError."""
        mine, begin = part_of(like)
        missing = mine.numel()
        for file, origin in self._parts.get(name, ()):
            shape = file.get_slice(name).get_shape()
            if len(shape) != len(begin):
                break
            low = [max(a, b) for a, b in zip(origin, begin, strict=True)]
            ends = (min(a + n, b + m) for a, n, b, m in zip(origin, shape, begin, mine.shape, strict=True))
            sizes = [end - start for end, start in zip(ends, low, strict=True)]
            if all(size > 0 for size in sizes):
                there = _slices(low, origin, sizes)
                read = file.get_slice(name)[there] if there else file.get_tensor(name)
                mine[_slices(low, begin, sizes)].copy_(read)
                missing -= read.numel()
        if missing > 0:
            raise CheckpointError(f"the checkpoint does not have all of {name} in shape {list(like.shape)}")


@contextmanager
def open_shards(folder: Path) -> Iterator[Shards]:
    """Open the shards in a folder. Raises CheckpointError if they are missing or malformed."""
    with ExitStack() as stack:
        try:
            files = {
                path.name: stack.enter_context(safe_open(path, framework="pt"))
                for path in sorted(folder.glob("rank-*.safetensors"))
            }
            shards = Shards(files)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{folder} cannot be read ({error}): resume from an older checkpoint"
            ) from error
        if not files:
            raise CheckpointError(f"{folder} has no state that this version can read: start a new run")
        yield shards


def raise_together(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError on every rank of a group if one rank has an error, which is the cause there."""
    text = torch.zeros(1024, dtype=torch.uint8)
    if error is not None:
        said = f"{type(error).__name__}: {error}".encode()[: text.numel()]
        text[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    texts = [text]
    if group is not None:
        texts = [torch.empty_like(text) for _ in range(dist.get_world_size(group))]
        dist.all_gather(texts, text, group=group)
    for rank, said_there in enumerate(texts):
        if said_there.any():
            reason = bytes(said_there.tolist()).rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"rank {rank} could not write its checkpoint ({reason})") from error


def part_of(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return the local part of a tensor, and the index of its first element in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, [0] * tensor.ndim
    _, origin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), list(origin)


def _slices(low: list[int], origin: list[int], sizes: list[int]) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(low, origin, sizes, strict=True))
