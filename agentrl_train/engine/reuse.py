"""What earlier requests tell about new ones: tokens that probably follow, and prefixes that are cached."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

CONTEXT = 4
"""Number of tokens that a guess is based on."""
MOST = 6
"""Tokens that are guessed at once; each costs as much as a sampled one, whether it is right or not."""
CAPACITY = 2**18
"""Number of contexts that are kept; the oldest are forgotten first."""
BLOCK = 16
"""Length of the shortest beginning, and of the steps in which longer ones are found."""
T = TypeVar("T", bound=Hashable)


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
    """Finds the owners of contexts that begin like another one, in time linear in its length.

    Each beginning of a multiple of ``BLOCK`` tokens has a hash that includes those before it.
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
        """Remove an owner, if it is there."""
        for beginning in self._hashes.pop(owner, ()):
            owners = self._owners[beginning]
            del owners[owner]
            if not owners:
                del self._owners[beginning]

    def alike(self, owner: T, context: Sequence[int]) -> Iterator[T]:
        """Iterate over the other owners whose contexts begin like this one, the longest beginnings first.

        Hashes may collide: compare the tokens.
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
