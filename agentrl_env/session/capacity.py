"""The places of a process for sessions: who gets one, what opens in it, when it is free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentrl_env.errors import ServerDraining, ServerFull, WireError
from agentrl_env.session import Session
from agentrl_env.session.runner import FairSlots


class Places(FairSlots):
    """Places for sessions; each is taken until all that its session held is released.

    Args:
        total: how many there are.
        opened: is called whenever an opening is over.
    """

    def __init__(self, total: int, opened: Callable[[], None]) -> None:
        super().__init__(total)
        self._opened = opened
        self._openings: set[asyncio.Task[Any]] = set()
        self._closings: set[asyncio.Task[None]] = set()
        self._ended = False

    @property
    def openings(self) -> int:
        """How many openings are under way; their sessions are in no table yet."""
        return len(self._openings)

    async def take(self, number: int = 1, wait_s: float = 0.0) -> None:
        """Take so many places or none. Raises ServerFull, ServerDraining."""
        for taken in range(number):
            try:
                await self._take_one(wait_s)
            except WireError:
                for _ in range(taken):
                    self.release()
                raise

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Open sessions in this, in places that were taken. Raises ServerDraining on ``end_openings``."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("sessions open in a task of an event loop")
        self._openings.add(task)
        try:
            yield
        except asyncio.CancelledError:
            self.refuse_late()  # its caller has not gone away: it is told why nothing opens
            raise
        finally:
            self._openings.discard(task)
            self._opened()

    def refuse_late(self) -> None:
        """Raise ServerDraining where a session has opened that nobody would close any more."""
        if self._ended:
            raise draining()

    async def end_openings(self) -> None:
        """Give up the openings under way, and all that may come; what they held is in ``all_released``."""
        self._ended = True
        openings = set(self._openings)
        for task in openings:
            task.cancel()
        if openings:
            await asyncio.wait(openings)

    def leave(self, session: Session | None) -> None:
        """Give a session's place to the next, once all that the session held is released."""
        closing = session.released if session is not None else None
        if closing is None or closing.done():
            self.release()
        else:
            self._closings.add(closing)
            closing.add_done_callback(self._released)

    def give_up(self, session: Session | None) -> None:
        """Close a session that nobody will use, and leave its place; None where none was made."""
        if session is not None:
            session.begin_close()
        self.leave(session)

    async def all_released(self) -> None:
        """Wait until what the sessions held that have left is released."""
        closings = [closing for closing in self._closings if not closing.done()]
        if closings:
            await asyncio.wait(closings)

    async def _take_one(self, wait_s: float) -> None:
        taken = not self._refusing and await self.acquire(wait_s)
        if self._refusing:
            if taken:
                self.release()
            raise draining()
        if not taken:
            raise ServerFull(f"all {self.total} sessions of this server are taken", retry_after=1)

    def _released(self, closing: asyncio.Task[None]) -> None:
        self._closings.discard(closing)
        self.release()


def draining() -> ServerDraining:
    """Return what whoever comes too late is told."""
    return ServerDraining("the server is shutting down; open sessions elsewhere")
