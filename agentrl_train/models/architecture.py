"""Parts of a model that learner and engines compute themselves, and the threads and memory that they share.

Architectures differ in the tokens that each kind of layer attends to, and in the scaling and capping of the
logits. On a CPU, an engine multiplies by weights in the processor's own layout.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def context_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model supports in a context, or None if it has no limit.

    LongRoPE has other frequencies beyond its original context. transformers selects them by the longest
    sequence of a pass, for all of its sequences, which therefore depend on one another beyond that context.
    """
    config = config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), _longrope_context(config))
    return min((limit for limit in limits if limit is not None), default=None)


def require_context(config: PreTrainedConfig, max_context: int) -> None:
    """Raise ``ValueError`` if a model supports fewer tokens than ``engine.max_context``."""
    limit = context_limit(config)
    if limit is None or max_context <= limit:
        return
    reason = ""
    if limit == _longrope_context(config.get_text_config()):
        reason = " (with more, LongRoPE changes the results of all sequences of a batch)"
    raise ValueError(
        f"the model supports at most {limit} tokens{reason}, but engine.max_context is {max_context}: "
        "lower it"
    )


def _longrope_context(config: PreTrainedConfig) -> int | None:
    """Return the original context of LongRoPE, or None for other embeddings of positions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(one for one in parameters.values() if isinstance(one, Mapping))]
    longrope = (one for one in each if one.get("rope_type") == "longrope")
    return min((int(one["original_max_position_embeddings"]) for one in longrope), default=None)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer, such as "full_attention" and "sliding_attention".

    Configurations without ``layer_types`` have windows in all layers or in no layer.
    """
    config = config.get_text_config()
    uniform = SLIDING if getattr(config, "sliding_window", None) else FULL
    return list(getattr(config, "layer_types", None) or [uniform] * config.num_hidden_layers)


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Return the kinds of layers that a model has."""
    return set(layer_types(model.config))


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument for the key/value cache of a model's body."""
    # transformers renamed "past_key_values" in 5.24.
    parameters = inspect.signature(model.base_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def has_masks(model: PreTrainedModel) -> bool:
    """Return True if ``visible`` determines the mask of every layer."""
    return layer_kinds(model) <= {FULL, SLIDING, CHUNKED}


def visible(config: PreTrainedConfig, kind: str, seen: Tensor, *, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the part of ``seen`` that a layer of this kind attends to.

    Args:
        config: text configuration of the model.
        kind: kind of the layer.
        seen: mask of a layer with full attention, with the shape of ``queries - keys``.
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


def reach(config: PreTrainedConfig, kind: str) -> float:
    """Return the length up to which a layer of this kind is equal to a layer with full attention."""
    if kind == SLIDING:
        return int(config.sliding_window)
    return int(config.attention_chunk_size) if kind == CHUNKED else math.inf


def additive_mask(
    config: PreTrainedConfig, kind: str, *, queries: Tensor, keys: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return a mask to add to the scores of a layer, with -inf if a query does not see a key.

    Args:
        config: text configuration of the model.
        kind: kind of the layer.
        queries: positions of the queries in their sequences, [..., queries, 1].
        keys: positions of the keys in their sequences, [keys].
        dtype: dtype of the scores.
    """
    seen = visible(config, kind, keys <= queries, queries=queries, keys=keys)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


FEW_QUERIES = 64
"""Grouped heads and plain products are faster up to this number of queries of a sequence. Beyond it, repeated
masks and scores are costly."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of some queries, [rows, heads, queries, dim].

    Args:
        query: [rows, heads, queries, dim].
        key: [rows, heads or fewer, keys, dim]. A processor multiplies it fastest if its columns are
            contiguous, as in the transpose of a [..., dim, keys] tensor.
        value: like ``key``, with contiguous rows.
        mask: added to the scores; None means no mask.
        is_causal: True if the queries belong to the last keys, and each one sees the keys up to its own.
            Only if ``can_be_causal`` is True, and without ``mask``.
        scaling: factor of the scores.
        softcap: bound of the scores (Gemma-2).
        sinks: logit of each head for attending to no key (gpt-oss).
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and sinks is None:
        grouped, by_column = query.shape[1] != key.shape[1], key.stride(-1) != 1
        few = not is_causal and query.shape[2] <= FEW_QUERIES
        if is_causal and attends_by_products(value):
            query, key = query.to(value.dtype), key.to(value.dtype)
            return _CausalBlocks.apply(query, key, value, scaling)  # type: ignore[no-any-return]
        if few and (grouped or by_column) and (query.device.type == "cpu" or mask is not None):
            return _attend_in_groups(query, key, value, mask=mask, scaling=scaling)
        if query.device.type != "cpu":
            return _attend_on_gpu(query, key, value, mask=mask, is_causal=is_causal, scaling=scaling)
        return scaled_dot_product_attention(
            query,
            key.contiguous() if by_column else key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=grouped,
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1 + key.shape[2] - query.shape[2])
        scores = scores.masked_fill(later, -torch.inf)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def _attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scaling: float
) -> Tensor:
    """Like ``attend``, but treat the query heads of a key head as additional queries.

    With shared keys (``enable_gqa``), the kernel of a CPU reads the keys once for each query head and
    multiplies bfloat16 row by row. With one query per sequence it takes up to seven times as long. On a GPU
    no fast kernel has both shared keys and a mask.
    """
    rows, heads, width, dim = query.shape
    shared = heads // key.shape[1]
    grouped = query.reshape(rows, key.shape[1], shared * width, dim)
    if key.stride(-1) == 1:
        repeated = mask.repeat(1, 1, shared, 1) if mask is not None and width > 1 else mask
        seen = scaled_dot_product_attention(grouped, key, value, attn_mask=repeated, scale=scaling)
    else:
        scores = (grouped * scaling) @ key.transpose(2, 3)
        if mask is not None:
            by_head = scores.view(rows, key.shape[1], shared, width, -1)
            by_head += mask[:, :, None]
        seen = scores.softmax(dim=-1) @ value
    return seen.reshape(rows, heads, width, value.shape[-1])


def _attend_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, is_causal: bool, scaling: float
) -> Tensor:
    """Like ``attend``, by a kernel of a GPU that keeps no scores.

    FlashAttention has shared keys and causal queries of the last keys, but no masks and no float32. The other
    kernel has both, but its heads have keys of their own.
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and not (is_causal and query.dtype in (torch.bfloat16, torch.float16)):
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        grouped = False
    if is_causal:
        mask = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


BLOCK_QUERIES = 128
"""Number of queries in a block. Only the scores of one block are in memory."""


def attends_by_products(value: Tensor) -> bool:
    """Return True if attention to these values is computed by plain products, a block of queries at a time.

    In bfloat16 on a CPU they are twice as fast, forward and backward, as ``scaled_dot_product_attention``.
    """
    return value.device.type == "cpu" and value.dtype == torch.bfloat16


def can_be_causal(value: Tensor, *, queries: int, window: float) -> bool:
    """Return True if the last queries of a sequence can attend to it without a mask.

    Args:
        value: values of the whole sequence, [..., keys, dim].
        queries: number of queries.
        window: length up to which the layer has full attention (``reach``).
    """
    keys = value.shape[-2]
    last = attends_by_products(value) or value.device.type != "cpu"
    return keys <= window and (queries == keys or last)


class _CausalBlocks(torch.autograd.Function):
    """Causal attention of the last tokens of a sequence. The scores are recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        asked, keys, values = _by_key_head(query, key, value)
        found = asked.new_empty(*asked.shape[:3], values.shape[-1])
        for rows, shares, known in _shares(asked, _columns(keys), scale):
            found[:, :, rows] = (shares @ values[:, :known]).view_as(found[:, :, rows])
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return found.view(*query.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = ctx.saved_tensors
        asked, keys, values = _by_key_head(query, key, value)
        of_found = gradient.reshape(*asked.shape[:3], -1)
        of_query = torch.empty_like(asked)
        # Many blocks add to the gradient of a key, so the sums have more precision.
        exact = torch.promote_types(value.dtype, torch.float32)
        of_key, of_value = (torch.zeros_like(one, dtype=exact) for one in (keys, values))
        value_columns = _columns(values)
        for rows, shares, known in _shares(asked, _columns(keys), ctx.scale):
            queries, of_seen = (one[:, :, rows].flatten(1, 2) for one in (asked, of_found))
            of_value[:, :known] += shares.transpose(1, 2) @ of_seen
            of_shares = of_seen @ value_columns[:, :, :known]
            of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype) * ctx.scale
            of_query[:, :, rows] = (of_scores @ keys[:, :known]).view_as(of_query[:, :, rows])
            of_key[:, :known] += of_scores.transpose(1, 2) @ queries
        return of_query.view_as(query), of_key.view_as(key).to(key), of_value.view_as(value).to(value), None


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [rows * key heads, queries of each, tokens, dim], and keys and values with one head."""
    shared = query.shape[1] // key.shape[1]
    return query.reshape(-1, shared, *query.shape[2:]), key.flatten(0, 1), value.flatten(0, 1)


def _columns(keys: Tensor) -> Tensor:
    """Return the transposed matrices, each row of them contiguous."""
    columns = keys.transpose(1, 2)
    return columns if columns.stride(-1) == 1 else columns.contiguous()


def _shares(asked: Tensor, columns: Tensor, scale: float) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield blocks of queries, their shares of the keys they see, and the number of these keys."""
    heads, _, width, _ = asked.shape
    for begin in range(0, width, BLOCK_QUERIES):
        rows = slice(begin, min(begin + BLOCK_QUERIES, width))
        size, known = rows.stop - begin, columns.shape[2] - width + rows.stop
        scores = (asked[:, :, rows] * scale).flatten(1, 2) @ columns[:, :, :known]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        scores.view(heads, -1, size, known)[..., known - size :].masked_fill_(later, -torch.inf)
        yield rows, scores.softmax(-1), known


PACKED_ROWS = 32
"""Number of rows that the layout is optimized for. Passes with other numbers can also use it."""
SMALLEST_PACKED_LAYER = 2**16
"""Number of weights of the smallest layer to pack."""
SMALLEST_PACKED_MODEL = 2**24
"""Least number of weights in linear layers to try packing. The weights of smaller models stay in caches."""
TRIED_WEIGHTS = 2**22
"""Number of weights in the measured product, which is more than the caches of a core can hold."""
LEAST_GAIN = 1.15
"""A packed product must be faster by this factor."""


class PackedLinear(nn.Linear):
    """A linear layer with a packed copy of its weight. Call ``repack`` after each change of the weight."""

    packed: Tensor

    def repack(self) -> None:
        """Pack the current weight."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, [..., outputs]."""
        return _packed_product(input, self.packed, self.bias)


def pack_weights(model: nn.Module) -> None:
    """Pack the linear layers of a model on a CPU, which needs the memory of their weights a second time."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST_PACKED_LAYER:
            module.__class__ = PackedLinear
    repack_weights(model)


def repack_weights(model: nn.Module) -> None:
    """Pack the weights of the packed layers of a model again."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.repack()


def packing_pays(model: nn.Module) -> bool:
    """Measure within a second if this processor multiplies the packed layers of a model faster."""
    weights = [module.weight.detach() for module in model.modules() if type(module) is nn.Linear]
    if sum(weight.numel() for weight in weights) < SMALLEST_PACKED_MODEL or not _packable(weights[0]):
        return False
    largest = max(weights, key=Tensor.numel)
    weight = largest[: max(1, TRIED_WEIGHTS // largest.shape[1])].contiguous()
    rows = torch.randn(PACKED_ROWS, weight.shape[1], dtype=weight.dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    except RuntimeError:  # bfloat16 on a processor that cannot multiply it
        return False
    plain_s = _fastest_s(lambda: nn.functional.linear(rows, weight))
    return plain_s > LEAST_GAIN * _fastest_s(lambda: _packed_product(rows, packed, None))


def _packed_product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return result


def _packable(weight: Tensor) -> bool:
    operations = ("_linear_pointwise", "_reorder_linear_weight")
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in operations)
    )


def _fastest_s(product: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some products, which is least disturbed by other load."""
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


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


PROBES = (4, 11)
"""Lengths of the sequences for ``check_logprobs``, which are computed together."""
ROUNDING, GPU_ROUNDING, COARSE_ROUNDING = 1e-4, 1e-2, 0.5
"""Largest mean differences in ``check_logprobs``: in float32 on a CPU, in float32 on other devices, and in
other dtypes, in which a router can choose other experts."""


def probes(model: PreTrainedModel) -> list[list[int]]:
    """Return a few sequences of tokens of a model, with a common first token."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return [[(1 + place * (7919 + length)) % vocabulary for place in range(length)] for length in PROBES]


@torch.no_grad()
def check_logprobs(model: PreTrainedModel, scored: Iterable[tuple[Sequence[int], Tensor]]) -> None:
    """Raise ``ValueError`` if log-probabilities are not those of a model with its own attention.

    Args:
        model: the model, with weights.
        scored: sequences of tokens, and the log-probabilities of all tokens but the first.
    """
    used, device = model.config._attn_implementation, next(model.parameters()).device
    differences: list[Tensor] = []
    model.set_attn_implementation("eager")
    try:
        for token_ids, found in scored:
            ids = torch.tensor([token_ids], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            differences.append((own - found.to(own)).abs())
    finally:
        model.set_attn_implementation(used)
    largest = ROUNDING if device.type == "cpu" else GPU_ROUNDING
    if model.dtype != torch.float32:
        largest = COARSE_ROUNDING
    if (mean := float(torch.cat(differences).mean())) > largest:
        raise ValueError(
            f"{type(model).__name__} has an attention that is not known here: log-probabilities differ by "
            f"{mean:.2g} on average"
        )


SOFT_PAUSE = 1
"""OpenMP's ``omp_pause_soft``: keep the settings."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Numbers of the parameters of glibc's ``mallopt``."""
LARGEST_REUSED = 2**30
"""Allocations up to this many bytes reuse freed memory."""


class Threads:
    """Divides CPU threads among the parts that compute at the same time. A single part gets all threads.

    Args:
        count: number of threads; None does not change their number.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._working: set[object] = set()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the caller as computing for the duration of the block."""
        self._working.add(token := object())
        try:
            self.share()
            yield
        finally:
            self._working.discard(token)

    def share(self) -> None:
        """Set the number of threads for the caller's operations, which PyTorch keeps for each thread."""
        if self._count is None:
            return
        share = max(1, self._count // max(1, len(self._working)))
        if share != torch.get_num_threads():
            torch.set_num_threads(share)
            if share == 1:
                release_idle_threads()


def release_idle_threads() -> None:
    """End the OpenMP threads that idle between two operations of the calling thread.

    Each thread that computes has its own. GNU OpenMP lets them wait actively for the next operation, but only
    while a process has no more of them than processors, so the threads of a part that has paused slow down
    the others: the prefill of a language model on two cores takes 1.3 times as long. Other implementations of
    OpenMP are not changed.
    """
    for library in _gnu_openmp():
        library.omp_pause_resource_all(SOFT_PAUSE)


@cache
def _gnu_openmp() -> tuple[ctypes.CDLL, ...]:
    """Return the copies of GNU OpenMP in this process. PyTorch and other packages bring their own."""
    if sys.platform != "linux":
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [ctypes.CDLL(path) for path in sorted(paths) if "libgomp" in path and Path(path).exists()]
    return tuple(library for library in libraries if hasattr(library, "omp_pause_resource_all"))


def share_freed_memory() -> None:
    """Make all threads of this process use one arena, so that each can reuse what another has freed.

    By default glibc gives each thread an arena that the others cannot use. With one, a run of SmolLM2-135M
    takes a tenth less memory at the same speed. This has no effect if threads of this process have allocated
    memory before, or if the environment sets ``MALLOC_ARENA_MAX``. Other allocators are not changed.
    """
    if (libc := glibc()) is not None and "MALLOC_ARENA_MAX" not in os.environ:
        libc.mallopt(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Make the allocator reuse the memory of freed activations instead of returning it to the kernel.

    By default glibc unmaps large tensors when they are freed. The kernel then clears each page again when it
    is next touched, which takes a sixth of the time of an update. Other allocators are not changed.
    """
    if (libc := glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc. Its ``mallinfo2`` is new in version 2.33."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
