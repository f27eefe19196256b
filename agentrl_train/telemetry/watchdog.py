"""Deadlines for blocking calls, processes that end with their parent, and a watchdog that reports every slot.

The watchdog observes trace spans. If no span starts or ends for a while, it logs the open spans of every slot
from a separate thread, so that it also reports a blocked event loop::

    no progress for 60 s; open spans:
    slot      task   sample  sibling  attempt  session   turn    waiting for   seconds
    slot 1    shop   17      0        0        8f3kX2    turn 3  environment   61
    slot 2    shop   17      1        0        -         -       open          75
    trainer   step 12 > publish                                                64
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from agentrl_train.errors import Stalled
from agentrl_train.types import UNTRACED, Trace

T = TypeVar("T")
logger = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1

SLOTS = "slots"
"""Track group of episodes."""
HEADINGS = ("slot", "task", "sample", "sibling", "attempt", "session", "turn", "waiting for", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An open span of a track."""

    name: str
    since: float
    facts: dict[str, Any]


class Watchdog:
    """Tracks open spans; implements ``Trace`` and forwards to another one.

    Args:
        quiet_s: time without progress after which the table is logged. It doubles after each report.
        trace: receives all spans.
        log: logs the table.
    """

    def __init__(
        self,
        *,
        quiet_s: float = 60.0,
        trace: Trace = UNTRACED,
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self._quiet_s = quiet_s
        self._trace = trace
        self._log = log
        self._lock = threading.Lock()
        self._open_spans: dict[str, list[Span]] = {}
        self._lanes: set[int] = set()
        self._last_progress = time.monotonic()
        self._stopped = threading.Event()

    @contextmanager
    def span(self, track: str, name: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Record a span while the block runs."""
        with self._trace.span(track, name, **facts) as collected:
            span = Span(name=name, since=time.monotonic(), facts=collected)
            self._note(track, span, begins=True)
            try:
                yield collected
            finally:
                self._note(track, span, begins=False)

    def mark(self, track: str, name: str, *, since: float, **facts: Any) -> None:
        """Forward a completed span."""
        self._last_progress = time.monotonic()
        self._trace.mark(track, name, since=since, **facts)

    @contextmanager
    def lane(self, group: str) -> Iterator[str]:
        """Yield the first free track of a group."""
        with self._lock:
            number = next(n for n in itertools.count(1) if n not in self._lanes)
            self._lanes.add(number)
        try:
            yield f"{group}/{group.removesuffix('s')} {number}"
        finally:
            with self._lock:
                self._lanes.discard(number)

    def _note(self, track: str, span: Span, *, begins: bool) -> None:
        with self._lock:
            self._last_progress = time.monotonic()
            spans = self._open_spans.setdefault(track, [])
            if begins:
                spans.append(span)
            else:
                spans.remove(span)
            if not spans:
                del self._open_spans[track]

    def table(self) -> str:
        """Return the open spans as a table: a line per slot, and the trainer."""
        now = time.monotonic()
        with self._lock:
            tracks = {track: list(spans) for track, spans in sorted(self._open_spans.items(), key=_order)}
        rows: list[tuple[str, ...]] = [HEADINGS]
        rows += [_slot(track, spans, now) for track, spans in tracks.items() if track.startswith(SLOTS)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for track, spans in tracks.items():
            if not track.startswith(SLOTS):
                path = " > ".join(span.name for span in spans)
                lines.append(f"{track.partition('/')[0]}: {path}, {now - spans[-1].since:.0f} s")
        return "\n".join(lines)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        last_report, limit = 0.0, self._quiet_s
        while not self._stopped.wait(limit / 10):
            quiet = time.monotonic() - self._last_progress
            if self._last_progress > last_report:
                limit = self._quiet_s
            if quiet >= limit:
                self._log(f"no progress for {quiet:.0f} s; open spans:\n{self.table()}")
                last_report, limit = time.monotonic(), 2 * limit


def _order(item: tuple[str, list[Span]]) -> tuple[str, int, str]:
    group, _, name = item[0].partition("/")
    number = name.rpartition(" ")[2]
    return group, int(number) if number.isdigit() else 0, name


def _slot(track: str, spans: list[Span], now: float) -> tuple[str, ...]:
    episode, last = spans[0], spans[-1]
    turn = next((span.name for span in spans if span.name.startswith("turn ")), "-")
    facts = [str(episode.facts.get(key, "-")) for key in ("index", "sibling", "attempt", "session")]
    waiting = "-" if last is episode else last.name
    return (track.partition("/")[2], episode.name, *facts, turn, waiting, f"{now - last.since:.0f}")


async def in_thread(call: Callable[[], T], *, within_s: float | None, doing: str) -> T:
    """Run a blocking call in a daemon thread and return its result.

    Args:
        call: function without arguments.
        within_s: deadline, or None.
        doing: description for the error message.

    Raises:
        Stalled: the deadline passed. The thread cannot be stopped and is abandoned.
    """
    loop = asyncio.get_running_loop()
    # A pair, because a future does not accept every error: StopIteration would be lost.
    outcome: asyncio.Future[tuple[BaseException | None, Any]] = loop.create_future()

    def settle(error: BaseException | None, result: Any) -> None:
        if not outcome.done():
            outcome.set_result((error, result))

    def run() -> None:
        error, result = None, None
        try:
            result = call()
        except BaseException as raised:  # thread boundary: the caller must get the error
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, error, result)

    threading.Thread(target=run, name=doing, daemon=True).start()
    try:
        done, _ = await asyncio.wait((outcome,), timeout=within_s)
        if not done:
            raise Stalled(f"{doing} took longer than {within_s:g} s; its thread is abandoned")
        error, result = outcome.result()
    finally:
        outcome.cancel()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def searches_working_directory() -> bool:
    """Return True if this process imports modules of the working directory first, as with ``python -m``.

    Child processes must then do the same, and otherwise they must not: a random.py there would replace the
    module of Python.
    """
    return sys.path[0] in ("", os.getcwd())


def same_python() -> tuple[str, ...]:
    """Return the command of this Python, with modules from the same places."""
    return (sys.executable,) if searches_working_directory() else (sys.executable, "-P")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent exits."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
