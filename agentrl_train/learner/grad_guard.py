"""Rejects updates whose gradient norm spikes."""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
from torch import Tensor

from agentrl_train.errors import GradientSpike

REMEMBERED = 50
"""Number of recent norms that form the median."""
FEWEST = 10
"""Number of norms needed before any is rejected."""


class SpikeGuard:
    """Rejects a gradient norm of more than ``factor`` times the recent median; 0 disables it.

    Rejected norms enter the median too, so that a lasting change of level is accepted after a while.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def state(self) -> Tensor:
        """Return the recent norms, for a checkpoint."""
        free = [float("nan")] * (REMEMBERED - len(self._norms))
        return torch.tensor([*self._norms, *free], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Restore what ``state()`` returned."""
        self._norms.clear()
        self._norms.extend(norm for norm in state.tolist() if norm == norm)

    def __call__(self, norm: float) -> None:
        """Check the norm of an update before it is applied; raises ``GradientSpike``."""
        usual = median(self._norms) if len(self._norms) >= FEWEST else None
        self._norms.append(norm)
        if self._factor and usual is not None and norm > self._factor * usual:
            raise GradientSpike(
                f"the gradient's norm is {norm:.3g}, and the median before it {usual:.3g}: more than "
                f"train.spike_factor = {self._factor:g} times as much. The update was not made."
            )
