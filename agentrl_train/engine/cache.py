"""State that the engine keeps of earlier tokens: keys and values, cached prefixes, likely continuations.

A pass is one row with the tokens of all sequences, one sequence after another, without padding. The layers of
any Hugging Face model accept it unchanged, because all layers but attention process each token separately. A
model whose ``attn_implementation`` is ``ATTENTION`` calls ``slot_attention``, which reads the cache of each
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import AttentionInterface

from agentrl_train.models.architecture import (
    FEW_QUERIES,
    additive_mask,
    attend,
    attends_by_products,
    cache_argument,
    can_be_causal,
    layer_types,
    reach,
    read_logits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

    from agentrl_train.engine.gpu import Rows

ATTENTION = "agentrl_slots"
"""Name of ``slot_attention`` among the attention implementations of transformers."""
CONTEXT = 4
"""Number of tokens that a guess is based on."""
MOST = 6
"""Tokens guessed in one pass. A guess costs as much as a sampled token, right or wrong."""
CAPACITY = 2**18
"""Number of contexts to keep. The oldest are dropped first."""
COLUMNS = 64
"""A cache that grows has a multiple of this many columns."""
GROWTH = 1.25
"""Least factor by which a cache grows."""
MOST_UNUSED = 1.6
"""Attention reads whole slots in place, with up to this many columns for each one that it needs."""
PAGE = 256
"""Columns of a page. FlashAttention reads pages with a multiple of 256."""
BLOCK = 16
"""Length of the shortest shared prefix, and increment of the longer prefixes."""
T = TypeVar("T", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class Group:
    """Sequences whose attention is computed in one call: tokens ``begin`` to ``end`` of a pass.

    The keys of a group are padded to its longest sequence, and its queries to the largest number of tokens
    that a sequence has in the pass.
    """

    begin: int
    end: int
    slots: Sequence[int]
    counts: Sequence[int]
    """Tokens of each sequence."""
    length: int
    """Number of cached tokens that attention sees, including the tokens of the pass."""
    view: bool = True
    """Read adjacent slots in place. Copies make results bitwise independent of the slots instead."""
    columns: int = field(init=False)
    """Number of columns that attention reads; those after ``length`` are masked."""
    keys_at: slice | Tensor = field(init=False)
    padded: Tensor | None = field(init=False, default=None)
    """Index in the group of each query [sequences, width]; None if all sequences have the same number."""
    unpadded: Tensor | None = field(init=False, default=None)
    """Index of each token among the padded queries."""
    masks: dict[str, Tensor | None] = field(init=False, default_factory=dict)

    @property
    def width(self) -> int:
        """Largest number of tokens of a sequence."""
        return max(self.counts)

    def prepare(self, device: torch.device, *, allocated: int) -> None:
        """Compute the indices, which are the same in every layer.

        Args:
            device: device of the cache.
            allocated: columns of the slots if attention consists of products, else 0. A product copies a part
                of a slot before it reads it, so it is faster to read all columns.
        """
        first, last = self.slots[0], self.slots[-1]
        adjacent = self.view and list(self.slots) == list(range(first, last + 1))
        self.keys_at = slice(first, last + 1) if adjacent else torch.tensor(self.slots, device=device)
        fits = self.length <= allocated <= MOST_UNUSED * self.length
        whole = adjacent and self.width <= FEW_QUERIES and fits
        self.columns = allocated if whole else self.length
        if min(self.counts) < self.width:
            counts = torch.tensor(self.counts)[:, None]
            columns = torch.arange(self.width)[None]
            begins = counts.cumsum(0) - counts
            self.padded = (begins + torch.minimum(columns, counts - 1)).to(device)
            self.unpadded = (columns < counts).flatten().nonzero()[:, 0].to(device)

    def mask(
        self, config: PreTrainedConfig, kind: str, positions: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Return a mask to add to the scores of a layer, [sequences, 1, width, columns]; None for no mask.

        Args:
            config: text configuration of the model.
            kind: kind of the layer.
            positions: positions of the tokens of the group.
            dtype: dtype of the scores.
        """
        if kind not in self.masks:
            queries = positions if self.padded is None else positions[self.padded.flatten()]
            # Padding has positions beyond the columns. A window there would be empty.
            queries = queries.clamp(max=self.length - 1).view(len(self.slots), 1, self.width, 1)
            keys = torch.arange(self.columns, device=positions.device)
            mask = additive_mask(config, kind, queries=queries, keys=keys, dtype=dtype)
            # On a GPU, looking at the mask would wait for all earlier work.
            self.masks[kind] = mask if mask.device.type != "cpu" or bool(mask.any()) else None
        return self.masks[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where a pass finds the keys and values of its sequences, in int32 as FlashAttention takes it."""

    begins: Tensor
    """First token of each sequence in the pass, and their total number, [sequences + 1]."""
    lengths: Tensor
    """Cached tokens that the last token of each sequence sees, [sequences]."""
    ends: Tensor
    """Their cumulative sums, from 0, [sequences + 1]."""
    table: Tensor
    """Pages of each sequence, [sequences, pages of a slot]."""
    widest: int
    """Largest number of tokens that a sequence has in the pass."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, window: float, scaling: float | None
    ) -> Tensor:
        """Return the attention of all sequences of a pass, [tokens, heads, dim].

        Args:
            query: [tokens, heads, dim].
            key: keys of the whole cache, [slots, heads or fewer, columns, dim].
            value: like ``key``.
            window: number of tokens that a token sees, itself included.
            scaling: factor of the scores.
        """
        from torch.nn.attention.varlen import varlen_attn  # new in PyTorch 2.12

        keys, values = (one.transpose(1, 2).unflatten(1, (-1, PAGE)).flatten(0, 1) for one in (key, value))
        return varlen_attn(  # type: ignore[return-value]  # without return_aux
            query,
            keys,
            values,
            self.begins,
            self.ends,
            self.widest,
            self.table.shape[1] * PAGE,
            scale=scaling,
            window_size=(-1 if window == math.inf else int(window) - 1, 0),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=self.lengths,
            block_table=self.table,
        )


@dataclass(slots=True, kw_only=True)
class Pass:
    """The tokens of one forward pass, flat, with the slot and the position of each."""

    token_ids: Sequence[int]
    slots: Sequence[int]
    positions: Sequence[int]
    groups: Sequence[Group]


_pass: ContextVar[SlotCache | None] = ContextVar("pass", default=None)


class SlotCache(Cache):
    """Keys and values of ``num_slots`` sequences of up to ``max_context`` tokens each.

    One more column after ``max_context``, or with pages one more slot, receives the keys and values of
    padding. If attention consists of products, keys are stored by column, and only as many columns as the
    longest sequence needs.

    Args:
        model: determines shapes and kinds of the layers.
        num_slots: number of sequences.
        max_context: maximum number of tokens of a sequence.
        paged: store the tokens of a slot in pages, which FlashAttention reads for all sequences in one call.
    """

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context: int, paged: bool = False
    ) -> None:
        self.layers: list[Any] = []
        self.offloading = False
        self.layer_class_to_replicate = None
        self.num_slots = num_slots
        self.max_context = max_context
        self.kinds = layer_types(model.config)
        self.config = model.config.get_text_config()
        self._argument = cache_argument(model)
        self.paged = paged
        self._by_column = not paged and attends_by_products(next(model.parameters()))
        self._columns = 0 if self._by_column else max_context + 1
        if paged:
            self._columns = max_context + -max_context % PAGE
        self.groups: Sequence[Group] = ()
        self.pages: Pages | None = None
        """The sequences of a pass, in place of ``groups``."""
        self.rows: Rows | None = None
        """The rows of a decode pass with fixed shapes, in place of ``groups``."""
        self.positions = torch.empty(0)
        self._slots = self._stored_at = torch.empty(0)
        self._storage: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def reading(self, one: Pass, *, device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield the arguments with which a model runs this pass."""
        tokens, self._slots, self.positions = torch.tensor(
            [one.token_ids, one.slots, one.positions], device=device
        )
        self.groups, self._stored_at = one.groups, self.positions
        self._reserve(max(max(one.positions) + 1, *(group.length for group in one.groups)))
        if self.paged:
            slots, begins, lengths = (
                torch.tensor(values, device=device)
                for values in (
                    [group.slots[0] for group in one.groups],
                    [*(group.begin for group in one.groups), one.groups[-1].end],
                    [group.length for group in one.groups],
                )
            )
            self.pages = self.pages_of(
                slots, begins=begins, lengths=lengths, widest=max(group.width for group in one.groups)
            )
        else:
            for group in one.groups:
                group.prepare(device, allocated=self._columns if self._by_column else 0)
        with self._entered():
            yield self._arguments(tokens)

    def pages_of(self, slots: Tensor, *, begins: Tensor, lengths: Tensor, widest: int) -> Pages:
        """Return the pages of the sequences of a pass. A slot has adjacent pages."""
        count = self._columns // PAGE
        table = slots[:, None] * count + torch.arange(count, device=slots.device)
        lengths = lengths.int()
        ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return Pages(begins=begins.int(), lengths=lengths, ends=ends, table=table.int(), widest=widest)

    @property
    def columns(self) -> int:
        """Return the number of columns of a slot."""
        return self._columns

    @contextmanager
    def decoding(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """Yield the arguments with which a model runs a decode pass with fixed shapes."""
        self._slots, self.positions, self._stored_at = rows.slots, rows.positions, rows.stored_at
        self.rows, self.pages = rows, rows.pages
        with self._entered():
            yield self._arguments(rows.token_ids)

    def _arguments(self, tokens: Tensor) -> dict[str, Any]:
        # Padding is stored beyond the last position that a model has: embeddings of positions end there.
        shown = self.positions.clamp(max=self.max_context - 1)
        return {
            "input_ids": tokens[None],
            "position_ids": shown[None],
            self._argument: self,
            "use_cache": True,
        }

    @contextmanager
    def _entered(self) -> Iterator[None]:
        token = _pass.set(self)
        try:
            yield
        finally:
            _pass.reset(token)
            self.rows = self.pages = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values [1, heads, tokens, dim] of a pass; return the whole cache."""
        while len(self._storage) <= layer_idx:
            keys = self._allocate(key_states, by_column=self._by_column)
            self._storage.append((keys, self._allocate(value_states)))
        keys, values = self._storage[layer_idx]
        keys[self._slots, :, self._stored_at] = key_states[0].transpose(0, 1)
        values[self._slots, :, self._stored_at] = value_states[0].transpose(0, 1)
        return keys, values

    def _reserve(self, columns: int) -> None:
        """Allocate at least this many columns."""
        if columns <= self._columns:
            return
        before = self._columns
        needed = max(columns, int(GROWTH * before))
        self._columns = min(needed + -needed % COLUMNS, self.max_context + 1)
        for layer, (keys, values) in enumerate(self._storage):
            more = (self._allocate(keys, by_column=self._by_column), self._allocate(values))
            for new, old in zip(more, (keys, values), strict=True):
                new[:, :, :before] = old
            self._storage[layer] = more

    def _allocate(self, like: Tensor, *, by_column: bool = False) -> Tensor:
        heads, columns, dim = like.shape[1], self._columns, like.shape[3]
        if by_column:
            return like.new_zeros(self.num_slots, heads, dim, columns).transpose(2, 3)
        if self.paged:
            return like.new_zeros(self.num_slots + 1, columns, heads, dim).transpose(1, 2)
        return like.new_zeros(self.num_slots, heads, columns, dim)

    def copy(self, source: int, target: int, *, length: int) -> None:
        """Copy the first ``length`` columns of slot ``source`` into slot ``target``."""
        for pair in self._storage:
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0, because positions are always given."""
        return 0


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a pass, [1, tokens, heads, dim].

    Args:
        module: attention module of the layer.
        query: [1, heads, tokens, dim].
        key: keys returned by ``SlotCache.update``, [slots, heads, columns, dim].
        value: values returned by ``SlotCache.update``, with the same shape.
        attention_mask: unused; the pass determines which tokens are visible.
        scaling: factor of the scores.
        softcap: bound of the scores (Gemma-2).
        s_aux: attention sinks of each head (gpt-oss).
    """
    cache = _pass.get()
    assert cache is not None
    kind = cache.kinds[int(module.layer_idx)]  # type: ignore[arg-type]
    flat = query[0]
    if cache.pages is not None:
        if softcap is not None or s_aux is not None:
            raise ValueError("FlashAttention with pages has no bound of the scores and no sinks")
        window = reach(cache.config, kind)
        attended = cache.pages.attend(flat.transpose(0, 1), key, value, window=window, scaling=scaling)
        return attended[None], None
    if cache.rows is not None:
        attended = cache.rows.attend(
            flat, key, value, kind=kind, scaling=scaling, softcap=softcap, sinks=s_aux
        )
        return attended[None], None
    result = query.new_empty(flat.shape[1], flat.shape[0], value.shape[-1])
    for group in cache.groups:
        part = slice(group.begin, group.end)
        size, width = len(group.slots), group.width
        asked = flat[:, part]
        if group.padded is not None:
            asked = asked.index_select(1, group.padded.flatten())
        asked = asked.view(-1, size, width, flat.shape[-1]).transpose(0, 1)
        keys, values = key[group.keys_at, :, : group.columns], value[group.keys_at, :, : group.columns]
        long = size == 1 and width > FEW_QUERIES
        is_causal = long and can_be_causal(values, queries=width, window=reach(cache.config, kind))
        seen = attend(
            asked,
            keys,
            values,
            mask=None if is_causal else group.mask(cache.config, kind, cache.positions[part], query.dtype),
            is_causal=is_causal,
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        seen = seen.transpose(1, 2).reshape(size * width, -1, value.shape[-1])
        result[part] = seen if group.unpadded is None else seen.index_select(0, group.unpadded)
    return result[None], None


AttentionInterface.register(ATTENTION, slot_attention)


def cached_logprobs(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], *, paged: bool = False
) -> list[Tensor]:
    """Return the log-probabilities of all tokens but the first of sequences, as an engine computes them.

    A first pass computes all sequences except their ends, which a second pass computes with the cache.
    ``paged`` is as in ``SlotCache``.
    """
    device = next(model.parameters()).device
    model.set_attn_implementation(ATTENTION)
    longest = max(map(len, sequences))
    cache = SlotCache(model, num_slots=len(sequences), max_context=longest, paged=paged)
    scores: list[list[Tensor]] = [[] for _ in sequences]
    for begin, end in ((0, -2), (-2, -1)):
        token_ids, slots, positions, groups = list[int](), list[int](), list[int](), list[Group]()
        for slot, sequence in enumerate(sequences):
            places = range(len(sequence))[begin:end]
            first = len(token_ids)
            token_ids += sequence[begin:end]
            slots += [slot] * len(places)
            positions += places
            groups.append(
                Group(
                    begin=first,
                    end=len(token_ids),
                    slots=[slot],
                    counts=[len(places)],
                    length=places.stop,
                )
            )
        one = Pass(token_ids=token_ids, slots=slots, positions=positions, groups=groups)
        with cache.reading(one, device=device) as inputs:
            logits = read_logits(model, model.base_model(**inputs).last_hidden_state[0])
        for group, found in zip(groups, scores, strict=True):
            found.append(logits[group.begin : group.end].float().log_softmax(-1))
    return [
        torch.cat(found).gather(-1, torch.tensor(sequence[1:], device=device)[:, None])[:, 0]
        for sequence, found in zip(sequences, scores, strict=True)
    ]


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixIndex(Generic[T]):
    """Finds the owners of contexts that begin like a given context, in time linear in its length.

    Each beginning with a multiple of ``BLOCK`` tokens has a hash, which includes the hash of the previous
    one.
    """

    def __init__(self) -> None:
        self._owners: dict[int, dict[T, None]] = {}
        self._hashes: dict[T, list[int]] = {}

    def add(self, owner: T, context: Sequence[int]) -> None:
        """Set the context of an owner."""
        self.discard(owner)
        hashes = self._hashes[owner] = list(_hashes(context))
        for beginning in hashes:
            self._owners.setdefault(beginning, {})[owner] = None

    def discard(self, owner: T) -> None:
        """Remove an owner if it exists."""
        for beginning in self._hashes.pop(owner, ()):
            owners = self._owners[beginning]
            del owners[owner]
            if not owners:
                del self._owners[beginning]

    def alike(self, owner: T, context: Sequence[int]) -> Iterator[T]:
        """Iterate over the other owners whose contexts begin like this one, the longest beginnings first.

        Hashes can collide, so compare the tokens.
        """
        seen = {owner}
        for beginning in reversed(list(_hashes(context))):
            for other in self._owners.get(beginning, ()):
                if other not in seen:
                    seen.add(other)
                    yield other


def _hashes(context: Sequence[int]) -> Iterator[int]:
    before = 0
    for begin in range(0, len(context) - BLOCK + 1, BLOCK):
        before = hash((before, *context[begin : begin + BLOCK]))
        yield before


class Drafts:
    """A table of n-grams: the token that last followed each ``CONTEXT`` tokens.

    Agents often repeat text: the JSON of tool calls, names in the prompt, the answers of siblings.

    Args:
        stop: tokens that are never guessed, because no token follows them.
    """

    def __init__(self, stop: Collection[int]) -> None:
        self._stop = stop
        self._following: dict[tuple[int, ...], int] = {}

    def learn(self, context: Sequence[int], token_ids: Sequence[int]) -> None:
        """Add a completion."""
        table, tokens = self._following, [*context[-CONTEXT:], *token_ids]
        for begin in range(len(tokens) - CONTEXT):
            before = tuple(tokens[begin : begin + CONTEXT])
            table.pop(before, None)  # so that it moves to the end
            table[before] = tokens[begin + CONTEXT]
        if len(table) > CAPACITY:
            for before in list(islice(table, len(table) - CAPACITY // 2)):
                del table[before]

    def guess(self, context: Sequence[int], token_ids: Sequence[int], *, most: int) -> list[int]:
        """Return the tokens that probably follow, at most ``most`` of them."""
        before = tuple(token_ids[-CONTEXT:])
        if len(before) < CONTEXT:
            before = (*context[len(before) - CONTEXT :], *before)
        guessed: list[int] = []
        while len(guessed) < min(most, MOST):
            token = self._following.get(before)
            if token is None or token in self._stop:
                break
            guessed.append(token)
            before = (*before[1:], token)
        return guessed


CALL_COLUMNS = 600
"""Cost of one more call of the attention on a CPU, in padded columns of a sequence."""


def join_calls(calls: Sequence[Group], *, decoding: Sequence[bool], on_cpu: bool) -> list[Group]:
    """Return attention calls, with adjacent decoding sequences joined in one call if that costs less."""
    groups: list[Group] = []
    for call, decodes in zip(calls, decoding, strict=True):
        last = groups[-1] if groups else None
        if last is not None and decodes and last.end == call.begin and (not on_cpu or _pays(last, call)):
            last.end, last.length = call.end, max(last.length, call.length)
            last.slots, last.counts = [*last.slots, *call.slots], [*last.counts, *call.counts]
        else:
            groups.append(call)
    return groups


def _pays(group: Group, call: Group) -> bool:
    """Return True if a single call for a group and one more sequence is cheaper than two calls on a CPU."""
    if call.slots[0] != group.slots[-1] + 1:
        return False
    size = len(group.slots)
    return (size + 1) * max(group.length, call.length) <= size * group.length + call.length + CALL_COLUMNS
