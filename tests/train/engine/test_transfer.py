"""Weights in shared memory and their fingerprints."""

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.engine.transfer import DeviceWeights, Fingerprint, SharedWeights, fingerprint, lost_push
from agentrl_train.learner import Learner
from agentrl_train.learner.sharding import buckets
from agentrl_train.models.checkpoint_names import CheckpointNames
from tests.architectures import tiny
from tests.tiny_models import make_model


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


def test_push_of_gathered_weights_holds_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 20_000
    monkeypatch.setattr("agentrl_train.learner.learner.buckets", partial(buckets, limit=limit))
    learner = Learner(tiny("Qwen3", num_hidden_layers=8), TrainSection(lora=LoraSection(rank=2, alpha=4.0)))
    gathered: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []
    gather = learner.gather

    def counted(names: Sequence[str]) -> dict[str, torch.Tensor]:
        made = gather(names)
        gathered.extend(weakref.ref(value) for value in made.values())
        held.append(sum(value.nbytes for one in gathered if (value := one()) is not None))
        return made

    monkeypatch.setattr(learner, "gather", counted)
    weights = SharedWeights(learner.weights(), dtype=torch.bfloat16, policy_version=1)
    weights.close()
    whole = sum(value.nbytes for name, value in learner.model.named_parameters())
    assert len(held) > 4
    assert max(held) < 1.5 * limit < whole / 4


class HostReads(TorchDispatchMode):
    """Counts the numbers read from tensors, and integer sums by device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.summed_on: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        if func is torch.ops.aten.sum.default:
            self.summed_on.add(args[0].device.type)
        return func(*args, **(kwargs or {}))


def test_fingerprint_does_not_wait_for_each_parameter() -> None:
    state = dict(make_model().named_parameters())
    with HostReads() as seen:
        weights = SharedWeights(state, dtype=torch.bfloat16, policy_version=3)
        assert fingerprint((name, value.bfloat16()) for name, value in state.items()) == weights.fingerprint
    assert seen.reads == 0
    weights.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fingerprint_is_computed_on_the_gpu() -> None:
    model = make_model()
    here = SharedWeights(dict(model.named_parameters()), dtype=torch.bfloat16, policy_version=3)
    model.to("cuda")
    with HostReads() as seen:
        there = SharedWeights(dict(model.named_parameters()), dtype=torch.bfloat16, policy_version=3)
    assert seen.summed_on == {"cuda"}
    assert there.fingerprint == here.fingerprint
    here.close()
    there.close()


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


def shards(state: dict[str, torch.Tensor]) -> list[Fingerprint]:
    """Return the fingerprints of two workers. Matrices are split between them, and both have the vectors."""
    halves = [
        {name: value.chunk(2)[worker] if value.ndim > 1 else value for name, value in state.items()}
        for worker in range(2)
    ]
    return [fingerprint(half.items()) for half in halves]


def test_lost_push_to_sharded_engine_is_detected_however_small() -> None:
    old = {name: value.detach().clone() for name, value in make_model().named_parameters()}
    new = {name: value * (1 + 1e-6) for name, value in old.items()}
    before = fingerprint(old.items()), shards(old)
    sent = fingerprint(new.items())
    assert lost_push(before=before, after=(sent, shards(new))) == ""
    assert "did not follow those sent" in lost_push(before=before, after=(sent, shards(old)))
    one_layer = {name: old[name] if ".1." in name else value for name, value in new.items()}
    assert "layers ['1']" in lost_push(before=before, after=(sent, shards(one_layer)))
    one_worker = [shards(new)[0], shards(old)[1]]
    assert "workers [1] still hold" in lost_push(before=before, after=(sent, one_worker))


def test_push_of_unchanged_layers_must_not_change_them() -> None:
    old = {name: value.detach().clone() for name, value in make_model().named_parameters()}
    new = {name: value * 1.5 if ".0." in name else value for name, value in old.items()}
    before = fingerprint(old.items()), shards(old)
    assert lost_push(before=before, after=(fingerprint(new.items()), shards(new))) == ""
    assert lost_push(before=before, after=(fingerprint(old.items()), shards(old))) == ""
    assert "layers ['0']" in lost_push(before=before, after=(fingerprint(old.items()), shards(new)))
