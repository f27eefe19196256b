"""Anchors, ratios, regions and corrections of the loss: published values, gradients and invariants."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_train.loss import (
    Tokens,
    band,
    cap,
    clip,
    divergence,
    geometric_ratio,
    importance_weights,
    interpolated,
    kl_penalty,
    old,
    policy_loss,
    sequence_ratio,
    sequence_token_ratio,
    soft,
    token_ratio,
    turn_ratio,
    unbounded,
)

RATIOS = {
    "token": token_ratio,
    "turn": turn_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
REGIONS = {
    "none": unbounded,
    "clip": clip,
    "cap": partial(cap, low=1.0, high=4.0),
    "soft": soft,
    "divergence": partial(divergence, low=0.2, high=0.2),
    "band": partial(band, low=0.5, high=1.0),
}
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 2])
TURNS = torch.tensor([0, 0, 1, 2, 2, 3])
LENGTHS = torch.tensor([3, 3, 3, 2, 2, 1])


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(logprobs, anchor, advantages=None, weights=None, **others) -> Tokens:
    size = len(logprobs)
    units = {"sequences": torch.zeros(size, dtype=torch.int64), "turns": torch.zeros(size, dtype=torch.int64)}
    return Tokens(
        **units
        | {
            "logprobs": logprobs,
            "behaviour": anchor,
            "advantages": torch.ones(size).double() if advantages is None else advantages,
            "weights": torch.ones(size).double() if weights is None else weights,
        }
        | others
    )


def six(seed: int = 0, *, spread: float = 0.3, by_sequence: bool = True) -> Tokens:
    """Return six tokens of three sequences near their anchor, weighted by sequence."""
    drawn = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(6, generator=drawn, dtype=torch.float64) - 0.2
    moved = spread * torch.randn(6, generator=drawn, dtype=torch.float64)
    advantages = torch.randn(3 if by_sequence else 6, generator=drawn, dtype=torch.float64)
    return tokens(
        logprobs.requires_grad_(),
        logprobs.detach() - moved,
        advantages[SEQUENCES] if by_sequence else advantages,
        1.0 / (3.0 * LENGTHS.double()),
        sequences=SEQUENCES,
        turns=TURNS,
    )


def gradient(given: Tokens, **pieces) -> torch.Tensor:
    loss, _ = policy_loss(given, **pieces)
    (found,) = torch.autograd.grad(loss, given.logprobs)
    return found


def test_gspo_ratio_matches_published_value() -> None:
    ratios = sequence_ratio(tensor([0.2, -0.1, 0.3, 0.0]), tokens(torch.zeros(4), torch.zeros(4)))
    assert ratios.tolist() == pytest.approx([1.105171] * 4, abs=1e-6)


def test_ratio_by_turn_is_the_mean_of_its_turn() -> None:
    given = tokens(torch.zeros(4), torch.zeros(4), turns=torch.tensor([0, 0, 1, 1]))
    assert turn_ratio(tensor([0.2, 0.4, 0.0, -0.2]), given).log().tolist() == pytest.approx(
        [0.3, 0.3, -0.1, -0.1]
    )


def test_ratio_by_sequence_ignores_tokens_without_weight() -> None:
    given = tokens(tensor([0.2, 0.4, float("nan")]), torch.zeros(3).double(), weights=tensor([1, 1, 0]))
    loss, _ = policy_loss(given, ratio=sequence_ratio, region=unbounded)
    assert loss.item() == pytest.approx(-2 * math.exp(0.3))


def test_gmpo_clips_each_token_only_if_that_lowers_the_objective() -> None:
    low, high = 1 - math.exp(-0.4), math.exp(0.4) - 1
    moved = tensor([1.0, -1.0, 0.2])
    for sign, expected in ((1.0, (0.4 - 1.0 + 0.2) / 3), (-1.0, (1.0 - 0.4 + 0.2) / 3)):
        given = tokens(moved, torch.zeros(3).double(), sign * torch.ones(3).double())
        ratios = geometric_ratio(moved, given, low=low, high=high)
        assert ratios.log().tolist() == pytest.approx([expected] * 3)


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    logprobs = tensor([10.0, 1.5, 1.0, 0.01]).log().requires_grad_()
    found = gradient(tokens(logprobs, torch.zeros(4).double()), region=partial(cap, low=1.0, high=0.5))
    assert found.tolist() == pytest.approx([-1.5, -1.5, -1.0, -0.01])


def test_soft_gate_falls_on_both_sides_and_faster_for_negative_advantages() -> None:
    logprobs = tensor([0.2, 1.0, 3.0]).log().requires_grad_()
    up = gradient(tokens(logprobs, torch.zeros(3).double()), region=soft) / logprobs.detach().exp()
    down = gradient(tokens(logprobs, torch.zeros(3).double(), -torch.ones(3).double()), region=soft)
    down = down / logprobs.detach().exp()
    assert up[1].item() == pytest.approx(-1.0)
    assert down[1].item() == pytest.approx(1.0)
    assert max(abs(up[0]), abs(up[2])) < 1.0
    assert abs(down[2]) < abs(up[2])


def test_divergence_masks_tokens_that_moved_too_far_in_the_direction_of_their_advantage() -> None:
    now, before = tensor([0.9, 0.9, 0.02, 0.3, 0.3]), tensor([0.6, 0.6, 0.001, 0.6, 0.6])
    advantages = tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    found = gradient(
        tokens(now.log().requires_grad_(), before.log(), advantages), region=REGIONS["divergence"]
    )
    assert (found == 0).tolist() == [True, False, False, True, False]


def test_band_masks_tokens_whatever_their_advantage() -> None:
    logprobs = tensor([0.4, 0.6, 1.9, 2.1]).log().requires_grad_()
    for sign in (1.0, -1.0):
        found = gradient(
            tokens(logprobs, torch.zeros(4).double(), sign * torch.ones(4).double()), region=REGIONS["band"]
        )
        assert (found == 0).tolist() == [True, False, False, True]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("region", REGIONS)
def test_gradient_at_the_anchor_is_the_plain_policy_gradient(ratio: str, region: str) -> None:
    given = six(spread=0.0)
    found = gradient(given, ratio=RATIOS[ratio], region=REGIONS[region])
    assert torch.allclose(found, -given.advantages * given.weights)


def test_gradient_of_gmpo_at_the_anchor_is_the_plain_policy_gradient() -> None:
    given = six(spread=0.0)
    found = gradient(given, ratio=partial(geometric_ratio, low=0.3, high=0.5), region=unbounded)
    assert torch.allclose(found, -given.advantages * given.weights)


@pytest.mark.parametrize("ratio", ["token", "turn", "sequence", "geometric"])
@pytest.mark.parametrize("region", ["none", "clip", "soft", "divergence", "band"])
@pytest.mark.parametrize("corrected", [False, True])
def test_gradients_match_finite_differences(ratio: str, region: str, corrected: bool) -> None:
    given, weigh = six(3), partial(importance_weights, cap=1.2)
    chosen = (RATIOS | {"geometric": partial(geometric_ratio, low=0.3, high=0.5)})[ratio]

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        moved = tokens(
            logprobs,
            given.behaviour,
            given.advantages,
            given.weights,
            sequences=SEQUENCES,
            turns=TURNS,
            old=given.behaviour + 0.1,
        )
        pieces = {"anchor": old, "correction": weigh} if corrected else {}
        return policy_loss(moved, ratio=chosen, region=REGIONS[region], **pieces)[0]

    assert torch.autograd.gradcheck(total, (given.logprobs,))


def test_gradient_of_capped_and_gspo_token_losses_matches_a_frozen_ratio() -> None:
    given = six(5, by_sequence=False)
    ratios = (given.logprobs - given.behaviour).detach()
    frozen = ratios.exp().clamp(0.0, 5.0)
    assert torch.allclose(gradient(given, region=REGIONS["cap"]), -frozen * given.advantages * given.weights)
    mean = torch.zeros(3).double().index_add(0, SEQUENCES, ratios) / torch.tensor([3.0, 2.0, 1.0]).double()
    expected = -mean[SEQUENCES].exp() * given.advantages * given.weights
    found = gradient(given, ratio=sequence_token_ratio, region=unbounded)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("age", "proximal", "ratio"),
    [(0, -1.0, math.exp(-0.5)), (1, -1.0, math.exp(-0.5)), (2, -1.25, 0.778801), (4, -1.375, 0.882497)],
)
def test_a3po_matches_published_values(age: int, proximal: float, ratio: float) -> None:
    given = tokens(tensor([-1.5]).requires_grad_(), tensor([-1.0]), ages=torch.tensor([age]))
    anchor = interpolated(given)
    assert anchor.item() == pytest.approx(proximal)
    assert not anchor.requires_grad
    own = (given.logprobs - anchor).exp()
    weight = importance_weights(anchor, given, cap=None)
    assert own.item() == pytest.approx(ratio, abs=1e-6)
    assert (own * weight).item() == pytest.approx(math.exp(-0.5))


@given(st.floats(-5, 0), st.floats(-5, 0), st.integers(0, 9))
def test_interpolated_anchor_lies_between_sampler_and_policy(sampler: float, policy: float, age: int) -> None:
    given = tokens(tensor([policy]), tensor([sampler]), ages=torch.tensor([age]))
    assert min(sampler, policy) - 1e-9 <= interpolated(given).item() <= max(sampler, policy) + 1e-9


def test_a3po_of_fresh_tokens_is_ppo_against_the_sampler() -> None:
    given = six(7)
    fresh = tokens(
        given.logprobs,
        given.behaviour,
        given.advantages,
        given.weights,
        ages=torch.tensor([0, 1, 1, 0, 1, 0]),
    )
    found = gradient(fresh, anchor=interpolated, correction=partial(importance_weights, cap=None))
    assert torch.allclose(found, gradient(given))


def test_corrections_match_published_values() -> None:
    ratios = tensor([0.1, 0.6, 1.0, 1.9, 3.0])
    given = tokens(torch.zeros(5).double(), torch.zeros(5).double())
    weigh = partial(importance_weights, ratios.log(), given)
    assert weigh(cap=2.0).tolist() == pytest.approx([0.1, 0.6, 1.0, 1.9, 2.0])
    assert weigh(cap=2.0, floor=0.5).tolist() == pytest.approx([0.0, 0.6, 1.0, 1.9, 0.0])
    assert weigh(cap=None).tolist() == pytest.approx(ratios.tolist())
    mean = math.exp(ratios.log().mean())
    assert weigh(cap=None, level="sequence").tolist() == pytest.approx([mean] * 5)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_importance_sampling_is_unbiased(p: float) -> None:
    """The reward equals the action, and both outcomes of a sampler at 0.3 are enumerated."""
    logit = tensor([math.log(p / (1 - p))]).requires_grad_()
    chances = torch.cat([logit.sigmoid(), 1 - logit.sigmoid()])
    sampler = tensor([0.3, 0.7])
    for pieces in (
        {"region": unbounded},
        {"region": unbounded, "anchor": old, "correction": partial(importance_weights, cap=None)},
    ):
        given = tokens(chances.log(), sampler.log(), tensor([1.0, 0.0]), sampler, old=chances.detach().log())
        loss, _ = policy_loss(given, **pieces)
        (found,) = torch.autograd.grad(loss, logit, retain_graph=True)
        assert found.item() == pytest.approx(-p * (1 - p))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from(sorted(RATIOS)), st.sampled_from(sorted(REGIONS)))
def test_loss_is_the_sum_over_whole_sequences(seed: int, ratio: str, region: str) -> None:
    given = six(seed)
    pieces = {"ratio": RATIOS[ratio], "region": REGIONS[region]}
    parts = []
    for at in (slice(0, 3), slice(3, 6)):
        fields = {name: value[at] for name in Tokens.__slots__ if (value := getattr(given, name)) is not None}
        first = {"sequences": fields["sequences"] - SEQUENCES[at][0], "turns": fields["turns"] - TURNS[at][0]}
        parts.append(policy_loss(Tokens(**fields | first), **pieces)[0].item())
    assert sum(parts) == pytest.approx(policy_loss(given, **pieces)[0].item())


def test_k2_estimate_is_half_the_squared_log_ratio() -> None:
    found = kl_penalty(tensor([-1.0]), tensor([-1.6]), tensor([1.0]), estimator="k2")
    assert found.item() == pytest.approx(0.18)


@pytest.mark.parametrize("pieces", [{"anchor": old}, {"anchor": interpolated}, {"ratio": sequence_ratio}])
def test_missing_inputs_are_named(pieces: dict) -> None:
    bare = Tokens(
        logprobs=torch.zeros(1), behaviour=torch.zeros(1), advantages=torch.ones(1), weights=torch.ones(1)
    )
    with pytest.raises(ValueError, match="needs"):
        policy_loss(bare, **pieces)
