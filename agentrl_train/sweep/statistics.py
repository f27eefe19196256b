"""Intervals of means over seeds, and p-values of differences, adjusted for the number of comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev, variance
from typing import Any

from agentrl_env.evaluation.statistics import wilson_interval

LEVEL = 0.05
"""Largest adjusted p-value of a finding. Intervals cover 1 - LEVEL."""
INTERVAL = "95 % interval of the mean over seeds"


def interval(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the mean of independent values with its 95 % interval by Student's t, or None without values.

    A single value has no interval: ``low`` and ``high`` are None.
    """
    if not values:
        return None
    mean, low, high = fmean(values), None, None
    if len(values) > 1:
        half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        low, high = mean - half, mean + half
    return {"mean": mean, "low": low, "high": high, "n": len(values)}


def share_interval(values: Sequence[float], *, episodes: float) -> dict[str, Any] | None:
    """Return the mean of shares, one for each run, with a 95 % interval that stays within 0 and 1.

    It is Wilson's interval with the quantile of Student's t. The number of trials is the number of
    independent episodes that would give the share the same variance as the mean over runs, as for cluster
    samples, because runs differ by more than chance among episodes. It is at most the number of episodes
    played. If all runs have the same share, their variance is unknown, and every run counts as one trial.

    Args:
        values: shares between 0 and 1.
        episodes: episodes that each share is measured with.
    """
    if len(values) < 2:
        return interval(values)
    mean, count = fmean(values), len(values)
    trials = float(count)
    if of_mean := variance(values) / count:
        trials = min(count * episodes, mean * (1.0 - mean) / of_mean)
    low, high = wilson_interval(mean * trials, trials, t_quantile(count - 1))
    return {"mean": mean, "low": low, "high": high, "n": count}


def p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of Student's t test of the mean 0, or None for a single difference."""
    if len(differences) < 2:
        return None
    mean, spread = fmean(differences), stdev(differences)
    if not spread:
        return 1.0 if not mean else 0.0
    return t_tails(mean / (spread / math.sqrt(len(differences))), len(differences) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values. The chance of any error among values up to 0.05 is at most 0.05."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def t_tails(t: float, degrees: int) -> float:
    """Return the probability that Student's t is further from 0 than ``t``."""
    # Abramowitz and Stegun, 26.7.3 and 26.7.4
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = (cosine if odd else 1.0) * (degrees > 1)
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1.0 - inside)


@cache
def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, degrees) > LEVEL else (low, middle)
    return high
