from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.loss import (
    Tokens,
    clip,
    entropy_bonus,
    importance_weights,
    kl_penalty,
    policy_loss,
    sft_loss,
)

finite = st.floats(-3, 3)
token_lists = st.lists(st.tuples(finite, finite, finite), min_size=1, max_size=12)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(logprobs, behaviour, advantages, weights, **others) -> Tokens:
    return Tokens(logprobs=logprobs, behaviour=behaviour, advantages=advantages, weights=weights, **others)


def one_token(ratio: float, advantage: float, **options) -> tuple[float, dict[str, float]]:
    tokens = of(tensor([ratio]).log(), tensor([0.0]), tensor([advantage]), tensor([1.0]))
    loss, stats = policy_loss(tokens, region=partial(clip, **options))
    return float(loss), {name: float(value) for name, value in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "expected", "clipped"),
    [
        (1.0, 2.0, {}, -2.0, 0),
        (1.2, 1.0, {}, -1.2, 0),
        (1.5, 1.0, {}, -1.28, 1),
        (0.5, 1.0, {}, -0.5, 0),
        (0.5, -1.0, {}, 0.8, 1),
        (2.0, -1.0, {}, 2.0, 0),
        (10.0, -1.0, {}, 3.0, 1),
        (10.0, -1.0, {"dual": None}, 10.0, 0),
        (1.5, 1.0, {"high": 0.2}, -1.2, 1),
        (0.5, -1.0, {"low": 0.3}, 0.7, 1),
    ],
)
def test_clipping_matches_published_values(ratio, advantage, options, expected, clipped):
    loss, stats = one_token(ratio, advantage, **options)
    assert loss == pytest.approx(expected)
    assert stats["clip_fraction"] == clipped


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0), (10.0, -1.0)])
def test_clipped_token_has_no_gradient(ratio, advantage):
    logprobs = tensor([ratio]).log().requires_grad_()
    policy_loss(of(logprobs, tensor([0.0]), tensor([advantage]), tensor([1.0])))[0].backward()
    assert logprobs.grad.item() == 0.0


@given(token_lists)
def test_gradient_of_unchanged_policy_is_plain_policy_gradient(tokens):
    logprobs, advantages, weights = (tensor(column) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, stats = policy_loss(of(logprobs, logprobs.detach().clone(), advantages, weights))
    loss.backward()
    assert torch.allclose(logprobs.grad, -advantages * weights)
    assert stats["clip_fraction"] == 0
    assert stats["kl"] == 0


def test_gradients_match_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([0, 1, 2, 3, 4, 0])
    behaviour = logits.detach().log_softmax(-1)[range(6), chosen] + 0.05 * torch.randn(6).double()
    advantages, weights = torch.randn(6).double(), torch.rand(6).double()
    reference = torch.randn(6).double() - 2

    def total(logits: torch.Tensor) -> torch.Tensor:
        scores = logits.log_softmax(-1)
        logprobs = scores[range(6), chosen]
        loss, _ = policy_loss(of(logprobs, behaviour, advantages, weights))
        penalty = kl_penalty(logprobs, reference, weights)
        return loss + 0.3 * penalty - 0.1 * entropy_bonus(-(scores.exp() * scores).sum(-1), weights)

    assert torch.autograd.gradcheck(total, (logits,))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_tokens_without_weight_have_no_loss_and_no_gradient(poison):
    logprobs = tensor([-1.0, -2.0]).requires_grad_()
    behaviour, weights = tensor([-1.0, poison]), tensor([0.5, 0.0])
    loss, stats = policy_loss(of(logprobs, behaviour, tensor([1.0, 1.0]), weights))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert logprobs.grad.tolist() == [-0.5, 0.0]
    assert stats["ratio"] == 1.0
    assert stats["kl"] == 0.0


def test_loss_of_no_tokens_is_zero():
    empty = torch.zeros(0, requires_grad=True)
    loss, stats = policy_loss(of(empty, torch.zeros(0), torch.zeros(0), torch.zeros(0)))
    loss.backward()
    assert loss.item() == 0.0
    assert {float(value) for value in stats.values()} == {0.0}


def test_extreme_ratio_does_not_overflow():
    loss, stats = one_token(float("1e300"), -1.0)
    assert loss == pytest.approx(3.0)
    assert stats["ratio_max"] < 1e9


@given(token_lists)
def test_loss_is_sum_over_any_split(tokens):
    columns = [tensor(column) for column in zip(*tokens, strict=True)]
    logprobs, behaviour, advantages = columns
    weights = torch.full_like(logprobs, 1 / len(tokens))
    whole, _ = policy_loss(of(logprobs, behaviour, advantages, weights))
    half = len(tokens) // 2
    parts = [
        policy_loss(of(*(column[at] for column in (*columns, weights))))[0]
        for at in (slice(half), slice(half, None))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole))


def test_kl_estimate_is_unbiased():
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    assert torch.isclose(kl_penalty(policy, reference, policy.exp()), exact)


@given(token_lists)
def test_kl_estimate_is_never_negative(tokens):
    policy, reference, _ = (tensor(column) for column in zip(*tokens, strict=True))
    assert kl_penalty(policy, reference, torch.ones_like(policy)) >= 0


def test_importance_weights_are_truncated_or_masked():
    ratio = tensor([0.1, 0.6, 1.0, 1.9, 3.0])
    tokens = of(ratio.log(), torch.zeros(5), torch.ones(5), torch.ones(5))
    truncated = importance_weights(ratio.log(), tokens, cap=2.0)
    masked = importance_weights(ratio.log(), tokens, cap=2.0, floor=0.5)
    assert truncated.tolist() == pytest.approx([0.1, 0.6, 1.0, 1.9, 2.0])
    assert masked.tolist() == pytest.approx([0.0, 0.6, 1.0, 1.9, 0.0])


def test_sft_loss_is_weighted_cross_entropy():
    logprobs = tensor([-1.0, -3.0, -5.0]).requires_grad_()
    weights = tensor([0.5, 0.5, 0.0])
    loss, _ = sft_loss(of(logprobs, torch.zeros(3), torch.zeros(3), weights))
    loss.backward()
    assert loss.item() == 2.0
    assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0]
