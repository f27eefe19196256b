"""Packed weights multiply like plain ones, and follow new weights."""

import asyncio

import pytest
import torch

from agentrl_train.engine.torch import TorchEngine
from agentrl_train.models import architecture
from agentrl_train.models.architecture import PackedLinear, pack_weights, packing_pays, repack_weights
from agentrl_train.types import SamplingParams
from tests.tiny_models import make_model

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch is built without oneDNN"
)
pytestmark = needs_onednn


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "SMALLEST_PACKED_LAYER", 1)
    monkeypatch.setattr(architecture, "SMALLEST_PACKED_MODEL", 1)


@pytest.mark.parametrize("rows", [1, 7, 32, 100])
@torch.inference_mode()
def test_packed_layer_has_the_product_of_the_plain_layer(rows: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 160)
    inputs = torch.randn(1, rows, 96)
    wanted = layer(inputs)
    layer.__class__ = PackedLinear
    layer.repack()
    torch.testing.assert_close(layer(inputs), wanted, rtol=1e-5, atol=1e-5)


def test_weights_that_the_processor_cannot_pack_stay_unchanged(
    small_layers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    assert not packing_pays(make_model(seed=0))


def test_packed_model_keeps_its_parameters_and_follows_new_weights(small_layers: None) -> None:
    model, other = make_model(seed=0), make_model(seed=1)
    names = [name for name, _ in model.named_parameters()]
    ids = torch.arange(3, 20)[None]
    pack_weights(model)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    assert [name for name, _ in model.named_parameters()] == names
    with torch.inference_mode():
        model.load_state_dict(other.state_dict())
        assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-4)
        repack_weights(model)
        torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-5)


def test_small_models_and_tensors_of_other_dtypes_are_not_packed() -> None:
    assert not packing_pays(make_model(seed=0))
    large = torch.nn.Sequential(torch.nn.Linear(4096, 4096, dtype=torch.float64))
    assert not packing_pays(large)


def test_engine_with_packed_weights_has_the_logprobs_of_new_weights(
    small_layers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "LEAST_GAIN", 0.0)
    context = list(range(3, 15))
    other = make_model(seed=1)

    async def sampled() -> tuple[list[int], list[float], bool]:
        model = make_model(seed=0)
        engine = TorchEngine({"current": model}, stop_token_ids=(), max_sequences=2, max_context=64)
        try:
            engine.publish(dict(other.named_parameters()), policy_version=1)
            done = await engine.generate(
                context, sampling=SamplingParams(max_new_tokens=8, seed=3), session_key="a"
            )
        finally:
            await engine.close()
        return done.token_ids, done.logprobs, any(isinstance(one, PackedLinear) for one in model.modules())

    tokens, logprobs, is_packed = asyncio.run(sampled())
    assert is_packed
    with torch.no_grad():
        logits = other(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=1e-4)
