"""A preallocated key/value cache with movable rows: active sequences first, parked ones behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """Keys and values of ``num_slots`` sequences of up to ``max_context`` tokens each.

    A forward pass over consecutive rows uses views; other rows are copied together. Each row writes at its
    own positions. One column beyond ``max_context`` receives what padding writes. Without ``views`` all rows
    are copied, so that results do not depend, bit for bit, on the position of the rows.
    """

    def __init__(self, *, num_slots: int, max_context: int, views: bool = True) -> None:
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self.num_slots = num_slots
        self.max_context = max_context
        self._views = views
        self._storage: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows: slice | torch.Tensor = slice(0, 0)
        self._index: tuple[torch.Tensor, slice, torch.Tensor] | None = None
        self._length = 0

    def aim(self, rows: Sequence[int], *, positions: torch.Tensor, length: int) -> None:
        """Point the next forward pass at ``rows``, writing at ``positions`` [rows, tokens].

        Attention sees the first ``length`` columns.
        """
        index = torch.tensor(rows, device=positions.device)
        consecutive = rows[-1] - rows[0] + 1 == len(rows) and list(rows) == sorted(rows)
        self._rows = slice(rows[0], rows[-1] + 1) if consecutive and self._views else index
        self._index = (index[:, None], slice(None), positions)
        self._length = length

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [rows, heads, tokens, dim]; return those of all cached tokens."""
        if layer_idx == len(self._storage):
            self._storage.append((self._allocate(key_states), self._allocate(value_states)))
        keys, values = self._storage[layer_idx]
        keys[self._index] = key_states.transpose(1, 2)
        values[self._index] = value_states.transpose(1, 2)
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        shape = (self.num_slots, states.shape[1], self.max_context + 1, states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def swap(self, a: int, b: int, *, length: int) -> None:
        """Exchange the first ``length`` columns of rows ``a`` and ``b``."""
        if a == b:
            return
        for pair in self._storage:
            for tensor in pair:
                kept = tensor[a, :, :length].clone()
                tensor[a, :, :length] = tensor[b, :, :length]
                tensor[b, :, :length] = kept

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first ``length`` columns of row ``source`` into row ``target``."""
        for pair in self._storage:
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given."""
        return 0
