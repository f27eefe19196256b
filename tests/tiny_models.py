"""A tiny random model and a tiny tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl_train.config import TrainSection
from agentrl_train.learner import Place
from agentrl_train.loss import Loss

torch.set_num_threads(1)  # several test processes share the processors, and the models are tiny

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]


def make_tokenizer(alphabet: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, by default with all bytes, so that it can encode any text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet is None else alphabet
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int = 0, vocabulary: int = 261) -> Qwen3ForCausalLM:
    """Return a random two-layer Qwen3 with grouped heads and tied embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def learner_arguments(**options: Any) -> dict[str, Any]:
    """Return the arguments of ``Learner`` for flat options."""
    train = {name: options.pop(name) for name in [*options] if name in TrainSection.model_fields}
    loss = {one.name: options.pop(one.name) for one in fields(Loss) if one.name in options}
    place = {"place": Place(device=torch.device(options.pop("device")))} if "device" in options else {}
    return {"train": TrainSection(**train), **({"loss": Loss(**loss)} if loss else {}), **place, **options}
