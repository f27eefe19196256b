"""An index of contexts by their beginnings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

BLOCK = 16
"""Length of the shortest beginning, and of the steps in which longer ones are found."""
T = TypeVar("T", bound=Hashable)


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
