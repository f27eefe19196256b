"""Packing of sequences into rows, and trees of sequences with common beginnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl_train.types import IntArray

SHORTEST_BEGINNING = 16
"""Tokens that sequences must have in common for their beginning to be computed once."""
MOST_COPIES = 4
"""Tokens of sequences for one of their tree, at most: attention copies the keys and values of beginnings."""
Row = list[int]
"""Indices of the sequences that share a row."""


def pack_rows(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Assign sequences to rows of ``capacity`` tokens, first fit decreasing.

    A sequence longer than ``capacity`` gets its own row.
    """
    free = np.zeros(len(lengths), np.int64)
    rows: list[Row] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = free[: len(rows)] >= lengths[i]
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = capacity
        rows[row].append(i)
        free[row] -= lengths[i]
    return rows


def families(sequences: Sequence[IntArray], max_tokens: int) -> list[list[int]]:
    """Divide sequences into parts whose trees have at most ``max_tokens`` tokens; those alike stay together.

    The sequences of a part have at most ``MOST_COPIES`` times as many. A longer one is a part of its own.
    """
    parts: list[list[int]] = []
    before, size, whole = np.empty(0, np.int64), 0, 0
    for i in alphabetical(sequences):
        one = sequences[i]
        added = len(one) - shared_beginning(before, one)
        if not parts or size + added > max_tokens or whole + len(one) > MOST_COPIES * max_tokens:
            parts.append([])
            size, added, whole = 0, len(one), 0
        parts[-1].append(i)
        before, size, whole = one, size + added, whole + len(one)
    return parts


def alphabetical(sequences: Sequence[IntArray]) -> list[int]:
    """Return the order in which each sequence has its longest common beginning with the one before it."""
    keys = [one.astype(">i8").tobytes() for one in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def shared_beginning(a: IntArray, b: IntArray) -> int:
    """Return the length of the common beginning, 0 where it is shorter than ``SHORTEST_BEGINNING``."""
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    same = int(unlike[0]) if len(unlike) else size
    return same if same >= SHORTEST_BEGINNING else 0
