"""SWEET-RL (arXiv 2503.15478): a critic of turns that sees privileged information, from preferences.

Pure functions of numpy arrays, float64. The critic is a language model; the advantage of a turn is the mean
over its tokens of the log-ratio of the critic, which sees the information, to a reference, which does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl_train.advantage import RESOLUTION, Values


def turn_means(log_ratios: Values, turns: NDArray[np.int64], *, count: int) -> Values:
    """Return the mean log-ratio of the tokens of each of ``count`` turns, 0 for turns without tokens.

    ``turns`` are the numbers of the tokens' turns, [n]. A long turn weighs as much as a short one.
    """
    sums = np.bincount(turns, weights=log_ratios, minlength=count)
    means: Values = sums / np.maximum(1, np.bincount(turns, minlength=count))
    return means


def drawn_pairs(advantages: Values, *, count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Return pairs of a better and a worse completion of a turn, drawn from the halves of their ranking.

    Args:
        advantages: of the completions, [n]; equal ones keep their order.
        count: number of pairs; none of fewer than two completions.
        generator: draws the pairs, with replacement.
    """
    order = np.argsort(-advantages, kind="stable")
    if not (half := len(order) // 2):
        return []
    draws = generator.integers(half, size=(count, 2))
    return [(int(order[better]), int(order[-1 - worse])) for better, worse in draws]


def preference_loss(scores: Values, returns: Values, *, beta: float) -> tuple[float, Values, int]:
    """Return the loss of Bradley-Terry over the pairs of some trajectories, its gradient, and their number.

    ``-log sigmoid(beta (S_i - S_j))``, summed over the pairs where i has the larger return, with S the sum of
    the advantages of a trajectory's turns.

    Args:
        scores: S of each trajectory of a group, [N].
        returns: their returns, [N]; those that differ by rounding are no pair.
        beta: steepness.
    """
    differences = returns[:, None] - returns[None, :]
    better = differences > RESOLUTION * np.abs(returns).max(initial=0.0)
    margins = beta * (scores[:, None] - scores[None, :])
    losses = np.where(better, np.logaddexp(0.0, -margins), 0.0)
    slopes = np.where(better, -beta / (1.0 + np.exp(np.minimum(margins, 500.0))), 0.0)
    return float(losses.sum()), slopes.sum(1) - slopes.sum(0), int(better.sum())


def dpo(
    scores: Values,
    pairs: Sequence[tuple[int, int]],
    *,
    sizes: NDArray[np.int64],
    beta: float,
    likelihood: float,
) -> tuple[float, Values]:
    """Return the mean loss of pairs, and its gradient by the log-probability of a token of each completion.

    The loss of a pair is ``-log sigmoid(beta (S_better - S_worse))``, DPO (arXiv 2305.18290), less the mean
    log-probability of the better one's tokens times ``likelihood``, which is in the gradient alone.

    Args:
        scores: sums over the tokens of the log-ratio of the policy to the reference, [n].
        pairs: numbers of the better and the worse completion.
        sizes: tokens of each completion, [n].
        beta: steepness.
        likelihood: weight of the log-likelihood.
    """
    total, gradient = 0.0, np.zeros(len(scores))
    for better, worse in pairs:
        loss, slopes, _ = preference_loss(scores[[better, worse]], np.array([1.0, 0.0]), beta=beta)
        total += loss
        gradient[[better, worse]] += slopes
        gradient[better] -= likelihood / sizes[better]
    return total / max(1, len(pairs)), gradient / max(1, len(pairs))
