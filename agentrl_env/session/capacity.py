"""Capacity: the number of sessions that a process can hold, and the fair queue for a free place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl_env.errors import ServeError, ServerDraining, ServerFull, WireError
from agentrl_env.session.session import Session

DRAINING = "the server is shutting down; open sessions elsewhere"


def check_limits(max_sessions: int, lease_s: float) -> None:
    """Raise ServeError if a process with these limits could not hold a session."""
    if max_sessions < 1:
        raise ServeError(f"max_sessions is {max_sessions}; it must be at least 1")
    if not lease_s > 0:  # this includes nan
        raise ServeError(f"lease_s is {lease_s:g}; it must be above 0, or every session expires immediately")


class Capacity:
    """A number of places. A place is taken until its session has released everything.

    Waiting openings are served in order.

    Args:
        total: number of places.
        on_opened: called after each opening, whether it succeeded or failed.
    """

    def __init__(self, total: int, on_opened: Callable[[], None]) -> None:
        self.total = total
        self.waiting = 0
        """Number of openings waiting for a place."""
        self._places = asyncio.Semaphore(total)
        self._on_opened = on_opened
        self._refusing = False
        self._ended = False
        self._openings: set[asyncio.Task[Any]] = set()
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def openings(self) -> int:
        """Number of openings that have a place but no open session yet."""
        return len(self._openings)

    async def take(self, number: int = 1, wait_s: float = 0.0) -> None:
        """Take ``number`` places. Takes none of them if it raises ServerFull or ServerDraining."""
        for taken in range(number):
            try:
                await self._take_one(wait_s)
            except WireError:
                for _ in range(taken):
                    self.release()
                raise

    def release(self) -> None:
        """Give a place back, and pass it to the first waiting opening."""
        self._places.release()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Return a context in which a session opens in a place that was taken.

        Raises ServerDraining if ``cancel_openings`` cancels the opening.
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
        """Refuse the waiting openings and all later ones."""
        self._refusing = True
        for _ in range(self.waiting):
            self.release()  # the woken opening sees that it is refused

    async def cancel_openings(self) -> None:
        """Cancel the openings in progress and all later ones."""
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
        if self._refusing:
            raise ServerDraining(DRAINING)
        full = ServerFull(f"all {self.total} sessions of this server are taken", retry_after=1)
        if wait_s <= 0 and self._places.locked():
            raise full
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise full from None
        finally:
            self.waiting -= 1
        if self._refusing:
            raise ServerDraining(DRAINING)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        self.release()
