"""Adaptive concurrency limit of one engine, controlled by its KV cache: usage and preemptions (AIMD)."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

HIGH, LOW = 0.95, 0.8
"""KV cache utilization above which the limit is cut, and below which it may grow."""
CUT, GROWTH = 0.7, 2.0


def next_limit(limit: float, *, most: int, kv_usage: float, preempted: bool, saturated: bool) -> float:
    """Return the next limit: additive increase, multiplicative decrease (AIMD).

    Args:
        limit: the current limit.
        most: upper bound.
        kv_usage: share of the KV cache that running requests hold, 0 to 1.
        preempted: whether requests lost their cache since the last call: between two observations the cache
            can fill and empty again.
        saturated: whether requests wait for the limit; an unreached limit does not grow.
    """
    if preempted or kv_usage > HIGH:
        return max(1.0, limit * CUT)
    if saturated and kv_usage < LOW:
        return min(float(most), limit + GROWTH)
    return limit


class ConcurrencyLimit:
    """Admits requests in FIFO order up to a limit that follows the utilization of the KV cache."""

    def __init__(self, *, most: int) -> None:
        self.limit = float(most)
        self.active = 0
        self._most = most
        self._preemptions = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def load(self) -> int:
        """Number of active and waiting requests."""
        return self.active + len(self._waiting)

    def observe(self, *, kv_usage: float, preemptions: float) -> None:
        """Adjust the limit to the reported KV cache utilization and the running total of preemptions."""
        preempted, self._preemptions = preemptions > self._preemptions, preemptions
        self.limit = next_limit(
            self.limit,
            most=self._most,
            kv_usage=kv_usage,
            preempted=preempted,
            saturated=bool(self._waiting),
        )
        self._admit()

    async def __aenter__(self) -> None:
        """Wait for admission."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            else:
                self._waiting.remove(place)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the admission."""
        self._leave()

    def _leave(self) -> None:
        self.active -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.active < int(self.limit):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self.active += 1
