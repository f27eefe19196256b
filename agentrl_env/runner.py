"""Runs authors' code under a deadline: coroutines as tasks, plain functions on threads or inline."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

AUTHOR_ERRORS = (Exception, SystemExit)
"""What authors' code may raise without harm to the process it runs in."""


class AuthorTimeout(Exception):
    """The author's code did not return in time."""


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
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await asyncio.wait((turn,), timeout=wait_s)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        if turn.done():
            return turn.result()
        self._give_up(turn)
        return False

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

    def _give_up(self, turn: asyncio.Future[bool]) -> None:
        if turn.done():
            if turn.result():
                self.release()
        else:
            turn.cancel()
            self._waiters.remove(turn)


class Threads:
    """A bounded set of daemon threads: code that never returns cannot keep the process alive."""

    def __init__(self, limit: int = 64) -> None:
        self._slots = FairSlots(limit)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0

    async def submit(
        self, function: Callable[[], Any], wait_s: float
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        """Start ``function`` on a thread; the future gives (value, error) and is never cancelled.

        Raises AuthorTimeout where no thread comes free within ``wait_s`` seconds.
        """
        if not await self._slots.acquire(wait_s):
            raise AuthorTimeout(f"no thread came free within {wait_s:g} s")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self._slots.release()
            if not done.done():
                done.set_result((value, error))

        def job() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:
                return  # the loop is closed: nobody is left to hear the answer

        in_use = self._slots.total - self._slots.free
        if self._started < in_use:
            self._started += 1
            threading.Thread(target=self._work, name="agentrl-env", daemon=True).start()
        self._jobs.put(job)
        return done

    def stop(self) -> None:
        """Let idle threads end; busy ones end after their job."""
        for _ in range(self._started):
            self._jobs.put(None)
        self._started = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Runner:
    """Runs the code of one session, and remembers a call that outlived its deadline."""

    def __init__(self, *, blocking: bool, threads: Threads) -> None:
        self._blocking = blocking
        self._threads = threads
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

    async def settle(self, timeout: float) -> None:
        """Wait until a call that outlived its deadline has ended, ``timeout`` seconds at most."""
        if self._stray is not None and not self._stray.done():
            await asyncio.wait((self._stray,), timeout=timeout)

    async def _on_thread(self, function: Callable[[], Any], timeout: float) -> Any:
        job = await self._threads.submit(function, timeout)
        self._stray = job
        await asyncio.wait((job,), timeout=timeout)
        if not job.done():
            raise AuthorTimeout(f"still running after {timeout:g} s")
        value, error = job.result()
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
            await asyncio.wait((task,), timeout=timeout)
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
