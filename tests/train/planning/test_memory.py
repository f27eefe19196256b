"""Memory estimates for engine and learner."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from agentrl_train.config import EngineSection, LoraSection, ModelSection, TrainSection
from agentrl_train.config.sections import VllmSection
from agentrl_train.learner.lora import add_adapters, is_adapter
from agentrl_train.planning.memory import (
    available_memory,
    engine_memory,
    learner_memory,
    needs,
    remedies,
    size_of,
)
from tests.architectures import ALTERNATING, SIZES
from tests.tiny_models import make_model

LORA = LoraSection(rank=4, alpha=8.0)
MODEL = make_model()
SIZE = size_of(MODEL, LORA)


def test_shapes_of_a_model_need_no_weights() -> None:
    with torch.device("meta"):
        model = make_model()
    assert size_of(model, LORA) == SIZE
    assert SIZE.parameters == sum(value.numel() for value in MODEL.parameters())


def test_adapters_are_counted_as_they_are_added() -> None:
    model = make_model()
    add_adapters(model, LORA)
    assert SIZE.adapters == sum(v.numel() for name, v in model.named_parameters() if is_adapter(name))


PER_LAYER = ALTERNATING | {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
UNEVEN: dict[str, dict[str, Any]] = {
    "gemma4_text": PER_LAYER | {"global_head_dim": 16},
    "gemma3n_text": PER_LAYER | {"intermediate_size": [48, 96], "activation_sparsity_pattern": [0.0, 0.0]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [1, 2]},
}
"""Architectures with numbers for each layer."""


@pytest.mark.parametrize("kind", UNEVEN)
def test_layers_of_different_shapes_are_counted(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES | UNEVEN[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    projections = [
        len(layer.weight)
        for name, layer in model.named_modules()
        if name.endswith(("k_proj", "v_proj"))  # the cache holds what these compute
    ]
    size = size_of(model, LORA)
    assert size.cached == sum(projections)
    widest = {"gemma4_text": 48, "gemma3n_text": 96, "hunyuan_v1_moe": 2 * 48}[kind]
    heads = 4 * (16 if kind == "gemma4_text" else 8)
    assert size.saved == 5 * 32 + 3 * heads + 4 * heads // 2 + 4 * widest


def test_model_without_layers_for_adapters_gets_no_advice_to_train_them() -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=96)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    size = size_of(model, remedy=LORA)
    assert (size.adapters, size.max_context) == (0, 96)
    with pytest.raises(ValueError, match="matches no linear layer of GPT2LMHeadModel"):
        size_of(model, LORA)
    names = [
        name
        for name, _ in remedies(ModelSection(path="a/b"), EngineSection(), TrainSection(), adaptable=False)
    ]
    assert not [name for name in names if "lora" in name]


def test_cache_grows_with_sessions_context_and_dtype() -> None:
    def cache(**settings: object) -> float:
        engine = EngineSection.model_validate({"max_context": 512, "max_new_tokens": 16} | settings)
        return engine_memory(SIZE, engine, sessions={"current": engine.max_sessions})["key/value cache"]

    layers, key_heads, head_width = 2, 2, 8
    assert cache(max_sessions=4) == 4 * 512 * layers * 2 * key_heads * head_width * 4
    assert cache(max_sessions=8) == 2 * cache(max_sessions=4)
    assert cache(max_sessions=4, dtype="bfloat16") == cache(max_sessions=4) / 2
    assert cache(max_context=600, device="cuda") == cache(max_context=768)


def test_every_sampling_policy_has_its_weights() -> None:
    sessions = {"current": 4, "stale": 4}
    found = engine_memory(SIZE, EngineSection(), sessions=sessions)
    assert found["weights"] == 2 * 4 * SIZE.parameters


def test_adam_takes_twelve_bytes_per_trained_parameter() -> None:
    for train, trained in ((TrainSection(), SIZE.parameters), (TrainSection(lora=LORA), SIZE.adapters)):
        found = learner_memory(SIZE, train)
        assert found["gradients"] + found["optimizer"] == 12 * trained


def test_frozen_weights_in_bfloat16_take_half() -> None:
    half, whole = (
        learner_memory(SIZE, TrainSection(lora=LORA), dtype=dtype)["weights"] - 4 * SIZE.adapters
        for dtype in ("bfloat16", "float32")
    )
    assert half == whole / 2


def test_activations_fall_with_the_micro_batch_and_with_checkpointing() -> None:
    def activations(**settings: object) -> float:
        return learner_memory(SIZE, TrainSection.model_validate(settings))["activations"]

    assert activations(micro_batch_tokens=512) < activations(micro_batch_tokens=4096)
    assert activations(activation_checkpointing=True) < activations()


def test_learner_processes_share_the_state() -> None:
    one, two = (learner_memory(SIZE, TrainSection(processes=count)) for count in (1, 2))
    assert two["optimizer"] == one["optimizer"] / 2
    assert two["activations"] == one["activations"]


def test_reference_of_a_kl_penalty_is_a_copy_unless_adapters_can_be_switched_off() -> None:
    assert learner_memory(SIZE, TrainSection(), reference=True)["reference"] == 4 * SIZE.parameters
    assert "reference" not in learner_memory(SIZE, TrainSection(lora=LORA), reference=True)


@pytest.mark.parametrize(
    ("layout", "needed"), [("separated", [3.0, 5.0]), ("colocated", [5.0]), ("shared", [8.0])]
)
def test_places_of_a_run_on_gpus_follow_the_layout(layout: str, needed: list[float]) -> None:
    places = needs(
        EngineSection(device="cuda"),
        layout=layout,
        engine_parts={"weights": 3.0},
        learner_parts={"weights": 5.0},
        available=6.0,
    )
    assert [one.needed for one in places] == needed
    assert [one.missing for one in places] == [value - 6.0 for value in needed]


def test_vllm_takes_its_share_of_a_gpu() -> None:
    vllm = VllmSection(args={"gpu_memory_utilization": 0.5})
    engine = EngineSection(kind="vllm", device="cuda", vllm=vllm)
    first, _ = needs(engine, layout="separated", engine_parts={"a": 9.0}, learner_parts={}, available=80.0)
    assert first.needed == 40.0


def test_remedies_never_split_an_episode_and_never_cost_more_memory() -> None:
    engine, train = EngineSection(max_context=1024), TrainSection(micro_batch_tokens=8192)
    needed = []
    names = []
    for name, (model, sampling, training) in remedies(ModelSection(path="a/b"), engine, train):
        names.append(name)
        assert training.micro_batch_tokens >= sampling.max_context
        parts = engine_memory(SIZE, sampling, sessions={"current": sampling.max_sessions})
        parts = parts | {"learner": sum(learner_memory(SIZE, training, dtype=model.dtype).values())}
        needed.append(sum(parts.values()))
    assert names[0] == "train.micro_batch_tokens = 4096"
    assert names[-1] == 'model.dtype = "bfloat16"'
    assert needed == sorted(needed, reverse=True)


def test_memory_of_this_machine_is_positive() -> None:
    assert 1e8 < available_memory("cpu") < 1e15
