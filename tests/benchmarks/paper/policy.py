"""The policy for the small tasks: a Qwen3 with 20 thousand random parameters. Tokens are letters."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import make_model, make_tokenizer


def write_policy(folder: Path, *, seed: int = 0) -> None:
    """Write the tokenizer and a model with random weights to a folder if they are missing."""
    if (folder / "tokenizer_config.json").exists():
        return
    tokenizer = small_tokenizer()
    make_model(seed=seed, vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for printable ASCII, one token for each character."""
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        string.printable[:95] + "\n"
    )[0][0]
    return make_tokenizer(characters)
