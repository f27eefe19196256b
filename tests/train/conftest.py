"""Fixtures for the trainer's tests: a tiny random model and a tiny tokenizer."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.tiny_models import make_model, make_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return make_model()
