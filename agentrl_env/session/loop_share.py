"""Loop share: how long author code can run on the event loop before other work gets a turn."""

from __future__ import annotations

import asyncio
from collections import deque

SLICE_S = 0.005
"""Seconds of author code after which the event loop runs all other work once."""
MAX_RELEASED = 256
"""Maximum number of calls that are released together, if the previous calls were quick."""


class LoopShare:
    """Divides an event loop between author code that runs on it and everything else.

    Once calls have taken ``SLICE_S`` seconds in total, further calls wait in order until the loop has run its
    other work. So other callers, timers and heartbeats wait for one call at most.
    """

    def __init__(self) -> None:
        self.taken = False
        """True while further calls must wait for their turn."""
        self._seconds = 0.0
        self._released = 1
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def charge(self, seconds: float) -> None:
        """Add the time of an ended call."""
        self._seconds += seconds
        if self._seconds > SLICE_S and not self.taken:
            self.taken, self._loop = True, asyncio.get_running_loop()
            self._loop.call_soon(self._open)

    async def turn(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the previous calls ran on a loop that has ended
            self.taken, self._seconds = False, 0.0
            self._waiting.clear()
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter
        while self._seconds > SLICE_S:  # a call that was released earlier has used up the slice
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
            self._loop.call_soon(self._open)  # after the released calls
