"""Memory of a run: weights, key/value cache, gradients, optimizer state and activations.

Estimates from the shapes of the model. For SmolLM2-135M in float32, the activations of an update of 2,048
tokens took 3.7 GB, and 1.0 GB with activation checkpointing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from agentrl_train.config import EngineSection, LoraSection, ModelSection, TrainSection
from agentrl_train.engine.cache import PAGE
from agentrl_train.learner.lora import add_adapters, is_adapter
from agentrl_train.models.architecture import (
    CHUNKED,
    FULL,
    SLIDING,
    SMALLEST_PACKED_MODEL,
    context_limit,
    layer_types,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MARGIN = 1.1
"""Factor on the activations, for norms of heads, masks and the allocator."""
HEAD_LOGITS = 2**26
"""Logits that the learner computes at a time."""
HEAD_COPIES = 4
"""Number of float32 tensors of the size of these logits that exist at the same time."""
LIBRARIES = 4e8
"""Bytes of a process that has loaded its libraries and no model."""
VLLM_CPU_CACHE = 2**30
"""Bytes of the key/value cache of vLLM on a CPU."""
REMEDY = LoraSection(rank=16, alpha=32.0)
"""Adapters that replace training of all weights if it does not fit."""
BYTES = {"float32": 4, "bfloat16": 2}
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The shapes of a model that determine its memory."""

    parameters: int
    adapters: int
    """Parameters of the LoRA adapters."""
    layers: int
    width: int
    cached: int
    """Numbers in the key/value cache for each token."""
    saved: int
    """Numbers that a layer keeps for each token for the backward pass."""
    vocabulary: int
    max_context: int
    """Longest context that the model was made for."""


def size_of(
    model: PreTrainedModel, lora: LoraSection | None = None, *, remedy: LoraSection | None = None
) -> ModelSize:
    """Return the shapes of a model, which can be on the meta device.

    Args:
        model: the model.
        lora: adapters of the run.
        remedy: adapters to count if the run has none. If their targets match no layer, 0 are counted.

    Raises:
        ValueError: no layer matches ``lora.targets``.
    """
    config = model.config.get_text_config()
    # Gemma-4 has layers of different shapes.
    each = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    layers = [_layer_shape(one, width=config.hidden_size) for one in each]
    attending = (kind in (FULL, SLIDING, CHUNKED) for kind in layer_types(config))
    adapters = 0
    try:
        if chosen := lora or remedy:
            adapters = _count_adapters(model, chosen)
    except ValueError:
        if lora is not None:
            raise
    return ModelSize(
        parameters=sum(value.numel() for value in model.parameters()),
        adapters=adapters,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        cached=sum(2 * layer.keys for layer, attends in zip(layers, attending, strict=True) if attends),
        saved=max(
            5 * config.hidden_size + 3 * layer.queries + 4 * layer.keys + 4 * layer.inner for layer in layers
        ),
        vocabulary=config.vocab_size,
        max_context=context_limit(config) or 2**20,
    )


class _LayerShape(NamedTuple):
    """Numbers of a layer for each token."""

    queries: int
    keys: int
    inner: int


def _layer_shape(config: PreTrainedConfig, *, width: int) -> _LayerShape:
    heads = _largest(config, "num_attention_heads")
    head_width = _largest(config, "head_dim") or width // heads
    inner = _largest(config, "intermediate_size") or 4 * width
    if experts := _largest(config, "num_experts_per_tok"):
        inner = experts * (_largest(config, "moe_intermediate_size") or inner)
    keys = (_largest(config, "num_key_value_heads") or heads) * head_width
    return _LayerShape(queries=heads * head_width, keys=keys, inner=inner)


def _largest(config: PreTrainedConfig, name: str) -> int:
    """Return a number of a configuration, the largest of a list with one for each layer, or 0 if missing."""
    value = getattr(config, name, None) or 0
    return max(value) if isinstance(value, Sequence) else int(value)


def _count_adapters(model: PreTrainedModel, lora: LoraSection) -> int:
    adapted = copy.deepcopy(model).to("meta")  # type: ignore[arg-type]  # as in loading
    add_adapters(adapted, lora)
    return sum(value.numel() for name, value in adapted.named_parameters() if is_adapter(name))


def engine_memory(size: ModelSize, engine: EngineSection, *, sessions: Mapping[str, int]) -> dict[str, float]:
    """Return the bytes of the parts of the engine. On a GPU, the cache of a session has whole pages.

    Args:
        size: shapes of the model.
        engine: settings of the engine. The dtype "auto" counts as float32.
        sessions: sampling policy -> number of its concurrent episodes.
    """
    number = 2 if engine.dtype == "bfloat16" else 4
    columns = engine.max_context + (-engine.max_context % PAGE if engine.device != "cpu" else 0)
    cache = sum(sessions.values()) * columns * size.cached * number
    if engine.kind == "vllm":
        cache = int(engine.vllm.args.get("kv_cache_memory_bytes", VLLM_CPU_CACHE)) * len(sessions)
    weights = float(len(sessions) * size.parameters * number)
    parts = {"weights": weights, "key/value cache": float(cache)}
    on_cpu = engine.kind == "torch" and engine.device == "cpu"
    if on_cpu and not engine.deterministic and size.parameters >= SMALLEST_PACKED_MODEL:
        parts["packed weights"] = weights
    return parts


def learner_memory(
    size: ModelSize,
    train: TrainSection,
    *,
    dtype: str = "float32",
    tokens: int | None = None,
    reference: bool = False,
    on_cpu: bool = True,
) -> dict[str, float]:
    """Return the bytes of the parts of one learner process.

    Args:
        size: shapes of the model.
        train: settings of the optimizer and of memory.
        dtype: ``model.dtype``.
        tokens: tokens of the largest micro-batch; by default ``train.micro_batch_tokens``.
        reference: True if a KL penalty needs a copy of the model.
        on_cpu: True if the same memory also holds copies for checkpoints, and Python's libraries.
    """
    tokens = train.micro_batch_tokens if tokens is None else tokens
    trained = size.parameters if train.lora is None else size.adapters
    weights = size.parameters * BYTES[dtype] + (4 * trained if train.lora is not None else 0)
    number = 2 if train.precision == "bfloat16" else 4
    layer = tokens * size.saved * number * MARGIN
    if train.activation_checkpointing:
        body = layer + tokens * size.width * size.layers * number
    else:
        body = layer * size.layers
    logits = min(tokens * size.vocabulary, HEAD_LOGITS)
    parts = {
        "weights": weights / train.processes,
        "gradients": 4 * trained / train.processes,
        "optimizer": 8 * trained / train.processes,
        "activations": body / train.sequence_parallel + 4 * HEAD_COPIES * logits,
    }
    if number == 2:
        parts["bfloat16 copies of weights"] = 2.0 * size.parameters
    if reference and train.lora is None:
        parts["reference"] = size.parameters * BYTES[dtype] / train.processes
    if on_cpu:
        parts |= {"checkpoint while it is written": 12.0 * trained, "libraries": LIBRARIES}
    elif train.offload_optimizer:
        parts["optimizer"] = 0.0
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Needed and available memory of one place, in bytes."""

    place: str
    needed: float
    available: float

    @property
    def missing(self) -> float:
        """Return the missing bytes, or a negative number if some are left."""
        return self.needed - self.available


def needs(
    engine: EngineSection,
    *,
    layout: str,
    engine_parts: Mapping[str, float],
    learner_parts: Mapping[str, float],
    available: float,
    gpus: int = 2,
) -> list[Need]:
    """Return the memory of each place of a run: this machine, or the GPUs of learner and engine."""
    sampling, training = sum(engine_parts.values()), sum(learner_parts.values())
    if engine.device == "cpu":
        return [Need(place="this machine", needed=sampling + training, available=available)]
    if engine.kind == "vllm":
        sampling = engine.vllm.memory_fraction * available
    if layout == "shared" or (layout == "separated" and gpus == 1):
        return [Need(place="the GPU", needed=sampling + training, available=available)]
    if layout == "colocated":
        return [Need(place="the GPU", needed=max(sampling, training), available=available)]
    return [
        Need(place="the engine's GPU", needed=sampling, available=available),
        Need(place="the learner's GPU", needed=training, available=available),
    ]


Sections = tuple[ModelSection, EngineSection, TrainSection]


def remedies(
    model: ModelSection, engine: EngineSection, train: TrainSection, *, adaptable: bool = True
) -> Iterator[tuple[str, Sections]]:
    """Yield settings that save memory. Each comes with the sections after this and all earlier changes.

    The order is by cost. Settings that do not change the results and hardly change the speed come first.
    ``adaptable`` is False if the model has no layers for ``REMEDY``.
    """

    def changed(section: Any, **update: Any) -> Any:
        return section.model_copy(update=update)

    while train.micro_batch_tokens // 2 >= engine.max_context:
        train = changed(train, micro_batch_tokens=train.micro_batch_tokens // 2)
        yield f"train.micro_batch_tokens = {train.micro_batch_tokens}", (model, engine, train)
    if not train.activation_checkpointing:
        train = changed(train, activation_checkpointing=True)
        yield "train.activation_checkpointing = true", (model, engine, train)
    if engine.dtype != "bfloat16":
        engine = changed(engine, dtype="bfloat16")
        yield 'engine.dtype = "bfloat16"', (model, engine, train)
    while engine.kind == "torch" and engine.max_sessions >= 16:
        engine = changed(engine, max_sessions=engine.max_sessions // 2)
        yield f"engine.max_sessions = {engine.max_sessions}", (model, engine, train)
    if train.lora is None and adaptable:
        train = changed(train, lora=REMEDY)
        yield f"train.lora = {{rank = {REMEDY.rank}, alpha = {REMEDY.alpha:g}}}", (model, engine, train)
    if model.dtype == "float32":
        model = changed(model, dtype="bfloat16")
        yield 'model.dtype = "bfloat16"', (model, engine, train)


def available_memory(device: str) -> float:
    """Return the bytes of memory that a new process can use: free memory of a GPU, or of this machine."""
    if device != "cpu":
        return float(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else 0.0
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if MEMINFO.exists():
        lines = MEMINFO.read_text().splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit, used = (_read_number(CGROUP / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def _read_number(path: Path) -> float | None:
    text = path.read_text().strip() if path.is_file() else ""
    return float(text) if text.isdecimal() else None
