"""The scores of sibling episodes -> one reward each. Pure functions.

All functions take the scores by name, [N] each, and the weights by name, and return the N rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from agentrl_train.advantage import Siblings, Values, compared

Combination = Callable[[Mapping[str, Values], Mapping[str, float]], Values]


def weighted(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """Return the weighted sum of the scores."""
    total: Values = _weigh(scores, weights).sum(axis=0)
    return total


def lowest(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """Return the lowest weighted score, so that the least satisfied grader decides."""
    found: Values = _weigh(scores, weights).min(axis=0)
    return found


def highest(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """Return the highest weighted score."""
    found: Values = _weigh(scores, weights).max(axis=0)
    return found


def standardized(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    """Return the weighted sum of the scores, each normalized to mean 0 and std 1 in the group (GDPO).

    Only the weights determine the influence of a score, not its scale. A score that does not vary in the
    group adds 0.
    """
    total = np.zeros(len(next(iter(scores.values()))))
    for name, values in scores.items():
        alone = Siblings(returns=values, tokens=np.ones_like(values), batch=values)
        total += weights.get(name, 1.0) * compared(alone)
    return total


def adaptive(
    scores: Mapping[str, Values],
    weights: Mapping[str, float],
    *,
    alignment: Mapping[str, float] | None = None,
    temperature: float = 0.1,
    fair: float = 0.9,
) -> Values:
    """Return the mean of the scores if they agree, or else favour the least satisfied scores.

    Federated RLHF (arXiv 2512.08786): if the ``fairness`` is at least ``fair``, the reward is the mean over
    the scores. Otherwise it is ``log(mean_g exp(alpha_g r_g))`` with ``alpha = softmax((1 - h) /
    temperature)``.

    Args:
        scores: scores of the siblings by name.
        weights: factors of the scores.
        alignment: h, how well each score was satisfied so far, from 0 to 1; by default its mean over the
            siblings.
        temperature: smaller values give more weight to the least satisfied score.
        fair: smallest fairness with which the mean is used.
    """
    values = _weigh(scores, weights)
    if fairness(values) >= fair:
        middle: Values = values.mean(axis=0)
        return middle
    past = values.mean(axis=1) if alignment is None else np.array([alignment[name] for name in scores])
    logits = (1.0 - past) / temperature
    shares = np.exp(logits - logits.max())
    found: Values = np.logaddexp.reduce((shares / shares.sum())[:, None] * values) - math.log(len(values))
    return found


def fairness(values: Values) -> float:
    """Return the mean over episodes of ``1 / (1 + CoV^2)`` of their scores, [scores, N]. 1 if all agree.

    CoV is the standard deviation of an episode's scores divided by their mean.
    """
    squares = np.square(values).mean(axis=0)
    shares = np.divide(values.mean(axis=0) ** 2, squares, out=np.ones_like(squares), where=squares > 0)
    return float(shares.mean())


def _weigh(scores: Mapping[str, Values], weights: Mapping[str, float]) -> Values:
    return np.array([weights.get(name, 1.0) * values for name, values in scores.items()])
