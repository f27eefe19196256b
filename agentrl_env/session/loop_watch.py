"""Watches an event loop from a thread and finds author code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from agentrl_env.session import executor

BLOCKED_S = 0.5
"""Seconds that author code may block the event loop of a server before a warning is logged."""
WARN_EVERY_S = 60.0
"""Seconds before a warning about the same line of code is repeated."""
ADVICE = "Write def instead of async def, and keep blocking = True: the method then runs on a thread."
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
logger = logging.getLogger("agentrl_env")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Author code that blocked the event loop."""

    function: str
    """Name of the method, such as ``Guess.guess``."""
    place: str
    """File and line of the author's innermost call."""

    def __str__(self) -> str:
        return f"{self.function}() blocks the event loop at {self.place}"


class LoopWatch:
    """Calls ``report`` from its thread whenever author code blocks an event loop.

    Args:
        limit_s: seconds that one call may block the loop. Calls of twice this duration are always found.
        report: called with the blocking code.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self, limit_s: float, report: Callable[[Block], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._report = report
        self._clock = clock
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running event loop until ``stop``."""
        arguments = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=arguments, name="agentrl-env-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._stopped.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        interval = self._limit_s / 2
        while not self._stopped.wait(interval):
            answered = threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            seen: FrameType | None = None
            since, reported = 0.0, False
            while not answered.wait(interval) and not self._stopped.is_set():
                entry, block = author_code(sys._current_frames().get(thread))
                if entry is not seen:  # the frame is kept alive, so no other call has the same one
                    seen, since, reported = entry, self._clock(), False
                elif block is not None and not reported and self._clock() - since >= self._limit_s:
                    reported = True
                    self._report(block)
                del entry


def warn_of_blocks(limit_s: float | None = None) -> LoopWatch:
    """Return a watch that logs a warning for each blocking line of code, at most once a minute."""
    warned: dict[str, float] = {}
    limit_s = BLOCKED_S if limit_s is None else limit_s

    def warn(block: Block) -> None:
        now = time.monotonic()
        if now - warned.get(block.place, -WARN_EVERY_S) >= WARN_EVERY_S:
            warned[block.place] = now
            facts = {"function": block.function, "place": block.place}
            message = "%s for more than %g s; all sessions of this process wait. %s"
            logger.warning(message, block, limit_s, ADVICE, extra={"facts": facts})

    return LoopWatch(limit_s, warn)


def author_code(frame: FrameType | None) -> tuple[FrameType | None, Block | None]:
    """Return the author's outermost frame in a stack and its description, or None for both."""
    outer: FrameType | None = None
    entry: FrameType | None = None
    innermost: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != executor.__file__:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<")):
            outer = frame
            if not file.startswith(_LIBRARIES):
                innermost, entry = innermost or frame, frame
        frame = frame.f_back
    if frame is not None:  # called by the executor, because the task itself can be an installed library
        entry = outer
    if entry is None:
        return None, None
    at = innermost or entry
    place = f"{at.f_code.co_filename.removeprefix(os.getcwd() + os.sep)}:{at.f_lineno}"
    return entry, Block(function=entry.f_code.co_qualname.rpartition("<locals>.")[2], place=place)
