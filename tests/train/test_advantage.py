import math
import re
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, TaskSample
from agentrl_train.advantage import (
    Siblings,
    advantages,
    batch_std,
    compared,
    leave_one_out,
    mean,
    none,
    normalized,
    std,
    unscaled,
)
from agentrl_train.algorithm import advantage_function, shaping_function, signal_function
from agentrl_train.batch import Aggregation, sequences, token_weights
from agentrl_train.config import AlgorithmSection, RunConfig, load_config
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn

ROOT = Path(__file__).parents[2]


def trajectory(
    reward: float,
    tokens: int = 2,
    *,
    invalid_calls: int = 0,
    end: EpisodeEnd = EpisodeEnd.TERMINATED,
) -> Trajectory:
    ids = list(range(tokens))
    completion = Completion(
        token_ids=ids, logprobs=[-1.0] * tokens, versions=[0] * tokens, finish_reason="stop"
    )
    turn = Turn(
        prompt_ids=[1],
        completion=completion,
        message=Message.assistant("x"),
        reply=[],
        reward=reward,
        invalid_calls=invalid_calls,
    )
    return Trajectory(
        sample=TaskSample(task="a"),
        opening=[],
        turns=[turn],
        end=end,
        reward=reward,
        success=reward >= 1,
    )


def group(
    rewards: Sequence[float], tokens: Sequence[int] | None = None, *, task: str = "a"
) -> TrajectoryGroup:
    tokens = tokens or [2] * len(rewards)
    members = [trajectory(r, n) for r, n in zip(rewards, tokens, strict=True)]
    return TrajectoryGroup(group_id=0, task=task, trajectories=members, admitted_version=0)


def totals(groups: Sequence[TrajectoryGroup], **options: object) -> list[list[float]]:
    """Return the advantage of each trajectory. All its turns must have the same advantage."""
    found = []
    for per_group in advantages(groups, **options):
        assert all(len(set(turns)) == 1 for turns in per_group if turns is not None)
        found.append([float(turns[0]) for turns in per_group if turns is not None])
    return found


def of(rewards: Sequence[float], **options: object) -> np.ndarray:
    options = {"normalization": "none"} | options
    return np.array(totals([group(rewards)], **options)[0])


reward_lists = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=8)
token_counts = st.integers(1, 40)


@st.composite
def task_groups(draw: st.DrawFn, task: str = "a") -> list[TrajectoryGroup]:
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        rewards = draw(reward_lists)
        tokens = draw(st.lists(token_counts, min_size=len(rewards), max_size=len(rewards)))
        groups.append(group(rewards, tokens, task=task))
    return groups


def rescaled(groups: Sequence[TrajectoryGroup], factor: float, shift: float) -> list:
    return [
        group(
            [factor * one.reward + shift for one in old.trajectories],
            [one.num_sampled_tokens for one in old.trajectories],
            task=old.task,
        )
        for old in groups
    ]


def test_task_normalization_matches_published_values():
    values, counts = [[np.array([1.0]), np.array([-1.0])]], [[np.array([2.0]), np.array([8.0])]]
    (((winner,), (loser,)),) = normalized(values, counts)
    result = [winner, loser]
    assert result == pytest.approx([1.897367, -0.474342], abs=1e-6)
    assert 2 * result[0] + 8 * result[1] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("wins", "expected_loo", "expected_grpo"),
    [(4, (0.571429, -0.571429), (0.935414, -0.935414)), (1, (1, -0.142857), (2.474874, -0.353553))],
)
def test_group_of_eight_matches_published_values(wins, expected_loo, expected_grpo):
    rewards = [1.0] * wins + [0.0] * (8 - wins)
    loo = of(rewards, baseline=leave_one_out, scale=unscaled)
    grpo = of(rewards)
    assert (loo[0], loo[-1]) == pytest.approx(expected_loo, abs=1e-6)
    assert (grpo[0], grpo[-1]) == pytest.approx(expected_grpo, abs=1e-6)


@given(reward_lists)
def test_leave_one_out_is_scaled_mean_baseline(rewards):
    n = len(rewards)
    mean = of(rewards, scale=unscaled)
    assert of(rewards, baseline=leave_one_out, scale=unscaled) == pytest.approx(mean * n / (n - 1))


@given(reward_lists, st.floats(-100, 100))
def test_advantages_are_shift_invariant(rewards, shift):
    moved = of([reward + shift for reward in rewards])
    assert moved == pytest.approx(of(rewards), abs=1e-6)


@given(task_groups(), st.floats(0.01, 1000), st.floats(-100, 100))
def test_task_normalization_is_scale_and_shift_invariant(groups, factor, shift):
    for scale in (std, unscaled):
        before = totals(groups, scale=scale)
        after = totals(rescaled(groups, factor, shift), scale=scale)
        for old, new in zip(before, after, strict=True):
            assert new == pytest.approx(old, abs=1e-5)


@given(task_groups("a"), task_groups("b"))
def test_tasks_are_independent(ours, theirs):
    assert totals([*theirs, *ours])[len(theirs) :] == totals(ours)


@given(task_groups())
def test_task_advantages_have_mean_zero_and_std_one_over_tokens(groups):
    results = totals(groups, scale=unscaled)
    live = [
        (value, one.num_sampled_tokens)
        for old, new in zip(groups, results, strict=True)
        for value, one in zip(new, old.trajectories, strict=True)
        if any(new)
    ]
    if not live:
        return
    tokens = np.repeat([value for value, _ in live], [count for _, count in live])
    number = sum(one.num_sampled_tokens for old in groups for one in old.trajectories)
    assert tokens.mean() == pytest.approx(0.0, abs=1e-9)
    assert (tokens**2).sum() == pytest.approx(number - 1)


@given(task_groups(), st.sampled_from([0.0, 0.1, 1.0]), st.integers(1, 5))
def test_group_without_signal_stays_zero_and_enlarges_the_others(groups, reward, size):
    flat = group([reward] * size, [30] * size)
    *found, added = totals([*groups, flat])
    before = totals(groups)
    number = sum(one.num_sampled_tokens for old in groups for one in old.trajectories)
    factor = math.sqrt((number + 30 * size - 1) / (number - 1))
    assert added == [0.0] * size
    for old, new in zip(before, found, strict=True):
        assert new == pytest.approx([factor * value for value in old])


EASY = [group([1.0] * 4 + [0.0] * 4, [10] * 8, task="easy") for _ in range(8)]
HARD = [group([1.0] + [0.0] * 7, [10] * 8, task="hard"), *[group([0.0] * 8, [10] * 8, task="hard")] * 7]


@pytest.mark.parametrize("scale", [std, unscaled])
def test_task_with_few_informative_groups_has_the_same_weight_as_another(scale):
    found = totals([*EASY, *HARD], scale=scale)
    squares = [10 * float(np.square(part).sum()) for part in (found[:8], found[8:])]
    assert squares == pytest.approx([639.0, 639.0])
    assert found[9:] == [[0.0] * 8] * 7


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_exact_task_normalization_is_the_equation_of_the_paper(shift):
    groups = [*HARD, group([1.0, 0.0], [5, 20], task="hard")]
    groups = rescaled(groups, 1.0, shift)
    plain = totals(groups, normalization="none")
    counts = [one.num_sampled_tokens for old in groups for one in old.trajectories]
    tokens = np.repeat(np.concatenate(plain), counts)
    expected = (np.concatenate(plain) - tokens.mean()) / tokens.std(ddof=1)
    found = np.concatenate(totals(groups, normalization="task_exact"))
    assert found == pytest.approx(expected)
    assert found[8] == pytest.approx(-tokens.mean() / tokens.std(ddof=1))
    assert found[8] != 0.0


def test_group_of_one_has_no_signal_with_group_baseline():
    for baseline in (mean, leave_one_out):
        assert of([3.0], baseline=baseline).tolist() == [0.0]
    assert of([3.0], baseline=none).tolist() == [3.0]


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 1.0000000149],
        [0.1 + 0.2, 0.3],
        [float(np.float32(0.7)), 0.7],
        [250.0, 250.0001],
        [-1.0, -1.000001, -1.0, -1.0],
    ],
)
@pytest.mark.parametrize("scale", [std, unscaled, batch_std])
def test_rounding_of_rewards_is_not_a_signal(rewards, scale):
    assert of(rewards, scale=scale).tolist() == [0.0] * len(rewards)
    assert totals([group(rewards), group([0.0, 1.0])], scale=scale)[0] == [0.0] * len(rewards)
    differs = signal_function(AlgorithmSection(), max_context=512)
    assert not differs(group(rewards))


@pytest.mark.parametrize("rewards", [[0.0, 1e-17], [0.1 + 0.2 - 0.3, 0.0], [1e-9, 0.0]])
def test_rounding_residue_of_cancelled_rewards_is_not_a_signal_in_its_task(rewards):
    assert totals([group(rewards), group([0.0, 1.0])])[0] == [0.0, 0.0]
    assert totals([group(rewards, task="b"), group([0.0, 1.0])])[0] != [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[1.0, 1.001], [1e-9, 3e-9], [100.0, 101.0]])
def test_small_differences_of_rewards_are_a_signal(rewards):
    assert of(rewards) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_task_without_spread_or_with_one_token_is_unchanged():
    assert totals([group([1.0, 1.0])], baseline=none, scale=unscaled) == [[1.0, 1.0]]
    assert totals([group([1.0], [1])], baseline=none, scale=unscaled) == [[1.0]]


def test_empty_groups_have_no_advantages():
    assert advantages([]) == []
    assert advantages([group([])]) == [[]]


def test_penalties_are_subtracted_once_per_trajectory():
    members = [
        trajectory(1.0, invalid_calls=3),
        trajectory(1.0, end=EpisodeEnd.TRUNCATED_LENGTH),
        trajectory(1.0, invalid_calls=1, end=EpisodeEnd.TRUNCATED_TURNS),
        trajectory(0.0),
    ]
    shaped = TrajectoryGroup(group_id=0, task="a", trajectories=members, admitted_version=0)
    (result,) = totals(
        [shaped],
        baseline=none,
        scale=unscaled,
        normalization="none",
        invalid_call_penalty=0.2,
        truncation_penalty=0.5,
    )
    assert result == pytest.approx([0.8, 0.5, 0.3, 0.0])


def test_reward_of_an_incomplete_episode_is_replaced():
    members = [
        trajectory(1.0, invalid_calls=1),
        trajectory(0.5, end=EpisodeEnd.TRUNCATED_TIME),
        trajectory(0.9),
        trajectory(0.0),
    ]
    shaped = TrajectoryGroup(group_id=0, task="a", trajectories=members, admitted_version=0)
    config = load_config(ROOT / "examples/quickstart/train.toml", ["algorithm={preset='agentrl'}"])
    found = shaping_function(config.algorithm, max_context=512)(shaped)
    assert found.returns.tolist() == [-0.2, -0.2, 0.9, 0.0]
    assert [rewards.sum() for rewards in found.rewards] == pytest.approx(found.returns.tolist())


@pytest.mark.parametrize("end", [EpisodeEnd.FAILED_ENVIRONMENT, EpisodeEnd.FAILED_ENGINE])
def test_failed_trajectory_is_rejected(end):
    failed = TrajectoryGroup(
        group_id=7,
        task="a",
        trajectories=[trajectory(0.0, end=end), trajectory(1.0)],
        admitted_version=0,
    )
    with pytest.raises(ValueError, match="group 7 of task 'a' contains a failed trajectory"):
        advantages([failed])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_non_finite_reward_is_rejected(reward):
    with pytest.raises(ValueError, match="must be finite"):
        advantages([group([reward, 0.0])])


def test_unknown_normalization_is_rejected():
    with pytest.raises(ValueError, match="normalization is 'all'; use one of task"):
        advantages([group([1.0, 0.0])], normalization="all")


@pytest.mark.parametrize("probability", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(("baseline", "factor"), [(leave_one_out, 1.0), (mean, 7 / 8), (none, 1.0)])
def test_expected_gradient_of_a_bernoulli_policy_is_exact(probability, baseline, factor):
    found = expected_gradient(probability, baseline=baseline, scale=unscaled)
    assert found == pytest.approx(factor * probability * (1 - probability))


@pytest.mark.parametrize(("probability", "factor"), [(0.05, 2.31), (0.2, 1.97), (0.5, 1.74), (0.9, 2.18)])
def test_scale_by_group_weighs_samples_by_their_difficulty(probability, factor):
    found = expected_gradient(probability, baseline=mean, scale=std)
    assert found / (probability * (1 - probability)) == pytest.approx(factor, abs=5e-3)


def expected_gradient(probability: float, **pieces: object) -> float:
    """Return the mean gradient of a logit over all outcomes of eight siblings. The action is the reward."""
    expected = 0.0
    for wins in range(9):
        actions = np.array([1.0] * wins + [0.0] * (8 - wins))
        chance = comb(8, wins) * probability**wins * (1 - probability) ** (8 - wins)
        siblings = Siblings(returns=actions, tokens=np.ones(8), batch=actions)
        advantage = compared(siblings, **pieces)
        expected += chance * float((advantage * (actions - probability)).mean())
    return expected


def numbered(groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [replace(one, group_id=number) for number, one in enumerate(groups)]


def net_push(groups: Sequence[TrajectoryGroup], aggregation: Aggregation) -> float:
    """Return the sum of weights times advantages over all tokens of a step."""
    groups = numbered(groups)
    found = advantages(groups, aggregation=aggregation)
    rows = sequences(groups, found)
    weights = token_weights(rows, aggregation=aggregation, constant_tokens=100)
    return sum(float((w * one.advantages).sum()) for w, one in zip(weights, rows, strict=True))


def test_short_winners_and_long_losers_balance_under_default_loss():
    one = group([1, 1, 0, 0, 0, 0, 0, 0], [50, 50, *[200] * 6])
    (found,) = totals([one], aggregation=AlgorithmSection().aggregation.name)
    assert found == pytest.approx([1.62] * 2 + [-0.54] * 6, abs=5e-3)
    (by_token,) = totals([one])
    assert by_token == pytest.approx([3.46] * 2 + [-0.29] * 6, abs=5e-3)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@given(groups=task_groups())
def test_normalized_advantages_sum_to_zero_under_weights_of_loss(groups, aggregation):
    assert net_push(groups, aggregation) == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_normalized_advantages_have_unit_variance_under_weights_of_loss(aggregation):
    groups = numbered([group([1, 0, 3], [4, 9, 2]), group([5, 1, 1], [3, 3, 8])])
    rows = sequences(groups, advantages(groups, aggregation=aggregation))
    weights = token_weights(rows, aggregation=aggregation, constant_tokens=100)
    total = sum(float(w.sum()) for w in weights)
    variance = sum(float((w * one.advantages**2).sum()) for w, one in zip(weights, rows, strict=True)) / total
    number = 6 if aggregation in ("sequence_mean", "rollout_mean", "segment_mean") else 29
    assert variance == pytest.approx((number - 1) / number, abs=1e-5)


def test_documented_algorithms_have_their_published_advantages():
    def config(*overrides: str) -> RunConfig:
        return load_config(ROOT / "examples/quickstart/train.toml", ["algorithm={}", *overrides])

    rows = dict(re.findall(r"\| train by (.*?) \| (.*?) \|", (ROOT / "docs/how-to/runs.md").read_text()))
    rewards, tokens = np.array([1.0, 0, 0, 0]), [50, 200, 200, 200]
    expected = {
        "GRPO without task advantage normalization": (rewards - 0.25) / rewards.std(ddof=1),
        "Dr. GRPO instead of GRPO": rewards - 0.25,
        "RLOO": (rewards - 0.25) * 4 / 3,
    }
    assert rows.keys() == expected.keys()
    for name, settings in rows.items():
        chosen = config(*re.findall(r"`(.*?)`", settings))
        found = advantage_function(chosen.algorithm, max_context=512)([group(rewards.tolist(), tokens)])
        assert np.concatenate(found[0]) == pytest.approx(expected[name].tolist())
