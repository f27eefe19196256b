"""Step 7 of 9: log-probabilities and advantages -> loss. Pure functions of tensors, used by ``learner``.

``policy_loss`` composes four functions. Each is an argument, and any function with the same signature can
replace the ones here::

    anchor      log-probabilities that the policy is compared with    ``behaviour``, ``old``, ``interpolated``
    ratio       policy / anchor                                       ``token_ratio``, ``sequence_ratio`` ...
    region      loss of a token, bounded where the ratio is far       ``clip``, ``cap``, ``soft`` ...
    correction  weight of a token where anchor and sampler differ     ``importance_weights``

All tensors have one entry per token. ``Tokens.weights`` include the global denominator of the aggregation
(``batch.py``), so the loss of a step is the plain sum over tokens, micro-batches and ranks. A weight of 0
marks a token that is not trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Stats = dict[str, Tensor]
"""Scalars: sums over the trained tokens, or maxima for names that end in ``_max``."""

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios: e^20 is far outside every clip range, and sums do not overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The N sampled tokens of a micro-batch; all tensors are [N]."""

    logprobs: Tensor
    """Log-probabilities under the policy in training, with gradient."""
    behaviour: Tensor
    """Log-probabilities under the distribution that the tokens were sampled from."""
    advantages: Tensor
    weights: Tensor
    old: Tensor | None = None
    """Log-probabilities recomputed before the update, if the loss needs them."""
    ages: Tensor | None = None
    """Policy versions between the sampling of each token and the start of this step."""
    sequences: Tensor | None = None
    """Number of the sequence of each token, from 0."""
    turns: Tensor | None = None
    """Number of the turn of each token, from 0. Turns of different sequences have different numbers."""


Objective = Callable[[Tokens], "tuple[Tensor, Stats]"]
"""Loss of some tokens, and its statistics."""
Anchor = Callable[[Tokens], Tensor]
Ratio = Callable[[Tensor, Tokens], Tensor]
"""``(log-ratios, tokens) -> ratios``."""
Region = Callable[[Tensor, Tokens], "tuple[Tensor, Tensor]"]
"""``(ratios, tokens) -> (losses, bounded)``; ``bounded`` marks the tokens that the region acted on."""
Correction = Callable[[Tensor, Tokens], Tensor]
"""``(log-probabilities of the anchor, tokens) -> weights``, without gradient."""


def behaviour(tokens: Tokens) -> Tensor:
    """Anchor at the sampler, whatever version it had: one ratio for staleness and update (bypass mode)."""
    return tokens.behaviour


def old(tokens: Tokens) -> Tensor:
    """Anchor at the policy before the update, recomputed: decoupled PPO (arXiv 2110.00641)."""
    return _require(tokens.old, "anchor 'old' needs log-probabilities recomputed before the update")


def interpolated(tokens: Tokens) -> Tensor:
    """Anchor between sampler and policy, without another forward pass (A-3PO, arXiv 2512.06547).

    ``log prox = a log behaviour + (1 - a) log policy``, without gradient, with a = 1 / age, or 1 for an age
    of 0.
    """
    ages = _require(tokens.ages, "anchor 'interpolated' needs the ages of the tokens")
    share = 1.0 / ages.clamp(min=1).to(tokens.logprobs.dtype)
    return share * tokens.behaviour + (1.0 - share) * tokens.logprobs.detach()


def token_ratio(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """Return the ratio of each token (PPO)."""
    return log_ratios.exp()


def turn_ratio(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """Return the geometric mean of the ratios of each turn."""
    return _unit_mean(log_ratios, tokens, _require(tokens.turns, "ratio 'turn' needs turns")).exp()


def sequence_ratio(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """Return the geometric mean of the ratios of each sequence (GSPO, arXiv 2507.18071)."""
    return _unit_mean(log_ratios, tokens, _sequences(tokens)).exp()


def sequence_token_ratio(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    """Return the ratio of the sequence with the gradient of the token (GSPO-token, arXiv 2507.18071)."""
    common = _unit_mean(log_ratios, tokens, _sequences(tokens)).detach()
    return (common + log_ratios - log_ratios.detach()).exp()


def geometric_ratio(
    log_ratios: Tensor, tokens: Tokens, *, low: float, high: float, dual: float = 3.0
) -> Tensor:
    """Return the geometric mean, over a sequence, of token ratios clipped to [1 - low, 1 + high].

    GMPO (arXiv 2507.20673): a ratio is clipped only if that lowers the objective. With a negative advantage
    it is at most ``dual``, as in ``clip``; 0 disables that bound.
    """
    bounded = log_ratios.clamp(math.log1p(-low), math.log1p(high))
    positive = tokens.advantages > 0
    pessimistic = torch.where(
        positive, torch.minimum(log_ratios, bounded), torch.maximum(log_ratios, bounded)
    )
    if dual:
        pessimistic = pessimistic.clamp(max=math.log(max(dual, 1.0 + high)))
    return _unit_mean(pessimistic, tokens, _sequences(tokens)).exp()


def unbounded(ratios: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return ``-r A``."""
    return -ratios * tokens.advantages, torch.zeros_like(ratios, dtype=torch.bool)


def clip(
    ratios: Tensor, tokens: Tokens, *, low: float = 0.2, high: float = 0.28, dual: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Return the larger of ``-r A`` and ``-clip(r, 1 - low, 1 + high) A``.

    For ``A < 0`` it is at most ``-dual A``. PPO (arXiv 1707.06347); unequal bounds: DAPO
    (2503.14476); dual clip: 1912.09729, 0 disables it.
    """
    advantages = tokens.advantages
    plain = -ratios * advantages
    bounded = -ratios.clamp(1.0 - low, 1.0 + high) * advantages
    losses = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual:
        ceiling = torch.where(advantages < 0, -dual * advantages, torch.inf)
        clipped = clipped | (losses > ceiling)
        losses = torch.minimum(losses, ceiling)
    return losses, clipped


def cap(ratios: Tensor, tokens: Tokens, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return ``-clip(r, 1 - low, 1 + high) A log pi``, the clipped ratio without gradient.

    CISPO (arXiv 2506.13585): no token loses its gradient. ``low = 1`` means no lower bound.
    """
    bounded = ratios.detach().clamp(1.0 - low, 1.0 + high)
    logprobs = torch.where(tokens.weights != 0, tokens.logprobs, 0.0)
    return -bounded * tokens.advantages * logprobs, bounded != ratios.detach()


def soft(
    ratios: Tensor, tokens: Tokens, *, positive: float = 1.0, negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """Return ``-(4 / t) sigmoid(t (r - 1)) A`` with t by the sign of A (SAPO, arXiv 2511.20347)."""
    steepness = torch.where(tokens.advantages > 0, positive, negative)
    gates = 4.0 / steepness * torch.sigmoid(steepness * (ratios - 1.0))
    return -gates * tokens.advantages, torch.zeros_like(ratios, dtype=torch.bool)


def divergence(
    ratios: Tensor, tokens: Tokens, *, low: float, high: float, cap: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Return ``-r A`` without the tokens whose probability has moved too far in the direction of A.

    DPPO with the binary total variation (arXiv 2602.04879): a token is omitted if ``p - q > high`` and ``A >
    0``, or ``q - p > low`` and ``A < 0``. p is its current probability and q = p / r its probability under
    the anchor. A rare token keeps its gradient at any ratio, so its weight is at most ``cap``. 0 disables
    this bound.
    """
    plain = ratios.detach()
    moved = tokens.logprobs.detach().exp() * (1.0 - 1.0 / plain)
    outside = ((tokens.advantages > 0) & (moved > high)) | ((tokens.advantages < 0) & (-moved > low))
    excess = (plain / cap).clamp(min=1.0) if cap else torch.ones_like(plain)
    return torch.where(outside, 0.0, -ratios / excess * tokens.advantages), outside | (excess > 1.0)


def band(ratios: Tensor, tokens: Tokens, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return ``-r A`` without the tokens whose ratio lies outside [1 - low, 1 + high], for any A."""
    outside = ((ratios < 1.0 - low) | (ratios > 1.0 + high)).detach()
    return torch.where(outside, 0.0, -ratios * tokens.advantages), outside


def importance_weights(
    anchor: Tensor,
    tokens: Tokens,
    *,
    cap: float = 2.0,
    floor: float | None = None,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Return the importance weights of the anchor over the sampler, without gradient.

    ``w = min(anchor / behaviour, cap)`` (truncated importance sampling, TIS; a ``cap`` of 0 means no bound).
    With a ``floor``, tokens whose ratio lies outside ``[floor, cap]`` get 0 instead (masked importance
    sampling: MIS, IcePop). By sequence, the ratio is the geometric mean over the sequence.
    """
    log_ratios = _log_ratios(anchor, tokens.behaviour, tokens.weights != 0).detach()
    if level == "sequence":
        log_ratios = _unit_mean(log_ratios, tokens, _sequences(tokens))
    ratios = log_ratios.exp()
    if floor is None:
        return ratios.clamp(max=cap) if cap else ratios
    inside = (ratios >= floor) & (ratios <= (cap or math.inf))
    return torch.where(inside, ratios, 0.0)


def policy_loss(
    tokens: Tokens,
    *,
    anchor: Anchor = behaviour,
    ratio: Ratio = token_ratio,
    region: Region = clip,
    correction: Correction | None = None,
) -> tuple[Tensor, Stats]:
    """Return the policy-gradient loss and its statistics; the defaults are those of PPO.

    At the anchor, the gradient of every composition is the plain policy gradient, ``-A grad log pi``. Stats:
    ``clip_fraction`` (tokens that the region acted on), ``ratio``, ``ratio_max``, ``kl`` (k3 estimate of
    KL(anchor || policy)).
    """
    anchored, weights = anchor(tokens), tokens.weights
    log_ratios = _log_ratios(tokens.logprobs, anchored, weights != 0)
    if correction is not None:
        weights = weights * correction(anchored, tokens)
    trained = weights != 0
    ratios = ratio(log_ratios, tokens)
    losses, bounded = region(ratios, tokens)
    with torch.no_grad():
        stats = {
            "clip_fraction": (bounded & trained).sum(),
            "ratio": (ratios * trained).sum(),
            "ratio_max": (ratios * trained).amax() if ratios.numel() else ratios.sum(),
            "kl": ((torch.expm1(log_ratios) - log_ratios) * trained).sum(),
        }
    return _weighted_sum(losses, weights), stats


def sft_loss(tokens: Tokens) -> tuple[Tensor, Stats]:
    """Return the weighted cross-entropy ``-sum(weights * logprobs)``."""
    return -_weighted_sum(tokens.logprobs, tokens.weights), {}


def value_loss(tokens: Tokens, *, clip: float | None = 0.2) -> tuple[Tensor, Stats]:
    """Return half the squared error of a critic's values (PPO, arXiv 1707.06347).

    A critic's ``Tokens`` hold values instead of log-probabilities: ``logprobs`` are the values in training,
    ``behaviour`` the values before the update, and ``advantages`` the target returns. The error is computed
    for the value and for the value clipped to within ``clip`` of the value before the update, and the larger
    error counts. None disables this clipping.
    """
    values, before, returns = tokens.logprobs, tokens.behaviour, tokens.advantages
    losses = (values - returns).square() / 2.0
    if clip is None:
        return _weighted_sum(losses, tokens.weights), {}
    near = before + (values - before).clamp(-clip, clip)
    bounded = (near - returns).square() / 2.0
    stats = {"clip_fraction": ((bounded > losses) & (tokens.weights != 0)).sum()}
    return _weighted_sum(torch.maximum(losses, bounded), tokens.weights), stats


def twin_loss(tokens: Tokens) -> tuple[Tensor, Stats]:
    """Return half the squared error of both twin critics (ArCHer, arXiv 2402.19446).

    ``logprobs`` are the values in training, [N, 2]. ``behaviour`` and ``advantages`` are the targets of the
    first and of the second critic, [N] each, with NaN for unknown targets.
    """
    targets = torch.stack([tokens.behaviour, tokens.advantages], -1)
    errors = torch.where(targets.isnan(), 0.0, tokens.logprobs - targets.nan_to_num())
    return _weighted_sum((errors.square() / 2.0).sum(-1), tokens.weights), {}


def kl_penalty(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    weights: Tensor,
    *,
    estimator: Literal["k2", "k3"] = "k3",
) -> Tensor:
    """Return the weighted estimate of KL(policy || reference), never negative.

    ``k3`` is ``q/p - 1 - log(q/p)`` per token, ``k2`` is ``log(q/p)^2 / 2``, whose gradient is unbiased for
    on-policy tokens: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratios = _log_ratios(reference_logprobs, logprobs, weights != 0)
    if estimator == "k2":
        return _weighted_sum(log_ratios.square() / 2.0, weights)
    return _weighted_sum(torch.expm1(log_ratios) - log_ratios, weights)


def entropy_bonus(entropy: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of token entropies, to be subtracted from the loss."""
    return _weighted_sum(entropy, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a learner: an objective, an entropy bonus, and a penalty for leaving a reference."""

    objective: Objective = policy_loss
    recompute: bool = False
    """Also give the objective the log-probabilities at the start of the step (``Tokens.old``)."""
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    """Weight of the penalty towards the learner's reference, or towards the model without its adapters."""
    kl_estimator: Literal["k2", "k3"] = "k3"


def _log_ratios(logprobs: Tensor, anchor: Tensor, trained: Tensor) -> Tensor:
    difference = torch.where(trained, logprobs - anchor, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _unit_mean(values: Tensor, tokens: Tokens, units: Tensor) -> Tensor:
    """Return the mean of ``values`` over the trained tokens of each unit, for every token of the unit."""
    trained = (tokens.weights != 0).to(values.dtype)
    sums = torch.zeros_like(values).index_add(0, units, values * trained)
    counts = torch.zeros_like(values).index_add(0, units, trained)
    return (sums / counts.clamp(min=1.0))[units]


def _sequences(tokens: Tokens) -> Tensor:
    return _require(tokens.sequences, "a ratio or weight by sequence needs the sequences of the tokens")


def _require(value: Tensor | None, reason: str) -> Tensor:
    if value is None:
        raise ValueError(f"{reason}.")
    return value


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights != 0, weights * values, 0.0).sum()
