"""Credit by turn and by state, and baselines, scales and filters that need unequal turns."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, TaskSample
from agentrl_train.advantage import (
    advantages,
    batch_mean,
    batch_std,
    by_state,
    by_trajectory,
    by_turn,
    greedy,
    leave_one_out,
    length_weighted,
    mean,
    mean_return,
    none,
    overlong_penalty,
    rewards_to_go,
    std,
    truncated,
    unscaled,
)
from agentrl_train.batch import sequences
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, TrajectoryGroup, Turn

CREDITS = {"trajectory": by_trajectory, "turn": by_turn, "state": by_state}
plain = partial(advantages, normalization="none")


def turn(reward: float, tokens: int, reply: str, *, invalid_calls: int = 0) -> Turn:
    completion = Completion(
        token_ids=[1] * tokens, logprobs=[-1.0] * tokens, versions=[0] * tokens, finish_reason="stop"
    )
    return Turn(
        prompt_ids=[0],
        completion=completion,
        message=Message.assistant("x"),
        reply=[Message(role="tool", content=reply, tool_call_id="1")],
        reward=reward,
        invalid_calls=invalid_calls,
    )


def episode(
    rewards: Sequence[float],
    *,
    name: str = "",
    tokens: int = 2,
    states: Sequence[str] = (),
    end: EpisodeEnd = EpisodeEnd.TERMINATED,
    invalid: int | None = None,
) -> Trajectory:
    """Return an episode with these turn rewards. ``states`` are the observations after each turn."""
    replies = [*states, *(f"{name} after {u}" for u in range(len(states), len(rewards)))]
    turns = [
        turn(reward, tokens, reply, invalid_calls=int(u == invalid))
        for u, (reward, reply) in enumerate(zip(rewards, replies, strict=True))
    ]
    return Trajectory(
        sample=TaskSample(task="a"),
        opening=[Message(role="user", content="go")],
        turns=turns,
        end=end,
        reward=sum(rewards),
        success=False,
    )


def group(*episodes: Trajectory, number: int = 0, task: str = "a") -> TrajectoryGroup:
    return TrajectoryGroup(group_id=number, task=task, trajectories=episodes, admitted_version=0)


def rewarded(*rewards: Sequence[float], **options: object) -> TrajectoryGroup:
    return group(*(episode(one, name=str(i)) for i, one in enumerate(rewards)), **options)


reward_lists = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=4)
groups_of_rewards = st.lists(reward_lists, min_size=2, max_size=5)


def test_rewards_to_go_are_discounted_per_turn() -> None:
    assert rewards_to_go(np.array([1.0, 0.0, 2.0]), 0.5).tolist() == [1.5, 1.0, 2.0]
    assert rewards_to_go(np.zeros(0)).tolist() == []


def test_gigpo_matches_published_values() -> None:
    one = rewarded([0, 0, 1], [0, 0, 0, 0, 1], [0], [0])
    (found,) = plain([one], credit=by_state, scale=unscaled)
    first = [turns[0] for turns in found]
    assert first == pytest.approx([0.973248, 0.885255, -0.929252, -0.929252], abs=1e-6)
    assert found[0][1:] == pytest.approx([0.5, 0.5])  # observations that occur once add nothing


def test_gigpo_of_unique_states_is_grpo() -> None:
    members = [episode([0, 1], name="0"), episode([0, 0], name="1")]
    unique = group(
        *(replace(one, opening=[Message(role="user", content=str(i))]) for i, one in enumerate(members))
    )
    found, expected = plain([unique], credit=by_state), plain([unique])
    assert np.concatenate(found[0]) == pytest.approx(np.concatenate(expected[0]))


def test_state_depends_only_on_the_observation() -> None:
    left = episode([0, 1], states=["the shop"])
    right = episode([0, 0], states=["the shop"])
    (found,) = plain([group(left, right)], credit=partial(by_state, gamma=1.0), scale=unscaled)
    assert np.concatenate(found) == pytest.approx([1.0, 1.0, -1.0, -1.0])


def test_credit_by_turn_uses_rewards_of_turns() -> None:
    one = rewarded([1, 0], [0, 1])
    (found,) = plain([one], credit=by_turn, scale=unscaled)
    assert [turns.tolist() for turns in found] == [[0.0, -0.5], [0.0, 0.5]]
    assert not np.concatenate(plain([one])[0]).any()  # the returns are equal


@given(groups_of_rewards)
def test_turn_that_no_sibling_reached_gets_the_credit_of_the_trajectory(rewards) -> None:
    one = rewarded([0.0] * 6 + [3.0], *rewards)
    (by_turns,), (whole,) = plain([one], credit=by_turn), plain([one])
    assert by_turns[0][-1] == pytest.approx(whole[0][-1])


def test_single_episode_without_baseline_gets_its_reward_to_go() -> None:
    (found,) = plain([rewarded([1, 2, 3])], credit=by_turn, baseline=none, scale=unscaled)
    assert found[0].tolist() == [6.0, 5.0, 3.0]


@pytest.mark.parametrize("name", CREDITS)
def test_rounding_residue_of_rewards_that_cancel_is_not_a_signal(name: str) -> None:
    credit = partial(CREDITS[name], gamma=1.0) if name != "trajectory" else by_trajectory
    for first, second in (([0.01, 0.02, -0.03], [0.0] * 3), ([1.0, -1.0], [0.0, 1e-66])):
        (found,) = plain([rewarded(first, second)], credit=credit)
        assert found[0][0] == 0.0
        assert found[1][0] == 0.0


@pytest.mark.parametrize("name", CREDITS)
@given(rewards=groups_of_rewards, factor=st.floats(0.01, 100), shift=st.floats(-50, 50))
def test_advantages_are_invariant_to_scale_and_to_shift_of_the_last_reward(
    name, rewards, factor, shift
) -> None:
    length = len(rewards[0])
    rewards = [[*one, *[0.0] * length][:length] for one in rewards]
    before, after = [], []
    for one in rewards:
        before.append(one)
        after.append([factor * reward for reward in one[:-1]] + [factor * one[-1] + shift])
    options = {"credit": partial(CREDITS[name], gamma=1.0) if name != "trajectory" else by_trajectory}
    (old,), (new,) = plain([rewarded(*before)], **options), plain([rewarded(*after)], **options)
    assert np.concatenate(new) == pytest.approx(np.concatenate(old), abs=1e-6)


def test_differences_with_vanishing_squares_are_not_divided_by_0() -> None:
    (found,) = plain([rewarded([0.0], [1e-200])])
    assert np.concatenate(found) == pytest.approx(np.zeros(2), abs=1e-6)


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("baseline", [mean, leave_one_out, length_weighted])
@pytest.mark.parametrize("normalization", ["task", "batch", "none"])
def test_group_of_equal_episodes_has_no_signal(name, baseline, normalization) -> None:
    flat, other = rewarded([0.1, 0.2], [0.1, 0.2], [0.1, 0.2]), rewarded([1.0], [0.0], number=1)
    options = {"credit": CREDITS[name], "baseline": baseline, "normalization": normalization}
    assert not np.concatenate(advantages([flat, other], **options)[0]).any()


def outcomes(p: float) -> Iterator[tuple[float, list[float], list[float]]]:
    """Yield probability, rewards and scores of all episodes of a task with up to two turns and a logit per
    turn.

    An episode ends if its first action is 0.
    """
    for first, second in ((0, 0), (1, 0), (1, 1)):
        chance = (p if first else 1 - p) * (1.0 if not first else p if second else 1 - p)
        rewards = [0.3 * first, 2.0 * second - 0.5] if first else [0.1]
        scores = [first - p, second - p] if first else [first - p]
        yield chance, rewards, scores


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(
    ("credit", "baseline", "factor"),
    [
        (by_turn, leave_one_out, 1.0),
        (by_trajectory, leave_one_out, 1.0),
        (by_turn, none, 1.0),
        (by_trajectory, mean, 2 / 3),
    ],
)
def test_expected_gradient_over_two_turns_is_exact(p, credit, baseline, factor) -> None:
    """All outcomes of three siblings are enumerated."""
    exact = np.zeros(2)
    for chance, rewards, scores in outcomes(p):
        for u, score in enumerate(scores):
            exact[u] += chance * score * sum(rewards)
    expected = np.zeros(2)
    for three in product(list(outcomes(p)), repeat=3):
        chance = np.prod([one[0] for one in three])
        (found,) = plain(
            [rewarded(*(one[1] for one in three))], credit=credit, baseline=baseline, scale=unscaled
        )
        for turns, (_, _, scores) in zip(found, three, strict=True):
            expected[: len(scores)] += chance * turns * np.array(scores) / 3
    assert expected == pytest.approx(factor * exact)


def test_credit_by_turn_has_less_variance_at_later_turns() -> None:
    """Each of six turns has its own reward, as in the additive chain of GiGPO's analysis."""
    rng, squares = np.random.default_rng(0), {"trajectory": np.zeros(6), "turn": np.zeros(6)}
    for _ in range(300):
        actions = rng.integers(0, 2, (8, 6)).astype(float)
        one = rewarded(*actions.tolist())
        for name, total in squares.items():
            found = np.array(plain([one], credit=CREDITS[name], scale=unscaled)[0])
            total += ((found * (actions - 0.5)) ** 2).mean(0)
    ratio = squares["turn"] / squares["trajectory"]
    assert (np.diff(ratio) < 0).all()
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] < 0.4


def test_length_weighted_baseline_weighs_returns_by_tokens() -> None:
    one = group(episode([1.0], tokens=9, name="0"), episode([0.0], tokens=1, name="1"))
    (found,) = plain([one], baseline=length_weighted, scale=unscaled)
    assert np.concatenate(found) == pytest.approx([0.1, -0.9])


def test_greedy_baseline_is_the_return_of_the_greedy_episode() -> None:
    one = replace(rewarded([1.0], [0.25]), greedy=episode([0.25]))
    (found,) = plain([one], baseline=greedy, scale=unscaled)
    assert np.concatenate(found) == pytest.approx([0.75, 0.0])
    with pytest.raises(ValueError, match="greedy episode in every group"):
        plain([rewarded([1.0], [0.0])], baseline=greedy)


def test_sample_equal_to_the_greedy_one_has_no_advantage() -> None:
    one = replace(rewarded([0.5]), greedy=episode([0.5]))
    assert plain([one], baseline=greedy, scale=unscaled)[0][0].tolist() == [0.0]


def test_batch_statistics_span_all_groups() -> None:
    two = [rewarded([1.0], [0.0]), rewarded([5.0], [4.0], number=1)]
    spread = np.array([1.0, 0.0, 5.0, 4.0]).std(ddof=1)
    lite = [float(turns[0]) for one in plain(two, scale=batch_std) for turns in one]
    assert lite == pytest.approx([0.5 / spread, -0.5 / spread] * 2)
    centred = [float(turns[0]) for one in plain(two, baseline=batch_mean, scale=unscaled) for turns in one]
    assert centred == pytest.approx([-1.5, -2.5, 2.5, 1.5])


def test_advantages_are_scaled_by_the_mean_return() -> None:
    found = plain([rewarded([1.0], [0.0], [0.0], [0.0])], scale=mean_return)
    assert np.concatenate(found[0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])


def test_batch_normalization_without_baseline_pushes_failures_down() -> None:
    single = [rewarded([1.0]), rewarded([0.0], number=1)]
    found = advantages(single, baseline=none, scale=unscaled, normalization="batch")
    assert float(found[0][0][0]) == -float(found[1][0][0]) > 0.0


def test_groups_of_largest_spread_are_kept_in_each_task() -> None:
    groups = [rewarded([float(n)], [0.0], number=n) for n in range(4)]
    groups += [rewarded([100.0 * n], [0.0], number=4 + n, task="b") for n in range(4)]
    found = plain(groups, keep_groups=0.5)
    assert [one[0] is not None for one in found] == [False, False, True, True] * 2
    assert [one.group_id for one in sequences(groups, found)] == [2, 2, 3, 3, 6, 6, 7, 7]
    kept = plain(groups, keep_groups=0.01)
    assert sum(one[0] is not None for one in kept) == 2


def test_truncated_episodes_count_only_in_the_baseline() -> None:
    cut = episode([0.0], name="1", end=EpisodeEnd.TRUNCATED_LENGTH)
    one = group(episode([1.0], name="0"), cut, episode([1.0], name="2"))
    (found,) = plain([one], leave_out=[truncated], scale=unscaled)
    assert found[1] is None
    assert found[0] == pytest.approx([1 / 3])
    assert len(sequences([one], [found])) == 2


def test_penalties_are_subtracted_at_the_turn_that_earned_them() -> None:
    one = group(episode([0, 0, 0], invalid=1, end=EpisodeEnd.TRUNCATED_TURNS), episode([0, 0, 0], name="1"))
    options = {"invalid_call_penalty": 0.2, "truncation_penalty": 0.5, "baseline": none, "scale": unscaled}
    (by_turns,), (whole,) = plain([one], credit=by_turn, **options), plain([one], **options)
    assert by_turns[0] == pytest.approx([-0.7, -0.7, -0.5])
    assert whole[0] == pytest.approx([-0.7] * 3)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (80, 0), (90, 0.25), (100, 0.5), (120, 0.5)])
def test_overlong_penalty_rises_over_the_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 100, 20, 0.5) == pytest.approx(penalty)


def test_overlong_penalty_counts_all_tokens_of_the_episode() -> None:
    one = group(episode([1.0, 0.0], tokens=4), episode([1.0], tokens=4, name="1"))
    (found,) = plain([one], overlong=(10, 4, 1.0), baseline=none, scale=unscaled)
    assert [float(turns[0]) for turns in found] == [0.0, 1.0]


def test_each_token_gets_the_advantage_of_its_turn() -> None:
    one = rewarded([1, 0], [0, 1])
    rows = sequences([one], plain([one], credit=by_turn, baseline=none, scale=unscaled))
    assert rows[0].advantages.tolist() == [0, 1, 1, 0, 0, 0]
    assert rows[1].advantages.tolist() == [0, 1, 1, 0, 1, 1]


def test_function_of_a_user_replaces_any_piece() -> None:
    def median(siblings) -> float:
        return float(np.median(siblings.returns))

    (found,) = plain([rewarded([9.0], [1.0], [0.0])], baseline=median, scale=std)
    assert [float(turns[0]) > 0 for turns in found] == [True, False, False]
    assert found[1].tolist() == [0.0]
