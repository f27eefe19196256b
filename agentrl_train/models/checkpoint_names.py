"""Names and shapes of a model's tensors in its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def persistent_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that belong in a checkpoint, such as the biases of a router."""
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
        """Names of tensors of the checkpoint that are not trained. Engines keep their dtype."""
        shapes = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
        self._sources: dict[str, list[str]] = {}
        for _, names in groupby(shapes, key=layer_of):
            joined = list(names)
            separate = revert_weight_conversion(model, {name: shapes[name] for name in joined})
            self._sources |= dict.fromkeys(separate, joined)
        self._plain = list(shapes) == list(self._sources) and not self.buffers
        self.separated = {name.split(".")[-2] for name in self._sources.keys() - shapes.keys()}
        """Names of layers that are separate only in a checkpoint, such as ``gate_proj`` of experts."""

    def __call__(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a view of ``state``, a name -> parameter mapping, with the names of a checkpoint."""
        if self._plain:
            return state
        buffers = {name: self._model.get_buffer(name) for name in self.buffers}
        return _Converted(self._model, self._sources, buffers, state)


class _Converted(Mapping[str, Tensor]):
    """The tensors of a checkpoint. Keeps the last converted layer."""

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
        yield from self._buffers  # first, so that wider numbers are aligned in a file
        yield from self._sources

    def __len__(self) -> int:
        return len(self._buffers) + len(self._sources)


def layer_of(name: str) -> str:
    """Return the part of a parameter name up to the number of its layer."""
    numbered = re.match(r".*?\.\d+\.", name)
    return numbered[0] if numbered else ""
