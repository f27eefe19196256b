"""Models with random weights: shapes of Qwen3, Qwen2.5 and SmolLM2 for a GPU, and a tiny shape for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

TOKENIZER = Path(__file__).parents[2] / "examples/quickstart/starter"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "135 M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "0.5 B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "0.6 B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7 B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4 B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}


def sizes(device: str) -> list[str]:
    """Return the names of the shapes to measure on a device."""
    return ["tiny"] if device == "cpu" else [name for name in SHAPES if name != "tiny"]


def make_model(size: str, *, device: str) -> Qwen3ForCausalLM:
    """Return a model with random weights."""
    torch.manual_seed(0)
    shape = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128} | SHAPES[size]
    config = Qwen3Config(
        **shape,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(device):
        return Qwen3ForCausalLM(config)


def save_model(size: str, folder: str | Path, *, device: str) -> None:
    """Write a model, in float32 from a CPU and otherwise in bfloat16, and the quick start's tokenizer."""
    model = make_model(size, device=device)
    model.to(torch.float32 if device == "cpu" else torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
