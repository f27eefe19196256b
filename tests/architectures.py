"""Tiny models with random weights for each supported architecture."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY, WINDOW = 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = ALTERNATING | {"query_pre_attn_scalar": 8}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "shared_intermediate_size": 32,
    "layer_types": ["mamba", "attention"],
}

LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
    },
}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 8}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "Llama 3.2": ("llama", {"tie_word_embeddings": True}),
    "SmolLM2": ("llama", {"num_key_value_heads": 4}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Ministral 3": ("ministral3", {"sliding_window": None}),
    "Mistral Small 3": (
        "mistral3",
        {"text_config": {"model_type": "mistral", "sliding_window": None}, "vision_config": PIXTRAL},
    ),
    "Phi-2": ("phi", {"num_key_value_heads": 4}),
    "Phi-3 long": ("phi3", {"sliding_window": None}),
    "Phi-4-mini": (
        "phi3",
        {"sliding_window": None, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "OLMo-2": ("olmo2", {}),
    "GLM-4": ("glm4", {}),
    "StableLM": ("stablelm", {}),
    "Granite-3": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral-v0.1": ("mistral", {"sliding_window": WINDOW}),
    "Phi-3": ("phi3", {"sliding_window": WINDOW}),
    "Starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "Gemma-2": ("gemma2", ALTERNATING | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    "Gemma-3": ("gemma3_text", GEMMA),
    "Gemma-3 with images": ("gemma3", {"text_config": GEMMA, "vision_config": VISION}),
    "OLMo-3": ("olmo3", ALTERNATING),
    "Exaone-4": ("exaone4", ALTERNATING),
    "Cohere2": ("cohere2", ALTERNATING | {"logit_scale": 0.25}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE": ("olmoe", MOE | {"norm_topk_prob": False}),
    "Qwen2-MoE": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 24}),
    "Qwen3-MoE": ("qwen3_moe", MOE),
    "Mixtral": ("mixtral", MOE | {"sliding_window": WINDOW}),
    "GLM-4.5": ("glm4_moe", ROUTED),
    "DeepSeek-V3": ("deepseek_v3", ROUTED | MLA | {"num_key_value_heads": 4}),
    "gpt-oss": ("gpt_oss", MOE | ALTERNATING),
}
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5": ("qwen3_5_text", LINEAR),
    "Qwen3-Next": ("qwen3_next", LINEAR | MOE | {"shared_expert_intermediate_size": 24}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "Granite-4": ("granitemoehybrid", MAMBA | MOE),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 4": (
        "llama4",
        {
            "text_config": {
                "num_local_experts": 2,
                "intermediate_size_mlp": 48,
                "attention_chunk_size": WINDOW,
            },
            "vision_config": VISION
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
    ),
}
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {"Doge": ("doge", {}), "Bloom": ("bloom", {})}
"""Architectures with an attention that the engine does not compute."""
ALL = DENSE | WINDOWED | MIXTURES | HYBRID


def configuration(name: str, **others: Any) -> PreTrainedConfig:
    """Return the tiny configuration of an architecture with the given options."""
    kind, options = (ALL | REFUSED | UNKNOWN)[name]
    if "text_config" in options:
        return AutoConfig.for_model(
            kind, **options | {"text_config": SIZES | options["text_config"] | others}
        )
    return AutoConfig.for_model(kind, **SIZES | options | others)


def tiny(name: str, seed: int = 0, **others: Any) -> PreTrainedModel:
    """Return a tiny model with random weights."""
    torch.manual_seed(seed)
    config = configuration(name, **others)
    has_images = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or name in REFUSED
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms, biases and routers are constant initially
        for value in [*model.parameters(), *persistent(model).values()]:
            if value.ndim <= 1 or not value.any():
                value.add_(torch.randn_like(value) * 0.1)
    return model.eval()


def persistent(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model."""
    kept = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name in kept}
