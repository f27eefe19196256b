"""SPEAR: the replay buffer with its schedule and loss, and Clip-Cov."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.advantage import advantages, shaped_rewards
from agentrl_train.batch import pack, sequences, token_weights, without_high_covariance
from agentrl_train.config import AlgorithmSection, ReplayTable
from agentrl_train.loss import Tokens, policy_loss
from agentrl_train.reward.scoring import cosine_rise
from agentrl_train.training.replay import Kept, Replay, join, read_replay
from agentrl_train.training.step_trainer import StepTrainer
from agentrl_train.types import Step, TrajectoryGroup
from agentrl_train.weights import Drift, DriftCheck
from tests.train.learner.test_learner import learner, made
from tests.train.test_advantage import group
from tests.train.test_algorithm import plain_config, refusal

PLAIN = AlgorithmSection(scale="none", normalization="none")


def kept(earned: float, *, step: int = 0, number: int = 0) -> Kept:
    return Kept(group=replace(group([earned]), group_id=number), earned=earned, step=step)


def numbers(replay: Replay) -> list[int]:
    return [one.group.group_id for one in replay.episodes]


def draw(replay: Replay, *, step: int = 1, count: int = 99, max_age: int = 10, seed: int = 0):
    found, rest = replay.draw(step=step, count=count, max_age=max_age, quantile=0.5, seed=(seed,))
    return {one.group_id: value for one, value in found}, rest


def test_schedules_have_the_published_values() -> None:
    assert [cosine_rise(step, 200) for step in (0, 100, 200, 999)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert [1.0 - cosine_rise(step, 200) for step in (0, 100, 200)] == pytest.approx([1.0, 0.5, 0.0])
    assert cosine_rise(0, 0) == 1.0


def test_advantage_is_recomputed_and_the_episode_leaves_once_the_policy_is_better() -> None:
    buffer = Replay(episodes=(kept(1.0),), history={"a": (0.1, 0.2, 0.5, 0.9)})
    assert draw(buffer)[0] == {0: pytest.approx(0.65)}
    better = buffer.with_returns([group([1.2, 1.4])], [np.array([1.2, 1.4])], length=4)
    assert better.history == {"a": (0.2, 0.5, 0.9, pytest.approx(1.3))}
    found, _ = draw(better)
    assert found[0] == pytest.approx(0.3)
    best = replace(better, history={"a": (1.1, 1.2, 1.3, 1.4)})
    assert draw(best) == ({}, replace(best, episodes=()))


def test_tasks_have_their_own_histories() -> None:
    groups = [group([0.0, 1.0]), group([100.0, 300.0], task="b")]
    returns = [np.array([0.0, 1.0]), np.array([100.0, 300.0])]
    buffer = Replay().with_returns(groups, returns, length=10)
    assert buffer.history == {"a": (0.5,), "b": (200.0,)}
    values = advantages(groups, normalization="none")
    buffer = buffer.with_episodes(groups, returns, values, step=1, size=10)
    assert [(one.group.task, one.earned) for one in buffer.episodes] == [("a", 1.0), ("b", 300.0)]
    assert buffer.baselines() == {"a": 0.5, "b": 200.0}


def test_episodes_of_positive_advantage_join_and_the_oldest_leave() -> None:
    groups = [replace(group([0.0, 1.0, 1.0]), group_id=1), replace(group([2.0, 2.0]), group_id=2)]
    returns = [shaped_rewards(one).returns for one in groups]
    values = advantages(groups, normalization="none")
    buffer = Replay(episodes=(kept(1.0, number=7), kept(1.0, number=8)))
    assert numbers(buffer.with_episodes(groups, returns, values, step=1, size=3)) == [8, 1, 1]
    left_out = [[None] * 3, [None] * 2]
    assert buffer.with_episodes(groups, returns, left_out, step=1, size=3) == buffer


def test_old_episodes_leave_untrained() -> None:
    buffer = Replay(
        episodes=(kept(1.0, step=1, number=1), kept(1.0, step=5, number=5)), history={"a": (0.0,)}
    )
    found, rest = draw(buffer, step=12)
    assert (found, rest.episodes) == ({5: 1.0}, ())
    found, rest = draw(buffer, step=12, count=0)
    assert (found, numbers(rest)) == ({}, [5])


@given(st.lists(st.floats(-2, 2), max_size=20), st.integers(0, 8), st.integers(0, 3))
def test_draws_are_seeded_bounded_and_take_each_episode_once(
    earned: list[float], count: int, seed: int
) -> None:
    buffer = Replay(
        episodes=tuple(kept(value, number=i) for i, value in enumerate(earned)), history={"a": (-1.0, 1.0)}
    )
    found, rest = draw(buffer, count=count, seed=seed)
    good = {i for i, value in enumerate(earned) if value >= 0.0}
    assert len(found) == min(count, len(good))
    assert found.keys() | set(numbers(rest)) == good
    assert not found.keys() & set(numbers(rest))
    assert all(found[i] == earned[i] for i in found)
    assert draw(buffer, count=count, seed=seed) == (found, rest)


def test_buffer_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    buffer = Replay(episodes=(kept(0.1 + 0.2, step=3, number=9),), history={"a": (1 / 3, -2.0), "b": (0.0,)})
    buffer.write(tmp_path)
    found = read_replay(tmp_path)
    assert (found.history, numbers(found)) == (buffer.history, [9])
    (one,) = found.episodes
    assert (one.earned, one.step) == (0.1 + 0.2, 3)
    before = sequences([kept(1.0).group], [[1.0]])[0]
    (after,) = sequences([one.group], [[1.0]])
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()
    Replay().write(tmp_path / "none")
    assert read_replay(tmp_path / "none") == Replay()


def gradient(batches) -> torch.Tensor:
    """Return the gradient of one learner update."""
    own, seen = learner(), []
    parameter = own.model.get_input_embeddings().weight
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    own.step(batches)
    return seen[-1]


@pytest.mark.parametrize("max_tokens", [32, 4096])
def test_joined_loss_is_the_loss_plus_the_weighted_loss_of_the_replay(max_tokens: int) -> None:
    options = {"aggregation": "constant", "constant_tokens": 20, "max_tokens": max_tokens}
    base, again = pack(made(seed=0), **options), pack(made(5, seed=1), **options)
    (both,) = join(base, again, weight=0.25)
    assert both.num_sequences == 14
    found = gradient([both])
    expected = gradient(base) + 0.25 * gradient(again)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert len(join(base, [], weight=1.0)) == len(join([], again, weight=1.0)) == 1


class NoEngine:
    """A stand-in for an engine that receives weights."""

    drift = Drift()

    def publish(self, state, *, policy_version: int) -> None:
        pass


def step_groups(step: int) -> list[TrajectoryGroup]:
    return [replace(group([0.0, 1.0, 1.0]), group_id=2 * step + i, admitted_version=step) for i in range(2)]


def trained(folder: Path, *, steps: range = range(3), buffer: Replay | None = None, **section):
    """Train some steps. Return the trainer and the metrics."""
    trainer = StepTrainer(
        one := learner(),
        NoEngine(),
        algorithm=PLAIN.model_copy(update={"replay": ReplayTable(**section)}),
        max_context=64,
        bad_batches=folder,
        check=DriftCheck(one.logprobs, inherited=range(100)),
    )
    trainer.replay = buffer or Replay()
    return trainer, [trainer.step(Step(groups=step_groups(step), trained_version=step)) for step in steps]


def same_weights(one: StepTrainer, other: StepTrainer) -> bool:
    theirs = other.learner.weights()
    return all(torch.equal(value, theirs[name]) for name, value in one.learner.weights().items())


def test_weight_of_0_is_bit_identical_to_the_base_algorithm(tmp_path: Path) -> None:
    plain, metrics = trained(tmp_path)
    assert "replay_size" not in metrics[0]
    first, _ = trained(tmp_path, steps=range(1))
    beginning, _ = trained(tmp_path, steps=range(1), weight=1.0)
    assert same_weights(first, beginning)
    assert not same_weights(first, plain)


def test_episodes_are_replayed_from_the_second_step_on(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path)
    trainer, metrics = trained(tmp_path, weight=1.0, warmup_steps=2, episodes=3)
    assert [one["replay_weight"] for one in metrics] == pytest.approx([0.0, 0.5, 1.0])
    assert [one["replayed_sequences"] for one in metrics] == [0, 3, 3]
    assert [one["replay_size"] for one in metrics] == [4, 5, 6]
    assert [one["sequences"] for one in metrics] == [6, 9, 9]
    assert not same_weights(trainer, plain)


def test_resumed_buffer_draws_the_same_episodes(tmp_path: Path) -> None:
    section = {"weight": 1.0, "warmup_steps": 0, "episodes": 2}
    whole, _ = trained(tmp_path, **section)
    half, _ = trained(tmp_path, steps=range(2), **section)
    half.replay.write(tmp_path)
    resumed, _ = trained(tmp_path, steps=range(2, 3), buffer=read_replay(tmp_path), **section)
    assert numbers(resumed.replay) == numbers(whole.replay)


@given(st.integers(0, 50), st.floats(0.01, 1.0))
def test_clip_cov_silences_a_share_of_the_tokens_in_its_range(seed: int, share: float) -> None:
    rows = noisy(seed)
    values, logprobs = sampled(rows)
    covariance = (values - values.mean()) * (logprobs - logprobs.mean())
    inside = (covariance > 0.1) & (covariance < 2.0)
    found = without_high_covariance(rows, share=share, low=0.1, high=2.0, seed=(seed,))
    after, _ = sampled(found)
    silenced = (after != values) & (values != 0)
    assert (after[silenced] == 0).all()
    assert not (silenced & ~inside).any()
    assert silenced.sum() == min(inside.sum(), max(1, int(share * len(values))))
    again = without_high_covariance(rows, share=share, low=0.1, high=2.0, seed=(seed,))
    assert all(np.array_equal(a.advantages, b.advantages) for a, b in zip(found, again, strict=True))


def test_clip_cov_changes_neither_weights_nor_rows() -> None:
    rows = noisy(0)
    found = without_high_covariance(rows, share=1.0, low=0.0, high=100.0, seed=(0,))
    for aggregation in ("token_mean", "sequence_mean"):
        pairs = zip(
            token_weights(rows, aggregation=aggregation),
            token_weights(found, aggregation=aggregation),
            strict=True,
        )
        assert all(np.array_equal(before, after) for before, after in pairs)
    assert without_high_covariance([], share=1.0, low=0.0, high=1.0, seed=(0,)) == []


def test_silenced_token_has_no_gradient_and_the_others_keep_theirs() -> None:
    rows = noisy(3)
    found = without_high_covariance(rows, share=0.2, low=0.05, high=9.0, seed=(0,))
    (values, logprobs), (after, _) = sampled(rows), sampled(found)
    weights = np.concatenate([w[r.loss_mask > 0] for w, r in zip(token_weights(rows), rows, strict=True)])
    start = torch.tensor(logprobs, requires_grad=True)

    def loss(policy: torch.Tensor, advantage: np.ndarray) -> torch.Tensor:
        given = Tokens(
            logprobs=policy,
            behaviour=torch.tensor(logprobs) - 0.05,
            advantages=torch.tensor(advantage),
            weights=torch.tensor(weights).double(),
        )
        return policy_loss(given)[0]

    (before,) = torch.autograd.grad(loss(start, values), start)
    (masked,) = torch.autograd.grad(loss(start, after), start)
    silenced = torch.tensor((after == 0) & (values != 0))
    assert silenced.any()
    assert masked[silenced].abs().max() == 0
    assert torch.equal(masked[~silenced], before[~silenced])
    for i in range(len(start)):  # by finite differences
        up, down = start.detach().clone(), start.detach().clone()
        up[i], down[i] = up[i] + 1e-6, down[i] - 1e-6
        slope = (loss(up, after) - loss(down, after)) / 2e-6
        assert float(slope) == pytest.approx(float(masked[i]), abs=1e-7)


def noisy(seed: int):
    rng = np.random.default_rng(seed)
    rows = made(5, seed=seed)
    return [
        replace(
            one,
            logprobs=(one.loss_mask * -rng.exponential(1.0, len(one))).astype(np.float32),
            advantages=(one.loss_mask * rng.normal()).astype(np.float32),
        )
        for one in rows
    ]


def sampled(rows) -> tuple[np.ndarray, np.ndarray]:
    on = [one.loss_mask > 0 for one in rows]
    values = np.concatenate([one.advantages[at] for one, at in zip(rows, on, strict=True)])
    logprobs = np.concatenate([one.logprobs[at] for one, at in zip(rows, on, strict=True)])
    return values.astype(np.float64), logprobs.astype(np.float64)


def test_preset_sets_replay_clip_cov_and_a_fading_reward() -> None:
    config = plain_config("algorithm.preset=spear")
    assert config.algorithm.replay.weight == 1.0
    assert config.algorithm.clip_cov.share == 0.02
    assert [one.spelled for one in config.reward.functions] == ["agentrl_train.reward:tool_use"]
    assert config.reward.fade_steps == {"tool_use": 100}
    assert "algorithm.clip_cov: low (50) must be below high" in refusal("algorithm.clip_cov.low=50")
    assert config.algorithm.region.dual == 10.0
