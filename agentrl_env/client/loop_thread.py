"""An event loop in a daemon thread, for synchronous callers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from agentrl_env.errors import ClientClosed

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from synchronous code. The thread starts with the first coroutine.

    Because the loop has its own thread, this works while another event loop is running, as in a
    notebook or an async test. ``stop()`` can be called at any time and repeatedly. A fork copies the loop and
    its connections but not the thread, so in a forked process only an unused object works.
    """

    def __init__(self, name: str = "agentrl-env-client") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._process = 0

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine and return its result.

        Raises:
            TimeoutError: There was no result within ``timeout`` seconds. The coroutine is cancelled, but this
                has no effect while it blocks the loop.
            ClientClosed: ``close()`` was called, or this process was forked from one that uses the loop.
        """
        try:
            loop = self._start()
        except ClientClosed:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result(timeout)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"No result within {timeout:g} s.") from None
        except BaseException:
            future.cancel()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on the private loop. Cancellation is passed on to it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._start()))

    def close(self) -> None:
        """Stop permanently."""
        self._closed = True
        self.stop()

    def stop(self, grace: float = 2.0) -> None:
        """Cancel the running tasks and end the thread, waiting at most ``grace`` seconds."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None or self._process != os.getpid():
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(grace)
            _await_exit(thread, grace)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed; make another")
            if self._loop is not None and self._process != os.getpid():
                raise ClientClosed(
                    "the client was used before this process was forked, and its connections belong to the "
                    "parent: make another client here, or start processes with 'spawn'"
                )
            if self._loop is None:
                self._process = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name=self._name, daemon=True
                )
                self._thread.start()
            return self._loop


def _await_exit(thread: threading.Thread, within: float) -> None:
    """Wait until the operating system has ended a joined thread, on Linux.

    Until then its last destructors can hold locks of C libraries. A process that is forked meanwhile has
    copies that nobody releases, so that OpenSSL would block it forever.
    """
    task, deadline = Path(f"/proc/self/task/{thread.native_id}"), time.monotonic() + within
    while not thread.is_alive() and task.exists() and time.monotonic() < deadline:
        time.sleep(0.0002)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=1.0) if tasks else asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
