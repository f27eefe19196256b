"""A guard against spikes: a gradient far larger than those before it makes no update."""

from __future__ import annotations

from collections import deque
from statistics import median

import torch
from torch import Tensor

from agentrl_train.errors import GradientSpike

REMEMBERED = 50
"""Updates whose norms are compared with."""
FEWEST = 10
"""Updates before which nothing is refused."""


class SpikeGuard:
    """Refuses a gradient norm of more than ``factor`` times the median of the last ones; 0 refuses nothing.

    A refused norm is remembered as well, so that a lasting change of level is taken for what it is.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def state(self) -> Tensor:
        """Return what is remembered, for a checkpoint."""
        free = [float("nan")] * (REMEMBERED - len(self._norms))
        return torch.tensor([*self._norms, *free], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Remember what ``state()`` returned."""
        self._norms.clear()
        self._norms.extend(norm for norm in state.tolist() if norm == norm)

    def __call__(self, norm: float) -> None:
        """Look at the norm of an update that is about to be made; raises ``GradientSpike``."""
        usual = median(self._norms) if len(self._norms) >= FEWEST else None
        self._norms.append(norm)
        if self._factor and usual is not None and norm > self._factor * usual:
            raise GradientSpike(
                f"the gradient's norm is {norm:.3g}, and the median before it {usual:.3g}: more than "
                f"train.spike_factor = {self._factor:g} times as much. The update was not made."
            )
