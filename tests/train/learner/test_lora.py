"""LoRA: training, checkpoints, and loading with PEFT."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from agentrl_train.__main__ import app
from agentrl_train.batch import pack
from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.learner import Learner
from agentrl_train.loss import Loss
from agentrl_train.models.loading import load_policy
from agentrl_train.storage.checkpoint import InModelFolder, save_checkpoint
from tests.train.learner.test_learner import llama, made, on_policy, qwen, snapshot

LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "mlp.down_proj"))
TRAIN = TrainSection(learning_rate=1e-2, lora=LORA)
IDS = torch.arange(1, 20)[None]


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers
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
