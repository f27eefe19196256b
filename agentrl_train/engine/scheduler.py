"""Continuous batching for one policy of the torch engine: scheduling, prefix sharing, drafts and sampling."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl_train.engine.cache import (
    ATTENTION,
    MOST,
    Drafts,
    Group,
    Pass,
    PrefixIndex,
    SlotCache,
    join_calls,
    shared_prefix,
)
from agentrl_train.engine.constraint import Truncation, unpack_sets
from agentrl_train.engine.gpu import DecodeGraphs, Fed, can_be_paged
from agentrl_train.errors import ConstraintError, EngineBroken, not_numbers
from agentrl_train.models.architecture import read_logits
from agentrl_train.types import SamplingParams

if TYPE_CHECKING:
    from agentrl_train.engine.torch import Request

BLOCK = 256
"""Number of weights in a block."""
SINGLE_BLOCK = 4096
"""Up to this number of weights, blocks are not faster."""
CACHED_LOGITS = 2**19
"""Number of logits that the caches of a processor hold, with the weights that are computed from them."""
LARGEST_UNIFORM = 1 - 2**-30
"""Prevents rounding from selecting the zero weights at the end of a block."""


def sample(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    truncation: Truncation | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverse transform sampling.

    The sample of a row depends only on its own uniform number, not on the rest of the batch.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows]. 0 is greedy, with the log-probability of temperature 1.
        uniforms: [rows], in [0, 1).
        truncation: limits that exclude improbable tokens.
        allowed: tokens that a constraint allows, [rows, vocabulary]. The others are excluded before
            ``truncation``. None allows all tokens.

    Returns:
        Token ids [rows], and their log-probabilities [rows] in float32 among the remaining tokens.
    """
    rows = max(1, CACHED_LOGITS // logits.shape[1])
    on_cpu = logits.device.type == "cpu"
    if on_cpu and len(logits) > rows:
        parts = [
            sample(
                logits[part],
                temperatures=temperatures[part],
                uniforms=uniforms[part],
                truncation=truncation[part] if truncation is not None else None,
                allowed=allowed[part] if allowed is not None else None,
            )
            for part in (slice(begin, begin + rows) for begin in range(0, len(logits), rows))
        ]
        drawn, scores = zip(*parts, strict=True)
        return torch.cat(drawn), torch.cat(scores)
    greedy = temperatures == 0
    scaled = logits.float()
    # A GPU would have to finish all earlier work before a condition is known.
    if not on_cpu or not bool((temperatures == 1).all()):
        scaled = scaled / torch.where(greedy, 1.0, temperatures)[:, None]
    if allowed is not None:
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    if truncation is not None:
        scaled = truncation.apply(scaled)
    largest = scaled.amax(dim=-1, keepdim=True)
    tokens, total = draw((scaled - largest).exp_(), uniforms[:, None].double())
    if not on_cpu or bool(greedy.any()):
        tokens = torch.where(greedy[:, None], scaled.argmax(dim=-1, keepdim=True), tokens)
    logprobs = scaled.gather(-1, tokens) - largest - total.log().float()
    return tokens[:, 0], logprobs[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index of each row, drawn in proportion to its weight, and the sum of the row, [rows, 1] each.

    Many weights are summed by blocks, and one by one only in the block that contains the draw. Cumulative
    sums need float64, because float32 would lose the tail, and float64 is slow for a whole vocabulary.

    Args:
        weights: [rows, size], not negative.
        uniforms: [rows, 1], float64 in [0, 1).
    """
    rows, size = weights.shape
    if size <= SINGLE_BLOCK:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        return torch.searchsorted(cumulative, uniforms * total, right=True).clamp_(max=size - 1), total
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK)) if size % BLOCK else weights
    blocks = padded.view(rows, -1, BLOCK)
    sums = blocks.sum(dim=-1)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniforms * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    within = 1 - (cumulative.gather(1, block) - target) / sums.gather(1, block).double()
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    column, _ = draw(inside, within.clamp_(0, LARGEST_UNIFORM))
    return block * BLOCK + column, total


PASS_TOKENS = 4096
"""Token budget of a pass. Sequences beyond it wait for the next pass."""
CHUNK_CELLS = 2**22
"""Budget of queries times keys of one sequence in a pass. Longer contexts are prefilled in chunks."""
SHORTEST_SHARE = 16
"""A sequence waits until another sequence has cached their common prefix if it has this many tokens."""
SHORTEST_VIEW = 64
"""Minimum attention width with fixed shapes. It doubles as a sequence grows."""
FIXED_ROWS = 16
"""Sequences of every decode pass in deterministic mode, padding included."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A slot of the cache: its session, its cached tokens, and the active request."""

    key: str
    slot: int
    cached: list[int] = field(default_factory=list)
    request: Request | None = None

    @property
    def ahead(self) -> Sequence[int]:
        """The tokens that are not cached yet, at least one while a request is active."""
        request, known = self.request, len(self.cached)
        assert request is not None
        if known >= len(request.context):
            return request.token_ids[known - len(request.context) :]
        return [*request.context[known:], *request.token_ids]


@dataclass(slots=True, kw_only=True)
class _Part:
    """The part of a pass that belongs to a sequence: pending tokens, then guesses of the next tokens."""

    sequence: _Sequence
    pending: Sequence[int]
    drafted: Sequence[int] = ()
    samples: bool = True
    """False for a chunk of a context if more chunks follow."""
    allowed: Sequence[bytes] = ()
    """Packed sets of the tokens that can be sampled, one for each position that samples."""
    failure: ConstraintError | None = None
    """Reason why no token can be sampled."""

    @property
    def unlimited(self) -> bool:
        """Return True if every token can be sampled at every position."""
        return not any(self.allowed)

    def constrain(self) -> None:
        """Find the allowed tokens, and drop guesses from the first one that is not allowed."""
        request = self.sequence.request
        if not self.samples or request is None:
            return
        self.allowed = [b""] * (1 + len(self.drafted))
        if request.matcher is None:
            return
        try:
            self.drafted, self.allowed = request.matcher.follow(self.drafted)
        except ConstraintError as error:
            self.drafted, self.allowed, self.failure = (), [b""], error


class Scheduler:
    """Continuous batching over one model. Not thread-safe: only the engine's thread calls it.

    A pass takes the pending tokens of all active sequences (a context or the last sampled token), followed by
    the guesses of ``Drafts``. At each position, the logits and the random number of that position determine
    the sampled token. Guesses up to the first wrong one are therefore the tokens that would be sampled
    without guesses (speculative decoding, but with the same draws).

    A sequence keeps its slot between two requests until another sequence needs it, least recently used first.
    Schedulers can share ``drafts``, because the policies of one run produce similar text.

    With ``fixed_rows`` a completion depends, bit for bit, only on the weights and its request. No prefix is
    shared or kept, no tokens are guessed, and each context is prefilled alone. Every decode pass has that
    many sequences, including padding, and its number of columns depends only on their length.

    A GPU replays passes that only decode as CUDA graphs. ``paged`` stores keys and values in pages. By
    default a GPU does so if ``can_be_paged``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        stop_token_ids: Sequence[int],
        num_slots: int,
        max_context: int,
        policy_version: int = 0,
        fixed_rows: int = 0,
        drafts: Drafts | None = None,
        paged: bool | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.name = name
        self.policy_version = policy_version
        self.num_sampled = 0
        self.num_prefilled = 0
        self.num_reprefilled = self.num_abandoned = 0
        self.num_completed = 0
        self._fixed_rows = fixed_rows
        self._stop = frozenset(stop_token_ids)
        self._device = next(model.parameters()).device
        self._max_context = max_context
        on_gpu = self._device.type == "cuda" and not fixed_rows
        paged = on_gpu and can_be_paged(model) if paged is None else paged
        self._cache = SlotCache(model, num_slots=num_slots, max_context=max_context, paged=paged)
        self._graphs = DecodeGraphs(model, self._cache, sample=sample) if on_gpu else None
        self._slots: list[_Sequence | None] = [None] * num_slots
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._active: dict[int, _Sequence] = {}
        """Sequences with a request, by slot."""
        self._prefixes: PrefixIndex[_Sequence] = PrefixIndex()
        self._drafts = drafts or Drafts(self._stop)
        self._reached: dict[str, int] = {}
        """Largest number of cached tokens per session. Prefilling them again counts as reprefilled."""
        self._waiting: deque[Request] = deque()

    @property
    def num_slots(self) -> int:
        """Return the capacity of the cache in sequences."""
        return len(self._slots)

    @property
    def busy(self) -> bool:
        """Return True if requests are active or waiting."""
        return bool(self._active or self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins the next pass with a free slot."""
        self._waiting.append(request)

    def abandon(self, session_key: str) -> None:
        """Drop a session: its cached prefix and its active request."""
        self._waiting = deque(r for r in self._waiting if r.session_key != session_key)
        self._reached.pop(session_key, None)
        sequence = self._sequences.get(session_key)
        if sequence is None:
            return
        if sequence.request is not None:
            self.num_abandoned += len(sequence.request.token_ids)
            del self._active[sequence.slot]
        self._drop(sequence)

    def load(self, state: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Load new weights and drop all cached prefixes, which belong to the old weights."""
        own = dict(self.model.named_parameters())
        missing = own.keys() - state.keys()
        if missing:
            raise KeyError(f"the published weights lack {sorted(missing)[0]}")
        for name, parameter in own.items():
            parameter.data.copy_(state[name])
        self.policy_version = policy_version
        for sequence in self._sequences.values():
            self._remember(sequence)
            sequence.cached.clear()

    def rebuilt(self, *, num_slots: int) -> Scheduler:
        """Return a scheduler with the same weights and a new cache, which restarts every request."""
        fresh = Scheduler(
            self.model,
            name=self.name,
            stop_token_ids=tuple(self._stop),
            num_slots=num_slots,
            max_context=self._max_context,
            policy_version=self.policy_version,
            fixed_rows=self._fixed_rows,
            drafts=self._drafts,
            paged=self._cache.paged,
        )
        fresh.num_sampled, fresh.num_prefilled = self.num_sampled, self.num_prefilled
        fresh.num_completed = self.num_completed
        under_way = [s.request for s in self._sequences.values() if s.request is not None]
        fresh.num_reprefilled = self.num_reprefilled
        fresh.num_abandoned = self.num_abandoned + sum(len(request.token_ids) for request in under_way)
        for request in [*under_way, *self._waiting]:
            request.restart()
            fresh.submit(request)
        return fresh

    def step(self) -> None:
        """Admit waiting requests, and run one pass, which samples at least one token of most sequences."""
        self._admit()
        if not self._fixed_rows:
            self._run(self._parts())
            return
        active = list(self._active.values())
        for sequence in active:
            if len(ahead := sequence.ahead) > 1:
                self._run([_Part(sequence=sequence, pending=ahead[:-1], samples=False)])
        for alike in self._alike(active):
            self._run([_Part(sequence=sequence, pending=sequence.ahead) for sequence in alike])

    # Slots: admission, sharing and eviction.

    def _admit(self) -> None:
        later: deque[Request] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            sequence = self._sequences.get(request.session_key) or self._claim(request.session_key)
            if sequence is None or sequence.request is not None:
                later.append(request)
                if sequence is None:
                    break
                continue
            self._sequences.move_to_end(sequence.key)
            kept = 0 if self._fixed_rows else shared_prefix(sequence.cached, request.context)
            del sequence.cached[min(kept, len(request.context) - 1) :]
            sequence.request = request
            self._active[sequence.slot] = sequence
            if not self._fixed_rows:
                self._prefixes.add(sequence, request.context)
        later.extend(self._waiting)
        self._waiting = later

    def _claim(self, key: str) -> _Sequence | None:
        """Return a slot for a new session, evicting the least recently used idle one if none is free."""
        slot = next((slot for slot, held in enumerate(self._slots) if held is None), None)
        if slot is None:
            victim = next((s for s in self._sequences.values() if s.request is None), None)
            if victim is None:
                return None
            slot = victim.slot
            self._remember(victim)
            self._drop(victim)
        sequence = self._sequences[key] = self._slots[slot] = _Sequence(key=key, slot=slot)
        return sequence

    def _drop(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.key]
        self._slots[sequence.slot] = None
        self._prefixes.discard(sequence)

    def _remember(self, sequence: _Sequence) -> None:
        self._reached[sequence.key] = max(self._reached.get(sequence.key, 0), len(sequence.cached))

    # Composition of a pass.

    def _parts(self) -> list[_Part]:
        """Return the work of the next pass by slot. Sequences that sample their next token come first."""
        decoding: list[_Part] = []
        prefilling: list[_Part] = []
        budget = PASS_TOKENS
        guesses = MOST
        if self._graphs is not None and self._active:
            guesses = self._graphs.most_guesses(1 + max(self._active))
        for slot in sorted(self._active):
            sequence = self._active[slot]
            ahead = sequence.ahead
            if len(ahead) == 1:
                decoding.append(
                    _Part(sequence=sequence, pending=ahead, drafted=self._guess(sequence, most=guesses))
                )
                continue
            if self._copy_prefix(sequence, prefilling):
                continue
            ahead = sequence.ahead
            fits = max(1, min(budget, CHUNK_CELLS // (len(sequence.cached) + len(ahead))))
            if budget > 0:
                part = _Part(sequence=sequence, pending=ahead[:fits], samples=fits >= len(ahead))
                prefilling.append(part)
                budget -= len(part.pending)
        return decoding + prefilling

    def _guess(self, sequence: _Sequence, *, most: int) -> list[int]:
        request = sequence.request
        assert request is not None
        room = self._max_context - len(sequence.cached) - 1
        left = request.sampling.max_new_tokens - len(request.token_ids) - 1
        return self._drafts.guess(request.context, request.token_ids, most=min(room, left, most))

    def _copy_prefix(self, sequence: _Sequence, prefilling: Sequence[_Part]) -> bool:
        """Copy the shared prefix from another sequence's cache. Return True if more of it will follow."""
        request = sequence.request
        assert request is not None
        if len(sequence.cached) >= len(request.context):
            return False
        ahead, coming = [*request.context, *request.token_ids], {part.sequence for part in prefilling}
        for other in self._prefixes.alike(sequence, request.context):
            found = min(shared_prefix(other.cached, ahead), len(ahead) - 1)
            copied = found > len(sequence.cached)
            if copied:
                self._cache.copy(other.slot, sequence.slot, length=found)
                sequence.cached[:] = ahead[:found]
            if other in coming and other.request is not None:
                soon = shared_prefix([*other.request.context, *other.request.token_ids], ahead)
                if soon >= len(sequence.cached) + SHORTEST_SHARE:
                    return True
            if copied:
                break
        return False

    def _alike(self, sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
        """Split sequences into passes of up to ``fixed_rows`` with the same attention width."""
        size = self._fixed_rows
        views: dict[int, list[_Sequence]] = {}
        for sequence in sequences:
            views.setdefault(self._view(sequence), []).append(sequence)
        return [
            alike[start : start + size] for alike in views.values() for start in range(0, len(alike), size)
        ]

    def _view(self, sequence: _Sequence) -> int:
        """Return the attention width of the next token of a sequence, which depends only on its length."""
        columns = SHORTEST_VIEW
        while columns <= len(sequence.cached):
            columns *= 2
        return min(columns, self._max_context + 1)

    # Forward pass and sampling.

    def _run(self, parts: Sequence[_Part]) -> None:
        """Run a pass and append the sampled tokens."""
        if not parts:
            return
        for part in parts:
            part.constrain()
        tokens, logprobs = self._sample(parts)
        if not np.isfinite(logprobs).all():
            raise EngineBroken(not_numbers("engine", self.policy_version))
        place = 0
        for part in parts:
            self._count_prefilled(part)
            part.sequence.cached.extend(part.pending)
            if part.samples:
                until = place + 1 + len(part.drafted)
                self._accept(part, tokens[place:until], logprobs[place:until])
                place = until

    def _sample(self, parts: Sequence[_Part]) -> tuple[list[int], list[float]]:
        """Run the model and sample the tokens, with which a GPU is waited for once."""
        chosen: list[SamplingParams] = []
        uniforms: list[float] = []
        for part in parts:
            if part.samples and (request := part.sequence.request) is not None:
                first, count = len(request.token_ids), 1 + len(part.drafted)
                chosen += [request.sampling] * count
                uniforms += request.uniforms[first : first + count].tolist()
        temperatures = [one.temperature for one in chosen]
        limits = Truncation.of(chosen, self._device) if any(one.truncates for one in chosen) else None
        decoded = None
        if self._graphs is not None and all(part.samples and len(part.pending) == 1 for part in parts):
            fed = [Fed(p.sequence.slot, len(p.sequence.cached), [*p.pending, *p.drafted]) for p in parts]
            decoded = self._graphs.run(
                fed, temperatures=temperatures, uniforms=uniforms, plain=lambda: self._logits(parts)
            )
            if decoded is not None and limits is None and all(part.unlimited for part in parts):
                return decoded.token_ids, decoded.logprobs
        logits = self._logits(parts) if decoded is None else decoded.logits()
        if not chosen:
            return [], []
        drawn = sample(
            logits,
            temperatures=torch.tensor(temperatures, device=self._device),
            uniforms=torch.tensor(uniforms, device=self._device),
            truncation=limits,
            allowed=self._allowed_tokens(parts, vocabulary=logits.shape[-1]),
        )
        tokens, logprobs = torch.stack([one.double() for one in drawn]).tolist()
        return [int(token) for token in tokens], logprobs

    def _allowed_tokens(self, parts: Sequence[_Part], *, vocabulary: int) -> torch.Tensor | None:
        """Return the tokens that each position can sample, or None if all can sample any."""
        if all(part.unlimited for part in parts):
            return None
        sets = [one for part in parts for one in part.allowed]
        return unpack_sets(sets, vocabulary).to(self._device)

    def _logits(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Run the model; return the logits [samples, vocabulary] of the positions that sample."""
        begins = np.cumsum([0, *(len(part.pending) + len(part.drafted) for part in parts)])
        padding = 0
        if self._fixed_rows and parts[0].samples:
            padding = self._fixed_rows - len(parts)
        token_ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for part, begin in zip(parts, begins.tolist(), strict=False):
            fed, first = [*part.pending, *part.drafted], len(part.sequence.cached)
            token_ids += fed
            slots += [part.sequence.slot] * len(fed)
            positions += range(first, first + len(fed))
            if part.samples:
                wanted += range(begin + len(part.pending) - 1, begin + len(fed))
        token_ids += [0] * padding
        slots += [parts[0].sequence.slot] * padding
        positions += [self._max_context] * padding
        groups = self._groups(parts, begins, padding=padding)
        one = Pass(token_ids=token_ids, slots=slots, positions=positions, groups=groups)
        with self._cache.reading(one, device=self._device) as inputs:
            hidden: torch.Tensor = self.model.base_model(**inputs).last_hidden_state[0]
        if padding:
            return read_logits(self.model, hidden)[: len(wanted)]
        if len(wanted) < len(token_ids):
            hidden = hidden[torch.tensor(wanted, dtype=torch.long, device=self._device)]
        return read_logits(self.model, hidden)

    def _groups(self, parts: Sequence[_Part], begins: np.ndarray, *, padding: int) -> list[Group]:
        """Return the attention calls: one call for adjacent decoding sequences of similar length."""
        if self._fixed_rows and parts[0].samples:
            slots = [part.sequence.slot for part in parts] + [parts[0].sequence.slot] * padding
            length = self._view(parts[0].sequence)
            counts = [1] * len(slots)
            return [Group(begin=0, end=len(slots), slots=slots, counts=counts, length=length, view=False)]
        calls = [
            Group(
                begin=begin,
                end=end,
                slots=[part.sequence.slot],
                counts=[end - begin],
                length=len(part.sequence.cached) + end - begin,
            )
            for part, begin, end in zip(parts, begins.tolist(), begins.tolist()[1:], strict=False)
        ]
        if self._cache.paged:
            return calls
        decoding, on_cpu = [len(part.pending) == 1 for part in parts], self._device.type == "cpu"
        return join_calls(calls, decoding=decoding, on_cpu=on_cpu)

    def _count_prefilled(self, part: _Part) -> None:
        known, count = len(part.sequence.cached), len(part.pending) - part.samples
        self.num_prefilled += count
        again = min(self._reached.get(part.sequence.key, 0), known + count) - known
        self.num_reprefilled += max(0, again)

    def _accept(self, part: _Part, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append the sampled tokens up to the first wrong guess, or up to the end of the request."""
        sequence, request = part.sequence, part.sequence.request
        assert request is not None
        for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            if part.failure is not None:
                self._fail(sequence, request, part.failure)
                return
            request.add(token, logprob, version=self.policy_version, drawn_from=part.allowed[position])
            self.num_sampled += 1
            if token in self._stop or len(request.token_ids) == request.sampling.max_new_tokens:
                self._finish(sequence, request, stopped=token in self._stop)
                return
            if request.matcher is not None:
                request.matcher.advance(token)
            if position == len(part.drafted) or token != part.drafted[position]:
                return
            sequence.cached.append(token)

    def _finish(self, sequence: _Sequence, request: Request, *, stopped: bool) -> None:
        sequence.request = None
        del self._active[sequence.slot]
        self.num_completed += 1
        self._drafts.learn(request.context, request.token_ids)
        request.done(request.completion(finish_reason="stop" if stopped else "length", policy=self.name))

    def _fail(self, sequence: _Sequence, request: Request, error: ConstraintError) -> None:
        sequence.request = None
        del self._active[sequence.slot]
        self.num_abandoned += len(request.token_ids)
        if request.failed is not None:
            request.failed(error)
