"""What is waited for in a session: steps under way, as tasks of the event loop or on threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Awaited(Protocol[T_co]):
    """What can be waited for: an ``asyncio.Future``, or an ``Answering``."""

    def done(self) -> bool:
        """Return whether it is over."""

    def cancelled(self) -> bool:
        """Return whether it was given up."""

    def result(self) -> T_co:
        """Return or raise what came of it."""

    def cancel(self) -> bool:
        """Give it up."""

    def add_done_callback(self, tell: Callable[[Any], None], /) -> None:
        """Have somebody told when it is over."""

    def remove_done_callback(self, tell: Callable[[Any], None], /) -> int:
        """Have somebody told no more."""


class Answering:
    """A step under way on a thread: a future that tells at once, not in the event loop's next turn."""

    __slots__ = ("_answer", "_over", "_told")

    def __init__(self) -> None:
        self._answer: bytes | None = None
        self._over = False
        self._told: list[Callable[[Answering], None]] = []

    def done(self) -> bool:
        """Return whether it is over."""
        return self._over

    def cancelled(self) -> bool:
        """Return whether it was given up."""
        return self._over and self._answer is None

    def result(self) -> bytes:
        """Return the answer."""
        if self._answer is None:
            raise asyncio.CancelledError
        return self._answer

    def set_result(self, answer: bytes) -> None:
        """Give the answer."""
        self._answer = answer
        self._end()

    def cancel(self) -> bool:
        """Give it up."""
        if not self._over:
            self._end()
        return True

    def add_done_callback(self, tell: Callable[[Answering], None], /) -> None:
        """Have somebody told when it is over."""
        self._told.append(tell)

    def remove_done_callback(self, tell: Callable[[Answering], None], /) -> int:
        """Have somebody told no more."""
        before = len(self._told)
        self._told = [other for other in self._told if other is not tell]
        return before - len(self._told)

    def _end(self) -> None:
        self._over = True
        told, self._told = self._told, []
        for tell in told:
            tell(self)


async def settled(future: Awaited[Any], timeout: float = math.inf) -> bool:
    """Wait until a future is done, at most ``timeout`` seconds, and return whether it is.

    Nothing happens to the future: not when the waiting is cancelled either.
    """
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(wake)
    timer = loop.call_later(timeout, wake) if timeout < math.inf else None
    try:
        await waiter
    finally:
        future.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()
    return future.done()


def follow(task: asyncio.Task[bytes], step: Answering, end: Callable[[Answering], None]) -> None:
    """Give a step the result of a task, right after ``end`` was told of it; given up, it cancels."""

    def settle(_: object) -> None:
        end(step)
        if task.cancelled() or task.exception() is not None:
            step.cancel()  # nobody may wait for what will never come
        elif not step.done():
            step.set_result(task.result())

    task.add_done_callback(settle)

    def give_up(_: object) -> None:
        task.cancel()

    step.add_done_callback(give_up)
