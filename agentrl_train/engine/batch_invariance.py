"""Measures whether rows of a batch are computed independently of one another, bit for bit."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

FIXED_ROWS = 16
"""Rows of every decode pass in deterministic mode, padding included."""


@torch.inference_mode()
def independent_rows(model: PreTrainedModel, *, wanted: int = FIXED_ROWS) -> int:
    """Return how many rows may share a pass: ``wanted`` if position and neighbours change no bit, else 1.

    Each token of a batch is tried at every position.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokens = torch.arange(wanted, device=device) * 7919 % vocabulary
    head = model.get_output_embeddings()

    def logits(shift: int) -> torch.Tensor:
        hidden = model.base_model(input_ids=tokens.roll(shift)[:, None], use_cache=False)[0]
        rolled: torch.Tensor = head(hidden[:, -1]).log_softmax(-1)
        return rolled.roll(-shift, dims=0)

    first = logits(0)
    same = all(torch.equal(first, logits(shift)) for shift in range(1, wanted))
    return wanted if same else 1
