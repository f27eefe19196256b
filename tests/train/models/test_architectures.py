"""Tiny models of every architecture: engine and learner agree, packing changes nothing, and checkpoints are
complete.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentrl_train.batch import pack
from agentrl_train.config import LoraSection, TrainSection
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.errors import EngineError, WeightMismatch
from agentrl_train.learner import Learner, logprobs
from agentrl_train.learner.agreement import check_head
from agentrl_train.learner.logprobs import one_row, sampled_logprobs, set_attention, shares_prefixes
from agentrl_train.models import architecture
from agentrl_train.models.checkpoint_names import CheckpointNames
from agentrl_train.models.loading import load_policy
from agentrl_train.models.stored import StoredModel, allocate, auto_class, safetensors_files
from agentrl_train.types import SamplingParams, TokenSequence
from agentrl_train.weights import FLOAT32, drift, probe_sequence, require_agreement
from tests.architectures import ALL, HYBRID, REFUSED, UNKNOWN, VOCABULARY, WINDOW, WINDOWED, tiny
from tests.tiny_models import learner_arguments

IDS = torch.randint(1, VOCABULARY, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(1))
MASKED = [name for name in ALL if name not in HYBRID]
UNHURRIED = {"Granite-4", "Qwen3-Next", "Qwen3.5"}
"""Architectures whose layers without attention run in plain PyTorch here."""


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test over architectures."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[slow] if name in UNHURRIED else []) for name in names]
    )


every = each(ALL)


@torch.no_grad()
def logits(model: torch.nn.Module, ids: Any = IDS) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=torch.as_tensor(ids), use_cache=False).logits
    return found


def made(lengths: tuple[int, ...] = (3 * WINDOW, 5, 2 * WINDOW, 9), seed: int = 0) -> list[TokenSequence]:
    """Return sequences, some longer than the window, with all tokens but the first sampled."""
    rng = np.random.default_rng(seed)
    found = []
    for group_id, length in enumerate(lengths):
        mask = np.ones(length, dtype=np.float32)
        mask[0] = 0
        found.append(
            TokenSequence(
                token_ids=rng.integers(1, VOCABULARY, length),
                loss_mask=mask,
                logprobs=mask * np.float32(-4.2),
                versions=np.where(mask > 0, 0, -1),
                advantages=mask * np.float32(rng.normal() + 1.0),
                task="a",
                group_id=group_id,
            )
        )
    return found


LORA = LoraSection(rank=4, alpha=8.0)


def trained(model: PreTrainedModel, **options: object) -> Learner:
    learner = Learner(model, **learner_arguments(learning_rate=1e-2, **options))
    for seed in (0, 1):
        learner.step(pack(made(seed=seed), max_tokens=300, packed=learner.packs_rows))
    return learner


def agree(learner: Learner, sequences: list[TokenSequence]) -> None:
    """Compare engine and learner as a run does before each update."""
    require_agreement(drift(learner.logprobs(sequences), sequences, version=0), tolerance=FLOAT32, version=0)


async def played(engine: TorchEngine, *, version: int) -> list[TokenSequence]:
    """Return concurrently sampled sequences of two turns that exceed the window."""
    rng = np.random.default_rng(version)
    contexts = [rng.integers(1, VOCABULARY, size=size).tolist() for size in (2 * WINDOW, 3 * WINDOW, 5)]

    async def play(number: int, context: list[int]) -> TokenSequence:
        for turn in range(2):
            sampling = SamplingParams(max_new_tokens=6, temperature=1.0, seed=7 * version + turn)
            done = await engine.generate(context, sampling=sampling, session_key=str(number))
            asked, context = context, [*context, *done.token_ids, 1 + turn, 7]
        return probe_sequence(asked, done)

    return await asyncio.gather(*(play(number, context) for number, context in enumerate(contexts)))


@pytest.mark.parametrize("name", MASKED)
async def test_torch_engine_agrees_with_learner_before_and_after_push(name: str) -> None:
    learner = Learner(tiny(name), TrainSection(learning_rate=1e-2))
    engine = TorchEngine({"current": tiny(name)}, stop_token_ids=[], max_sequences=4, max_context=96)
    try:
        for version in (0, 1):
            sequences = await played(engine, version=version)
            found = drift(learner.logprobs(sequences), sequences, version=version)
            assert found.worst < 2e-5
            learner.step(pack(made(seed=version), max_tokens=300))
            await asyncio.to_thread(engine.publish, learner.weights(), policy_version=version + 1)
    finally:
        await engine.close()


@pytest.mark.parametrize("name", HYBRID)
def test_torch_engine_refuses_layers_without_attention(name: str) -> None:
    with pytest.raises(EngineError, match=r"does not support models with layers of type .* 'vllm'"):
        TorchEngine({"current": tiny(name)}, stop_token_ids=[], max_sequences=4, max_context=96)


@pytest.mark.parametrize("name", UNKNOWN)
def test_torch_engine_refuses_an_attention_that_it_does_not_compute(name: str) -> None:
    with pytest.raises(EngineError, match=rf"does not support {name}ForCausalLM .* 'vllm'"):
        TorchEngine({"current": tiny(name)}, stop_token_ids=[], max_sequences=4, max_context=96)


def test_learner_refuses_an_attention_that_packed_rows_change() -> None:
    with pytest.raises(ValueError, match=r"attention that is not known here: .* 'eager'"):
        Learner(tiny("Doge"), TrainSection(learning_rate=1e-2))
    sequences = made((IDS.shape[1], 5))
    for name, attention in (("Doge", "eager"), ("Bloom", "sdpa")):
        learner = Learner(tiny(name), TrainSection(learning_rate=1e-2), attention=attention)
        own = logits(tiny(name), sequences[0].token_ids[None]).log_softmax(-1)[0, :-1]
        expected = own.gather(-1, torch.tensor(sequences[0].token_ids)[1:, None])[:, 0]
        assert np.allclose(learner.logprobs(sequences)[0][1:], expected, atol=1e-5)


@pytest.mark.parametrize("name", MASKED)
def test_packed_rows_have_logprobs_of_single_sequences(name: str) -> None:
    model, sequences = tiny(name), made()
    set_attention(model)
    (batch,) = pack(sequences, max_tokens=200, row_tokens=4 * WINDOW + 8)
    assert any(int(micro.segment_ids.max()) > 1 for micro in batch.micro_batches)
    with torch.no_grad():
        packed = torch.cat([sampled_logprobs(model, micro)[0] for micro in batch.micro_batches])
        alone = torch.cat([sampled_logprobs(model, one_row(one))[0] for one in sequences])
    assert torch.allclose(packed.sort()[0], alone.sort()[0], atol=1e-5)


@pytest.mark.parametrize("name", MASKED)
def test_gradient_of_packed_rows_equals_that_of_single_sequences(name: str) -> None:
    model, sequences = tiny(name), made()
    set_attention(model)
    gradients = []
    for micros in ([one_row(*sequences)], [one_row(one) for one in sequences]):
        model.zero_grad()
        torch.cat([sampled_logprobs(model, micro)[0] for micro in micros]).sum().backward()
        gradients.append([value.grad for value in model.parameters() if value.grad is not None])
    for packed, alone in zip(*gradients, strict=True):
        assert torch.allclose(packed, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()) + 1e-7)


def alike(seed: int = 0) -> list[TokenSequence]:
    """Return sequences with common prefixes, within and beyond the window. Two of them are equal."""
    rng = np.random.default_rng(seed)
    opening = rng.integers(1, VOCABULARY, 2 * WINDOW + 3)
    turn = np.concatenate([opening, rng.integers(1, VOCABULARY, 2 * WINDOW)])
    ends = [(opening, 3), (turn, 7), (turn[:-5], WINDOW), (turn, 0), (turn, 0), (opening[:-1], 4)]
    tokens = [np.concatenate([head, rng.integers(1, VOCABULARY, size)]) for head, size in ends]
    made_to_fit = made(tuple(len(one) for one in tokens), seed=seed)
    return [replace(one, token_ids=ids) for one, ids in zip(made_to_fit, tokens, strict=True)]


@pytest.mark.parametrize("name", MASKED)
def test_shared_prefixes_change_neither_logprobs_nor_gradient(name: str) -> None:
    model, sequences, weights = tiny(name), alike(), torch.rand(1000)
    set_attention(model)
    assert shares_prefixes(model) == (name not in {"StableLM"})
    found: list[list[torch.Tensor]] = []
    for micros in ([one_row(*sequences)], [one_row(one) for one in sequences]):
        model.zero_grad()
        scores = torch.cat([sampled_logprobs(model, micro)[0] for micro in micros])
        (scores * weights[: len(scores)]).sum().backward()
        parameters = [value.grad for value in model.parameters() if value.grad is not None]
        found.append([scores.detach(), *parameters])
    for shared, alone in zip(*found, strict=True):
        assert torch.allclose(shared, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()) + 1e-7)


@pytest.mark.parametrize("name", MASKED)
def test_attention_of_a_packed_row_costs_as_much_as_its_sequences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores are computed within sequences, and for about two windows of keys in layers with windows."""
    computed: list[int] = []

    def attend(query: torch.Tensor, key: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        computed.append(query.shape[2] * key.shape[2])
        return architecture.attend(query, key, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "attend", attend)
    model, lengths = tiny(name), (6 * WINDOW, 5, 2 * WINDOW, 9)
    set_attention(model)
    sampled_logprobs(model, one_row(*made(lengths)))
    whole = sum(length**2 for length in lengths)
    near = sum(min(length, 2 * WINDOW) * length for length in lengths)
    windowed = architecture.layer_types(model.config).count("sliding_attention")
    assert sum(computed) <= windowed * near + (2 - windowed) * whole


@each(HYBRID)
def test_layers_without_attention_are_trained_one_sequence_per_row(name: str) -> None:
    learner = Learner(tiny(name), TrainSection(learning_rate=1e-2))
    assert not learner.packs_rows
    with pytest.raises(ValueError, match="pack with packed=False"):
        learner.step(pack(made()))
    assert learner.step(pack(made(), packed=False))["grad_norm"] > 0


def test_model_with_custom_attention_is_trained_one_sequence_per_row() -> None:
    config = AutoConfig.for_model("gptj", vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    learner = Learner(auto_class(config).from_config(config), TrainSection(learning_rate=1e-2))
    together = learner.logprobs(made())
    apart = [learner.logprobs([one])[0] for one in made()]
    assert all(np.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(together, apart, strict=True))
    assert learner.step(pack(made(), packed=learner.packs_rows))["grad_norm"] > 0


@every
def test_checkpoint_is_complete(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    learner = trained(tiny(name))
    expected = logits(learner.model)
    learner.snapshot().write(tmp_path)
    tokenizer.save_pretrained(tmp_path / "model")
    loaded, _ = load_policy(str(tmp_path / "model"))
    # transformers before 5.21 does not cap the scores of Gemma-2 with "sdpa".
    loaded.set_attn_implementation("eager")
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    resumed = Learner(tiny(name, seed=1), TrainSection(learning_rate=1e-2))
    resumed.load(tmp_path)
    assert torch.equal(logits(resumed.model), expected)


@pytest.mark.parametrize(
    ("name", "dtype"), [("Qwen3", torch.float32), *((name, torch.bfloat16) for name in ALL)]
)
def test_model_read_layer_by_layer_equals_a_plain_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path, max_shard_size="20KB")
    config = AutoConfig.from_pretrained(tmp_path)
    plain = auto_class(config).from_pretrained(tmp_path, dtype=dtype)
    stored = StoredModel(tmp_path, files=safetensors_files(tmp_path), dtype=dtype)
    read = stored.model()
    assert all(value.is_meta for value in read.parameters())
    allocate(read, torch.device("cpu"))
    stored.load_into(read)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(read, kind)()), dict(getattr(plain, kind)())
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert value.dtype == theirs[key].dtype, key
            assert torch.equal(value, theirs[key]), key
    assert list(CheckpointNames(read)({})) == list(CheckpointNames(plain)({}))
    assert read.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lack 1 tensors, model.norm.weight first"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            r"have model\.norm\.weight in the shape \(31,\), its config\.json \(32,\)",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCABULARY, 32)}),
            "different tensors lm_head.weight and model.embed_tokens.weight, which its configuration ties",
        ),
    ],
    ids=["missing", "misshapen", "untied"],
)
def test_incomplete_files_are_rejected(
    change: Callable[[dict[str, torch.Tensor]], object], reason: str, tmp_path: Path
) -> None:
    tiny("Qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        list(StoredModel(tmp_path, files=safetensors_files(tmp_path), dtype=torch.float32).layers())


@every
def test_pushed_tensors_equal_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    pushed = CheckpointNames(model)(dict(model.named_parameters()))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(pushed) == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in pushed.items())


@every
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers
def test_peft_reproduces_adapter(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tiny(name).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, _ = load_policy(str(tmp_path / "base"))
    learner = trained(model, lora=LORA)
    expected = logits(learner.model)
    assert not torch.allclose(expected, logits(tiny(name)), atol=1e-2)
    learner.snapshot().write(tmp_path / "run")
    assert not any(
        "vision" in name for name, value in learner.model.named_parameters() if value.requires_grad
    )
    base, _ = load_policy(str(tmp_path / "base"))
    base.set_attn_implementation("eager")
    peft = PeftModel.from_pretrained(base, str(tmp_path / "run" / "model"))
    assert torch.allclose(logits(peft), expected, atol=1e-5)
    resumed = Learner(copy.deepcopy(tiny(name)), TrainSection(learning_rate=1e-2, lora=LORA))
    resumed.load(tmp_path / "run")
    assert torch.equal(logits(resumed.model), expected)


@every
def test_logits_are_scaled_and_capped_as_by_the_model(name: str) -> None:
    model = tiny(name)
    check_head(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # the check does not depend on the weights
    check_head(model)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architecture_is_rejected(
    name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    tiny(name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_policy(str(tmp_path))
    with pytest.raises(ValueError, match=r"Llama4ForCausalLM does not say .* use a model of another"):
        Learner(model, TrainSection(learning_rate=1e-2))


def test_missing_logit_cap_is_detected_even_with_small_logits() -> None:
    model = tiny("Qwen3")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    plain = model.forward

    def capped(**inputs: object) -> object:
        output = plain(**inputs)
        output.logits = 30 * torch.tanh(output.logits / 30)
        return output

    model.forward = capped  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="changes hidden states or logits around its head"):
        Learner(model, TrainSection(learning_rate=1e-2))


@pytest.mark.parametrize("name", WINDOWED)
def test_drift_check_covers_packed_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drift check detects a learner that ignores windows in packed rows."""
    learner, sequences = Learner(tiny(name), TrainSection(learning_rate=1e-2)), made()
    alone = [learner.logprobs([one])[0] for one in sequences]
    for one, row in zip(sequences, alone, strict=True):
        one.logprobs[:] = row
    agree(learner, sequences)
    monkeypatch.setattr(logprobs, "layer_types", lambda config: ["full_attention"] * 2)
    with pytest.raises(WeightMismatch):
        agree(learner, sequences)
