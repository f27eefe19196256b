"""LoRA (arXiv 2106.09685): trains a product of two low-rank matrices alongside each frozen matrix.

The file format is that of PEFT. Engines receive merged weights under the original parameter names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from agentrl_train.config import LoraSection
from agentrl_train.learner.sharding import full
from agentrl_train.models.adapters import CONFIG, PREFIX, REVISION, TENSORS
from agentrl_train.models.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LoraLinear(nn.Linear):
    """A frozen linear layer and its adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scaling: float
    active: bool = True

    @classmethod
    def around(cls, layer: nn.Linear, lora: LoraSection, generator: torch.Generator) -> Self:
        """Return an equivalent layer with an untrained adapter that shares the weights of ``layer``."""
        size, device = (layer.in_features, layer.out_features), layer.weight.device
        if layer.weight.is_meta:  # the frozen weights are read later, adapters are not in any file
            device = torch.device("cpu")
        one = cls(*size, bias=layer.bias is not None, device="meta")
        one.weight, one.bias = layer.weight, layer.bias
        bound = 1.0 / math.sqrt(layer.in_features)  # the initialization of PEFT
        drawn = torch.empty(lora.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        one.lora_A = nn.Parameter(drawn.to(device))
        one.lora_B = nn.Parameter(torch.zeros(layer.out_features, lora.rank, device=device))
        one.scaling = lora.alpha / lora.rank
        return one

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the layer plus its adapter."""
        output = super().forward(input)
        if not self.active:
            return output
        # The adapters stay in float32 even if the frozen weights are in bfloat16. If the input has another
        # dtype than the weights, autocast is active and converts it.
        if input.dtype == self.weight.dtype:
            input = input.to(self.lora_A.dtype)
        product = linear(self.scaling * linear(input, self.lora_A), self.lora_B)
        return output + product.to(output.dtype)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute with only the frozen weights for the duration of the block."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def add_adapters(model: PreTrainedModel, lora: LoraSection) -> None:
    """Freeze a model and add adapters, identical on every rank.

    Raises:
        ValueError: no layer matches the targets.
    """
    chosen = {name: layer for name, layer in _layers(model).items() if _matches(name, lora.targets)}
    if not chosen:
        raise ValueError(
            f"train.lora.targets = {list(lora.targets)} matches no linear layer of {type(model).__name__}; "
            f"it has {', '.join(_layer_types(model))}."
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, layer in chosen.items():
        model.set_submodule(name, LoraLinear.around(layer, lora, generator))


def is_adapter(name: str) -> bool:
    """Return True if a parameter belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


def merged(model: nn.Module, name: str) -> Tensor:
    """Return a full parameter with its adapter merged. Every rank of a sharded model must call this."""
    owner, _, leaf = name.rpartition(".")
    layer = model.get_submodule(owner)
    whole = full(layer.get_parameter(leaf).detach())
    if isinstance(layer, LoraLinear) and leaf == "weight":
        whole = whole + layer.scaling * (full(layer.lora_B.detach()) @ full(layer.lora_A.detach()))
    return whole


def save_adapter(
    folder: Path, model: PreTrainedModel, lora: LoraSection, tensors: Mapping[str, Tensor]
) -> None:
    """Write an adapter's tensors in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    modules, parameters = _targets(model, {name.rpartition(".")[0] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name_or_path,
        "revision": getattr(model, REVISION, None),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    named = {f"{PREFIX}{name}.weight": value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / TENSORS, metadata={"format": "pt"})


def _targets(model: PreTrainedModel, adapted: set[str]) -> tuple[list[str], list[str]]:
    """Return the layers with adapters as PEFT selects them: by module and by parameter.

    If a module has the name of an expert's layers, PEFT applies it to all experts. It does not do so for a
    parameter.
    """
    experts = CheckpointNames(model).separated
    by_parameter = sorted(name for name in adapted if _last(name) in experts)
    by_module = sorted(adapted - set(by_parameter))
    short = {_last(name) for name in by_module}
    alike = {name for name, _ in _linear(model) if _last(name) in short}
    return sorted(short) if alike == set(by_module) else by_module, [f"{one}.weight" for one in by_parameter]


def _linear(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def _layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the text decoder, without the head and image encoders."""
    decoder = {id(part) for part in model.get_decoder().modules()}
    return {name: layer for name, layer in _linear(model) if id(layer) in decoder}


def _layer_types(model: PreTrainedModel) -> list[str]:
    return sorted({_last(name) for name in _layers(model)})


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _matches(name: str, targets: tuple[str, ...]) -> bool:
    return not targets or any(name == target or name.endswith(f".{target}") for target in targets)
