"""Capacity: how many sessions a process holds at once, and the fair queue for a free place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl_env.errors import ServerDraining, ServerFull, WireError
from agentrl_env.session.session import Session

DRAINING = "the server is shutting down; open sessions elsewhere"


class Capacity:
    """A number of places; each is taken until its session has released everything.

    Waiting openings are served in order.

    Args:
        total: number of places.
        on_opened: callback after each opening, whatever its outcome.
    """

    def __init__(self, total: int, on_opened: Callable[[], None]) -> None:
        self.total = total
        self._free = total
        self._on_opened = on_opened
        self._waiters: deque[asyncio.Future[bool]] = deque()
        self._refusing = False
        self._ended = False
        self._openings: set[asyncio.Task[Any]] = set()
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Number of openings that wait for a place."""
        return len(self._waiters)

    @property
    def openings(self) -> int:
        """Number of openings that have a place and no open session yet."""
        return len(self._openings)

    async def take(self, number: int = 1, wait_s: float = 0.0) -> None:
        """Take ``number`` places, or none. Raises ServerFull, ServerDraining."""
        for taken in range(number):
            try:
                await self._take_one(wait_s)
            except WireError:
                for _ in range(taken):
                    self.release()
                raise

    def release(self) -> None:
        """Give a place back, to the first opening that waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return
        self._free += 1

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Context in which a session opens in a place that was taken.

        Raises ServerDraining where ``cancel_openings`` cancels it.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("sessions open in a task of an event loop")
        self._openings.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.check_open()
            raise
        finally:
            self._openings.discard(task)
            self._on_opened()

    def check_open(self) -> None:
        """Raise ServerDraining once ``cancel_openings`` was called."""
        if self._ended:
            raise ServerDraining(DRAINING)

    def refuse_new(self) -> None:
        """Refuse the openings that wait, and all later ones."""
        self._refusing = True
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(False)

    async def cancel_openings(self) -> None:
        """Cancel the openings under way, and all later ones."""
        self._ended = True
        openings = set(self._openings)
        for task in openings:
            task.cancel()
        if openings:
            await asyncio.wait(openings)

    def leave(self, session: Session | None) -> None:
        """Release a session's place once its environment is closed."""
        closing = session.closing if session is not None else None
        if closing is None or closing.done():
            self.release()
        else:
            self._closings.add(closing)
            closing.add_done_callback(self._closed)

    def discard(self, session: Session | None) -> None:
        """Close a session that failed to open, and release its place."""
        if session is not None:
            session.begin_close()
        self.leave(session)

    async def all_closed(self) -> None:
        """Wait until the environments of sessions that have left are closed."""
        closings = [closing for closing in self._closings if not closing.done()]
        if closings:
            await asyncio.wait(closings)

    async def _take_one(self, wait_s: float) -> None:
        taken = not self._refusing and await self._acquire(wait_s)
        if self._refusing:
            if taken:
                self.release()
            raise ServerDraining(DRAINING)
        if not taken:
            raise ServerFull(f"all {self.total} sessions of this server are taken", retry_after=1)

    async def _acquire(self, wait_s: float) -> bool:
        if self._free > 0 and not self._waiters:
            self._free -= 1
            return True
        if wait_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(waiter)
        timer = loop.call_later(wait_s, self._time_out, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._waiters.remove(waiter)
            elif waiter.result():  # it was served in the moment of its cancellation
                self.release()
            raise
        finally:
            timer.cancel()

    def _time_out(self, waiter: asyncio.Future[bool]) -> None:
        if not waiter.done():
            self._waiters.remove(waiter)
            waiter.set_result(False)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        self.release()
