"""Packed rows -> log-probabilities of the sampled tokens.

The head and the softmax run only at sampled tokens, in chunks, so that no [tokens, vocabulary] tensor is
materialized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from agentrl_train.types import MicroBatch, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = tuple[int, int]
"""Slice of every row that a rank holds, as (index, count); ``(0, 1)`` is the whole row."""
WHOLE: Part = (0, 1)


class Scorer(nn.Module):
    """A causal language model that outputs log-probability and entropy of the sampled tokens.

    Body and head share one ``forward``, so that a sharded model gathers tied embeddings once.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, max_logits: int, part: Part) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._max_logits = max_logits
        self._part = part

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return ``sampled_logprobs`` of this rank's slice of the rows."""
        return sampled_logprobs(
            self.model,
            micro,
            temperature=self._temperature,
            max_logits=self._max_logits,
            entropy_gradient=entropy_gradient,
            part=self._part,
        )


def sampled_logprobs(
    model: PreTrainedModel,
    micro: MicroBatch,
    *,
    temperature: float = 1.0,
    max_logits: int = 2**26,
    entropy_gradient: bool = False,
    part: Part = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of a micro-batch's N sampled tokens, [N] each, by rows.

    Computed on the model's device. Logits [N, vocabulary] of more than ``max_logits`` entries are computed in
    chunks, and recomputed in the backward pass. A ``part`` of the rows scores the tokens whose predecessor is
    in it.
    """
    device = next(model.parameters()).device
    inputs = _inputs(model, micro, part, device=device)
    hidden = model.base_model(use_cache=False, **inputs)[0]
    predicts = (_next(micro.loss_mask, part) > 0).to(device)
    hidden, targets = hidden[predicts], _next(micro.token_ids, part).to(device)[predicts]
    head = model.get_output_embeddings()

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).sum(-1), entropy

    size = max(1, max_logits // head.weight.shape[0])
    if len(targets) <= size:
        return score(hidden, targets)
    chunks = [
        checkpoint(score, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([one for one, _ in chunks]), torch.cat([one for _, one in chunks])


def select_sampled(values: Tensor, micro: MicroBatch, part: Part = WHOLE) -> Tensor:
    """Return the entries [N] of ``values`` [rows, row length] at the sampled tokens, by rows."""
    return _next(values, part)[_next(micro.loss_mask, part) > 0]


def padding_free(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch as one row without padding; sampled tokens keep their order.

    The first token of a sequence is never sampled, so no prediction crosses a sequence boundary.
    """
    real = micro.segment_ids > 0
    begins = micro.position_ids[real] == 0
    fields = {name: getattr(micro, name)[real][None] for name in MicroBatch.__slots__}
    return MicroBatch(**fields | {"segment_ids": begins.cumsum(0)[None]})


def packs_rows(model: PreTrainedModel) -> bool:
    """Return whether the model supports packed rows: full attention in every layer."""
    layer_types = getattr(model.config, "layer_types", None) or ["full_attention"]
    return set(layer_types) == {"full_attention"}


def use_flash(model: PreTrainedModel, name: str) -> None:
    """Switch a model to flash-attn; raises ``ValueError`` if it is not available."""
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"train.attention = {name!r} is not available: {reason}") from error


def uses_flash(model: PreTrainedModel) -> bool:
    """Return whether the model uses flash-attn, which supports packed rows of variable length."""
    return str(model.config._attn_implementation).startswith("flash_attention")


def check_head(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ``ValueError`` if the model caps or scales the logits after its head."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        plain = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False)[0])
    if not torch.allclose(whole.float(), plain.float(), rtol=1e-2, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} caps or scales its logits after the head, which the learner "
            "does not reproduce; train a model whose logits are the head's output."
        )


def one_row(one: TokenSequence) -> MicroBatch:
    """Return a sequence as a micro-batch of one row."""
    mask = torch.from_numpy(one.loss_mask)[None]
    return MicroBatch(
        token_ids=torch.from_numpy(one.token_ids)[None],
        position_ids=torch.arange(len(one))[None],
        segment_ids=torch.ones(1, len(one), dtype=torch.int64),
        loss_mask=mask,
        logprobs=torch.from_numpy(one.logprobs)[None],
        advantages=torch.from_numpy(one.advantages)[None],
        weights=mask,
    )


def _inputs(
    model: PreTrainedModel, micro: MicroBatch, part: Part, *, device: torch.device
) -> dict[str, Tensor]:
    """Return the inputs of the model body: tokens and, where needed, positions and mask.

    Packed rows get a block-causal mask [rows, 1, row length, row length] over whole rows, also where a rank
    holds a slice of them. Flash attention derives the boundaries from the positions and needs no mask.
    """
    packed = _is_packed(micro, model)
    inputs = {"input_ids": _cut(micro.token_ids, part).to(device)}
    if packed or part != WHOLE:
        inputs["position_ids"] = _cut(micro.position_ids, part).to(device)
    if packed and not uses_flash(model):
        segments = _padded(micro.segment_ids, part).to(device)
        same = segments[:, None, :, None] == segments[:, None, None, :]
        inputs["attention_mask"] = same.tril()
    return inputs


def _is_packed(micro: MicroBatch, model: PreTrainedModel) -> bool:
    """Return whether sequences share a row and need a mask.

    Rows of one sequence need none: causal attention ignores padding behind a sequence, and faster kernels run
    without a mask. Raises ``ValueError`` if the model does not support packed rows.
    """
    packed = int(micro.segment_ids.max()) > 1
    if packed and not packs_rows(model):
        raise ValueError(
            "this model has layers other than full attention, which do not separate packed sequences; "
            "pack with packed=False, one sequence per row."
        )
    return packed


def _next(values: Tensor, part: Part) -> Tensor:
    """Return, for each token of the part, the entry of the next token; 0 at the end of a row."""
    return _cut(pad(values[:, 1:], (0, 1)), part)


def _cut(values: Tensor, part: Part) -> Tensor:
    index, count = part
    return _padded(values, part).chunk(count, dim=1)[index]


def _padded(values: Tensor, part: Part) -> Tensor:
    return pad(values, (0, -values.shape[1] % part[1]))
