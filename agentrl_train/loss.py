"""Step 7 of 9: log-probabilities and advantages -> loss. Pure functions of tensors, used by ``learner``.

All tensors have the same shape, with one entry per token. ``weights`` include the global denominator of the
aggregation (``batch.py``), so the loss of a step is the plain sum over tokens, micro-batches and ranks. A
weight of 0 marks a token that is not trained on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Stats = dict[str, Tensor]
"""Scalars: sums over the trained tokens, or maxima for names that end in ``_max``."""

Objective = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Stats]]
"""``(logprobs, behaviour_logprobs, advantages, weights) -> (loss, stats)``."""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: e^20 is far outside every clip range, and sums do not overflow."""


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """Return the clipped policy-gradient loss and its statistics.

    With ``r = exp(logprobs - behaviour_logprobs)`` the loss of a token is ``-min(r A, clip(r, 1 -
    clip_low, 1 + clip_high) A)`` (PPO, arXiv 1707.06347; unequal bounds DAPO, 2503.14476), and for
    ``A < 0`` at most ``-dual_clip * A`` (dual clip, 1912.09729; ``None`` disables it). Stats:
    ``clip_fraction`` (tokens whose gradient is clipped away), ``ratio``, ``ratio_max``, ``kl``
    (k3 estimate of KL(behaviour || policy)).
    """
    trained = weights != 0
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, trained)
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        clipped = clipped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    with torch.no_grad():
        stats = {
            "clip_fraction": (clipped & trained).sum(),
            "ratio": (ratio * trained).sum(),
            "ratio_max": (ratio * trained).amax() if ratio.numel() else ratio.sum(),
            "kl": ((torch.expm1(log_ratio) - log_ratio) * trained).sum(),
        }
    return _weighted_sum(loss, weights), stats


def sft_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, weights: Tensor
) -> tuple[Tensor, Stats]:
    """Return the weighted cross-entropy ``-sum(weights * logprobs)``; the other arguments are ignored."""
    return -_weighted_sum(logprobs, weights), {}


def importance_weights(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    *,
    cap: float = 2.0,
    floor: float | None = None,
) -> Tensor:
    """Return the importance weights of the proximal policy over the sampler, without gradient.

    ``w = min(proximal / behaviour, cap)`` (truncated importance sampling). With a ``floor``, tokens
    whose ratio lies outside ``[floor, cap]`` get 0 instead (masked importance sampling).
    """
    ratio = (proximal_logprobs - behaviour_logprobs).detach().exp()
    if floor is None:
        return ratio.clamp(max=cap)
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)


def kl_penalty(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted k3 estimate of KL(policy || reference), never negative.

    ``q/p - 1 - log(q/p)`` per token: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio = _log_ratio(reference_logprobs, logprobs, weights != 0)
    return _weighted_sum(torch.expm1(log_ratio) - log_ratio, weights)


def entropy_bonus(entropy: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of token entropies, to be subtracted from the loss."""
    return _weighted_sum(entropy, weights)


def _log_ratio(logprobs: Tensor, anchor: Tensor, trained: Tensor) -> Tensor:
    difference = torch.where(trained, logprobs - anchor, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights != 0, weights * values, 0.0).sum()
