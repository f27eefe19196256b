"""LoRA: training, checkpoints, and loading with PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from agentrl_train.__main__ import app
from agentrl_train.batch import pack
from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.errors import ConfigError
from agentrl_train.learner import Learner
from agentrl_train.loss import Loss
from agentrl_train.models.loading import load_policy
from agentrl_train.storage.checkpoint import InModelFolder, save_checkpoint
from tests.tiny_models import make_model, make_tokenizer
from tests.train.learner.test_learner import llama, made, on_policy, qwen, snapshot

LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "mlp.down_proj"))
TRAIN = TrainSection(learning_rate=1e-2, lora=LORA)
IDS = torch.arange(1, 20)[None]
# PEFT asks transformers
old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def trained(model: PreTrainedModel, lora: LoraSection = LORA, steps: int = 4) -> Learner:
    learner = Learner(model, TrainSection(learning_rate=1e-2, lora=lora))
    for number in range(steps):
        learner.step(pack(made(seed=number)))
    return learner


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("make", [qwen, llama])
def test_adapter_starts_as_identity_and_learns(make):
    before = logits(make())
    learner = Learner(make(), TRAIN)
    assert torch.equal(logits(learner.model), before)
    sequences = on_policy(learner, made(advantage=1.0))
    likely = sum(row.sum() for row in learner.logprobs(sequences))
    learner.step(pack(sequences))
    assert sum(row.sum() for row in learner.logprobs(sequences)) > likely + 1.0
    assert not torch.allclose(logits(learner.model), before, atol=1e-2)


def test_only_adapters_are_trained():
    learner = trained(qwen())
    fresh = dict(qwen().named_parameters())
    assert all(torch.equal(value, fresh.get(name, value)) for name, value in learner.model.named_parameters())
    adapters = {name for name, value in learner.model.named_parameters() if value.requires_grad}
    layers = {name.rpartition(".")[0] for name in adapters}
    ends = {"self_attn.q_proj", "mlp.down_proj"}
    assert layers == {f"model.layers.{number}.{end}" for number in (0, 1) for end in ends}
    sizes = sum(value.numel() for value in learner.snapshot().state.values())
    assert sizes < 0.5 * sum(value.numel() for value in fresh.values())


def test_default_targets_are_all_linear_layers_but_head():
    learner = trained(llama(), LoraSection(rank=2, alpha=4.0), steps=1)
    names = [name for name, value in learner.model.named_parameters() if value.requires_grad]
    assert len(names) == 2 * 2 * 7
    assert not any("lm_head" in name for name in names)


def test_kl_penalty_needs_no_copy_of_the_model():
    def learned(**options) -> tuple[list[float], Learner]:
        one = Learner(qwen(), TRAIN, loss=Loss(kl_coefficient=0.5), **options)
        return [one.step(pack(made(seed=number)))["kl_reference"] for number in range(4)], one

    penalties, without = learned()
    expected, with_copy = learned(reference=qwen())
    assert penalties == pytest.approx(expected, abs=1e-6)
    assert penalties[-1] > 1e-3
    assert torch.allclose(logits(without.model), logits(with_copy.model), atol=1e-5)


def test_kl_penalty_without_reference_or_adapters_is_rejected():
    with pytest.raises(ValueError, match="needs a reference model"):
        Learner(qwen(), loss=Loss(kl_coefficient=0.5))


def test_adapters_stay_in_float32_on_bfloat16_weights():
    one = Learner(qwen().bfloat16(), TRAIN)
    sequences = on_policy(one, made(advantage=1.0))
    likely = sum(row.sum() for row in one.logprobs(sequences))
    metrics = one.step(pack(sequences))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=0.05)  # the precision of bfloat16
    assert sum(row.sum() for row in one.logprobs(sequences)) > likely + 1.0
    dtypes = {value.requires_grad: value.dtype for value in one.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_unknown_target_is_rejected():
    with pytest.raises(ValueError, match="matches no linear layer of Qwen3ForCausalLM; it has down_proj,"):
        Learner(qwen(), TrainSection(lora=LoraSection(rank=2, alpha=4.0, targets=("query",))))


@pytest.mark.parametrize("make", [qwen, llama])
def test_published_weights_are_merged_under_original_names(make):
    learner = trained(make())
    weights = dict(learner.weights())
    plain = make()
    assert list(weights) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    assert torch.allclose(logits(plain), logits(learner.model), atol=1e-5)


@pytest.fixture
def checkpoint(tmp_path: Path, model, tokenizer) -> tuple[Path, Learner]:
    """Return a checkpoint and the learner that wrote it."""
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy, _ = load_policy(str(tmp_path / "base"))
    learner = trained(policy)
    parts = [learner.snapshot(), InModelFolder(pretrained=tokenizer)]
    save_checkpoint(tmp_path / "run" / "checkpoints", step=4, parts=parts, loop={})
    return tmp_path / "run" / "checkpoints" / "step_000004", learner


@old_name
def test_peft_loads_checkpoint(tmp_path: Path, checkpoint):
    folder, learner = checkpoint
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(base, str(folder / "model"))
    assert torch.allclose(logits(with_adapter), logits(learner.model), atol=1e-5)
    whole = with_adapter.merge_and_unload()
    assert torch.allclose(logits(whole), logits(learner.model), atol=1e-5)


def test_adapter_checkpoint_loads_as_policy(checkpoint):
    folder, learner = checkpoint
    policy, _ = load_policy(str(folder / "model"))
    assert torch.allclose(logits(policy), logits(learner.model), atol=1e-5)


@pytest.mark.parametrize(
    ("named", "dtype", "tolerance"), [("run", "float32", 1e-5), ("step", "bfloat16", 0.1)]
)
def test_merge_writes_model_folder(tmp_path: Path, checkpoint, named: str, dtype: str, tolerance: float):
    folder, learner = checkpoint
    source = folder.parents[1] if named == "run" else folder
    line = ["merge", str(source), "--output", str(tmp_path / "merged"), "--dtype", dtype]
    done = CliRunner().invoke(app, line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    merged, tokenizer = load_policy(str(tmp_path / "merged"))
    assert torch.allclose(logits(merged), logits(learner.model), atol=tolerance)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {value.dtype for value in stored.parameters()} == {getattr(torch, dtype)}
    assert tokenizer.chat_template
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_resumed_adapter_continues_bit_for_bit(tmp_path: Path):
    straight = trained(qwen())
    straight.snapshot().write(tmp_path)
    resumed = Learner(qwen(), TRAIN)
    resumed.load(tmp_path)
    for one in (straight, resumed):
        one.step(pack(made(seed=9)))
    ours, theirs = snapshot(straight), snapshot(resumed)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_activation_checkpointing_gives_adapters_the_same_updates():
    norms = []
    for checkpointing in (False, True):
        learner = Learner(qwen(), TRAIN.model_copy(update={"activation_checkpointing": checkpointing}))
        norms.append([learner.step(pack(made(seed=seed)))["grad_norm"] for seed in range(3)])
    assert norms[1] == pytest.approx(norms[0])


def write_peft_adapter(folder: Path, **options: Any) -> None:
    """Write an adapter with random matrices and its base with PEFT."""
    make_model().save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | options
    adapted = get_peft_model(base, LoraConfig(**options))
    torch.manual_seed(0)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(0.3 * torch.randn_like(value))
    adapted.save_pretrained(folder / "adapter")


PLAIN: dict[str, dict[str, Any]] = {
    "one rank": {},
    "all linear layers": {"target_modules": "all-linear"},
    "rank-stabilized": {"use_rslora": True},
    "other ranks": {"rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 3}},
    "other scales": {"alpha_pattern": {"v_proj": 32, r"layers\.1\..*": 1}},
    "both, rank-stabilized": {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 32},
        "use_rslora": True,
    },
}


@old_name
@pytest.mark.parametrize("kind", PLAIN)
def test_adapter_of_peft_is_merged_as_by_peft(kind: str, tmp_path: Path):
    write_peft_adapter(tmp_path, **PLAIN[kind])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    policy, _ = load_policy(str(tmp_path / "adapter"))
    assert torch.allclose(logits(policy), logits(merged), atol=1e-4)


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora = True"),
    "whole modules": ({"modules_to_save": ["norm"]}, "modules_to_save = .'norm'."),
    "biases": ({"bias": "lora_only"}, "bias = 'lora_only'"),
    "biases of the adapter": ({"lora_bias": True}, "lora_bias = True"),
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, r"the tensor model\.embed_tokens"),
    "the tied head": ({"target_modules": ["q_proj", "lm_head"]}, r"the tensor lm_head\.base_layer"),
    "tokens": ({"trainable_token_indices": [5, 6]}, r"trainable_token_indices = \[5, 6\]"),
    "residual weights": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "repeated layers": ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication = "),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHER)
def test_adapter_that_changes_more_than_linear_layers_is_refused(kind: str, tmp_path: Path):
    options, named = OTHER[kind]
    write_peft_adapter(tmp_path, **options)
    with pytest.raises(ConfigError, match=rf"{named}.*merge it into its base with PEFT first"):
        load_policy(str(tmp_path / "adapter"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: Any) -> None:
    """Change the tensors and the configuration of an adapter."""
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(values | config))


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
NORM, HEAD = "base_model.model.model.norm", "base_model.model.lm_head"
BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], dict[str, Any], str]] = {
    "transposed weights": (lambda tensors: None, {"fan_in_fan_out": True}, "fan_in_fan_out = True"),
    "another method": (lambda tensors: None, {"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
    "an unknown setting": (lambda tensors: None, {"use_new_kind": True}, "use_new_kind = True"),
    "an unknown tensor": (
        lambda tensors: tensors.update({f"{FIRST}.lora_magnitude_vector": torch.ones(32)}),
        {},
        r"has the tensor model\.layers\.0\.self_attn\.q_proj\.lora_magnitude_vector",
    ),
    "half of a pair": (
        lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight"),
        {},
        r"lacks the tensor model\.layers\.0\.self_attn\.q_proj\.lora_B",
    ),
    "no tensors": (dict.clear, {}, "has no tensors"),
    "a layer that is not linear": (
        lambda tensors: tensors.update(
            {f"{NORM}.lora_A.weight": torch.ones(1, 32), f"{NORM}.lora_B.weight": torch.ones(1, 1)}
        ),
        {},
        r"changes model\.norm, which is not a linear layer",
    ),
    "the tied head": (
        lambda tensors: tensors.update(
            {f"{HEAD}.lora_A.weight": torch.ones(1, 32), f"{HEAD}.lora_B.weight": torch.ones(261, 1)}
        ),
        {},
        r"changes lm_head, but its base model ties model\.embed_tokens\.weight and lm_head\.weight",
    ),
    "another shape": (
        lambda tensors: tensors.update({f"{FIRST}.lora_B.weight": torch.ones(1, 4)}),
        {},
        r"by a matrix of the shape \(1, 32\), and its base model has the shape \(32, 32\)",
    ),
}


@old_name
@pytest.mark.parametrize("fault", BROKEN)
def test_adapter_that_cannot_be_merged_exactly_is_refused_with_its_fault(fault: str, tmp_path: Path):
    change, config, named = BROKEN[fault]
    write_peft_adapter(tmp_path)
    rewrite(tmp_path / "adapter", change, **config)
    with pytest.raises(ConfigError, match=named):
        load_policy(str(tmp_path / "adapter"))
