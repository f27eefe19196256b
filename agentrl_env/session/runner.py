"""Runs authors' code under a deadline: coroutines as tasks, plain functions on threads or inline."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from agentrl_env.session.threads import AUTHOR_ERRORS, AuthorTimeout, Job, Outcome, Threads

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class FairSlots:
    """A counted resource whose waiters are served first come, first served."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._waiters: deque[asyncio.Future[bool]] = deque()
        self._refusing = False

    @property
    def waiting(self) -> int:
        """How many are waiting."""
        return len(self._waiters)

    async def acquire(self, wait_s: float) -> bool:
        """Take one, waiting at most ``wait_s`` seconds; False when none came free."""
        if self.free > 0 and not self._waiters:
            self.free -= 1
            return True
        if wait_s <= 0 or self._refusing:
            return False
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiters.append(turn)
        timer = loop.call_later(wait_s, self._time_out, turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiters.remove(turn)
            elif turn.result():  # it came just when its taker left
                self.release()
            raise
        finally:
            timer.cancel()

    def release(self) -> None:
        """Give one back: to the first who waits, else to the heap."""
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.free += 1

    def refuse_all(self) -> None:
        """Send everybody who waits away, and whoever would wait."""
        self._refusing = True
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(False)

    def _time_out(self, turn: asyncio.Future[bool]) -> None:
        if not turn.done():
            self._waiters.remove(turn)
            turn.set_result(False)


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
        if not step.done():
            step.set_result(task.result())

    task.add_done_callback(settle)

    def give_up(_: object) -> None:
        task.cancel()

    step.add_done_callback(give_up)


def run_through(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, and return what it returns."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something")


class Runner:
    """Runs the code of one session, and remembers a call that outlived its deadline."""

    def __init__(self, *, blocking: bool, threads: Threads) -> None:
        self._blocking = blocking
        self._threads = threads
        self._job: Job | None = None
        self._stray: asyncio.Future[Any] | None = None

    async def call(self, function: Callable[..., Any], timeout: float, /, *args: Any, **kw: Any) -> Any:
        """Return what ``function`` returns, awaited where it is a coroutine.

        Raises AuthorTimeout after ``timeout`` seconds, else whatever the function raises.
        """
        if inspect.iscoroutinefunction(function) or not self._blocking:
            value = function(*args, **kw)
        else:
            value = await self._on_thread(lambda: function(*args, **kw), timeout)
        return await self._awaited(value, timeout) if inspect.isawaitable(value) else value

    def start(self, function: Callable[[], Any], timeout: float, tell: Callable[[Outcome], None]) -> None:
        """Call a plain function on a thread, and ``tell`` the event loop its outcome; see ``Threads``."""
        self._job = self._threads.start(function, timeout, tell)

    async def known(
        self, outcome: Outcome, function: Callable[..., Any], timeout: float | None, /, **_: Any
    ) -> Any:
        """Return or raise the outcome of a call that ``start`` began, as ``call`` would have."""
        value, error = outcome
        if error is not None:
            raise error
        if inspect.isawaitable(value):
            return await self._awaited(value, math.inf if timeout is None else timeout)
        return value

    def give_up(self) -> None:
        """Tell nobody any more of the call that ``start`` began last."""
        if self._job is not None:
            self._job.give_up()

    async def settle(self, timeout: float) -> None:
        """Wait until a call that outlived its deadline has ended, ``timeout`` seconds at most."""
        if self._job is not None:
            await self._job.settle(timeout)
        if self._stray is not None:
            await settled(self._stray, timeout)

    async def _on_thread(self, function: Callable[[], Any], timeout: float) -> Any:
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def tell(outcome: Outcome) -> None:
            if not answer.done():  # its caller may be leaving just now
                answer.set_result(outcome)

        job = self._job = self._threads.start(function, timeout, tell)
        try:
            value, error = await answer
        except asyncio.CancelledError:
            job.give_up()
            raise
        if error is not None:
            raise error
        return value

    async def _awaited(self, awaitable: Awaitable[Any], timeout: float) -> Any:
        async def run() -> tuple[Any, BaseException | None]:
            try:
                return await awaitable, None
            except AUTHOR_ERRORS as error:
                return None, error

        task = asyncio.ensure_future(run())
        self._stray = task
        try:
            await settled(task, timeout)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            raise AuthorTimeout(f"still running after {timeout:g} s")
        if task.cancelled():
            raise RuntimeError("the coroutine cancelled itself")
        value, error = task.result()
        if error is not None:
            raise error
        return value
