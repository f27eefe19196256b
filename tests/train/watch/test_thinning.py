"""The points in the curves of a long run."""

import math

import pytest

from agentrl_train.watch.thinning import ThinnedSteps


def steps(first: int, last: int) -> list[dict]:
    return [
        {"step": n, "loss": float(n), "tasks": {"shop": {"success": float(n)}}}
        for n in range(first, last + 1)
    ]


def test_short_run_is_drawn_with_every_point():
    thinned = ThinnedSteps(most=4)
    thinned.update(steps(1, 4))
    assert (thinned.size, thinned.means()) == (1, steps(1, 4))


def test_each_point_is_the_mean_of_equally_many_steps():
    thinned = ThinnedSteps(most=4)
    thinned.update(steps(1, 13))
    points = [(one["step"], one["loss"], one["tasks"]["shop"]["success"]) for one in thinned.means()]
    assert points == [(4, 2.5, 2.5), (8, 6.5, 6.5), (12, 10.5, 10.5), (13, 13.0, 13.0)]


def test_appended_steps_give_the_same_points_as_a_single_call():
    whole, growing, run = ThinnedSteps(most=6), ThinnedSteps(most=6), steps(1, 50)
    for end in range(1, 51):
        growing.update(run[:end])
    whole.update(run)
    assert growing.means() == whole.means()
    assert len(whole.means()) <= 6


def test_resumed_run_starts_again():
    thinned, run = ThinnedSteps(most=4), steps(1, 9)
    thinned.update(run)
    thinned.update([*steps(1, 2)])
    assert (thinned.size, thinned.means()) == (1, steps(1, 2))


def test_missing_values_are_skipped_and_missing_ages_are_zero():
    thinned = ThinnedSteps(most=2)
    thinned.update(
        [
            {"step": 1, "kl": None, "tokens_of_age_0": 8.0},
            {"step": 2, "kl": 3.0, "tokens_of_age_0": 4.0, "tokens_of_age_1": 4.0},
            {"step": 3, "kl": math.nan},
        ]
    )
    first, last = thinned.means()
    assert first["kl"] == pytest.approx(3.0)
    assert (first["tokens_of_age_0"], first["tokens_of_age_1"]) == (6.0, 2.0)
    assert "kl" not in last
