"""Draw tokens, each request from its own random stream, with the exact log-probability of each draw."""

from __future__ import annotations

import torch


def sample(
    logits: torch.Tensor, *, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the distribution function.

    A row's draw depends on its own uniform number alone, never on its neighbours in the batch.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows]; 0 is greedy, and the log-probability is then that of temperature 1.
        uniforms: [rows], in [0, 1).

    Returns:
        Token ids [rows] and their log-probabilities [rows], float32.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)  # float32 loses the far tail
    targets = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    tokens = torch.where(greedy, scaled.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]
