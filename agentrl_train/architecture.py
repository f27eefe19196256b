"""Differences between architectures: attention masks, logits, and the tensors of a checkpoint.

Learner and engines call the body and the head of a model themselves. Here is what lies between and behind
them: the tokens that each kind of layer attends to, and the scaling and capping of the logits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.generic import ModelOutput

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LARGE_LOGIT = 100.0
"""Size of the logits that ``check_head`` tries: capping changes large logits only."""


def layer_types(model: PreTrainedModel) -> list[str]:
    """Return the kind of each layer, such as "full_attention" and "sliding_attention".

    Configurations without ``layer_types`` have windows in every layer or in none.
    """
    config = model.config.get_text_config()
    uniform = SLIDING if getattr(config, "sliding_window", None) else FULL
    return list(getattr(config, "layer_types", None) or [uniform] * config.num_hidden_layers)


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Return the kinds of layers that a model has."""
    return set(layer_types(model))


def has_masks(model: PreTrainedModel) -> bool:
    """Return whether ``attention_masks`` determines what every layer sees."""
    return layer_kinds(model) <= {FULL, SLIDING, CHUNKED}


def visible(config: PreTrainedConfig, kind: str, seen: Tensor, *, queries: Tensor, keys: Tensor) -> Tensor:
    """Return what of ``seen`` a layer of this kind attends to.

    Args:
        config: text configuration of the model.
        kind: kind of the layer.
        seen: true where a layer with full attention sees a key, of the shape of ``queries - keys``.
        queries: positions of the queries in their sequences.
        keys: positions of the keys in their sequences.
    """
    mask = seen
    if kind == SLIDING:
        mask = seen & (queries - keys < config.sliding_window)
    elif kind == CHUNKED:
        size = config.attention_chunk_size
        mask = seen & (queries // size == keys // size)
    return mask


def attention_masks(
    model: PreTrainedModel, seen: Tensor, *, queries: Tensor, keys: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return the attention mask of a forward pass, or one for each kind of layer.

    Args:
        model: its layers satisfy ``has_masks``.
        seen: [rows, 1, queries, keys], true where a layer with full attention sees a token.
        queries: positions of the queries in their sequences, [rows or 1, 1, queries, 1].
        keys: positions of the keys in their sequences, [rows or 1, 1, 1, keys].
    """
    config = model.config.get_text_config()
    masks = {}
    for kind in layer_kinds(model):
        mask = visible(config, kind, seen, queries=queries, keys=keys)
        if model.config._attn_implementation == "eager":  # added to the scores
            lowest = torch.finfo(model.dtype).min
            mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill_(~mask, lowest)
        masks[kind] = mask
    return masks.popitem()[1] if len(masks) == 1 else masks


def read_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states, scaled and capped as the model does."""
    config = model.config.get_text_config()
    logits: Tensor = model.get_output_embeddings()(hidden)
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if factor := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if the logits of a model are not ``read_logits`` of its body.

    Random numbers take the place of the body and of the head, those of the latter as large as logits can be,
    so that the result does not depend on the weights, which need not be there.
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
    """The output of a body; what it does not have is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that belong into a checkpoint, such as the biases of a router."""
    stored = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name in stored}


class CheckpointNames:
    """Converts parameters of a model to the names and shapes of its checkpoints, which vLLM reads.

    transformers joins some tensors of a checkpoint in memory, such as the experts of a layer. The conversion
    takes one layer at a time.

    Args:
        model: the model, before it is sharded or gets adapters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.buffers = list(persistent_buffers(model))
        """Names of tensors of the checkpoint that are not trained; engines keep their dtype."""
        shapes = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
        self._sources: dict[str, list[str]] = {}
        for _, names in groupby(shapes, key=layer_of):
            joined = list(names)
            separate = revert_weight_conversion(model, {name: shapes[name] for name in joined})
            self._sources |= dict.fromkeys(separate, joined)
        self._plain = list(shapes) == list(self._sources) and not self.buffers
        self.separated = {name.split(".")[-2] for name in self._sources.keys() - shapes.keys()}
        """Names of layers that are separate in a checkpoint only, such as ``gate_proj`` of experts."""

    def __call__(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a view of ``state``, a name -> parameter mapping, with the names of a checkpoint."""
        if self._plain:
            return state
        buffers = {name: self._model.get_buffer(name) for name in self.buffers}
        return _Converted(self._model, self._sources, buffers, state)


class _Converted(Mapping[str, Tensor]):
    """The tensors of a checkpoint; the last converted layer is kept."""

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Mapping[str, list[str]],
        buffers: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> None:
        self._model = model
        self._sources = sources
        self._buffers = buffers
        self._state = state
        self._held: Mapping[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            return self._buffers[name]
        if name not in self._held:
            self._held = {}
            joined = {source: self._state[source] for source in self._sources[name]}
            self._held = revert_weight_conversion(self._model, joined)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._buffers  # first, where wider numbers are aligned in a file
        yield from self._sources

    def __len__(self) -> int:
        return len(self._buffers) + len(self._sources)


def layer_of(name: str) -> str:
    """Return the part of a parameter name up to the number of its layer."""
    numbered = re.match(r".*?\.\d+\.", name)
    return numbered[0] if numbered else ""
