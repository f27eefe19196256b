"""Estimates of success and their confidence intervals, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean, variance

import numpy as np

Z = 1.959964
"""Quantile of the normal distribution for intervals of 95 %."""
RESAMPLES = 10_000
Estimated = tuple[float, float, float]
"""A value, and the two ends of its interval."""
_CHUNK = 1_000_000


def wilson_interval(successes: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion: 95 % by default, (0, 1) without trials.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    if trials <= 0:
        return 0.0, 1.0
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # Rounding can move the interval's end past the share itself at 0 and 1.
    return max(0.0, min(share, (middle - spread) / scale)), min(1.0, max(share, (middle + spread) / scale))


def effective_trials(groups: Sequence[Sequence[bool]]) -> float:
    """Return the effective number of independent trials in groups of trials of one sample each.

    Attempts at one sample are correlated, so they contain less information than attempts at different
    samples. The result is ``p (1 - p) / v``, with ``v`` as the variance of the overall share, estimated from
    the groups' means. It is limited to the range from the number of groups to the number of trials (the
    design effect: L. Kish, "Survey Sampling", 1965).
    """
    groups = [group for group in groups if group]
    trials = sum(map(len, groups))
    if trials == len(groups):
        return float(trials)
    share = sum(map(sum, groups)) / trials
    if len(groups) < 2 or share in (0.0, 1.0):
        return float(len(groups))
    mean_size = trials / len(groups)
    spread = variance([(sum(group) - share * len(group)) / mean_size for group in groups]) / len(groups)
    return min(float(trials), max(float(len(groups)), share * (1 - share) / spread if spread else math.inf))


def weighted_sum(estimates: Sequence[Estimated], weights: Sequence[float]) -> Estimated:
    """Return a weighted sum of independent estimates, with its interval.

    Of two shares with Wilson intervals and the weights -1 and 1, it is the interval of their difference by
    R. G. Newcombe, "Interval estimation for the difference between independent proportions" (1998), method
    10; for further sums see G. Y. Zou and A. Donner, "Construction of confidence limits about effect
    measures" (2008).
    """
    total = below = above = 0.0
    for (value, *ends), weight in zip(estimates, weights, strict=True):
        low, high = sorted(weight * end for end in ends)
        total += weight * value
        below += (weight * value - low) ** 2
        above += (high - weight * value) ** 2
    return total, total - math.sqrt(below), total + math.sqrt(above)


def mean_change(before: Sequence[Estimated], after: Sequence[Estimated]) -> Estimated:
    """Return the mean of the differences, after minus before, with its interval.

    The interval assumes independent samples. If both results are on the same samples, it is too wide rather
    than too narrow.
    """
    share = 1 / len(before)
    return weighted_sum([*before, *after], [-share] * len(before) + [share] * len(after))


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of ``k`` attempts succeeds.

    ``1 - C(n - c, k) / C(n, k)`` (arXiv 2107.03374). Raises ``ValueError`` if ``k`` is not in 1..trials.
    """
    _check_k(trials, k)
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


def pass_hat_k(trials: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the probability that all of ``k`` attempts succeed.

    ``C(c, k) / C(n, k)`` (pass^k, arXiv 2406.12045). Raises ``ValueError`` if ``k`` is not in 1..trials.
    """
    _check_k(trials, k)
    return math.comb(successes, k) / math.comb(trials, k)


def _check_k(trials: int, k: int) -> None:
    if not 1 <= k <= trials:
        raise ValueError(f"pass@{k} needs at least {k} attempts per sample, and there are {trials}.")


def sign_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact sign test. Zeros are ignored. Only zeros give 1.

    For pairs of single attempts, with differences of -1, 0 and 1, it is McNemar's exact test.
    """
    more = sum(difference > 0 for difference in differences)
    less = sum(difference < 0 for difference in differences)
    number = more + less
    tail = sum(math.comb(number, count) for count in range(min(more, less) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << number)))  # because floats are limited to 2**1024


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of a mean. Pass paired differences for a paired test.

    B. Efron, "Bootstrap methods: another look at the jackknife" (1979). Raises ``ValueError`` without values.
    """
    if not values:
        raise ValueError("cannot compute a confidence interval without values")
    given, rng = np.asarray(values, dtype=float), np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(given))
    means = [
        given[rng.integers(len(given), size=(min(rows, resamples - begin), len(given)))].mean(axis=1)
        for begin in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return fmean(values) if values else None
