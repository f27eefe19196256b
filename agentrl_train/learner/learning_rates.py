"""Learning rates that suit a model of a given size. docs/how-to/real-models.md has the sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from agentrl_train.config.sections import TrainSection

LORA_FACTOR = 10.0
"""Ratio of the learning rates of adapters and of all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Settings of models up to a size, if all weights are trained."""

    parameters: float
    """Largest number of parameters."""
    learning_rate: float
    imitation_rate: float
    """Learning rate of ``agentrl-train sft``."""
    max_grad_norm: float


BY_SIZE = (
    Defaults(parameters=10e6, learning_rate=5e-4, imitation_rate=1e-3, max_grad_norm=0.1),
    Defaults(parameters=200e6, learning_rate=2e-5, imitation_rate=1e-4, max_grad_norm=1.0),
    Defaults(parameters=1e9, learning_rate=5e-6, imitation_rate=5e-5, max_grad_norm=1.0),
    Defaults(parameters=3e9, learning_rate=2e-6, imitation_rate=2e-5, max_grad_norm=1.0),
    Defaults(parameters=float("inf"), learning_rate=1e-6, imitation_rate=1e-5, max_grad_norm=1.0),
)


def defaults_of(parameters: int, *, lora: bool) -> Defaults:
    """Return the defaults of a model of this size."""
    found = next(one for one in BY_SIZE if parameters <= one.parameters)
    factor = LORA_FACTOR if lora else 1.0
    return Defaults(
        parameters=found.parameters,
        learning_rate=factor * found.learning_rate,
        imitation_rate=min(factor * found.imitation_rate, max(2e-4, found.imitation_rate)),
        max_grad_norm=found.max_grad_norm,
    )


def learning_rate_of(train: TrainSection, model: nn.Module) -> float:
    """Return the peak learning rate. With "auto" it depends on the size of the model, without adapters."""
    if train.learning_rate != "auto":
        return train.learning_rate
    parameters = sum(value.numel() for value in model.parameters())
    return defaults_of(parameters, lora=train.lora is not None).learning_rate
