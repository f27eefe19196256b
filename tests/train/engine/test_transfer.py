"""Weights in shared memory and their fingerprints."""

import os

import pytest
import torch
from safetensors import safe_open

from agentrl_train.architecture import CheckpointNames
from agentrl_train.engine.transfer import DeviceWeights, SharedWeights, fingerprint
from tests.architectures import tiny
from tests.conftest import make_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_weights_are_readable_in_engine_dtype(dtype: torch.dtype) -> None:
    state = dict(make_model().named_parameters())
    weights = SharedWeights(state, dtype=dtype, policy_version=3)
    with safe_open(weights.path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name].to(dtype)) for name in state)
    assert fingerprint(found.items()) == weights.fingerprint
    weights.close()
    weights.close()
    assert not os.path.exists(weights.path)


def test_tensors_that_are_not_trained_keep_their_dtype() -> None:
    model = tiny("GLM-4.5")
    names = CheckpointNames(model)
    (bias,) = names.buffers
    state = names(dict(model.named_parameters()))
    weights = SharedWeights(state, dtype=torch.bfloat16, policy_version=3, exact=names.buffers)
    with safe_open(weights.path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(found.pop(bias), model.get_buffer(bias))
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in found.items())
    on_device = DeviceWeights(state, dtype=torch.bfloat16, policy_version=3, exact=names.buffers)
    assert on_device.fingerprint == weights.fingerprint
    assert list(on_device.state) == list(state)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in on_device.state
    weights.close()


def test_fingerprint_ignores_fusing_and_padding_and_detects_changed_bit() -> None:
    state = {name: value.detach().clone() for name, value in make_model().named_parameters()}
    whole = fingerprint(state.items())
    fused = dict(state)
    parts = [fused.pop(f"model.layers.0.self_attn.{name}_proj.weight") for name in "qkv"]
    fused["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    embedding = fused["model.embed_tokens.weight"]
    fused["model.embed_tokens.weight"] = torch.cat([embedding, torch.zeros(59, embedding.shape[1])])
    assert fingerprint(fused.items()) == whole
    state["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    changed = fingerprint(state.items())
    assert {layer for layer in whole if changed[layer] != whole[layer]} == {"1"}
