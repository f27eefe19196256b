"""Runs authors' code under a deadline: coroutines as tasks, plain functions on threads or inline."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from agentrl_env.session.answering import settled
from agentrl_env.session.threads import AUTHOR_ERRORS, AuthorTimeout, Job, Outcome, Threads

T = TypeVar("T")


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
    """Runs the code of one session, and remembers a call that outlived its deadline.

    Args:
        blocking: whether plain functions run on threads.
        threads: those.
        limit: deadline of a call that has none of its own, in seconds.
    """

    def __init__(self, *, blocking: bool, threads: Threads, limit: float = math.inf) -> None:
        self._blocking = blocking
        self._limit = limit
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
            return await self._awaited(value, self._limit if timeout is None else timeout)
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
