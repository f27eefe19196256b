import copy
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl_train.batch import pack
from agentrl_train.config import load_config
from agentrl_train.errors import LossNotFinite
from agentrl_train.learner import Learner, lr_fraction, sampled_logprobs, select_sampled
from agentrl_train.learner.logprobs import (
    ROW_TOKENS,
    Scorer,
    padding_free,
    sampled_units,
    set_attention,
    shared_rows,
)
from agentrl_train.loss import clip, importance_weights, old, policy_loss, sequence_ratio, sft_loss
from agentrl_train.training.compose import learner_options
from agentrl_train.types import FloatArray, TokenSequence
from tests.tiny_models import learner_arguments

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/train.toml"

VOCABULARY = 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def qwen(**options) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    options = SIZES | {"tie_word_embeddings": True, "head_dim": 8} | options
    return Qwen3ForCausalLM(Qwen3Config(**options))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


@pytest.fixture(params=[qwen, llama], ids=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.param()


def learner(model: PreTrainedModel | None = None, **options) -> Learner:
    options = {"learning_rate": 1e-2} | options
    return Learner(model or qwen(), **learner_arguments(**options))


def made(count: int = 9, seed: int = 0, advantage: float | None = None) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    found = []
    for group_id, length in enumerate(rng.integers(4, 30, count)):
        mask = (rng.random(length) < 0.6).astype(np.float32)
        mask[0], mask[-1] = 0, 1
        value = rng.normal() if advantage is None else advantage
        found.append(
            TokenSequence(
                token_ids=rng.integers(0, VOCABULARY, length),
                loss_mask=mask,
                logprobs=mask * np.float32(-3.9),
                versions=np.where(mask > 0, 0, -1),
                advantages=mask * np.float32(value),
                task="a",
                group_id=group_id,
            )
        )
    return found


def with_(one: TokenSequence, **changes) -> TokenSequence:
    fields = {name: getattr(one, name) for name in TokenSequence.__slots__}
    return TokenSequence(**(fields | changes))


def on_policy(learner: Learner, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    scores = learner.logprobs(sequences)
    return [with_(one, logprobs=row) for one, row in zip(sequences, scores, strict=True)]


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in learner.weights().items()}


def gradients(model: PreTrainedModel, sequences: Sequence[TokenSequence], **packing) -> list:
    """Return the gradient of one update, captured by a replaced optimizer step."""
    caught: list[torch.Tensor] = []
    one = learner(model, learning_rate=1e-12, max_grad_norm=1e9)
    hook = one._optimizer.register_step_pre_hook(
        lambda *_: caught.extend(value.grad.clone() for value in model.parameters())
    )
    one.step(pack(sequences, **packing))
    hook.remove()
    return caught


def whole_logprobs(model: PreTrainedModel, one: TokenSequence, temperature: float) -> FloatArray:
    ids = torch.from_numpy(one.token_ids)[None]
    with torch.no_grad():
        scores = (model.eval()(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    picked = scores[range(len(one) - 1), one.token_ids[1:]].numpy()
    return np.concatenate([np.zeros(1), picked]) * one.loss_mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_full_model(model, temperature):
    sequences = made()
    scores = learner(model, temperature=temperature).logprobs(sequences)
    for one, row in zip(sequences, scores, strict=True):
        assert row == pytest.approx(whole_logprobs(model, one, temperature), abs=1e-5)


@given(st.lists(st.integers(1, 3 * ROW_TOKENS), min_size=1, max_size=60), st.integers(1, 4))
def test_sequences_are_packed_so_that_no_two_rows_could_be_merged(lengths, ranks):
    rows = shared_rows(lengths, ranks=ranks)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[number] for number in row) for row in rows)
    assert sizes[-1] <= max(*lengths, sum(sorted(lengths)[:2]), ROW_TOKENS)
    assert len(sizes) == 1 or sizes[0] + sizes[1] > min(ROW_TOKENS, sum(lengths) // ranks)


def test_many_short_sequences_share_a_forward_pass(model):
    trained, passes = learner(model), []
    trained.model.model.register_forward_hook(lambda *_: passes.append(1))
    sequences = made(12)
    scores = trained.logprobs(sequences)
    assert len(passes) == 1
    for one, row in zip(sequences, scores, strict=True):
        assert row == pytest.approx(whole_logprobs(model, one, 1.0), abs=1e-5)


@pytest.mark.parametrize("row_tokens", [0, 64])
def test_packed_rows_have_logprobs_of_single_sequences(model, row_tokens):
    one = learner(model)
    sequences = on_policy(one, made(12))
    (batch,) = pack(sequences, max_tokens=130, row_tokens=row_tokens)
    assert any(int(micro.segment_ids.max()) > 1 for micro in batch.micro_batches)
    for micro in batch.micro_batches:
        with torch.no_grad():
            scores, _ = sampled_logprobs(model, micro)
        assert torch.allclose(scores, select_sampled(micro.logprobs, micro), atol=1e-5)


def test_padding_free_rows_have_same_logprobs_in_same_order(model):
    (packed,) = pack(made(12), max_tokens=200, row_tokens=64)
    (padded,) = pack(made(12), max_tokens=200, packed=False)
    with torch.no_grad():
        left = [sampled_logprobs(model, micro)[0] for micro in padded.micro_batches]
    set_attention(model)
    for micro, expected in zip(padded.micro_batches, left, strict=True):
        with torch.no_grad():
            assert torch.allclose(sampled_logprobs(model, padding_free(micro))[0], expected, atol=1e-5)
    for micro in packed.micro_batches:
        dense = padding_free(micro)
        assert dense.token_ids.shape == (1, int((micro.segment_ids > 0).sum()))
        assert torch.equal(select_sampled(dense.weights, dense), select_sampled(micro.weights, micro))


def test_plain_attention_has_the_logprobs_of_the_default():
    plain, default = learner(attention="eager"), learner()
    assert plain.model.config._attn_implementation == "eager"
    assert default.model.config._attn_implementation != "eager"
    for ours, theirs in zip(plain.logprobs(made()), default.logprobs(made()), strict=True):
        assert np.allclose(ours, theirs, atol=1e-5)
    batches = pack(made(), packed=plain.packs_rows)
    assert all(int(micro.segment_ids.max()) == 1 for batch in batches for micro in batch.micro_batches)
    assert plain.step(batches)["grad_norm"] == pytest.approx(
        default.step(pack(made()))["grad_norm"], rel=1e-4
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash-attn might be installed")
def test_unavailable_attention_is_rejected():
    with pytest.raises(
        ValueError, match=r"^model.attention = 'flash_attention_2' is not available: .*; set it"
    ):
        learner(attention="flash_attention_2")


def test_chunked_logits_change_neither_logprobs_nor_gradient(model):
    (batch,) = pack(made(), max_tokens=1000)
    (micro,) = batch.micro_batches
    set_attention(model)
    results = []
    for max_logits in (10**9, 5 * VOCABULARY, 1):
        scores, entropy = sampled_logprobs(model, micro, max_logits=max_logits, entropy_gradient=True)
        model.zero_grad()
        (scores.sum() + entropy.sum()).backward()
        results.append([scores, entropy, *(value.grad.clone() for value in model.parameters())])
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.allclose(left, right, atol=1e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
@pytest.mark.parametrize(
    "packing",
    [{"max_tokens": 30}, {"max_tokens": 64, "row_tokens": 60}, {"packed": False, "max_tokens": 50}],
)
def test_gradient_does_not_depend_on_micro_batches(aggregation, packing):
    model, sequences = qwen(), made()
    whole = gradients(model, sequences, aggregation=aggregation, max_tokens=10**6)
    split = gradients(model, sequences, aggregation=aggregation, **packing)
    for left, right in zip(whole, split, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-6)


def test_skipping_zero_advantages_keeps_gradient():
    model = qwen()
    sequences = made(5) + made(5, seed=1, advantage=0.0)
    whole = gradients(model, sequences)
    skipped = gradients(model, sequences, skip_zero_advantages=True)
    for left, right in zip(whole, skipped, strict=True):
        assert torch.allclose(left, right, rtol=1e-4, atol=1e-6)


def test_observed_tokens_have_no_gradient():
    """The advantages and log-probabilities of observed tokens do not affect the update."""
    model, sequences = qwen(), made()
    noisy = [
        with_(
            one,
            advantages=np.where(one.loss_mask > 0, one.advantages, 99).astype(np.float32),
            logprobs=np.where(one.loss_mask > 0, one.logprobs, 99).astype(np.float32),
        )
        for one in sequences
    ]
    for left, right in zip(gradients(model, sequences), gradients(model, noisy), strict=True):
        assert torch.equal(left, right)


def test_activation_checkpointing_recomputes_layers_and_gives_same_update():
    calls: list[int] = []
    results = []
    for checkpointing in (False, True):
        one = learner(activation_checkpointing=checkpointing)
        one.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        one.step(pack(made()))
        results.append(snapshot(one))
    plain, checkpointed = results
    assert len(calls) == 3
    for name, value in plain.items():
        assert torch.allclose(value, checkpointed[name], atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_of_a_model_is_off(checkpointing):
    one = learner(qwen(attention_dropout=0.5), activation_checkpointing=checkpointing)
    metrics = one.step(pack(on_policy(one, made())))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def with_dropout() -> PreTrainedModel:
    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attention_dropout=0.3,
    )
    return PhiForCausalLM(config)


@pytest.mark.parametrize("make", [with_dropout, lambda: qwen(attention_dropout=0.3)])
def test_activation_checkpointing_leaves_dropout_off(make):
    one = learner(make(), activation_checkpointing=True)
    metrics = one.step(pack(on_policy(one, made())))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_unchanged_policy_has_ratio_one_and_zero_kl(model):
    one = learner(model, temperature=0.8)
    metrics = one.step(pack(on_policy(one, made())))
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-8)
    assert metrics["clip_fraction"] == 0.0


def test_step_metrics_count_tokens_and_updates():
    sequences = made(8)
    batches = pack(sequences, num_minibatches=2)
    metrics = learner().step(batches)
    assert metrics["updates"] == 2
    assert metrics["sequences"] == 8
    assert metrics["tokens"] == sum(len(one) for one in sequences)
    assert metrics["loss_tokens"] == sum(one.loss_mask.sum() for one in sequences)
    assert metrics["slots"] == sum(batch.num_slots for batch in batches)
    assert 0 < metrics["entropy"] <= np.log(VOCABULARY)
    assert metrics["grad_norm"] > 0
    assert metrics["seconds"] > 0


def test_step_raises_probability_of_rewarded_tokens():
    one = learner(learning_rate=1e-3)
    good, bad = made(6, advantage=1.0), made(6, seed=1, advantage=-1.0)
    before = [row.sum() for row in one.logprobs([*good, *bad])]
    one.step(pack(on_policy(one, [*good, *bad])))
    after = [row.sum() for row in one.logprobs([*good, *bad])]
    change = np.subtract(after, before)
    assert change[:6].sum() > 0 > change[6:].sum()


def test_policy_learns_rewarded_token_from_its_samples():
    one = learner(learning_rate=3e-3)
    rng = np.random.default_rng(0)
    prompt = np.array([1, 2, 3])
    for _ in range(25):
        chances = np.exp(next_token_logprobs(one.model, prompt).astype(np.float64))
        drawn = rng.choice(VOCABULARY, size=64, p=chances / chances.sum())
        rewards = (drawn % 4 == 0).astype(float)
        sampled = [
            with_(
                made(1)[0],
                token_ids=np.array([*prompt, token]),
                loss_mask=np.array([0, 0, 0, 1], np.float32),
                logprobs=np.array([0, 0, 0, np.log(chances[token])], np.float32),
                advantages=np.array([0, 0, 0, value], np.float32),
            )
            for token, value in zip(drawn, rewards - rewards.mean(), strict=True)
        ]
        one.step(pack(sampled))
    assert np.exp(next_token_logprobs(one.model, prompt))[::4].sum() > 0.9


def next_token_logprobs(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.from_numpy(prompt)[None]).logits
    return logits[0, -1].log_softmax(-1).numpy()


def test_sft_loss_equals_cross_entropy_of_model(model):
    one = learner(model, objective=sft_loss)
    sequences = made(4)
    labels = [np.where(s.loss_mask > 0, s.token_ids, -100) for s in sequences]
    with torch.no_grad():
        losses = [
            float(model(input_ids=torch.from_numpy(s.token_ids)[None], labels=torch.tensor(label)[None]).loss)
            for s, label in zip(sequences, labels, strict=True)
        ]
    metrics = one.step(pack(sequences, aggregation="sequence_mean"))
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_sft_memorizes_sequences():
    one = learner(objective=sft_loss)
    sequences = made(4)
    losses = [one.step(pack(sequences, aggregation="token_mean"))["loss"] for _ in range(30)]
    assert losses[-1] < 0.5 < losses[0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_loss_raises_and_changes_nothing(poison):
    one, sequences = learner(), made()
    spoilt = np.where(sequences[0].loss_mask > 0, poison, 0).astype(np.float32)
    bad = with_(sequences[0], advantages=spoilt)
    before = snapshot(one)
    with pytest.raises(LossNotFinite, match=r"update 1: loss (nan|-?inf)"):
        one.step(pack([bad, *sequences[1:]]))
    assert one.num_updates == 0
    assert all(torch.equal(value, before[name]) for name, value in one.weights().items())
    fresh = learner()
    one.step(pack(sequences))
    fresh.step(pack(sequences))
    assert all(torch.equal(v, fresh.weights()[name]) for name, v in one.weights().items())


def test_resumed_learner_continues_bit_for_bit(tmp_path):
    options = {"warmup_steps": 2, "total_steps": 8, "weight_decay": 0.1}
    steps = [pack(made(6, seed=seed), num_minibatches=2, seed=seed) for seed in range(4)]
    straight = learner(**options)
    for batches in steps[:2]:
        straight.step(batches)
    snapshot = straight.snapshot()
    metrics = [straight.step(batches) for batches in steps[2:]]
    draw = torch.rand(1)
    snapshot.write(tmp_path)

    resumed = learner(moved(qwen()), **options)
    resumed.load(tmp_path)
    assert resumed.num_updates == 4
    again = [resumed.step(batches) for batches in steps[2:]]
    timeless = [{k: v for k, v in m.items() if k != "seconds"} for m in metrics]
    assert [{k: v for k, v in m.items() if k != "seconds"} for m in again] == timeless
    assert torch.equal(torch.rand(1), draw)
    for name, value in resumed.weights().items():
        assert torch.equal(value, straight.weights()[name])


def test_learner_resumes_without_the_optimizer_and_warns(tmp_path, caplog):
    straight = learner(warmup_steps=2)
    for seed in range(2):
        straight.step(pack(made(6, seed=seed)))
    straight.snapshot().write(tmp_path)
    shutil.rmtree(tmp_path / "learner" / "optimizer")

    resumed = learner(moved(qwen()), warmup_steps=2)
    resumed.load(tmp_path)
    assert "has no optimizer state" in caplog.text
    assert resumed.num_updates == 2
    for name, value in resumed.weights().items():
        assert torch.equal(value, straight.weights()[name])
    assert resumed.step(pack(made(6, seed=2)))["grad_norm"] > 0.0
    assert resumed.num_updates == 3


def test_learning_rate_follows_its_schedule():
    whole = [lr_fraction(i, 2, 6, 0.1) for i in range(8)]
    assert whole == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1, 0.1])
    late = [lr_fraction(i, 2, 12, 0.0, 0.4) for i in range(12)]
    assert late == pytest.approx([0.5] + [1.0] * 7 + [0.75, 0.5, 0.25, 0.0])
    assert [lr_fraction(i) for i in (0, 5, 10**6)] == [1.0, 1.0, 1.0]
    cosine = [lr_fraction(i, 2, 6, 0.1, 1.0, "cosine") for i in range(8)]
    assert cosine == pytest.approx([0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1, 0.1, 0.1], abs=1e-4)


def test_updates_follow_learning_rate():
    one = learner(learning_rate=2e-3, warmup_steps=4)
    rates = [one.step(pack(made(3)))["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3])


def test_weights_list_every_parameter_and_tied_ones_once():
    tied, untied = learner(qwen()).weights(), learner(llama()).weights()
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in untied
    assert not any(value.requires_grad for value in tied.values())
    fresh = qwen()
    assert set(fresh.load_state_dict(tied, strict=False).missing_keys) == {"lm_head.weight"}


def test_weights_share_memory_with_model():
    one = learner()
    weights, before = one.weights(), snapshot(one)
    one.step(pack(made()))
    assert not torch.equal(weights["model.norm.weight"], before["model.norm.weight"])


def test_vectors_have_no_weight_decay():
    one = learner(learning_rate=0.1, weight_decay=0.5)
    before = snapshot(one)
    one.step(pack(made(advantage=0.0)))
    after = one.weights()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    embedding = "model.embed_tokens.weight"
    assert torch.allclose(after[embedding], 0.95 * before[embedding])


def test_kl_penalty_pulls_policy_to_reference():
    one = learner(
        llama(),
        reference=moved(llama()),
        kl_coefficient=1.0,
        learning_rate=1e-3,
    )
    sequences = made(advantage=0.0)
    divergence = [one.step(pack(on_policy(one, sequences)))["kl_reference"] for _ in range(8)]
    assert divergence[-1] < 0.5 * divergence[0]
    assert all(value.grad is None for value in one._reference.parameters())


def moved(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.05 * torch.randn_like(value)
    return model


def test_entropy_bonus_raises_entropy():
    one = learner(entropy_coefficient=1.0, learning_rate=3e-3)
    sequences = made(advantage=0.0)
    entropy = [one.step(pack(on_policy(one, sequences)))["entropy"] for _ in range(5)]
    assert entropy[-1] > entropy[0]


def decoupled_loss(**bounds: float) -> dict[str, Any]:
    correction = partial(importance_weights, **bounds)
    return {"recompute": True, "objective": partial(policy_loss, anchor=old, correction=correction)}


def test_importance_cap_clips_against_recomputed_logprobs():
    sampled_elsewhere = [with_(one, logprobs=one.logprobs - 2 * one.loss_mask) for one in made(advantage=1.0)]
    bypassed = learner().step(pack(sampled_elsewhere))
    one = learner(**decoupled_loss(cap=0.5))
    decoupled = one.step(pack(sampled_elsewhere))
    assert bypassed["clip_fraction"] > 0.5
    assert decoupled["clip_fraction"] == 0.0
    assert decoupled["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert decoupled["loss"] == pytest.approx(-0.5, abs=0.05)


def test_importance_floor_masks_tokens_outside_the_range():
    sampled_elsewhere = [with_(one, logprobs=one.logprobs - 2 * one.loss_mask) for one in made(advantage=1.0)]
    assert learner(**decoupled_loss(cap=0.5, floor=0.1)).step(pack(sampled_elsewhere))[
        "loss"
    ] == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("overrides", "reached"),
    [
        ([], -0.5),
        (["algorithm.correction.cap=0.25"], -0.25),
        (["algorithm.correction={name = 'mask', cap = 0.5, floor = 0.1}"], 0.0),
        (["algorithm.entropy_coefficient=1.0"], -3.8),
    ],
)
def test_configuration_keys_reach_loss(overrides: list[str], reached: float) -> None:
    decoupled = ["algorithm.anchor=old", "algorithm.correction=truncate", "algorithm.correction.cap=0.5"]
    config = load_config(QUICKSTART, [*decoupled, *overrides])
    one = Learner(qwen(), **learner_options(config, model=qwen()))
    sampled_elsewhere = [with_(one, logprobs=one.logprobs - 2 * one.loss_mask) for one in made(advantage=1.0)]
    assert one.step(pack(sampled_elsewhere))["loss"] == pytest.approx(reached, abs=0.1)


@pytest.mark.parametrize("packing", [{"packed": False}, {"max_tokens": 40}, {"row_tokens": 64}])
def test_loss_by_sequence_does_not_depend_on_packing(packing):
    sequences = [with_(one, logprobs=one.logprobs - 0.1 * one.loss_mask) for one in made()]
    options = {"objective": partial(policy_loss, ratio=sequence_ratio), "max_grad_norm": 1e9}
    whole = learner(**options).step(pack(sequences, max_tokens=10**6))
    split = learner(**options).step(pack(sequences, **packing))
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert split["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


def test_turns_and_sequences_are_numbered_in_packed_rows():
    (batch,) = pack(made(), row_tokens=64)
    for micro in batch.micro_batches:
        sequences, turns = sampled_units(micro)
        flat, flat_turns = sampled_units(padding_free(micro))
        assert sequences.tolist() == flat.tolist()
        assert turns.tolist() == flat_turns.tolist()
        assert sequences[-1] + 1 == (micro.position_ids[micro.segment_ids > 0] == 0).sum()
        pairs = list(zip(sequences.tolist(), turns.tolist(), strict=True))
        assert len(set(pairs)) == turns[-1] + 1


def test_bfloat16_is_close_to_float32():
    sequences = made(advantage=1.0)
    exact, lowered = learner(objective=sft_loss), learner(objective=sft_loss, precision="bfloat16")
    metrics = lowered.step(pack(sequences))
    assert metrics["loss"] == pytest.approx(exact.step(pack(sequences))["loss"], rel=0.02)
    assert {value.dtype for value in lowered.weights().values()} == {torch.float32}


def test_clip_range_is_argument_of_objective():
    sequences = [with_(one, logprobs=one.logprobs - 1 * one.loss_mask) for one in made()]
    free = learner(objective=partial(policy_loss, region=partial(clip, low=0.99, high=1e9, dual=None)))
    assert free.step(pack(sequences))["clip_fraction"] < 0.05
    assert learner().step(pack(sequences))["clip_fraction"] > 0.2


def test_logits_are_scaled_as_by_the_model():
    torch.manual_seed(0)
    model, sequences = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), made()
    for one, row in zip(sequences, learner(model).logprobs(sequences), strict=True):
        assert row == pytest.approx(whole_logprobs(model, one, 1.0), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_matches_cpu(model):
    sequences = made()
    here, there = learner(model), learner(copy.deepcopy(model), device="cuda")
    for left, right in zip(here.logprobs(sequences), there.logprobs(sequences), strict=True):
        assert left == pytest.approx(right, abs=1e-4)
    batches = pack(sequences, max_tokens=100, row_tokens=64)
    ours, theirs = here.step(batches), there.step(batches)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_gives_same_updates_as_sdpa():
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    metrics = []
    for attention in ("sdpa", "flash_attention_2"):
        one = learner(qwen(head_dim=32), attention=attention, device="cuda", precision="bfloat16")
        metrics.append(one.step(pack(made(12), max_tokens=200, row_tokens=64)))
    assert metrics[1]["loss"] == pytest.approx(metrics[0]["loss"], rel=0.05)
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("capability", "large", "chosen", "expected"),
    [
        ("avx512_bf16", True, "auto", "bfloat16"),
        ("amx_bf16", True, "auto", "bfloat16"),
        ("avx2", True, "auto", "float32"),
        ("avx512_bf16", False, "auto", "float32"),
        ("avx512_bf16", True, "float32", "float32"),
        ("avx2", False, "bfloat16", "bfloat16"),
    ],
)
def test_large_model_uses_bfloat16_if_the_processor_is_faster_with_it(
    monkeypatch, capability, large, chosen, expected
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    if large:
        monkeypatch.setattr("agentrl_train.models.loading.LARGE_MODEL", 1)
    one = learner(precision=chosen)
    assert one.settings.precision == expected
    ours = learner(precision=expected).step(pack(made()))
    assert one.step(pack(made()))["loss"] == ours["loss"]


def test_bfloat16_gives_nearly_the_log_probabilities_of_float32():
    exact, rounded = (learner(precision=name).logprobs(made()) for name in ("float32", "bfloat16"))
    differences = np.concatenate([np.abs(a - b) for a, b in zip(exact, rounded, strict=True)])
    assert 0 < differences.mean() < 0.1


class Largest(TorchDispatchMode):
    """Records the number of entries in the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return made


def test_full_logits_are_never_materialized(monkeypatch: pytest.MonkeyPatch):
    """With the smallest chunks of logits, tensors of the model's body are the largest."""
    vocabulary, sequences = 5000, made(12)
    sampled = int(sum(one.loss_mask.sum() for one in sequences))
    largest = {}
    for max_logits in (10 * vocabulary, 10**9):
        monkeypatch.setattr(Scorer, "max_logits", max_logits)
        one = learner(qwen(vocab_size=vocabulary), entropy_coefficient=0.01)
        with Largest() as seen:
            one.step(pack(sequences, max_tokens=10**6))
        largest[max_logits] = seen.entries
    embedding = one.model.get_input_embeddings().weight.numel()
    assert largest[10**9] == sampled * vocabulary
    assert largest[10 * vocabulary] == embedding < sampled * vocabulary


def test_offloaded_optimizer_gives_same_updates(tmp_path):
    options = {"weight_decay": 0.1, "warmup_steps": 2}
    here, there = learner(**options), learner(offload_optimizer=True, **options)
    for seed in range(4):
        ours, theirs = (one.step(pack(made(seed=seed))) for one in (here, there))
        assert theirs["loss"] == ours["loss"]
    there.snapshot().write(tmp_path)
    resumed = learner(moved(qwen()), offload_optimizer=True, **options)
    resumed.load(tmp_path)
    for one in (here, there, resumed):
        one.step(pack(made(seed=9)))
    for name, value in here.weights().items():
        assert torch.equal(there.weights()[name], value)
        assert torch.equal(resumed.weights()[name], value)
