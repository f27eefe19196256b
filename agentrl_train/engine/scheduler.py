"""Continuous batching for one policy of the torch engine: scheduling, KV cache rows and sampling."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl_train.architecture import attention_masks, read_logits
from agentrl_train.engine.kv_cache import SlotCache
from agentrl_train.types import Completion, SamplingParams


def sample(
    logits: torch.Tensor, *, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverse transform sampling.

    The sample of a row depends only on its own uniform number, not on the rest of the batch.

    Args:
        logits: [rows, vocabulary].
        temperatures: [rows]; 0 is greedy, and the log-probability is then that of temperature 1.
        uniforms: [rows], in [0, 1).

    Returns:
        Token ids [rows] and their log-probabilities [rows], float32.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)  # float32 loses the tail
    targets = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    tokens = torch.where(greedy, scaled.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


DECODES_BETWEEN_ADMISSIONS = 3
"""Decode steps between admissions: prefilling requests one by one would cost a forward pass each."""
SHARED_TOKENS = 16
"""Length of the common prefix from which sequences share prefilled tokens, such as siblings' openings."""
PREFILL_TOKENS = 8192
"""Token budget of one prefill pass, padding included."""
SHORTEST_VIEW = 64
"""Minimum attention width with fixed shapes; it doubles as a sequence grows."""
FIXED_ROWS = 16
"""Rows of every decode pass in deterministic mode, padding included."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A completion request; ``done`` is called once, in the thread of the engine."""

    session_key: str
    context: Sequence[int]
    sampling: SamplingParams
    done: Callable[[Completion], None]
    uniforms: np.ndarray = field(init=False)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.sampling.seed)
        self.uniforms = generator.random(self.sampling.max_new_tokens, dtype=np.float32)

    def restart(self) -> None:
        """Discard the sampled tokens; the random numbers stay the same."""
        for sampled in (self.token_ids, self.logprobs, self.versions):
            sampled.clear()


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """A cache row: its session, its cached tokens, and the active request."""

    key: str
    row: int
    cached: list[int] = field(default_factory=list)
    request: Request | None = None


class Scheduler:
    """Continuous batching over one model. Not thread-safe: only the engine's thread calls it.

    Rows ``0 … num_active`` of the cache are decoding; the rows behind them hold the prefixes of sessions
    between two turns, evicted in LRU order.

    With ``fixed_rows`` a completion depends, bit for bit, only on the weights and its request: no prefix is
    kept, each context is prefilled alone, and every decode pass has that many rows, padding included, and a
    number of columns given by the length of the row.
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
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.policy_version = policy_version
        self.num_sampled = 0
        self.num_prefilled = 0
        self.num_reprefilled = self.num_abandoned = 0
        self.num_completed = 0
        self._fixed_rows = fixed_rows
        self._stop = frozenset(stop_token_ids)
        self._device = next(model.parameters()).device
        self._cache = SlotCache(num_slots=num_slots, max_context=max_context, views=not fixed_rows)
        self._columns = torch.arange(max_context + 1, device=self._device)
        self._rows: list[_Sequence | None] = [None] * num_slots
        self._active = 0
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._reached: dict[str, int] = {}
        """Largest number of cached tokens per session: prefilling up to there again counts as reprefilled."""
        self._waiting: deque[Request] = deque()
        self._decodes = 0

    @property
    def num_slots(self) -> int:
        """Return the capacity of the cache in sequences."""
        return len(self._rows)

    @property
    def busy(self) -> bool:
        """Return whether requests are active or waiting."""
        return bool(self._active or self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins the batch at a later step."""
        self._waiting.append(request)

    def abandon(self, session_key: str) -> None:
        """Drop a session: its cached prefix and its active request."""
        self._waiting = deque(r for r in self._waiting if r.session_key != session_key)
        self._reached.pop(session_key, None)
        sequence = self._sequences.pop(session_key, None)
        if sequence is None:
            return
        if sequence.request is not None:
            self.num_abandoned += len(sequence.request.token_ids)
        if sequence.row < self._active:
            self._park(sequence)
        self._rows[sequence.row] = None

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
        """Return a scheduler with the same weights and a new cache, in which every request restarts."""
        fresh = Scheduler(
            self.model,
            name=self.name,
            stop_token_ids=tuple(self._stop),
            num_slots=num_slots,
            max_context=self._cache.max_context,
            policy_version=self.policy_version,
            fixed_rows=self._fixed_rows,
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
        """Admit waiting requests, prefill active rows, and sample one token for each."""
        if self._waiting and (self._active == 0 or self._decodes >= DECODES_BETWEEN_ADMISSIONS):
            self._admit()
            self._decodes = 0
        self._decodes += 1
        self._catch_up()
        self._decode()

    def _num_new(self, sequence: _Sequence) -> int:
        request = sequence.request
        assert request is not None
        return len(request.context) + len(request.token_ids) - len(sequence.cached)

    # Rows: admission, parking and eviction.

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
            shared = 0 if self._fixed_rows else _shared_prefix(sequence.cached, request.context)
            del sequence.cached[min(shared, len(request.context) - 1) :]
            sequence.request = request
            self._move(sequence, self._active)
            self._active += 1
        later.extend(self._waiting)
        self._waiting = later

    def _claim(self, key: str) -> _Sequence | None:
        """Return a row for a new session, evicting the least recently used parked one if none is free."""
        row = next((r for r in range(self._active, len(self._rows)) if self._rows[r] is None), None)
        if row is None:
            victim = next((s for s in self._sequences.values() if s.request is None), None)
            if victim is None:
                return None
            row = victim.row
            self._remember(victim)
            del self._sequences[victim.key]
        sequence = _Sequence(key=key, row=row)
        self._rows[row] = sequence
        self._sequences[key] = sequence
        return sequence

    def _remember(self, sequence: _Sequence) -> None:
        self._reached[sequence.key] = max(self._reached.get(sequence.key, 0), len(sequence.cached))

    def _park(self, sequence: _Sequence) -> None:
        sequence.request = None
        self._active -= 1
        self._move(sequence, self._active)

    def _move(self, sequence: _Sequence, row: int) -> None:
        """Swap the row of a sequence with ``row``, cache contents included."""
        other = self._rows[row]
        if other is sequence:
            return
        length = max(len(sequence.cached), len(other.cached) if other else 0)
        self._cache.swap(sequence.row, row, length=length)
        self._rows[sequence.row], self._rows[row] = other, sequence
        if other is not None:
            other.row = sequence.row
        sequence.row = row

    # Forward passes.

    def _catch_up(self) -> None:
        """Prefill pending tokens; sequences with a common prefix copy it from the first one prefilled."""
        behind = [s for s in self._rows[: self._active] if s is not None and self._num_new(s) > 1]
        if not behind:
            return
        if self._fixed_rows:
            for sequence in behind:
                self._prefill([sequence])
            return
        known = {_beginning(s.cached): s for s in self._sequences.values() if len(s.cached) >= SHARED_TOKENS}
        leaders: list[_Sequence] = []
        followers: list[tuple[_Sequence, _Sequence]] = []
        for sequence in behind:
            ahead = self._new_tokens(sequence)
            if sequence.cached or len(ahead) <= SHARED_TOKENS:
                leaders.append(sequence)
                continue
            source = known.setdefault(_beginning(ahead), sequence)
            if source is sequence:
                leaders.append(sequence)
            else:
                followers.append((sequence, source))
        self._prefill(leaders)
        for sequence, source in followers:
            ahead = self._new_tokens(sequence)
            length = min(_shared_prefix(source.cached, ahead), len(ahead) - 1)
            self._cache.copy(source.row, sequence.row, length=length)
            sequence.cached.extend(ahead[:length])
        self._prefill([s for s, _ in followers if self._num_new(s) > 1])

    def _prefill(self, behind: list[_Sequence]) -> None:
        """Prefill all pending tokens of rows but the last, which the next decode pass takes."""
        for rows in _of_like_length(behind, limit=PREFILL_TOKENS, length=lambda s: self._num_new(s) - 1):
            chunks = [self._new_tokens(s)[:-1] for s in rows]
            width = len(chunks[-1])
            tokens = [list(c) + [0] * (width - len(c)) for c in chunks]
            self._forward(torch.tensor(tokens, device=self._device), rows)
            for sequence, chunk in zip(rows, chunks, strict=True):
                known = len(sequence.cached)
                sequence.cached.extend(chunk)
                self.num_prefilled += len(chunk)
                again = min(self._reached.get(sequence.key, 0), len(sequence.cached)) - known
                self.num_reprefilled += max(0, again)

    def _decode(self) -> None:
        rows = [s for s in self._rows[: self._active] if s is not None]
        if self._fixed_rows:
            for alike in self._alike(rows):
                self._decode_rows(alike, padding=self._fixed_rows - len(alike))
        elif rows:
            self._decode_rows(rows)

    def _alike(self, rows: Sequence[_Sequence]) -> list[list[_Sequence]]:
        """Split rows into passes of up to ``fixed_rows`` with the same attention width."""
        size = self._fixed_rows
        views: dict[int, list[_Sequence]] = {}
        for sequence in rows:
            views.setdefault(self._view(sequence), []).append(sequence)
        return [
            alike[start : start + size] for alike in views.values() for start in range(0, len(alike), size)
        ]

    def _view(self, sequence: _Sequence) -> int:
        """Return the attention width of the next token of a sequence, a function of its length alone."""
        columns = SHORTEST_VIEW
        while columns <= len(sequence.cached):
            columns *= 2
        return min(columns, self._cache.max_context + 1)

    def _decode_rows(self, rows: Sequence[_Sequence], *, padding: int = 0) -> None:
        requests = [s.request for s in rows if s.request is not None]
        tokens = [self._new_tokens(s)[-1] for s in rows]
        fed = torch.tensor(tokens + [0] * padding, device=self._device)[:, None]
        hidden = self._forward(fed, rows, padding=padding)
        temperatures = [r.sampling.temperature for r in requests] + [1.0] * padding
        uniforms = [float(r.uniforms[len(r.token_ids)]) for r in requests] + [0.0] * padding
        drawn, logprobs = sample(
            read_logits(self.model, hidden[:, -1]),
            temperatures=torch.tensor(temperatures, device=self._device),
            uniforms=torch.tensor(uniforms, device=self._device),
        )
        self.num_sampled += len(rows)
        for sequence, request, last, token, logprob in zip(
            rows, requests, tokens, drawn.tolist(), logprobs.tolist(), strict=False
        ):
            sequence.cached.append(last)
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.policy_version)
        # Rows move only now: a move copies as many columns as ``cached`` counts.
        for sequence, request in zip(rows, requests, strict=True):
            self._finish(sequence, request)

    def _forward(self, tokens: torch.Tensor, rows: Sequence[_Sequence], *, padding: int = 0) -> torch.Tensor:
        """Run tokens [rows + padding, width] after the cached tokens of each row; return hidden states.

        Padding rows read the first row and write to the spare column.
        """
        most = self._cache.max_context
        first = torch.tensor([len(s.cached) for s in rows] + [most] * padding, device=self._device)
        positions = first[:, None] + torch.arange(tokens.shape[1], device=self._device)
        positions.clamp_(max=most)
        length = min(max(len(s.cached) for s in rows) + tokens.shape[1], most + 1)
        if self._fixed_rows and tokens.shape[1] == 1:
            length = self._view(rows[0])
        places = [s.row for s in rows] + [rows[0].row] * padding
        self._cache.aim(places, positions=positions, length=length)
        # Padding rows stand beyond the columns, where a window would be empty.
        queries = positions.clamp(max=length - 1)[:, None, :, None]
        keys = self._columns[None, None, None, :length]
        mask = attention_masks(self.model, keys <= queries, queries=queries, keys=keys)
        output = self.model.base_model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _new_tokens(self, sequence: _Sequence) -> Sequence[int]:
        request = sequence.request
        assert request is not None
        known = len(sequence.cached)
        if known >= len(request.context):
            return request.token_ids[known - len(request.context) :]
        return [*request.context[known:], *request.token_ids]

    def _finish(self, sequence: _Sequence, request: Request) -> None:
        stopped = request.token_ids[-1] in self._stop
        if not stopped and len(request.token_ids) < request.sampling.max_new_tokens:
            return
        self._park(sequence)
        self.num_completed += 1
        request.done(
            Completion(
                token_ids=request.token_ids,
                logprobs=request.logprobs,
                versions=request.versions,
                finish_reason="stop" if stopped else "length",
                policy=self.name,
            )
        )


@torch.inference_mode()
def independent_rows(model: PreTrainedModel, *, wanted: int = FIXED_ROWS) -> int:
    """Return how many rows may share a pass: ``wanted`` if position and neighbours change no bit, else 1.

    Each token of a batch is tried at every position.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokens = torch.arange(wanted, device=device) * 7919 % vocabulary
    head = model.get_output_embeddings()

    def logits(shift: int) -> torch.Tensor:
        hidden = model.base_model(input_ids=tokens.roll(shift)[:, None], use_cache=False)[0]
        rolled: torch.Tensor = head(hidden[:, -1]).log_softmax(-1)
        return rolled.roll(-shift, dims=0)

    first = logits(0)
    same = all(torch.equal(first, logits(shift)) for shift in range(1, wanted))
    return wanted if same else 1


def _beginning(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens[:SHARED_TOKENS])


def _shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    if list(b[: len(a)]) == list(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _of_like_length(
    sequences: list[_Sequence], *, limit: int, length: Callable[[_Sequence], int]
) -> list[list[_Sequence]]:
    """Group sequences by length into batches with little padding and at most ``limit`` padded tokens."""
    batches: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=length):
        width, last = length(sequence), batches[-1] if batches else []
        if last and width <= 2 * length(last[0]) + 16 and width * (len(last) + 1) <= limit:
            last.append(sequence)
        else:
            batches.append([sequence])
    return batches
