"""Sampling of tokens from logits: temperature, constraint, truncation and the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from agentrl_train.types import SamplingParams

BLOCK = 256
"""Weights of a block."""
SINGLE_BLOCK = 4096
"""Number of weights up to which blocks do not pay."""
LARGEST_UNIFORM = 1 - 2**-30
"""Keeps a draw off the weights of zero at the end of a block, where rounding would lead it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The limits of ``SamplingParams`` on the tokens that may be sampled, [rows] each."""

    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, requested: Sequence[SamplingParams], device: torch.device) -> Truncation | None:
        """Return the limits of these rows, or None where none of them has any."""
        if all(one.top_p == 1.0 and one.top_k == 0 and one.min_p == 0.0 for one in requested):
            return None
        return cls(
            top_p=torch.tensor([one.top_p for one in requested], device=device),
            top_k=torch.tensor([one.top_k for one in requested], device=device),
            min_p=torch.tensor([one.min_p for one in requested], device=device),
        )

    def apply(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] that are -inf for the tokens that are left out.

        In the order of vLLM: ``min_p``, ``top_k``, then ``top_p`` of what these leave. The most probable
        token is always kept.
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
        temperatures: [rows]; 0 is greedy, and the log-probability is then that of temperature 1.
        uniforms: [rows], in [0, 1).
        truncation: which tokens are left out.
        allowed: tokens that a constraint allows, [rows, vocabulary]; the others are left out before
            ``truncation``. None allows all.

    Returns:
        Token ids [rows] and their log-probabilities [rows], float32, among the tokens that are kept.
    """
    greedy = temperatures == 0
    scaled = logits.float()
    if not bool((temperatures == 1).all()):
        scaled = scaled / torch.where(greedy, 1.0, temperatures)[:, None]
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    if truncation is not None:
        scaled = truncation.apply(scaled)
    largest, best = scaled.max(dim=-1, keepdim=True)
    weights = (scaled - largest).exp_()
    drawn, total = draw(weights, uniforms[:, None].double())
    tokens = torch.where(greedy[:, None], best, drawn)
    logprobs = scaled.gather(-1, tokens) - largest - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index of each row, drawn in proportion to its weight, and the sum of the row.

    Many weights are summed by blocks, and one by one only in the block that the draw falls into, because
    cumulative sums need float64, in which float32 loses no tail, and that is slow for a whole vocabulary.

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
        found = torch.searchsorted(cumulative, uniforms * total, right=True)
        return found.clamp_(max=size - 1), total
    blocks = F.pad(weights, (0, -size % BLOCK)).view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniforms * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    share = sums.gather(1, block).double()
    within = 1 - (cumulative.gather(1, block) - target) / share
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    column, _ = draw(inside, within.clamp_(0, LARGEST_UNIFORM))
    return block * BLOCK + column, total


def unpacked(sets: Sequence[bytes], vocabulary: int) -> torch.Tensor:
    """Return sets of tokens, packed as in ``AllowedSets``, as booleans [sets, vocabulary]; b"" has all."""
    found = np.ones((len(sets), vocabulary), dtype=bool)
    for row, packed in zip(found, sets, strict=True):
        if packed:
            row[:] = np.unpackbits(np.frombuffer(packed, np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(found)
