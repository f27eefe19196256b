from pathlib import Path

import pytest
import torch

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.models import copy_of, load_policy
from tests.conftest import make_model, make_tokenizer


def test_model_folder_loads_in_float32(tmp_path: Path) -> None:
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load_policy(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template


def test_bfloat16_copy_keeps_rotary_frequencies_and_tied_weights() -> None:
    copied = copy_of(make_model(), dtype="bfloat16")
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers() if b.is_floating_point()} == {torch.float32}
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all"])
def test_missing_model_folder_is_reported(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        load_policy(path)


def test_missing_device_is_reported(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="device = 'gpu' is not available"):
        load_policy(str(tmp_path), device="gpu")
