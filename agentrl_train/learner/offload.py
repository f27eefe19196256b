"""The optimizer in host memory: the device keeps the parameters alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agentrl_train.learner.storage import host_copy


class HostCopies:
    """Copies of the trained parameters in host memory, which the optimizer updates in their place.

    The moments are there with them: of Adam's 12 bytes a parameter beside the gradient, 4 stay on the device.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self._trained = trained
        self.copies = {name: nn.Parameter(host_copy(value)) for name, value in trained.items()}

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Bring the gradients to the copies, and what the block makes of these back to the device."""
        for name, copy in self.copies.items():
            gradient: Tensor | None = self._trained[name].grad
            copy.grad = None if gradient is None else gradient.to("cpu")
        yield
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.grad = None
                self._trained[name].copy_(copy)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters over as they are on the device."""
        for name, copy in self.copies.items():
            copy.copy_(self._trained[name])
