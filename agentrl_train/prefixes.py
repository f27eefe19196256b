"""Common beginnings of sequences, which a forward pass computes once.

The episodes of a group begin with the same messages, and often with the same turns. Nothing that follows
changes the hidden states of a beginning, so sequences that begin alike form a tree, and a pass over its
tokens gives the hidden states of all of them::

    a b c d e      kept      a b c d e  x y  z      branches   0..5, then 5..7 behind 0..3,
    a b c x y      places    0 1 2 3 4                         then 7..8 behind 0..2
    a b z                    0 1 2 5 6
                             0 1 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl_train.types import IntArray

SHORTEST = 16
"""Tokens that two sequences must have in common: a branch costs one more call of the attention."""
Span = tuple[int, int]
"""Begin and end among the tokens of a tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Adjacent tokens of a tree that follow one another in a sequence."""

    begin: int
    end: int
    context: tuple[Span, ...] = ()
    """Where the tokens before them are, in their order."""

    @property
    def start(self) -> int:
        """Position of the first token in its sequence."""
        return sum(end - begin for begin, end in self.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Sequences that share their common beginnings."""

    kept: IntArray
    """Index of each token of the tree in the concatenated sequences."""
    places: IntArray
    """Index in the tree of each token of the concatenated sequences."""
    branches: Sequence[Branch]
    """In the order of the tokens of the tree, which they cover."""


def prefix_tree(sequences: Sequence[IntArray]) -> PrefixTree:
    """Return the tree of sequences of token ids, which are not empty."""
    starts = np.cumsum([0, *(len(one) for one in sequences)])
    places = np.empty(starts[-1], np.int64)
    kept: list[IntArray] = []
    branches: list[Branch] = []
    path: list[Span] = []
    before, size = np.empty(0, np.int64), 0
    for i in _alphabetical(sequences):
        one = sequences[i]
        same = _shared(before, one)
        path = _truncated(path, same)
        if added := len(one) - same:
            branches.append(Branch(begin=size, end=size + added, context=tuple(path)))
            path = [*path, (size, size + added)]
            kept.append(np.arange(starts[i] + same, starts[i + 1]))
            size += added
        places[starts[i] : starts[i + 1]] = np.concatenate([np.arange(*span) for span in path])
        before = one
    return PrefixTree(kept=np.concatenate(kept), places=places, branches=branches)


def families(sequences: Sequence[IntArray], max_tokens: int) -> list[list[int]]:
    """Divide sequences into parts whose trees have at most ``max_tokens`` tokens; those alike stay together.

    A longer sequence is a part of its own.
    """
    parts: list[list[int]] = []
    before, size = np.empty(0, np.int64), 0
    for i in _alphabetical(sequences):
        one = sequences[i]
        added = len(one) - _shared(before, one)
        if not parts or size + added > max_tokens:
            parts.append([])
            size, added = 0, len(one)
        parts[-1].append(i)
        before, size = one, size + added
    return parts


def _alphabetical(sequences: Sequence[IntArray]) -> list[int]:
    """Return the order in which each sequence has its longest common beginning with the one before it."""
    keys = [one.astype(">i8").tobytes() for one in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _shared(a: IntArray, b: IntArray) -> int:
    """Return the length of the common beginning, 0 where it is shorter than ``SHORTEST``."""
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    same = int(unlike[0]) if len(unlike) else size
    return same if same >= SHORTEST else 0


def _truncated(path: Sequence[Span], length: int) -> list[Span]:
    """Return the first ``length`` tokens of a path; adjacent spans are one."""
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
