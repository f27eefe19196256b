"""Loop share: how long author code may run on the event loop before everything else gets a turn."""

from __future__ import annotations

import asyncio
from collections import deque

SLICE_S = 0.005
"""Seconds of author code on the event loop after which the loop does everything else once."""
MAX_RELEASED = 256
"""Calls that get their turn at once, where those before were quick."""


class LoopShare:
    """Divides an event loop between author code that runs on it and everything else.

    Once calls have taken ``SLICE_S`` seconds together, further ones wait in order until the loop has run:
    other callers, timers and heartbeats wait for one call at most, however many are sent at once.
    """

    def __init__(self) -> None:
        self.taken = False
        """True while further calls must wait for their turn."""
        self._seconds = 0.0
        self._released = 1
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def charge(self, seconds: float) -> None:
        """Count a call that has ended."""
        self._seconds += seconds
        if self._seconds > SLICE_S and not self.taken:
            self.taken, self._loop = True, asyncio.get_running_loop()
            self._loop.call_soon(self._open)

    async def turn(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the last calls ran on a loop that has ended
            self.taken, self._seconds = False, 0.0
            self._waiting.clear()
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter
        while self._seconds > SLICE_S:  # a call that was released before has taken the slice
            waiter = loop.create_future()
            self._waiting.appendleft(waiter)
            await waiter

    def _open(self) -> None:
        quick, self._seconds = self._seconds <= SLICE_S, 0.0
        self._released = min(2 * self._released, MAX_RELEASED) if quick else 1
        for _ in range(min(self._released, len(self._waiting))):
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self.taken = bool(self._waiting)
        if self._waiting and self._loop is not None:
            self._loop.call_soon(self._open)  # after the calls that were released
