"""Packed rows -> log-probabilities of the sampled tokens.

Attention is computed for one sequence after another, so that packing adds no cost. Sequences that begin alike
share the hidden states of their beginning. The head and the softmax run only at sampled tokens, in chunks, so
that no [tokens, vocabulary] tensor is materialized.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from agentrl_train.batch import Row, alphabetical, families, joined_sets, pack_rows, shared_beginning
from agentrl_train.models.architecture import (
    additive_mask,
    attend,
    can_be_causal,
    has_masks,
    layer_types,
    reach,
    read_logits,
)
from agentrl_train.types import IntArray, MicroBatch, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = tuple[int, int]
"""Slice of every row that a rank holds, as (index, count); ``(0, 1)`` is the whole row."""
WHOLE: Part = (0, 1)
ATTENTION = "agentrl_segments"
"""Name of ``segment_attention`` among the attention implementations of transformers."""
ROW_TOKENS = 2048
"""Tokens of short sequences that share a forward pass without gradients."""
CACHED_LOGITS = 2**19
"""Number of logits that a CPU scores at a time, so that they stay in its cache."""
Span = tuple[int, int]
"""Start and end among the tokens of a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Adjacent tokens of a tree that follow one another in a sequence."""

    begin: int
    end: int
    context: tuple[Span, ...] = ()
    """Spans of the preceding tokens, in order."""
    masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False)
    """Masks of the attention, which layers of one kind share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Sequences that share their common beginnings.

    Later tokens do not change the hidden states of a beginning, so one tree is enough for all sequences::

        a b c d e      kept      a b c d e  x y  z      branches   0 to 5, 5 to 7 after 0 to 3,
        a b c x y      places    0 1 2 3 4                         and 7 to 8 after 0 to 2
        a b z                    0 1 2 5 6
                                 0 1 7
    """

    kept: IntArray
    """Index of each token of the tree in the concatenated sequences."""
    places: IntArray
    """Index in the tree of each token of the concatenated sequences."""
    branches: Sequence[Branch]
    """The branches, which cover all tokens of the tree in order."""


class Scorer(nn.Module):
    """A causal language model that outputs log-probability and entropy of the sampled tokens.

    Body and head share one ``forward``, so that a sharded model gathers tied embeddings once.
    """

    max_logits = 2**26
    """Number of logits that are computed at a time."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, part: Part) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._part = part

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return ``sampled_logprobs`` of this rank's slice of the rows."""
        return sampled_logprobs(
            self.model,
            micro,
            temperature=self._temperature,
            max_logits=self.max_logits,
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
    hidden, targets = hidden_before(model, micro, part=part)
    head = model.get_output_embeddings()
    allowed = select_sampled(micro.allowed, micro, part).to(hidden.device)
    sets = micro.allowed_sets.to(hidden.device) if len(micro.allowed_sets) > 1 else None

    def score(hidden: Tensor, targets: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        logits = read_logits(model, hidden)
        return score_tokens(
            logits,
            targets,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            allowed=None if sets is None else (allowed, sets),
        )

    size = max(1, max_logits // head.weight.shape[0])
    if len(targets) <= size:
        return score(hidden, targets, allowed)
    chunks = [
        checkpoint(score, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(size), targets.split(size), allowed.split(size), strict=True)
    ]
    return torch.cat([one for one, _ in chunks]), torch.cat([one for _, one in chunks])


def score_tokens(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
    allowed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of N tokens in float32, [N] each.

    Args:
        logits: [N, vocabulary].
        targets: the tokens, [N].
        temperature: divides the logits.
        entropy_gradient: True if the entropy has a gradient.
        allowed: number of the set of each row, [N], and the sets as packed bits, [sets, bytes]. The
            distribution is over the tokens in the set of the row. The first set has all tokens. None allows
            all tokens in every row.
    """
    logprobs, entropy = _Scores.apply(logits, targets, temperature, *(allowed or (None, None)))
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _Scores(torch.autograd.Function):
    """Keeps only the logits. PyTorch's operations would keep or create five tensors of their size."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        allowed: Tensor | None,
        sets: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
        ctx.allowed, ctx.sets = allowed, sets
        for rows in _blocks(logits):
            scores = _log_softmax(logits[rows], temperature, _forbidden_tokens(ctx, rows, logits.shape[1]))
            logprobs[rows] = scores.gather(-1, targets[rows, None])[:, 0]
            entropy[rows] = scores.exp().mul_(scores).sum(-1).neg_()
        ctx.save_for_backward(logits, targets, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, targets, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        found = torch.empty_like(logits)
        for rows in _blocks(logits):
            scores = _log_softmax(
                logits[rows], ctx.temperature, _forbidden_tokens(ctx, rows, logits.shape[1])
            )
            shares = scores.exp()
            if of_entropy is not None:
                scores.add_(entropy[rows, None]).mul_(shares).mul_(-of_entropy[rows, None])
            else:
                scores.zero_()
            if of_logprobs is not None:
                scores.addcmul_(shares, of_logprobs[rows, None], value=-1.0)
                scores.scatter_add_(-1, targets[rows, None], of_logprobs[rows, None])
            found[rows] = scores.div_(ctx.temperature)
        return found, None, None, None, None


def _log_softmax(logits: Tensor, temperature: float, forbidden: Tensor | None) -> Tensor:
    scaled = logits.float() / temperature
    if forbidden is not None:
        # The lowest number instead of -inf: the probability is also 0, and the entropy is not NaN.
        scaled = scaled.masked_fill_(forbidden, torch.finfo(torch.float32).min)
    return scaled.log_softmax(-1)


def _forbidden_tokens(ctx: Any, rows: slice, vocabulary: int) -> Tensor | None:
    """Return the forbidden tokens of rows, [rows, vocabulary], or None if no token is forbidden."""
    if ctx.sets is None or not bool(ctx.allowed[rows].any()):
        return None
    places = ctx.allowed[rows]
    bits = torch.arange(8, device=places.device)
    forbidden = (ctx.sets[places][:, :, None] >> bits & 1).flatten(1)[:, :vocabulary] == 0
    rest = vocabulary - forbidden.shape[1]  # a teacher can have more rows in its head
    return torch.cat([forbidden, (places > 0)[:, None].expand(-1, rest)], dim=1) if rest else forbidden


def _blocks(logits: Tensor) -> list[slice]:
    count, vocabulary = logits.shape
    size = max(1, CACHED_LOGITS // vocabulary) if logits.device.type == "cpu" else max(1, count)
    return [slice(begin, begin + size) for begin in range(0, count, size)]


def hidden_before(model: PreTrainedModel, micro: MicroBatch, *, part: Part = WHOLE) -> tuple[Tensor, Tensor]:
    """Return the hidden states before the N sampled tokens, [N, width], and these tokens, [N], by rows."""
    device = next(model.parameters()).device
    if attends_to_segments(model) and part == WHOLE:
        micro = padding_free(micro)
    predicts = _next(micro.loss_mask, part) > 0
    targets = _next(micro.token_ids, part)[predicts].to(device)
    if shares_prefixes(model) and part == WHOLE:
        begins = (micro.position_ids[0] == 0).nonzero()[1:, 0].tolist()
        tree = prefix_tree(np.split(micro.token_ids[0].numpy(), begins))
        hidden = model.base_model(
            input_ids=micro.token_ids[:, tree.kept].to(device),
            position_ids=micro.position_ids[:, tree.kept].to(device),
            branches=tree.branches,
            use_cache=False,
        )[0]
        places = torch.from_numpy(tree.places)[predicts[0]]
        return hidden[0].index_select(0, places.to(device)), targets
    inputs = _inputs(model, micro, part, device=device)
    hidden = model.base_model(use_cache=False, **inputs)[0]
    return hidden[predicts.to(device)], targets


def select_sampled(values: Tensor, micro: MicroBatch, part: Part = WHOLE) -> Tensor:
    """Return the entries [N] of ``values`` [rows, row length] at the sampled tokens, by rows."""
    return _next(values, part)[_next(micro.loss_mask, part) > 0]


def sampled_units(micro: MicroBatch, part: Part = WHOLE) -> tuple[Tensor, Tensor]:
    """Return the sequence number and the turn number of each sampled token, [N] each, from 0.

    A turn is a run of consecutive sampled tokens.
    """
    rows, length = micro.segment_ids.shape
    numbers = micro.segment_ids + torch.arange(rows)[:, None] * (length + 1)
    sequences = select_sampled(numbers, micro, part)
    positions = select_sampled(micro.position_ids, micro, part)
    changes = sequences.diff() != 0
    gaps = changes | (positions.diff() != 1)
    first = sequences.new_zeros(min(1, len(sequences)))
    return torch.cat([first, changes.cumsum(0)]), torch.cat([first, gaps.cumsum(0)])


def padding_free(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch as one row without padding; sampled tokens keep their order.

    The first token of a sequence is never sampled, so no prediction crosses a sequence boundary.
    """
    real = micro.segment_ids > 0
    begins = micro.position_ids[real] == 0
    return replace(micro.each(lambda values: values[real][None]), segment_ids=begins.cumsum(0)[None])


def set_attention(model: PreTrainedModel, name: str = "sdpa") -> None:
    """Make a model attend within the sequences of packed rows, by PyTorch ("sdpa") or by flash-attn.

    Layers without attention stay as they are. Raises ``ValueError`` if flash-attn is not available.
    """
    if name == "sdpa":
        if has_masks(model):
            model.set_attn_implementation(ATTENTION)
        return
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"model.attention = {name!r} is not available: {reason}; set it to 'sdpa'"
        ) from error


def prefix_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """Return the tree of sequences of token ids, which are not empty."""
    starts = np.cumsum([0, *(len(one) for one in sequences)])
    places = np.empty(starts[-1], np.int64)
    kept: list[IntArray] = []
    branches: list[Branch] = []
    path: list[Span] = []
    before, size = np.empty(0, np.int64), 0
    for i in alphabetical(sequences):
        one = sequences[i]
        same = shared_beginning(before, one)
        path = _truncate(path, same)
        if added := len(one) - same:
            branches.append(Branch(begin=size, end=size + added, context=tuple(path)))
            path = [*path, (size, size + added)]
            kept.append(np.arange(starts[i] + same, starts[i + 1]))
            size += added
        places[starts[i] : starts[i + 1]] = np.concatenate([np.arange(*span) for span in path])
        before = one
    return PrefixTree(kept=np.concatenate(kept), places=places, branches=branches)


def _truncate(path: Sequence[Span], length: int) -> list[Span]:
    """Return the first ``length`` tokens of a path, with adjacent spans joined."""
    found: list[Span] = []
    for begin, end in path:
        end = min(end, begin + length)
        if begin == end:
            break
        length -= end - begin
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    branches: Sequence[Branch] | None = None,
    position_ids: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention within the sequences of a row, [rows, tokens, heads, dim].

    Args:
        module: attention module of the layer.
        query: [rows, heads, tokens, dim].
        key: [rows, heads or fewer, tokens, dim].
        value: like ``key``.
        attention_mask: unused; a token attends to the preceding tokens of its sequence.
        branches: the sequences. Models that do not pass this argument must pass ``position_ids``.
        position_ids: positions of the tokens in their sequences.
        scaling: factor of the scores.
        softcap: bound of the scores (Gemma-2).
        s_aux: attention sinks of each head (gpt-oss).

    Raises:
        ValueError: the model passes neither of them, but sequences share their beginnings.
    """
    config: Any = module.config
    kind = layer_types(config)[int(module.layer_idx)]  # type: ignore[arg-type]
    score = partial(attend, scaling=scaling, softcap=softcap, sinks=s_aux)
    found: list[Tensor] = []
    for branch in _segments(position_ids, query.shape[2]) if branches is None else branches:
        asked = query[:, :, branch.begin : branch.end]
        spans = [*branch.context, (branch.begin, branch.end)]
        keys, values = (_concatenate([one[:, :, begin:end] for begin, end in spans]) for one in (key, value))
        found += _attend_in_parts(
            asked, keys, values, config=config, kind=kind, score=score, masks=branch.masks
        )
    return torch.cat([one.transpose(1, 2) for one in found], dim=1), None


def _attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: Any,
    kind: str,
    score: Callable[..., Tensor],
    masks: dict[tuple[object, ...], Tensor],
) -> list[Tensor]:
    """Return the attention of the last tokens of a sequence (the queries), in parts."""
    length, window = key.shape[2], reach(config, kind)
    start = length - query.shape[2]
    if can_be_causal(value, queries=length - start, window=window):
        return [score(query, key, value, is_causal=True)]
    found: list[Tensor] = []
    places, size = torch.arange(length, device=query.device), int(min(window, length))
    for begin in range(start, length, size):
        end, first = min(begin + size, length), max(0, begin + 1 - size if window < length else 0)
        queries, nearby = places[begin:end, None], places[first:end]
        if (one := (kind, begin, query.dtype)) not in masks:
            masks[one] = additive_mask(config, kind, queries=queries, keys=nearby, dtype=query.dtype)
        asked, near = query[:, :, begin - start : end - start], slice(first, end)
        found.append(score(asked, key[:, :, near], value[:, :, near], mask=masks[one]))
    return found


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


AttentionInterface.register(ATTENTION, segment_attention)


def _segments(position_ids: Tensor | None, tokens: int) -> list[Branch]:
    """Return the sequences of a row. Each sequence starts at position 0."""
    if position_ids is None or position_ids.shape[1] != tokens:
        return [Branch(begin=0, end=tokens)]
    positions = position_ids[0]
    begins = (positions == 0).nonzero()[:, 0].tolist()
    if bool(((positions.diff() != 1) & (positions[1:] != 0)).any()):
        raise ValueError(
            "this model does not tell its attention which sequences share their beginning: "
            "set model.attention = 'eager'."
        )
    return [Branch(begin=begin, end=end) for begin, end in zip(begins, [*begins[1:], tokens], strict=True)]


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Return True if sequences that begin alike can be computed as a tree.

    Additional arguments of the model body must reach its attention.
    """
    if not has_masks(model) or model.config._attn_implementation != ATTENTION:
        return False
    body = model.base_model
    names = [name for name, one in body.named_modules() if hasattr(one, "layer_idx")]
    around = {path for name in names for path in (name, name.rpartition(".")[0])}
    passing = [body, *(one for one in map(body.get_submodule, around) if not isinstance(one, nn.ModuleList))]
    return bool(names) and all(_passes_arguments(module.forward) for module in passing)


def _passes_arguments(function: Callable[..., Any]) -> bool:
    """Return True if a function uses its ``**kwargs``. Some functions accept and ignore them."""
    return _loads_kwargs(inspect.unwrap(function).__code__)


@cache
def _loads_kwargs(code: CodeType) -> bool:
    loaded = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_FAST")]
    return any("kwargs" in (one if isinstance(one, tuple) else (one,)) for one in loaded)


def attends_to_segments(model: PreTrainedModel) -> bool:
    """Return True if a model separates the sequences of a single row without padding."""
    return has_masks(model) and str(model.config._attn_implementation).startswith(
        (ATTENTION, "flash_attention")
    )


def one_row(*sequences: TokenSequence) -> MicroBatch:
    """Return sequences as a micro-batch of one row."""

    def joined(name: str) -> Tensor:
        return torch.cat([torch.from_numpy(getattr(one, name)) for one in sequences])[None]

    mask = joined("loss_mask")
    allowed, sets = joined_sets(sequences)
    numbers = torch.arange(1, len(sequences) + 1)
    return MicroBatch(
        token_ids=joined("token_ids"),
        position_ids=torch.cat([torch.arange(len(one)) for one in sequences])[None],
        segment_ids=numbers.repeat_interleave(torch.tensor([len(one) for one in sequences]))[None],
        loss_mask=mask,
        logprobs=joined("logprobs"),
        advantages=joined("advantages"),
        ages=torch.zeros_like(mask, dtype=torch.int64),
        weights=mask,
        allowed=torch.from_numpy(np.concatenate(allowed))[None],
        allowed_sets=torch.from_numpy(sets),
    )


def rows_to_score(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], *, part: Part = WHOLE, ranks: int = 1
) -> list[Row]:
    """Distribute sequences over rows for a pass without gradients. Similar beginnings share a row."""
    lengths = [len(one) for one in sequences]
    if not attends_to_segments(model):
        return [[number] for number in range(len(lengths))]
    if shares_prefixes(model) and part == WHOLE:
        return families([one.token_ids for one in sequences], min(ROW_TOKENS, sum(lengths) // ranks))
    return shared_rows(lengths, ranks=ranks)


def shared_rows(lengths: Sequence[int], *, ranks: int = 1) -> list[Row]:
    """Distribute sequences over rows, with at least one row for each rank if there are enough tokens.

    A row has room for the longest sequence, for the two shortest, or for ``ROW_TOKENS``, whichever is most. A
    forward pass of a few short sequences costs nearly as much as a full row.
    """
    shortest = sorted(lengths)[:2]
    room = max(*lengths, sum(shortest), min(ROW_TOKENS, sum(lengths) // ranks)) if lengths else 0
    return pack_rows(lengths, room)


def _inputs(model: PreTrainedModel, micro: MicroBatch, part: Part, *, device: torch.device) -> dict[str, Any]:
    """Return the inputs of the model body: tokens and, if needed, the boundaries of sequences.

    Rows of one sequence need no boundaries, because causal attention ignores padding after a sequence. Raises
    ``ValueError`` if sequences share a row and the model does not separate them.
    """
    inputs: dict[str, Any] = {"input_ids": _cut(micro.token_ids, part).to(device)}
    if attends_to_segments(model):
        inputs["position_ids"] = _cut(micro.position_ids, part).to(device)
        positions = _pad(micro.position_ids, part)
        inputs["branches"] = _segments(positions, positions.shape[1])
    elif int(micro.segment_ids.max()) > 1:
        raise ValueError(
            "this model does not separate packed sequences: it has layers without attention, or "
            "set_attention was not called; pack with packed=False, one sequence per row."
        )
    return inputs


def _next(values: Tensor, part: Part) -> Tensor:
    """Return, for each token of the part, the entry of the next token; 0 at the end of a row."""
    return _cut(pad(values[:, 1:], (0, 1)), part)


def _cut(values: Tensor, part: Part) -> Tensor:
    index, count = part
    return _pad(values, part).chunk(count, dim=1)[index]


def _pad(values: Tensor, part: Part) -> Tensor:
    return pad(values, (0, -values.shape[1] % part[1]))
