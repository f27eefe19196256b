"""Metrics of a step, aggregated over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl_train.types import Batch

Reduce = Callable[[Tensor, str], Tensor]
"""``(values, "sum" | "max") -> values of all ranks``."""


class MetricSums:
    """Sums of micro-batch statistics (maxima for names ending in ``_max``) and means over updates."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._updates: dict[str, list[float]] = {}
        self._tokens = 0

    def add(self, stats: Mapping[str, Tensor], tokens: int) -> None:
        """Add the statistics of one micro-batch."""
        self._tokens += tokens
        for name, value in stats.items():
            old = self._sums.get(name, torch.zeros_like(value))
            self._sums[name] = torch.maximum(old, value) if name.endswith("_max") else old + value

    def add_update(self, **values: float) -> None:
        """Add values of one update that are the same on every rank."""
        for name, value in values.items():
            self._updates.setdefault(name, []).append(value)

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """Return means over updates and over the tokens of all ranks."""
        means = {name: float(np.mean(values)) for name, values in self._updates.items()}
        maxima = [name for name in self._sums if name.endswith("_max")]
        others = [name for name in self._sums if name not in maxima]
        totals = reduce(_vector([self._tokens, *(self._sums[name] for name in others)]), "sum")
        largest = reduce(_vector([self._sums[name] for name in maxima]), "max")
        tokens, *sums = totals.tolist()
        shares = {name: value / max(1, tokens) for name, value in zip(others, sums, strict=True)}
        return means | shares | dict(zip(maxima, largest.tolist(), strict=True))


def sizes(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the counts of a step: updates, sequences, tokens and slots."""
    return {
        "updates": float(len(batches)),
        "sequences": float(sum(batch.num_sequences for batch in batches)),
        "loss_tokens": float(sum(batch.num_loss_tokens for batch in batches)),
        "tokens": float(sum(batch.num_tokens for batch in batches)),
        "slots": float(sum(batch.num_slots for batch in batches)),
    }


def _vector(values: Sequence[Tensor | int]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)
