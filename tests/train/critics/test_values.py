"""A critic: values of packed rows, gradients, updates, checkpoints, and training steps."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from agentrl_train.batch import pack, sequences
from agentrl_train.config import AlgorithmSection, TrainSection
from agentrl_train.config.credit import GaeToken
from agentrl_train.critics.networks import ValueCritic
from agentrl_train.critics.trainer import CriticTrainer, critic_trainer
from agentrl_train.errors import CheckpointError
from agentrl_train.loss import Tokens, value_loss
from agentrl_train.types import EpisodeEnd, TokenSequence
from tests.tiny_models import learner_arguments
from tests.train.learner.test_learner import llama, made, qwen
from tests.train.test_credit import episode, group

GAE = {"credit": "gae_token", "baseline": "value", "scale": "none", "normalization": "none"}


def critic(model=None, *, head: bool = True, clip: float | None = None, **options) -> ValueCritic:
    """Return a critic with a random head instead of zeros."""
    options = {"learning_rate": 1e-2} | options
    one = ValueCritic(
        model or qwen(), objective=partial(value_loss, clip=clip), **learner_arguments(**options)
    )
    if head:
        with torch.no_grad():
            torch.nn.init.normal_(one.model.get_output_embeddings().weight)
    return one


def targets(count: int = 9, seed: int = 0) -> list[TokenSequence]:
    """Return rows of a critic: values before the update, and returns."""
    rng = np.random.default_rng(seed)
    draw = lambda one: one.loss_mask * rng.normal(size=len(one)).astype(np.float32)  # noqa: E731
    return [replace(one, logprobs=draw(one), advantages=draw(one)) for one in made(count, seed)]


def gradients(one: ValueCritic, rows: list[TokenSequence], **packing) -> list[torch.Tensor]:
    caught: list[torch.Tensor] = []
    parameters = list(one.model.parameters())
    hook = one._optimizer.register_step_pre_hook(lambda *_: caught.extend(p.grad.clone() for p in parameters))
    one.step(pack(rows, aggregation="token_mean", **packing))
    hook.remove()
    return caught


@pytest.mark.parametrize("make", [qwen, llama])
def test_values_belong_to_the_states_before_the_tokens(make) -> None:
    model = make()
    one, body = critic(model), copy.deepcopy(model.base_model)
    head, rows = one.model.get_output_embeddings(), made()
    for row, found in zip(rows, one.values(rows), strict=True):
        with torch.no_grad():
            hidden = body(torch.from_numpy(row.token_ids)[None])[0][0]
            expected = np.append(0.0, head(hidden)[:-1, 0].numpy()) * row.loss_mask
        assert found == pytest.approx(expected, abs=1e-4)


def test_values_start_at_zero_and_the_policy_is_unchanged() -> None:
    policy = qwen()
    one = critic(copy.deepcopy(policy), head=False)
    assert not any(found.any() for found in one.values(made()))
    one.step(pack(targets(), aggregation="token_mean"))
    assert any(found.any() for found in one.values(made()))
    for name, value in qwen().named_parameters():
        assert torch.equal(value, policy.get_parameter(name))


def test_value_loss_is_half_the_squared_error_clipped_around_the_old_values() -> None:
    given = partial(Tokens, weights=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    values = torch.tensor([1.0, 0.9, 5.0], dtype=torch.float64)
    before = torch.tensor([0.0, 0.8, 0.0], dtype=torch.float64)
    returns = torch.tensor([2.0, 0.0, 9.0], dtype=torch.float64)
    tokens = given(logprobs=values, behaviour=before, advantages=returns)
    assert float(value_loss(tokens, clip=None)[0]) == pytest.approx((0.5 + 0.405) / 2)
    bounded, stats = value_loss(tokens, clip=0.2)
    assert float(bounded) == pytest.approx((1.8**2 / 2 + 0.405) / 2)
    assert int(stats["clip_fraction"]) == 1


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_gradient_of_values_matches_finite_differences(clip: float | None) -> None:
    torch.manual_seed(0)
    values, before, returns = torch.randn(3, 12, dtype=torch.float64)
    weights = torch.rand(12, dtype=torch.float64)

    def total(values: torch.Tensor) -> torch.Tensor:
        tokens = Tokens(logprobs=values, behaviour=before, advantages=returns, weights=weights)
        return value_loss(tokens, clip=clip)[0]

    assert torch.autograd.gradcheck(total, (values.requires_grad_(),))


def test_gradient_of_a_parameter_matches_a_finite_difference() -> None:
    one, rows, step = critic(max_grad_norm=1e9, learning_rate=1e-12), targets(4), 1e-3
    bias = one.model.get_output_embeddings().bias
    weights = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    gradient = dict(zip(weights, gradients(one, rows), strict=True))["lm_head.bias"]
    found = []
    for sign in (1, -1):
        for name, p in one.model.named_parameters():
            p.data.copy_(weights[name])
        bias.data += sign * step
        errors = [
            ((value - row.advantages)[row.loss_mask > 0] ** 2) / 2
            for value, row in zip(one.values(rows), rows, strict=True)
        ]
        found.append(float(np.concatenate(errors).astype(np.float64).mean()))
    assert float(gradient) == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-2)


@pytest.mark.parametrize(
    "packing",
    [{"max_tokens": 30}, {"max_tokens": 64, "row_tokens": 60}, {"packed": False, "max_tokens": 50}],
)
def test_gradient_of_values_does_not_depend_on_micro_batches(packing) -> None:
    rows = targets()
    whole = gradients(critic(learning_rate=1e-12), rows, max_tokens=10**6)
    split = gradients(critic(learning_rate=1e-12), rows, **packing)
    for left, right in zip(whole, split, strict=True):
        assert torch.allclose(left, right, rtol=1e-3, atol=1e-5)


def test_observed_tokens_do_not_change_the_update_of_values() -> None:
    rows = targets()
    noisy = [replace(one, advantages=one.advantages + 7 * (1 - one.loss_mask)) for one in rows]
    one, other = critic(), critic()
    one.step(pack(rows, aggregation="token_mean"))
    other.step(pack(noisy, aggregation="token_mean"))
    for name, value in one.model.named_parameters():
        assert torch.equal(value, other.model.get_parameter(name))


def test_critic_learns_the_returns_of_states() -> None:
    rows = [replace(one, advantages=one.loss_mask * (one.token_ids % 3)) for one in made()]
    rows = [replace(one, advantages=one.advantages.astype(np.float32)) for one in rows]
    one = critic(head=False)
    losses = [one.step(pack(rows, aggregation="token_mean"))["loss"] for _ in range(60)]
    assert losses[-1] < losses[0] / 5


def test_resumed_critic_continues_bit_for_bit(tmp_path) -> None:
    steps = [pack(targets(6, seed), aggregation="token_mean", num_minibatches=2) for seed in range(4)]
    straight = critic(head=False, clip=0.2)
    for batches in steps[:2]:
        straight.step(batches)
    straight.snapshot().write(tmp_path)
    losses = [straight.step(batches)["loss"] for batches in steps[2:]]
    resumed = critic(head=False, clip=0.2)
    resumed.load(tmp_path)
    assert resumed.num_updates == 4
    assert [resumed.step(batches)["loss"] for batches in steps[2:]] == losses
    for name, value in resumed.model.named_parameters():
        assert torch.equal(value, straight.model.get_parameter(name))


def test_checkpoint_without_a_critic_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="start a new run"):
        critic().load(tmp_path)


def trainer(one: ValueCritic, **settings) -> CriticTrainer:
    return critic_trainer(
        one,
        settings=GaeToken(warmup_steps=2),
        algorithm=AlgorithmSection(**GAE | settings),
        train=TrainSection(micro_batch_tokens=64),
        max_context=512,
        encode=str.encode,
    )


def test_rows_have_the_advantages_of_their_tokens() -> None:
    groups = [group(episode([0, 1.0]), episode([0.5])), group(episode([2.0]), number=1)]
    one = critic(qwen())
    rows = trainer(one).rows(groups)
    plain = sequences(groups, [[0.0, 0.0], [0.0]])
    returns = [[1, 1, 1, 1], [0.5, 0.5], [2, 2]]
    for row, value, other, expected in zip(rows, one.values(plain), plain, returns, strict=True):
        sampled = row.loss_mask > 0
        assert row.token_ids.tolist() == other.token_ids.tolist()
        assert row.logprobs.tolist() == other.logprobs.tolist()
        assert row.advantages[sampled] == pytest.approx(expected - value[sampled], abs=1e-5)
        assert not row.advantages[~sampled].any()


def test_empty_or_omitted_trajectories_have_no_rows() -> None:
    cut = episode([1.0], end=EpisodeEnd.TRUNCATED_TURNS)
    one = trainer(critic(), leave_out=["truncated"])
    rows = one.rows([group(episode([1.0], tokens=0), cut, episode([1.0, 0.0]))])
    assert [int(row.loss_mask.sum()) for row in rows] == [4]
    assert one.learn(step=1)["critic_tokens"] == 6.0  # the critic also learns from the truncated episode


def test_metrics_use_the_values_before_the_update() -> None:
    groups = [group(episode([0, 1.0]), episode([0.5]), episode([2.0, 0.0, 0.0]))]
    one = trainer(critic(head=False))
    one.rows(groups)
    first = one.learn(step=1)
    assert first["explained_variance"] == pytest.approx(0.0)
    assert first["value_mean"] == 0.0
    assert first["critic_loss"] > 0
    for step in range(2, 40):
        one.rows(groups)
        last = one.learn(step=step)
    assert last["explained_variance"] > 0.2
    assert last["critic_loss"] < first["critic_loss"]


def test_only_the_critic_learns_in_the_first_steps() -> None:
    assert [trainer(critic()).alone(step) for step in (1, 2, 3)] == [True, True, False]
