"""Truncated sampling, which excludes improbable tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl_train.types import SamplingParams


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
