"""Guesses of the tokens that follow, from what was sampled after the same tokens before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

CONTEXT = 4
"""Number of tokens that a guess is based on."""
MOST = 6
"""Tokens that are guessed at once; each costs as much as a sampled one, whether it is right or not."""
CAPACITY = 2**18
"""Number of contexts that are kept; the oldest are forgotten first."""


class Drafts:
    """A table of n-grams: the token that last followed each ``CONTEXT`` tokens.

    Agents repeat themselves: the JSON of tool calls, names of the prompt, the answers of siblings.

    Args:
        stop: tokens that are never guessed, since nothing follows them.
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
