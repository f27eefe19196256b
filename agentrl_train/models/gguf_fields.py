"""Checks that transformers reads everything in a GGUF file that changes the results of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gguf import GGUFReader
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from agentrl_train.models.gguf_rope import FACTORS, UNSUPPORTED

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def require_fields(reader: GGUFReader, config: PreTrainedConfig) -> None:
    """Check that a configuration has the values of a GGUF file.

    Raises:
        ValueError: transformers ignores a field, and the configuration has another value.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    for name, expected in _values(config):
        field = reader.fields.get(f"{architecture}.{name}")
        value = None if field is None else field.contents()
        if isinstance(value, int | float) and not math.isclose(value, expected, rel_tol=1e-5):
            raise ValueError(
                f"it has {architecture}.{name} = {value:g} instead of {expected:g}, {UNSUPPORTED}"
            )
    if architecture == "llama" and "llama.attention.head_count_kv" not in reader.fields:
        raise ValueError(f"it lacks llama.attention.head_count_kv, {UNSUPPORTED}")


def require_tensors_read(reader: GGUFReader, model: PreTrainedModel) -> None:
    """Check that a model has a parameter for each tensor of a GGUF file, such as the biases of a layer.

    Raises:
        ValueError: transformers ignores a tensor.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor).keys()
    names = {one.name for one in reader.tensors} - set(FACTORS)
    # Joined experts have a name without suffix.
    if ignored := sorted(name for name in names if not {name, name.removesuffix(".weight")} & known):
        raise ValueError(
            f"it has {len(ignored)} tensors that are not read, {ignored[0]} first, {UNSUPPORTED}"
        )


def _values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield fields that transformers ignores for some architectures, and the values in a configuration."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        yield name, getattr(config, name, None) or 0.0
    yield "attention.sliding_window", getattr(config, "sliding_window", None) or 0
    for epsilon in (getattr(config, name) for name in EPSILONS if hasattr(config, name)):
        yield "attention.layer_norm_rms_epsilon", epsilon
        yield "attention.layer_norm_epsilon", epsilon
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:  # otherwise each kind of layer has its own
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        yield "attention.key_length", head
        yield "rope.freq_base", rope["rope_theta"]
        yield "rope.dimension_count", int(head * part)
