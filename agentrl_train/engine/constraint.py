"""Limits on the next token: a grammar and the tokens so far -> the tokens that can follow, by llguidance.

Truncated sampling excludes improbable tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agentrl_train.errors import ConstraintError
from agentrl_train.types import AllowedSets, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Number of compiled grammars to cache. The requests of an agent program use only a few."""
MAX_REASON = 500
"""Maximum number of quoted characters of a reason from the library."""


class Grammars:
    """Compiles grammars for the tokens of one tokenizer. Thread-safe.

    Args:
        tokenizer: the tokenizer of the policy.
        stop_token_ids: tokens that end a completion; they are allowed when the grammar is satisfied.
        vocabulary: rows of the head of the policy; by default the size of the tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        vocabulary: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop_token_ids)
        self._vocabulary = vocabulary or len(tokenizer)
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(KEPT)(self._compile)
        self._control_tokens = lru_cache(1)(self._find_control_tokens)

    @classmethod
    def of_vllm(cls, config: Any, stop_token_ids: Sequence[int]) -> Grammars:
        """Return the grammars of the policy that a model configuration of vLLM describes."""
        tokenizer = AutoTokenizer.from_pretrained(config.model, revision=config.revision)
        return cls(tokenizer, stop_token_ids=stop_token_ids, vocabulary=config.get_vocab_size())

    def start(self, grammar: str) -> Matcher:
        """Return a matcher at the position of the first token.

        Raises:
            ConstraintError: llguidance is missing, or it cannot compile the grammar.
        """
        compiled = self._compiled(grammar)
        return Matcher(compiled.deep_copy(), stop=self._stop, vocabulary=self._vocabulary)

    def written(self, text: str) -> str:
        """Return a text as a part of a grammar.

        Control tokens are written as ids, because text in a grammar cannot contain them. Raises like
        ``start``.
        """
        parts: list[str] = []
        rest = ""
        position = 0
        while position < len(text):
            if mark := self.control(text[position:]):
                parts += [quote(rest)] if rest else []
                parts.append(f"<[{self._control_tokens()[mark]}]>")
                rest = ""
            else:
                rest += text[position]
            position += len(mark) or 1
        return " ".join([*parts, *([quote(rest)] if rest else [])])

    def control(self, text: str) -> str:
        """Return the control token at the start of a text, or "" if there is none."""
        return max(filter(text.startswith, self._control_tokens()), key=len, default="")

    def _find_control_tokens(self) -> dict[str, int]:
        made = self._library()
        added = self._tokenizer.added_tokens_decoder.items()
        return {str(token): i for i, token in added if str(token).strip() and made.is_special_token(i)}

    def _library(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> LLTokenizer:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConstraintError(
                "constrained decoding needs llguidance: install agentrl-kit[train]"
            ) from error
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConstraintError(
                "constrained decoding needs a tokenizer of the tokenizers library, and this policy has a "
                f"{type(self._tokenizer).__name__}"
            )
        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=list(self._stop))

    def _compile(self, grammar: str) -> LLMatcher:
        made = self._library()
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, made)
        if failed:
            raise ConstraintError(" ".join(messages)[:MAX_REASON])
        return LLMatcher(made, grammar, log_level=0)


class Matcher:
    """The tokens that can follow the tokens so far.

    Args:
        matcher: matcher of the library, at the position of the first token.
        stop: tokens that end a completion.
        vocabulary: size of the sets.
    """

    def __init__(self, matcher: Any, *, stop: Sequence[int], vocabulary: int) -> None:
        self._matcher = matcher
        self._stop = frozenset(stop)
        self._bytes = (vocabulary + 7) // 8

    def restart(self) -> None:
        """Return to the position of the first token."""
        self._matcher.reset()

    def advance(self, token: int) -> None:
        """Append a token, which must be allowed and must not be a stop token."""
        self._matcher.consume_token(token)

    def allowed(self) -> bytes:
        """Return the allowed tokens as in ``AllowedSets``.

        Raises:
            ConstraintError: no token is allowed, or the grammar is too complex.
        """
        packed: bytes = self._matcher.compute_bitmask()[: self._bytes]
        if self._matcher.is_error():
            reason = str(self._matcher.get_error()).partition("\n")[0]
            raise ConstraintError(
                f"the constraint cannot be kept ({reason[:MAX_REASON]}): the tokenizer cannot write what it "
                "asks for, or it is too complex"
            )
        return packed

    def follow(self, guesses: Sequence[int]) -> tuple[Sequence[int], list[bytes]]:
        """Return the guesses up to the first that is not allowed, and the sets before and after each guess.

        The position does not change. Raises like ``allowed``.
        """
        ends = [number for number, token in enumerate(guesses) if token in self._stop]
        guesses = guesses[: ends[0] if ends else None]
        guesses = guesses[: self._matcher.validate_tokens(list(guesses))]
        found = [self.allowed()]
        for token in guesses:
            self._matcher.consume_token(token)
            found.append(self.allowed())
        if guesses:
            self._matcher.rollback(len(guesses))
        return guesses, found

    def sets_of(self, token_ids: Sequence[int]) -> AllowedSets:
        """Return the sets that the tokens of a completion were drawn from, from the first token on.

        Raises:
            ConstraintError: a token is not allowed, or the grammar is too complex.
        """
        sets: dict[bytes, int] = {}
        places = []
        for token in token_ids:
            allowed = self.allowed()
            if not allowed[token // 8] & 1 << token % 8:
                raise ConstraintError(f"the constraint was not kept: token {token} is not allowed")
            places.append(sets.setdefault(allowed, len(sets) + 1))
            if token not in self._stop:
                self.advance(token)
        return AllowedSets(sets=tuple(sets), places=places)


def quote(text: str) -> str:
    """Return a text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def unpack_sets(sets: Sequence[bytes], vocabulary: int) -> torch.Tensor:
    """Return packed sets (see ``AllowedSets``) as booleans [sets, vocabulary]. b"" contains all tokens."""
    found = np.ones((len(sets), vocabulary), dtype=bool)
    for row, packed in zip(found, sets, strict=True):
        if packed:
            row[:] = np.unpackbits(np.frombuffer(packed, np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The limits of ``SamplingParams`` on the tokens that can be sampled, [rows] each."""

    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, requested: Sequence[SamplingParams], device: torch.device) -> Truncation:
        """Return the limits of these rows."""
        return cls(
            top_p=torch.tensor([one.top_p for one in requested], device=device),
            top_k=torch.tensor([one.top_k for one in requested], device=device),
            min_p=torch.tensor([one.min_p for one in requested], device=device),
        )

    def __getitem__(self, rows: slice) -> Truncation:
        """Return the limits of some rows."""
        return Truncation(top_p=self.top_p[rows], top_k=self.top_k[rows], min_p=self.min_p[rows])

    def apply(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] that are -inf for the excluded tokens.

        The limits apply in the order of vLLM: ``min_p``, ``top_k``, then ``top_p`` of the remaining tokens.
        The most probable token is always kept.
        """
        ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        out = ordered < ordered[:, :1] + self.min_p.log()[:, None]
        ranks = torch.arange(scaled.shape[-1], device=scaled.device)
        out |= (ranks >= self.top_k[:, None]) & (self.top_k > 0)[:, None]
        probabilities = ordered.masked_fill(out, -torch.inf).softmax(dim=-1, dtype=torch.float64)
        before = probabilities.cumsum(dim=-1) - probabilities
        out |= (before >= self.top_p[:, None]) & (self.top_p < 1.0)[:, None]
        return scaled.masked_fill(out.scatter(-1, tokens, out), -torch.inf)
