"""Scaling of rotary frequencies in GGUF files, which transformers does not read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from gguf import GGUFReader
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of Llama 3.1 to 3.3. Their GGUF files contain only the resulting divisors of the frequencies."""
UNSCALED = {"rope_type": "linear", "factor": 1.0}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
COMPLETE = "gpt-oss"
"""Architecture with a scaling that transformers reads."""
UNSUPPORTED = "which this conversion does not support: use the safetensors files of the model"


def read_rope_scaling(reader: GGUFReader, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the entries of ``rope_parameters`` that the configuration of a GGUF file lacks.

    Raises:
        ValueError: the file scales its rotary frequencies in another way.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    if architecture == COMPLETE:
        return {}
    prefix = f"{architecture}.rope.scaling."
    fields = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    if scale := reader.fields.get(f"{architecture}.rope.scale_linear"):  # the name in old files
        fields.setdefault("factor", scale.contents())
    factors = {one.name: torch.tensor(one.data) for one in reader.tensors if one.name in FACTORS}
    added = _from_fields(fields)
    if added and factors:
        raise ValueError(f"it scales its rotary frequencies twice, {UNSUPPORTED}")
    if factors:
        added = _from_factors(factors, config)
    if added and "rope_type" not in (config.rope_parameters or {}):  # e.g. another scaling in each layer
        raise ValueError(f"it scales the rotary frequencies of {architecture}, {UNSUPPORTED}")
    return added


def _from_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields.get("type", "linear" if fields.get("factor", 0) not in (0, 1) else "none")
    known = {"type", "factor", "original_context_length", "finetuned"}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn") or not fields.get("factor") or fields.keys() - known:
        settings = ", ".join(f"{name} {fields[name]}" for name in sorted(fields))
        raise ValueError(f"it scales its rotary frequencies ({settings}), {UNSUPPORTED}")
    added = {"rope_type": kind, "factor": float(fields["factor"])}
    if kind == "yarn":
        if "original_context_length" not in fields:
            raise ValueError(f"it scales its rotary frequencies from an unknown length, {UNSUPPORTED}")
        added["original_max_position_embeddings"] = int(fields["original_context_length"])
    return added


def _from_factors(factors: Mapping[str, Tensor], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the scaling of Llama 3 if it results in exactly the divisors of a file."""
    divisors = factors.get("rope_freqs.weight", torch.zeros(0))
    if set(factors) == {"rope_freqs.weight"} and bool((divisors == 1).all()):
        return {}
    if set(factors) == {"rope_freqs.weight"} and "rope_type" in (config.rope_parameters or {}):
        added = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
        expected = _frequencies(config, UNSCALED) / _frequencies(config, added)
        if expected.shape == divisors.shape and torch.allclose(expected, divisors.float(), rtol=1e-4):
            return added
    raise ValueError(f"it divides its rotary frequencies ({', '.join(sorted(factors))}), {UNSUPPORTED}")


def _frequencies(config: PreTrainedConfig, added: Mapping[str, Any]) -> Tensor:
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = {**config.rope_parameters, **added}
    frequencies, _ = ROPE_INIT_FUNCTIONS[added["rope_type"]](scaled, torch.device("cpu"))
    return frequencies
