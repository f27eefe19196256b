"""Success estimates and their intervals, compared with textbook values, enumeration and simulation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.evaluation.statistics import (
    Estimated,
    bootstrap_interval,
    effective_trials,
    mean_change,
    pass_at_k,
    pass_hat_k,
    sign_test,
    weighted_sum,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_matches_textbook_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_interval_without_trials_is_zero_to_one():
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 400), st.data())
def test_interval_contains_share_and_is_symmetric(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = wilson_interval(successes, trials)
    assert 0.0 <= low <= successes / trials <= high <= 1.0
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored == pytest.approx((1.0 - high, 1.0 - low))


@given(trials=st.integers(1, 8), data=st.data())
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_draws(trials, data):
    successes = data.draw(st.integers(0, trials))
    k = data.draw(st.integers(1, trials))
    draws = list(itertools.combinations([1] * successes + [0] * (trials - successes), k))
    assert pass_at_k(trials, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(trials, successes, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize("estimate", [pass_at_k, pass_hat_k])
def test_more_draws_than_attempts_are_rejected(estimate):
    with pytest.raises(ValueError, match="needs at least 5 attempts"):
        estimate(4, 2, 5)


def test_sign_test_is_mcnemars_exact_test():
    # R: mcnemar exact of 1 and 8 discordant pairs: 2 * pbinom(1, 9, 0.5)
    assert sign_test([1] * 8 + [-1] + [0] * 20) == pytest.approx(2 * (1 + 9) / 2**9)
    assert sign_test([0, 0]) == sign_test([1, -1]) == sign_test([]) == 1.0
    assert sign_test([-1] * 3_000) == 0.0 or sign_test([-1] * 3_000) < 1e-300


@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=30))
def test_sign_test_does_not_depend_on_the_direction(differences):
    assert sign_test(differences) == sign_test([-d for d in differences])
    assert 0 < sign_test(differences) <= 1


def test_bootstrap_interval_repeats_and_covers_the_mean():
    values = np.random.default_rng(3).normal(0.3, 1.0, 400).tolist()
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    half = 1.96 * np.std(values) / math.sqrt(400)
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.02)
    assert bootstrap_interval([0.5, 0.5]) == (0.5, 0.5)
    with pytest.raises(ValueError, match="without values"):
        bootstrap_interval([])


def test_attempts_at_one_sample_count_by_their_information():
    assert effective_trials([[True], [False], [True]]) == 3
    alike = [[True] * 8 if n % 2 else [False] * 8 for n in range(40)]
    assert effective_trials(alike) == pytest.approx(
        40, abs=1
    )  # eight equal attempts carry no more information than one
    rng = np.random.default_rng(0)
    unlike = (rng.random((200, 8)) < 0.4).tolist()
    assert effective_trials(unlike) > 1_200  # attempts are as independent as samples
    assert effective_trials([[True] * 8] * 5) == 5
    assert effective_trials([]) == 0


def test_interval_with_attempts_covers_the_true_share():
    rng, covered, naive = np.random.default_rng(7), 0, 0
    for _ in range(300):
        wins = rng.random((40, 8)) < rng.beta(0.4, 0.4, 40)[:, None]  # samples of unlike difficulty
        share, worth = wins.mean(), effective_trials(wins.tolist())
        low, high = wilson_interval(share * worth, worth)
        covered += low <= 0.5 <= high
        low, high = wilson_interval(int(wins.sum()), wins.size)
        naive += low <= 0.5 <= high
    assert covered / 300 > 0.92
    assert naive / 300 < 0.75  # an interval that treats attempts as samples is too narrow


def share(successes: int, trials: int) -> Estimated:
    return (successes / trials, *wilson_interval(successes, trials))


def test_interval_of_a_difference_of_shares_matches_newcombe():
    found = weighted_sum([share(48, 80), share(56, 70)], (1, -1))
    assert found == pytest.approx((-0.2, -0.3339, -0.0524), abs=1e-4)
    low, high = sorted(-end for end in found[1:])
    assert mean_change([share(48, 80)], [share(56, 70)]) == pytest.approx((-found[0], low, high))


def test_interval_of_a_change_narrows_with_the_number_of_tasks():
    one = mean_change([share(10, 50)], [share(15, 50)])
    three = mean_change([share(10, 50)] * 3, [share(15, 50)] * 3)
    assert one[0] == pytest.approx(three[0])
    assert one[1] < 0 < three[1]
    assert one[0] - one[1] == pytest.approx(math.sqrt(3) * (three[0] - three[1]))
