"""Weights of a model in safetensors files, read one layer at a time.

A model on the meta device first gets adapters and is sharded. Then every rank reads one layer after another
and keeps its shards. No rank ever holds more than one whole layer.
"""

from __future__ import annotations

import copy
import inspect
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from agentrl_train.models.adapters import REVISION
from agentrl_train.models.checkpoint_names import layer_of, persistent_buffers
from agentrl_train.models.shards import part_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNREAD = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Buffers in old files, which models now compute."""
BUILDING = threading.Lock()
"""Held while a model is built, because the library then replaces methods of all models in the process."""


def auto_class(config: Any) -> Any:
    """Return the class that loads models of a configuration with their language head."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def require_whole_weights(config: Any) -> None:
    """Check that the weights of a configuration can be trained.

    Raises:
        ValueError: they are quantized.
    """
    parts = (config, config.get_text_config())
    quantization = next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)
    if quantization is not None:
        settings = quantization if isinstance(quantization, dict) else vars(quantization)
        method = settings.get("quant_method", "an unknown method")
        raise ValueError(
            f"its weights are quantized ({getattr(method, 'value', method)}) and cannot be trained: "
            "choose the model without quantization, or dequantize it first"
        )


def require_all_tensors(*, lacking: Collection[str], mismatched: Collection[Any]) -> None:
    """Check that transformers has found all tensors of a model in its files.

    Args:
        lacking: names of the missing tensors.
        mismatched: names and both shapes of tensors with other shapes.

    Raises:
        ValueError: a tensor is missing, or has another shape.
    """
    if lacking:
        raise ValueError(
            f"its files lack {len(lacking)} tensors, {min(lacking)} first: download them again, or correct "
            "the architecture in its config.json"
        )
    if mismatched:
        name, stored, expected = min(mismatched)
        raise ValueError(
            f"its files have {name} in the shape {tuple(stored)}, its config.json {tuple(expected)}: correct "
            "its config.json"
        )


def require_no_surplus(model: PreTrainedModel, surplus: Iterable[str]) -> None:
    """Check that the files of a model have no tensors that its modules do not read.

    The files can have tensors that transformers ignores for the architecture, buffers, layers for multi-token
    prediction, and modules that the model does not have, such as a value head.

    Args:
        model: the model, with or without weights.
        surplus: names in its files that it has not read.

    Raises:
        ValueError: a tensor belongs to a module of the model, or to a layer beyond the last.
    """
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), *_UNREAD]))
    modules = {name for name, _ in model.named_modules() if name}
    prefix = f"{model.base_model_prefix}."
    predicted = _predicted_layers(model.config.get_text_config())

    def belongs(name: str) -> bool:
        """Return True if the model has the module of a tensor, or the list of its layer."""
        owner = name.rpartition(".")[0]
        layers, _, number = layer_of(name)[:-1].rpartition(".")
        owners = {owner} if number in predicted else {owner, layers}
        return any(one in modules or prefix + one in modules for one in owners)

    if found := [name for name in surplus if not ignored.search(name) and belongs(name)]:
        raise ValueError(
            f"its files have {len(found)} tensors that its architecture does not use, {min(found)} first: "
            "correct the architecture in its config.json"
        )


def _predicted_layers(config: Any) -> set[str]:
    """Return the numbers of the layers for multi-token prediction, which follow the last layer."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return {str(number) for number in range(first, first + count)}


def require_ties(model: PreTrainedModel) -> None:
    """Check that a loaded model has tied the tensors that its configuration ties.

    Raises:
        ValueError: it has not, because its files have different tensors.
    """
    tensors = tensors_of(model)
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if tensors[name] is not tensors[other]:
            raise _different_tensors(name, other)


def _different_tensors(name: str, other: str) -> ValueError:
    return ValueError(
        f"its files have different tensors {name} and {other}, which its configuration ties: set "
        "tie_word_embeddings to false in its config.json"
    )


def safetensors_files(path: str | Path, *, revision: str | None = None) -> list[str]:
    """Return the safetensors files of a model in a folder or on the hub. Empty if it has other files."""
    place = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if (found := cached_file(path, SAFE_WEIGHTS_NAME, **place)) is not None:
        return [found]
    if (index := cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **place)) is not None:
        return list(get_checkpoint_shard_files(path, index, revision=revision)[0])
    return []


class StoredModel:
    """A model whose weights are in safetensors files.

    Args:
        path: a model folder, or a model name on the hub.
        files: its ``safetensors_files``.
        dtype: dtype of the parameters.
        revision: revision on the hub.

    Raises:
        OSError: the model has no configuration.
        ValueError: tensors of the model are missing from the files, or have other shapes.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        files: Sequence[str],
        dtype: torch.dtype,
        revision: str | None = None,
    ) -> None:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        require_whole_weights(config)
        self._files = files
        self._empty = _without_weights(config, dtype)
        with suppress(OSError):  # the model has no generation config
            self._empty.generation_config = GenerationConfig.from_pretrained(
                path, revision=revision or "main"
            )
        setattr(self._empty, REVISION, revision)
        self._dtype = dtype
        self._conversions: list[Any] = get_model_conversion_mapping(self._empty)
        self._check()

    def model(self) -> PreTrainedModel:
        """Return the model, its parameters and persistent buffers on the meta device."""
        return copy.deepcopy(self._empty)

    def layers(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each layer, and the tensors outside the layers, in host memory."""
        with ExitStack() as stack:
            groups: dict[str, dict[str, Any]] = {}
            for file in (stack.enter_context(safe_open(path, framework="pt")) for path in self._files):
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    groups.setdefault(layer_of(name), {})[name] = file.get_slice(name)
            for tensors in groups.values():
                one = copy.deepcopy(self._empty)
                self._convert(one, tensors, device="cpu")
                read = {name: value for name, value in tensors_of(one).items() if not value.is_meta}
                self._check_tied(read)
                yield read

    def load_into(self, model: PreTrainedModel) -> None:
        """Copy the weights into a model, each rank into its shards."""
        for tensors in self.layers():
            fill(model, tensors)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each parameter and persistent buffer."""
        return {name: value.shape for name, value in tensors_of(self._empty).items()}

    def _convert(self, model: PreTrainedModel, tensors: Mapping[str, Any], *, device: str) -> Any:
        """Let transformers rename, join and cast tensors of the files into a model without weights."""
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=self._dtype,
            dtype_plan=model._get_dtype_plan(self._dtype),
            weight_mapping=self._conversions,
        )
        # The first versions of transformers 5 require a plan of tensor parallelism.
        accepted = inspect.signature(convert_and_load_state_dict_in_model).parameters
        plan = {"tp_plan": None} if "tp_plan" in accepted else {}
        return convert_and_load_state_dict_in_model(model, dict(tensors), config, **plan)[0]

    def _check_tied(self, read: Mapping[str, Tensor]) -> None:
        for name, other in self._empty.all_tied_weights_keys.items():
            if name in read and other in read and not torch.equal(read[name], read[other]):
                raise _different_tensors(name, other)

    def _check(self) -> None:
        """Convert only the shapes, to find missing tensors and the names in a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    tensors[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
        tried = copy.deepcopy(self._empty)
        found = self._convert(tried, tensors, device="meta")
        self._empty._weight_conversions = tried._weight_conversions
        names: dict[int, set[str]] = {}
        for name, value in tensors_of(self._empty).items():
            names.setdefault(id(value), set()).add(name)
        require_all_tensors(
            lacking=[min(tied) for tied in names.values() if tied <= found.missing_keys],
            mismatched=found.mismatched_keys,
        )
        require_no_surplus(self._empty, found.unexpected_keys)
        if found.conversion_errors:
            raise ValueError(f"its files do not fit its architecture: {next(iter(found.conversion_errors))}")
        dtypes = {name: value.dtype for name, value in tensors_of(tried).items()}
        for name, value in tensors_of(self._empty).items():
            value.data = value.data.to(dtypes[name])  # some stay in float32


@torch.no_grad()
def fill(model: PreTrainedModel, whole: Mapping[str, Tensor]) -> None:
    """Copy full tensors into the named parameters and buffers, each rank into its shard."""
    stored = tensors_of(model)
    for name, value in whole.items():
        mine, begin = part_of(stored[name])
        mine.copy_(value[tuple(slice(a, a + n) for a, n in zip(begin, mine.shape, strict=True))])


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate tensors of the meta device on a device, and move the other tensors there."""
    for value in module.parameters():  # in place, so that tied parameters stay tied
        if value.is_meta:
            empty = nn.Parameter(torch.empty_like(value, device=device), value.requires_grad)
            torch.utils.swap_tensors(value, empty)
    module._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters and the buffers of a checkpoint. Tied parameters have all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | persistent_buffers(model)


def _without_weights(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model on the meta device, except for buffers that no file has, such as rotary frequencies."""
    with BUILDING, torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    for name, value in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(value, device="cpu")
    model.initialize_weights()
    model.eval()
    return model
