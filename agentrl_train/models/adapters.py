"""Files of LoRA adapters, in the format of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter under this model's parameter names."""
    found = load_file(folder / TENSORS)
    return {name.removeprefix(PREFIX).removesuffix(".weight"): value for name, value in found.items()}


def adapter_base(folder: Path) -> str | None:
    """Return the base model of the adapter in a folder, or None if there is no adapter."""
    path = folder / CONFIG
    return str(json.loads(path.read_text())["base_model_name_or_path"]) if path.is_file() else None


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Merge the adapter in a folder into the weights of its base model."""
    config, tensors = json.loads((folder / CONFIG).read_text()), read_adapter(folder)
    scaling = config["lora_alpha"] / config["r"]
    for name in tensors:
        if name.endswith(".lora_A"):
            layer = name.removesuffix(".lora_A")
            product = tensors[f"{layer}.lora_B"] @ tensors[name]
            weight = model.get_submodule(layer).get_parameter("weight")
            weight.add_(scaling * product.to(weight))
