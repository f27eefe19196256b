"""Passes of a GPU: a trial of attention by pages, and decode passes as CUDA graphs of compiled layers.

A pass of a small model has a thousand kernels, each shorter than its launch from Python. Compiled layers have
fewer, and a graph launches them together. A graph has fixed shapes and addresses. Its rows are the
first slots of the cache, in order, with the same number of tokens each. Slots and tokens that do not take
part are padding, with the position ``max_context``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from agentrl_train.engine.cache import MOST, Pages, SlotCache, cached_logprobs, slot_attention
from agentrl_train.errors import ran_out_of_memory
from agentrl_train.models.architecture import CHUNKED, additive_mask, attend, layer_types, probes, read_logits

logger = logging.getLogger(__name__)

MOST_ERROR = 0.1
"""Mean difference of two kernels in bfloat16, relative to the mean size of the values."""
MOST_ROWS = 128
"""A decode pass with more tokens is limited by products, so more guesses would cost time."""
SHORTEST_VIEW = 256
"""Minimum number of columns that attention reads without pages. It doubles as sequences grow."""
SMALLEST_COMPILED = 50_000_000
"""Compiling takes up to a minute, which smaller models do not need."""
COMPILED, GRAPHS = "compiled layers", "CUDA graphs"
UNCOMPILED = "agentrl_slots_uncompiled"
"""Name of ``slot_attention`` as compiled layers call it."""
WARM_UPS = 2
"""Passes before a capture, in which libraries select their kernels and allocate their memory."""


class Fed(NamedTuple):
    """The tokens of a sequence in a decode pass, each of which samples the next token."""

    slot: int
    begin: int
    """Position of the first token."""
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The result of a decode pass, in the order of the tokens."""

    token_ids: list[int]
    logprobs: list[float]
    padded: Tensor
    """Logits of all rows, [rows, vocabulary], which the next pass overwrites."""
    places: Tensor
    """Row of each token."""

    def logits(self) -> Tensor:
        """Return the logits of the tokens, [tokens, vocabulary]."""
        return self.padded[self.places.to(self.padded.device)]


class Sample(Protocol):
    """Samples a token of each row; see ``scheduler.sample``."""

    def __call__(self, logits: Tensor, *, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and log-probabilities."""
        ...


class Shape(NamedTuple):
    """The shape of a graph."""

    slots: int
    width: int
    """Tokens of each slot."""
    columns: int
    """Columns that attention reads; all of them with pages."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a pass, padding included."""
        return self.slots * self.width


class Rows:
    """The tokens of a decode pass with fixed shapes, read from one vector of float64 on the device.

    Args:
        inputs: token ids, positions, temperatures and uniform numbers, [slots, width] each, and the number of
            cached tokens of each slot if all tokens of its row were stored.
        shape: shape of the pass.
        cache: the cache of the sequences.
    """

    def __init__(self, inputs: Tensor, *, shape: Shape, cache: SlotCache) -> None:
        tokens, positions, temperatures, uniforms = inputs[: 4 * shape.tokens].view(4, -1)
        self._shape = shape
        self._config = cache.config
        self._masks: dict[str, Tensor] = {}
        self.token_ids = tokens.long()
        self.positions = positions.long()
        self.temperatures, self.uniforms = temperatures.float(), uniforms.float()
        slots = torch.arange(shape.slots, device=inputs.device)
        self.slots = slots.repeat_interleave(shape.width, output_size=shape.tokens)
        self.stored_at = self.positions
        self.pages: Pages | None = None
        if cache.paged:
            padding = self.positions >= cache.max_context
            self.slots = self.slots.masked_fill(padding, cache.num_slots)
            self.stored_at = self.positions.masked_fill(padding, 0)
            begins = torch.arange(shape.slots + 1, device=inputs.device) * shape.width
            lengths = inputs[4 * shape.tokens :]
            self.pages = cache.pages_of(slots, begins=begins, lengths=lengths, widest=shape.width)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        kind: str,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention of the pass without pages, [tokens, heads, dim].

        Args:
            query: [heads, tokens, dim].
            key: keys of the whole cache, [slots, heads or fewer, columns, dim].
            value: like ``key``.
            kind: kind of the layer.
            scaling: factor of the scores.
            softcap: bound of the scores.
            sinks: logit of each head for attending to no key.
        """
        slots, width, columns = self._shape
        asked = query.view(-1, slots, width, query.shape[-1]).transpose(0, 1)
        seen = attend(
            asked,
            key[:slots, :, :columns],
            value[:slots, :, :columns],
            mask=self._mask(kind, query.dtype),
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
        return seen.transpose(1, 2).reshape(slots * width, -1, value.shape[-1])

    def _mask(self, kind: str, dtype: torch.dtype) -> Tensor:
        if kind not in self._masks:
            slots, width, columns = self._shape
            # Padding has a position beyond the columns. A window there would be empty.
            queries = self.positions.clamp(max=columns - 1).view(slots, 1, width, 1)
            keys = torch.arange(columns, device=queries.device)
            self._masks[kind] = additive_mask(self._config, kind, queries=queries, keys=keys, dtype=dtype)
        return self._masks[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A pass that can be repeated with other inputs."""

    staged: Tensor
    """Inputs in the memory of the host."""
    inputs: Tensor
    logits: Tensor
    """[tokens, vocabulary]."""
    drawn: Tensor
    """Token ids and log-probabilities, [2, tokens] in float64."""
    replay: Callable[[], object]


class DecodeGraphs:
    """Decode passes of one model, captured at the first use of each shape.

    The first replay of a graph must give the logits of a plain pass. If it does not, or if the model cannot
    be compiled or captured, later graphs have no compiled layers, or all later passes are plain ones.

    Args:
        model: the model, whose attention is ``slot_attention``.
        cache: the cache of its sequences.
        sample: samples the tokens, as a part of the graphs.
        compiled: compile the layers; by default if the model has ``SMALLEST_COMPILED`` parameters or more.
    """

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, *, sample: Sample, compiled: bool | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._sample = sample
        self._device = next(model.parameters()).device
        self._captured: dict[Shape, _Captured] = {}
        self._pool: Any = None
        """Memory that the graphs share, because they never run at the same time."""
        if compiled is None:
            compiled = sum(value.numel() for value in model.parameters()) >= SMALLEST_COMPILED
        self._means = [COMPILED, GRAPHS] if compiled else [GRAPHS]
        """What the passes use; the first one is lost first."""
        self._layers: CompiledLayers | None = None

    def most_guesses(self, slots: int) -> int:
        """Return how many tokens can be guessed for each sequence if the first ``slots`` slots take part."""
        width = max(1, MOST_ROWS // _slots(slots, self._cache.num_slots))
        return min(MOST, (1 << width.bit_length() - 1) - 1)  # widths are powers of two

    def run(
        self,
        fed: Sequence[Fed],
        *,
        temperatures: Sequence[float],
        uniforms: Sequence[float],
        plain: Callable[[], Tensor],
    ) -> Decoded | None:
        """Return the result of a decode pass, or None if the model cannot be captured.

        Args:
            fed: the tokens of each sequence.
            temperatures: temperature of each token's sample.
            uniforms: random number of each token's sample, in [0, 1).
            plain: returns the logits of the same pass without a graph.
        """
        shape = self._shape(fed)
        fits = all(one.begin + shape.width <= self._cache.columns for one in fed)
        if not self._means or not fits:
            return None
        expected = None
        if (captured := self._captured.get(shape)) is None:
            expected = plain()
            if (captured := self._capture(shape)) is None:
                return None
            self._captured[shape] = captured
        at = self._stage(captured.staged.numpy(), shape, fed, temperatures, uniforms)
        captured.inputs.copy_(captured.staged, non_blocking=True)
        captured.replay()
        drawn = captured.drawn.cpu()[:, at]  # waits for the pass
        decoded = Decoded(
            token_ids=drawn[0].long().tolist(),
            logprobs=drawn[1].tolist(),
            padded=captured.logits,
            places=at,
        )
        if expected is not None and not _alike(decoded.logits(), expected):
            self._give_up("the logits differ from those of a plain pass")
            return None
        return decoded

    def _shape(self, fed: Sequence[Fed]) -> Shape:
        slots = _slots(1 + max(one.slot for one in fed), self._cache.num_slots)
        width = 1 << (max(len(one.token_ids) for one in fed) - 1).bit_length()
        columns = self._cache.columns
        if not self._cache.paged:
            view, longest = SHORTEST_VIEW, max(one.begin for one in fed) + width
            while view < longest:
                view *= 2
            columns = min(view, columns)
        return Shape(slots, width, columns)

    def _stage(
        self,
        values: np.ndarray,
        shape: Shape,
        fed: Sequence[Fed],
        temperatures: Sequence[float],
        uniforms: Sequence[float],
    ) -> Tensor:
        """Write the inputs of a pass. Return the places of the tokens among the padded ones."""
        cells, lengths = self._blank(values, shape)
        counts = [len(one.token_ids) for one in fed]
        firsts = [one.slot * shape.width for one in fed]
        at = np.concatenate([np.arange(i, i + count) for i, count in zip(firsts, counts, strict=True)])
        cells[0, at] = list(chain.from_iterable(one.token_ids for one in fed))
        cells[1, at] = at - np.repeat(np.array(firsts) - [one.begin for one in fed], counts)
        cells[2, at], cells[3, at] = temperatures, uniforms
        lengths[[one.slot for one in fed]] = [one.begin + shape.width for one in fed]
        return torch.from_numpy(at)

    def _blank(self, values: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Write the inputs of a pass of padding. Return the numbers of each token, and of each slot."""
        cells, lengths = values[: 4 * shape.tokens].reshape(4, -1), values[4 * shape.tokens :]
        cells[:] = np.array([[0], [self._cache.max_context], [1], [0]])
        lengths[:] = shape.width  # the tokens of a row are the last ones that it sees, so padding counts
        return cells, lengths

    def _capture(self, shape: Shape) -> _Captured | None:
        """Return a captured pass of padding, or None if the first of the means cannot be used."""
        staged = torch.zeros(4 * shape.tokens + shape.slots, dtype=torch.float64)
        self._blank(staged.numpy(), shape)
        inputs = staged.to(self._device)

        def compute() -> tuple[Tensor, Tensor]:
            return self._compute(inputs, shape)

        replay: Callable[[], object]
        try:
            if self._device.type == "cuda":
                graph, (logits, drawn) = _graph(compute, device=self._device, pool=self._pool)
                self._pool, replay, staged = graph.pool(), graph.replay, staged.pin_memory()
            else:
                replay, (logits, drawn) = _repeat(compute)
        except Exception as error:  # whatever a model does that a graph cannot repeat
            if ran_out_of_memory(error):
                raise
            self._give_up(str(error))
            return None
        return _Captured(staged=staged, inputs=inputs, logits=logits, drawn=drawn, replay=replay)

    def _compute(self, inputs: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return the logits and the drawn tokens with their log-probabilities, without waiting for them."""
        rows = Rows(inputs, shape=shape, cache=self._cache)
        with self._compiled_layers(), self._cache.decoding(rows) as arguments:
            hidden = self._model.base_model(**arguments).last_hidden_state[0]
        logits = read_logits(self._model, hidden)
        drawn = self._sample(logits, temperatures=rows.temperatures, uniforms=rows.uniforms)
        return logits, torch.stack([one.double() for one in drawn])

    def _compiled_layers(self) -> AbstractContextManager[None]:
        if COMPILED not in self._means:
            return nullcontext()
        if self._layers is None:
            self._layers = CompiledLayers(self._model, self._cache)
        return self._layers.used()

    def _give_up(self, reason: str) -> None:
        logger.warning("decoding without %s, which is slower: %s", self._means.pop(0), reason)
        self._captured.clear()


class CompiledLayers:
    """The layers of a model, compiled for passes of any size, except their attention and cache.

    Layers with the same kinds of parts share their code. Checks before each compiled part take longer than it
    saves, so this is only for captured passes.

    Raises:
        ValueError: the model has no list of its layers.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        number = model.config.get_text_config().num_hidden_layers
        lists = (one for one in model.base_model.modules() if isinstance(one, nn.ModuleList))
        self._layers = next((one for one in lists if len(one) == number), None)
        if self._layers is None:
            raise ValueError("the model has no list of its layers")
        self._model = model
        self._cache = cache
        self._forward = [torch.compile(layer.forward, dynamic=True) for layer in self._layers]
        self._update = torch.compiler.disable(cache.update)
        AttentionInterface.register(UNCOMPILED, torch.compiler.disable(slot_attention))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute passes with the compiled layers."""
        assert self._layers is not None
        before = self._model.config._attn_implementation
        with (
            torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),  # numbers of layers differ
            # Equal sizes are a coincidence.
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            self._model.set_attn_implementation(UNCOMPILED)
            self._cache.update = self._update  # type: ignore[method-assign]
            for layer, forward in zip(self._layers, self._forward, strict=True):
                layer.forward = forward
            try:
                yield
            finally:
                for layer in self._layers:
                    del layer.forward
                del self._cache.update
                self._model.set_attn_implementation(before)


def _graph(
    compute: Callable[[], tuple[Tensor, Tensor]], *, device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """Capture a pass. Return its graph, and the tensors with the results of each replay."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The learner's thread can use the same GPU during the capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        results = compute()
    return graph, results


def _repeat(
    compute: Callable[[], tuple[Tensor, Tensor]],
) -> tuple[Callable[[], object], tuple[Tensor, Tensor]]:
    """Return a function that computes a pass again, and the tensors with its results."""
    results = compute()

    def replay() -> None:
        for kept, new in zip(results, compute(), strict=True):
            kept.copy_(new)

    return replay, results


def _slots(count: int, most: int) -> int:
    """Return the slots of the smallest graph with at least ``count``: a power of two, or 1.5 times one."""
    size = 1 << max(0, count - 1).bit_length()
    return min(most, size * 3 // 4 if size >= 4 and count <= size * 3 // 4 else size)


def _alike(found: Tensor, plain: Tensor) -> bool:
    found, plain = found.float(), plain.float()
    return bool((found - plain).abs().mean() <= MOST_ERROR * plain.abs().mean())


def can_be_paged(model: PreTrainedModel) -> bool:
    """Return True if a GPU can compute the attention of a model by pages."""
    return CHUNKED not in layer_types(model.config) and agrees(model)


@torch.inference_mode()
def agrees(model: PreTrainedModel) -> bool:
    """Return True if the log-probabilities of a model are the same with and without pages."""
    sequences = probes(model)
    try:
        found, plain = (torch.cat(cached_logprobs(model, sequences, paged=paged)) for paged in (True, False))
    except Exception as error:  # whatever a kernel does not support
        if ran_out_of_memory(error):
            raise
        logger.info("attention without pages: %s", error)
        return False
    if same := _alike(found, plain):
        logger.info("attention by pages")
    else:
        logger.warning("attention without pages, which is slower: FlashAttention gives other results")
    return same
