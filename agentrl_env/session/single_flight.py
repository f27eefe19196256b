"""Work that is asked for under a name is done once, however often it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Work:
    task: asyncio.Task[Any]
    callers: int = 0


class Once(Generic[T]):
    """Work under way, by name; whoever asks for the same shares it, and the last to leave ends it."""

    def __init__(self) -> None:
        self._under_way: dict[str, _Work] = {}

    async def do(self, name: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the work under this name returns, begun now where it is not under way."""
        while (work := self._under_way.get(name)) is not None and work.callers == 0:
            await asyncio.wait((work.task,))  # its callers were gone, and it is being ended: begin anew
        if work is None:
            work = self._under_way[name] = _Work(asyncio.create_task(begin()))
            work.task.add_done_callback(lambda _: self._under_way.pop(name, None))
        work.callers += 1
        try:
            result: T = await asyncio.shield(work.task)
            return result
        finally:
            work.callers -= 1
            if work.callers == 0 and not work.task.done():
                work.task.cancel()  # whoever asked is gone
