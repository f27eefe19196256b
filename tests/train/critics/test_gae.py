"""Generalized advantage estimation: published values, and invariants for any rewards and values."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.advantage import normalize_and_mask, rewards_to_go, shaped_rewards, truncated
from agentrl_train.critics.gae import (
    bi_level_gae,
    estimate,
    fit_metrics,
    gae,
    token_gae,
    turn_gae,
    turn_numbers,
    units_of_tokens,
)
from agentrl_train.types import EpisodeEnd
from tests.train.test_credit import episode, group

ESTIMATORS = {"token": token_gae, "turn": turn_gae, "bi_level": bi_level_gae}
numbers = st.floats(-10, 10).map(lambda value: round(value, 3))
fractions = st.floats(0, 1)


def advantages_and_returns(groups, values, *, invalid_call_penalty: float = 0.0, **options):
    """Return the advantages of tokens, or None for omitted trajectories, and the critic's targets."""
    shaped = [shaped_rewards(one, invalid_call_penalty=invalid_call_penalty) for one in groups]
    found = [
        [estimate(token_gae, *each) for each in zip(one.trajectories, rewards.rewards, own, strict=True)]
        for one, rewards, own in zip(groups, shaped, values, strict=True)
    ]
    returns = [list(map(np.add, *pair)) for pair in zip(found, values, strict=True)]
    return normalize_and_mask(groups, shaped, found, units=units_of_tokens, **options), returns


@st.composite
def episodes(draw):
    """Generate turn rewards, token values, and turns of tokens with observations between them."""
    rewards, values, turns = [], [], []
    for number in range(draw(st.integers(1, 4))):
        observed, sampled = draw(st.integers(0, 3)), draw(st.integers(1, 4))
        turns += [-1] * observed + [number] * sampled
        values += draw(st.lists(numbers, min_size=observed + sampled, max_size=observed + sampled))
        rewards.append(draw(numbers))
    return np.array(rewards), np.array(values), np.array(turns)


def test_masked_estimate_matches_published_values() -> None:
    rewards, values = np.array([0.0, 1.0]), np.array([0.5, 0.4, 9.0, 9.0, 0.3, 0.2])
    found = token_gae(rewards, values, np.array([0, 0, -1, -1, 1, 1]), token_gamma=0.9, lam=0.8)
    assert found == pytest.approx([0.00279, 0.19832, 0, 0, 0.456, 0.8], abs=5e-6)
    alone = gae(np.array([0, 0, 0, 1.0]), values[[0, 1, 4, 5]], gamma=0.9, lam=0.8)
    assert found[[0, 1, 4, 5]].tolist() == alone.tolist()


def test_bi_level_estimate_matches_published_values() -> None:
    values, turns = np.arange(1, 11) / 10, np.repeat([0, 1], 5)
    found = bi_level_gae(np.ones(2), values, turns, gamma=0.95, token_gamma=1.0, lam=1.0)
    expected = [1.85, 1.75, 1.65, 1.55, 1.45, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert found == pytest.approx(expected)


def test_bi_level_estimate_keeps_turns_without_reward() -> None:
    values, turns = np.arange(1, 11) / 10, np.repeat([0, 1], 5)
    found = bi_level_gae(np.array([0.0, 1.0]), values, turns, gamma=0.95)
    assert found[4] == pytest.approx(0.95 * 1.0 - 0.5 + 0.95 * 0.0)
    assert found[5:] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])


def test_estimate_by_turn_starts_at_first_tokens_and_covers_the_turn() -> None:
    values, turns = np.array([7.0, 1.0, 5.0, 7.0, 2.0]), np.array([-1, 0, 0, -1, 1])
    found = turn_gae(np.array([0.0, 1.0]), values, turns, gamma=0.5, lam=0.0)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
    found = turn_gae(np.array([0.0, 1.0]), values, turns, gamma=0.5, lam=1.0)
    assert found.tolist() == [0.0, -0.5, -0.5, 0.0, -1.0]


@given(episodes())
def test_estimate_without_discount_is_return_minus_value(given_) -> None:
    rewards, values, turns = given_
    to_go, sampled = rewards_to_go(rewards), turns >= 0
    found = token_gae(rewards, values, turns)
    assert found[sampled] == pytest.approx(to_go[turns[sampled]] - values[sampled])
    starts = {number: values[turns == number][0] for number in set(turns[sampled].tolist())}
    by_turn = turn_gae(rewards, values, turns)
    assert by_turn[sampled] == pytest.approx([to_go[u] - starts[u] for u in turns[sampled].tolist()])
    assert bi_level_gae(rewards, values, turns, gamma=1.0) == pytest.approx(found)


@given(episodes(), numbers, fractions)
def test_estimate_with_lambda_zero_is_the_one_step_difference(given_, bootstrap: float, gamma: float) -> None:
    rewards, values, turns = given_
    own = np.flatnonzero(turns >= 0)
    found = token_gae(rewards, values, turns, bootstrap, token_gamma=gamma, lam=0.0)[own]
    last = np.append(turns[own][1:] != turns[own][:-1], True)
    after = np.append(values[own][1:], bootstrap)
    assert found == pytest.approx(last * rewards[turns[own]] + gamma * after - values[own])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(given_=episodes(), gamma=fractions, lam=fractions, noise=numbers)
def test_values_of_observed_tokens_do_not_matter_and_they_have_no_advantage(
    name: str, given_, gamma: float, lam: float, noise: float
) -> None:
    rewards, values, turns = given_
    estimate = partial(
        ESTIMATORS[name], **({"token_gamma": gamma} if name == "token" else {"gamma": gamma}), lam=lam
    )
    found = estimate(rewards, values, turns)
    assert not found[turns < 0].any()
    assert found.tolist() == estimate(rewards, np.where(turns < 0, noise, values), turns).tolist()
    own = turns >= 0
    assert found[own].tolist() == estimate(rewards, values[own], turns[own]).tolist()


@pytest.mark.parametrize("name", ESTIMATORS)
@given(given_=episodes(), lam=fractions)
def test_exact_values_give_no_advantage(name: str, given_, lam: float) -> None:
    rewards, _, turns = given_
    values = np.where(turns >= 0, rewards_to_go(rewards)[turns], 0.0)
    gamma = {} if name == "token" else {"gamma": 1.0}
    assert ESTIMATORS[name](rewards, values, turns, lam=lam, **gamma) == pytest.approx(0.0, abs=1e-9)


@given(episodes(), fractions, numbers)
def test_estimates_of_single_token_turns_are_equal(given_, lam: float, bootstrap: float) -> None:
    rewards, values, _ = given_
    turns, values = np.arange(len(rewards)), np.resize(values, len(rewards))
    by_token = token_gae(rewards, values, turns, bootstrap, token_gamma=0.9, lam=lam)
    assert turn_gae(rewards, values, turns, bootstrap, gamma=0.9, lam=lam) == pytest.approx(by_token)
    bi_level = bi_level_gae(rewards, values, turns, bootstrap, gamma=0.9, lam=lam)
    assert bi_level == pytest.approx(by_token)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_turn_without_tokens_adds_its_reward_to_the_previous_turn(name: str) -> None:
    values, turns = np.array([1.0, 2.0, 3.0]), np.array([0, 0, 2])
    found = ESTIMATORS[name](np.array([1.0, 5.0, 2.0]), values, turns)
    assert found.tolist() == ESTIMATORS[name](np.array([6.0, 2.0]), values, np.array([0, 0, 1])).tolist()
    none = ESTIMATORS[name](np.array([1.0]), np.zeros(2), np.array([-1, -1]))
    assert none.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("end", "last"),
    [
        (EpisodeEnd.TERMINATED, 1.0 - 0.25),
        (EpisodeEnd.TRUNCATED_TURNS, 1.0 + 0.25 - 0.25),
        (EpisodeEnd.TRUNCATED_TIME, 1.0 + 0.25 - 0.25),
        (EpisodeEnd.TRUNCATED_LENGTH, 1.0 + 0.25 - 0.25),
    ],
)
def test_truncated_episodes_bootstrap_from_the_last_value_and_terminated_ones_do_not(
    end: EpisodeEnd, last: float
) -> None:
    one = group(episode([0.0, 1.0], end=end))
    values = [[np.array([0.5, 0.5, 0.5, 0.25])]]
    found, returns = advantages_and_returns([one], values, normalization="none")
    assert found[0][0] is not None
    assert found[0][0][-1] == pytest.approx(last)
    assert returns[0][0] == pytest.approx(found[0][0] + values[0][0])


def test_advantages_are_normalized_over_tokens_and_returns_are_not() -> None:
    groups = [group(episode([0.0, 1.0]), episode([0.0], tokens=5)), group(episode([3.0]), number=1)]
    values = [[np.zeros(4), np.zeros(5)], [np.zeros(2)]]
    found, returns = advantages_and_returns(groups, values)
    every = np.concatenate([one for per_group in found for one in per_group])
    assert every.mean() == pytest.approx(0.0)
    assert every.std(ddof=1) == pytest.approx(1.0)
    assert returns[1][0].tolist() == [3.0, 3.0]


def test_truncated_episode_can_be_omitted_for_the_policy_and_keeps_its_returns() -> None:
    one = group(episode([1.0]), episode([2.0], end=EpisodeEnd.TRUNCATED_TURNS))
    found, returns = advantages_and_returns([one], [[np.zeros(2), np.ones(2)]], leave_out=[truncated])
    assert found[0][1] is None
    assert returns[0][1].tolist() == [3.0, 3.0]


def test_penalties_change_the_returns() -> None:
    one = group(episode([1.0, 0.0], invalid=0))
    _, returns = advantages_and_returns([one], [[np.zeros(4)]], invalid_call_penalty=0.5)
    assert returns[0][0].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_tokens_are_numbered_by_turn() -> None:
    assert turn_numbers(episode([0.0, 0.0, 0.0], tokens=2)).tolist() == [0, 0, 1, 1, 2, 2]


def test_explained_variance_is_one_for_exact_values_and_zero_for_their_mean() -> None:
    explained = lambda *pair: fit_metrics(*pair)["explained_variance"]  # noqa: E731
    returns = np.array([0.0, 1.0, 2.0])
    assert explained(returns, returns) == 1.0
    assert explained(np.ones(3), returns) == 0.0
    assert explained(np.ones(3), np.ones(3)) == 0.0
