"""A tiny Llama in a GGUF file, written with gguf."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_models import CHAT_TEMPLATE, SPECIAL

TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def make_llama(*, tied: bool = True, rope: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """Return a random two-layer Llama with grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    without: Collection[str] = (),
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> None:
    """Write a model as a GGUF file with Q8_0 matrices, and quantize the weights of the model itself the same
    way.

    ``without`` names tensors to omit from the file. ``change`` adds entries to it.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, parameter in model.named_parameters():
        stored = gguf_name(name)
        values = parameter.float().numpy()
        if values.ndim == 2:
            quantized = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            parameter.copy_(torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0)))
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            if count := heads.get(stored.split(".")[-2]):  # llama.cpp interleaves both halves of each head
                rows, columns = quantized.shape
                halves = quantized.reshape(count, 2, rows // count // 2, columns)
                quantized = halves.swapaxes(1, 2).reshape(rows, columns)
            if stored not in without:
                writer.add_tensor(stored, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        elif stored not in without:
            writer.add_tensor(stored, values)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the name of a parameter in llama.cpp."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if name.startswith("model.layers."):
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return f"{NAMES[name.removesuffix('.weight')]}.weight"
