"""Single flight: concurrent calls with the same key share one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentrl_env.errors import IdempotencyConflict

T = TypeVar("T")


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Any]
    digest: str
    callers: int = 0


class SingleFlight(Generic[T]):
    """Tasks by key. A task is cancelled when its last caller gives up."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight] = {}

    async def run(self, key: str, begin: Callable[[], Coroutine[Any, Any, T]], digest: str = "") -> T:
        """Return the result of the task under ``key``. Start the task if there is none.

        Raises IdempotencyConflict if the task has another digest.
        """
        while (flight := self._flights.get(key)) is not None and flight.callers == 0:
            await asyncio.wait((flight.task,))  # it is being cancelled
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(begin()), digest)
            flight.task.add_done_callback(lambda _: self._flights.pop(key, None))
        check_digest(digest, flight.digest)
        flight.callers += 1
        try:
            result: T = await asyncio.shield(flight.task)
            return result
        finally:
            flight.callers -= 1
            if flight.callers == 0 and not flight.task.done():
                abandon(flight.task)


def abandon(work: asyncio.Future[Any]) -> None:
    """Cancel work without callers, and retrieve its error.

    asyncio would log an error that is never retrieved.
    """
    work.cancel()
    work.add_done_callback(lambda done: done.cancelled() or done.exception())


def check_digest(digest: str, first: str) -> None:
    """Raise IdempotencyConflict if a repeated request differs from the first request with its key."""
    if digest != first:
        raise IdempotencyConflict("this request_id was used for another request; use a new one")
