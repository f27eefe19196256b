"""Checks before training that the learner computes what a model computes in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from agentrl_train.learner.logprobs import ATTENTION, one_row, sampled_logprobs
from agentrl_train.models.architecture import check_logprobs, has_masks, probes, read_logits
from agentrl_train.types import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE_LOGIT = 100.0
"""Size of the logits in ``check_head``. Capping changes only large logits."""


@torch.no_grad()
def check_attention(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if packing changes the log-probabilities of a model."""
    if not has_masks(model) or model.config._attn_implementation != ATTENTION:
        return
    sequences = probes(model)
    row = one_row(*(_sampled_tokens(token_ids) for token_ids in sequences))
    found, _ = sampled_logprobs(model, row)
    sizes = [len(token_ids) - 1 for token_ids in sequences]
    try:
        check_logprobs(model, zip(sequences, found.split(sizes), strict=True))
    except ValueError as error:
        raise ValueError(f"{error}; set model.attention = 'eager'") from error


def _sampled_tokens(token_ids: Sequence[int]) -> TokenSequence:
    """Return a sequence of tokens that are all sampled, except the first."""
    mask = (np.arange(len(token_ids)) > 0).astype(np.float32)
    return TokenSequence(
        token_ids=np.array(token_ids),
        loss_mask=mask,
        logprobs=mask,
        versions=mask.astype(np.int64),
        advantages=mask,
        task="",
        group_id=0,
    )


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if the logits of a model are not ``read_logits`` of its body.

    Random numbers replace the outputs of the body and of the head, so that the result does not depend on the
    weights, which do not have to be loaded. The numbers of the head are as large as logits can be.
    """
    if model.base_model is model:
        raise ValueError(
            f"{type(model).__name__} does not say which part of it comes before the head, so it cannot be "
            "trained: use a model of another architecture."
        )
    body, head = model.base_model, model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    device = torch.device("cpu") if head.weight.is_meta else head.weight.device
    generator = torch.Generator().manual_seed(0)
    hidden, logits = (
        (torch.randn(1, 4, size, generator=generator) * scale).to(device, model.dtype)
        for size, scale in ((width, 1.0), (vocabulary, LARGE_LOGIT))
    )
    entered: list[Tensor] = []

    def read(inputs: Tensor) -> Tensor:
        entered.append(inputs)
        return logits

    ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
    try:
        body.forward, head.forward = (lambda *_, **__: _Output(last_hidden_state=hidden)), read
        whole = model(input_ids=ids, use_cache=False).logits
        plain = read_logits(model, hidden)
    finally:
        del body.forward, head.forward
    same = len(entered) == 2 and torch.equal(entered[0], entered[1])
    if not (same and torch.allclose(whole.float(), plain.float(), rtol=1e-3, atol=1e-3)):
        raise ValueError(
            f"{type(model).__name__} changes hidden states or logits around its head in a way that is not "
            "known here, so log-probabilities would be wrong: train a model of another architecture."
        )


@dataclass
class _Output(ModelOutput):
    """The output of a body. Missing attributes are None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
