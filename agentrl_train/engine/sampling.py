"""Sampling of tokens from logits, among all tokens or, with truncation, only the probable ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl_train.errors import EngineBroken, not_numbers
from agentrl_train.types import SamplingParams

BLOCK = 256
"""Number of weights in a block."""
SINGLE_BLOCK = 4096
"""Up to this number of weights, blocks are not faster."""
CACHED_LOGITS = 2**19
"""Number of logits that the caches of a processor hold, with the weights that are computed from them."""
LARGEST_UNIFORM = 1 - 2**-30
"""Prevents rounding from selecting the zero weights at the end of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The limits of ``SamplingParams`` on the tokens that can be sampled, [rows] each."""

    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, requested: Sequence[SamplingParams], device: torch.device) -> Truncation:
        """Return the limits of these rows."""
        return cls(
            top_p=torch.tensor([one.top_p for one in requested], device=device),
            top_k=torch.tensor([one.top_k for one in requested], device=device),
            min_p=torch.tensor([one.min_p for one in requested], device=device),
        )

    def __getitem__(self, rows: slice) -> Truncation:
        """Return the limits of some rows."""
        return Truncation(top_p=self.top_p[rows], top_k=self.top_k[rows], min_p=self.min_p[rows])

    def apply(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] that are -inf for the excluded tokens.

        The limits apply in the order of vLLM: ``min_p``, ``top_k``, then ``top_p`` of the remaining tokens.
        The most probable token is always kept.
        """
        ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        out = ordered < ordered[:, :1] + self.min_p.log()[:, None]
        ranks = torch.arange(scaled.shape[-1], device=scaled.device)
        out |= (ranks >= self.top_k[:, None]) & (self.top_k > 0)[:, None]
        probabilities = ordered.masked_fill(out, -torch.inf).softmax(dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities
        out |= (before >= self.top_p[:, None]) & (self.top_p < 1.0)[:, None]
        return scaled.masked_fill(out.scatter(-1, tokens, out), -torch.inf)


def sample(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    truncation: Truncation | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverse transform sampling.

    The sample of a row depends only on its own uniform number, not on the rest of the batch.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows]. 0 is greedy, with the log-probability of temperature 1.
        uniforms: [rows], in [0, 1).
        truncation: limits that exclude improbable tokens.
        allowed: tokens that a constraint allows, [rows, vocabulary]. The others are excluded before
            ``truncation``. None allows all tokens.

    Returns:
        Token ids [rows], and their log-probabilities [rows] in float32 among the remaining tokens.
    """
    rows = max(1, CACHED_LOGITS // logits.shape[1])
    if logits.device.type == "cpu" and len(logits) > rows:
        parts = [
            sample(
                logits[part],
                temperatures=temperatures[part],
                uniforms=uniforms[part],
                truncation=truncation[part] if truncation is not None else None,
                allowed=allowed[part] if allowed is not None else None,
            )
            for part in (slice(begin, begin + rows) for begin in range(0, len(logits), rows))
        ]
        drawn, scores = zip(*parts, strict=True)
        return torch.cat(drawn), torch.cat(scores)
    greedy = temperatures == 0
    scaled = logits.float()
    if not bool((temperatures == 1).all()):
        scaled = scaled / torch.where(greedy, 1.0, temperatures)[:, None]
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    if truncation is not None:
        scaled = truncation.apply(scaled)
    largest = scaled.amax(dim=-1, keepdim=True)
    tokens, total = draw((scaled - largest).exp_(), uniforms[:, None].double())
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    logprobs = scaled.gather(-1, tokens) - largest - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index of each row, drawn in proportion to its weight, and the sum of the row.

    Many weights are summed by blocks, and one by one only in the block that contains the draw. Cumulative
    sums need float64, because float32 would lose the tail, and float64 is slow for a whole vocabulary.

    Args:
        weights: [rows, size], not negative.
        uniforms: [rows, 1], float64 in [0, 1).

    Returns:
        Indices [rows, 1] and sums [rows, 1] in float64.
    """
    rows, size = weights.shape
    if size <= SINGLE_BLOCK:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniforms * total, right=True).clamp_(max=size - 1), total
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK)) if size % BLOCK else weights
    blocks = padded.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniforms * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    within = 1 - (cumulative.gather(1, block) - target) / sums.gather(1, block).double()
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    column, _ = draw(inside, within.clamp_(0, LARGEST_UNIFORM))
    return block * BLOCK + column, total


def require_numbers(logprobs: Sequence[float], *, version: int) -> None:
    """Raise ``EngineBroken`` if a sampled token has no log-probability, because its draw means nothing.

    Args:
        logprobs: log-probabilities of sampled tokens.
        version: policy version of the weights.
    """
    if not all(map(math.isfinite, logprobs)):
        raise EngineBroken(not_numbers("engine", version))
