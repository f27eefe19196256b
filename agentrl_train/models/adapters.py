"""Files of LoRA adapters, in the format of PEFT."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl_train.config import LoraSection
from agentrl_train.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
REVISION = "hub_revision"
"""Attribute of a model with its revision on the hub, which its adapters name."""
MERGE_WITH_PEFT = "merge it into its base with PEFT first (merge_and_unload)"
_NEEDED = {"r", "lora_alpha", "alpha_pattern", "use_rslora"}
"""Keys of PEFT's configuration that determine the merged weights. Ranks are read from the tensors."""
_HARMLESS = {
    *("peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("inference_mode", "lora_dropout", "bias", "init_lora_weights", "rank_pattern"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "lora_ga_config"),
}
"""Keys that do not, if the values of ``_PLAIN`` hold. Any other key must be unset."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initializations also change the weights of the base model.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter under this model's parameter names."""
    found = load_file(folder / TENSORS)
    return {name.removeprefix(PREFIX).removesuffix(".weight"): value for name, value in found.items()}


def has_adapter(folder: Path) -> bool:
    """Return True if a folder has an adapter."""
    return (folder / CONFIG).is_file()


def adapter_base(folder: Path) -> str | None:
    """Return the base model of the adapter in a folder, or None if the folder has no adapter.

    Raises:
        ConfigError: the adapter names no base model.
    """
    if not has_adapter(folder):
        return None
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{folder / CONFIG} names no base model: set base_model_name_or_path in it")
    return base


def adapter_revision(folder: Path) -> str | None:
    """Return the revision of the base model of the adapter in a folder, or None if it names none."""
    return (_config(folder).get("revision") or None) if has_adapter(folder) else None


def require_whole_model(path: str | Path) -> None:
    """Check that a model is not an adapter.

    Raises:
        ConfigError: it is.
    """
    if has_adapter(folder := Path(path)):
        _config(folder)  # a broken file has an error of its own
        raise ConfigError(
            f"{path} holds adapters, not a whole model: write a whole model first, with "
            f"agentrl-train merge {path} --output FOLDER"
        )


def check_lora(lora: LoraSection | None, path: str) -> None:
    """Check that a run does not train adapters on top of adapters. A checkpoint could name only one base.

    Raises:
        ConfigError: it does.
    """
    if lora is not None:
        require_whole_model(path)


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Merge the adapter in a folder into the weights of its base model.

    Raises:
        ValueError: the adapter changes more than linear layers of the model, or has another method.
    """
    config, tensors = _config(folder), read_adapter(folder)
    _check_config(config)
    layers = {name.rpartition(".")[0] for name in tensors}
    pairs = {f"{layer}.{part}" for layer in layers for part in ("lora_A", "lora_B")}
    if tensors.keys() != pairs:
        name = min(tensors.keys() - pairs or pairs - tensors.keys())
        problem = "has the tensor" if name in tensors else "lacks the tensor"
        raise ValueError(f"its {TENSORS} {problem} {name}: {MERGE_WITH_PEFT}")
    if not layers:
        raise ValueError(f"its {TENSORS} has no tensors")
    for layer in sorted(layers):
        a, b = tensors[f"{layer}.lora_A"].float(), tensors[f"{layer}.lora_B"].float()
        weight = _weight(model, layer)
        if weight.shape != (len(b), a.shape[1]):
            raise ValueError(
                f"it changes {layer} by a matrix of the shape {(len(b), a.shape[1])}, and its base model has "
                f"the shape {tuple(weight.shape)}: correct base_model_name_or_path in its {CONFIG}"
            )
        weight.add_((_scale(config, layer, rank=len(a)) * (b @ a)).to(weight))


def _config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"the adapter {str(folder)!r} cannot be loaded: {error} in {CONFIG}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG} is not a JSON object")
    return config


def _check_config(config: Mapping[str, Any]) -> None:
    """Check that an adapter is plain LoRA, so that its matrices are all that it changes."""
    for key, value in config.items():
        plain = value in _PLAIN[key] if key in _PLAIN else not value or key in _NEEDED | _HARMLESS
        if not plain:
            raise ValueError(f"{key} = {value!r} of its {CONFIG} is not supported: {MERGE_WITH_PEFT}")


def _weight(model: PreTrainedModel, layer: str) -> Tensor:
    """Return the weight of a linear layer that no other module has."""
    module = dict(model.named_modules()).get(layer)
    if not isinstance(module, nn.Linear):  # other layers store their weights in another way
        raise ValueError(f"it changes {layer}, which is not a linear layer of its base: {MERGE_WITH_PEFT}")
    parameters = model.named_parameters(remove_duplicate=False)
    names = [name for name, value in parameters if value is module.weight]
    if len(names) > 1:
        raise ValueError(
            f"it changes {layer}, but its base model ties {' and '.join(names)}: train an adapter for other "
            "layers, or untie them in the base first"
        )
    return module.weight


def _scale(config: Mapping[str, Any], layer: str, *, rank: int) -> float:
    """Return the factor of the product of a layer's matrices."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matching = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", layer))
    alpha = next(matching, config["lora_alpha"])  # PEFT also takes the first match
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
