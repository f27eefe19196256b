"""Threads for author code that can block.

With 64 callers, running a call on a thread adds 31 us with ``concurrent.futures`` and 50 us with
``anyio.to_thread``, which is longer than most tools run. Here it adds 5 us: an awake thread takes one job
after another, results reach the event loop together, and more threads wake only if jobs wait for longer than
this. Unlike ``ThreadPoolExecutor``, the threads are daemons, and threads that hang are replaced.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from typing import Any

from agentrl_env.errors import AUTHOR_ERRORS, ServerFull
from agentrl_env.session.loop_share import LoopShare

SCALE_EVERY_S = 0.002
"""Seconds between checks whether waiting jobs need more threads."""
QUICK_JOBS = 20
"""Jobs per thread and interval above which jobs count as quick, so that more threads would not help."""
REPLACEMENT_FACTOR = 4
"""Maximum number of threads, as a multiple of ``limit``, if some jobs never return."""
MIN_CEILING = 256
"""Lower bound of the maximum number of threads."""
WATCH_S = 0.02
"""Seconds after which a new job that has not ended gets a timer for its deadline."""
STALLED_S = 5.0
"""A full pool counts as exhausted if no thread takes a job for this many seconds."""
ID_BYTES, ROW_BYTES = 64, 80
"""Lengths of the session id at the start of a row of ``RunningCalls``, and of the whole row."""
LOOP_ROW = slice(0, ID_BYTES)
"""Position of the session id in the event loop's row."""
NO_CALL = ord(" ")
"""First byte of a row without a call."""


class AuthorTimeout(Exception):
    """Author code did not return in time."""


Outcome = tuple[Any, BaseException | None]
"""Return value or exception of a call."""


class RunningCalls:
    """The sessions whose author code is running, in memory that the watchdog's process can read.

    The first row is for the event loop, and the others are for threads. A row has the id of the session, or a
    space if no call runs, then the id of the thread and a line break. By default there is a single row in the
    process's own memory, which is not read.

    Args:
        memory: the rows, such as a mapped file. Threads beyond its end are not shown.
    """

    def __init__(self, memory: mmap | bytearray | None = None) -> None:
        self.memory = bytearray(ROW_BYTES) if memory is None else memory
        self._free = [slice(n, n + ID_BYTES) for n in range(ROW_BYTES, len(self.memory), ROW_BYTES)][::-1]
        self._claim(LOOP_ROW)

    def row(self) -> tuple[mmap | bytearray, slice]:
        """Return the memory for the calls of this thread, and the position of the session's id in it."""
        try:
            row = self._free.pop()
        except IndexError:
            return bytearray(ID_BYTES), LOOP_ROW
        self._claim(row)
        return self.memory, row

    def release(self, memory: mmap | bytearray, row: slice) -> None:
        """Give back the row of a thread that ends."""
        if memory is self.memory:
            self._free.append(row)

    def _claim(self, row: slice) -> None:
        text = f"{'':{ID_BYTES}} {threading.get_native_id()}".ljust(ROW_BYTES - 1) + "\n"
        self.memory[row.start : row.start + ROW_BYTES] = text.encode()


class Job:
    """A call on a thread. Its deadline restarts when a thread takes it."""

    __slots__ = (
        "_ended",
        "_function",
        "_inbox",
        "_made",
        "_outcome",
        "_timeout",
        "_timer",
        "answer",
        "began",
        "opening",
        "ran",
        "session",
    )

    def __init__(
        self, function: Callable[[], Any], timeout: float, inbox: _Inbox, session: bytes, opening: bool
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._inbox = inbox
        self._made = time.monotonic()
        self.began: float | None = None
        """Time at which a thread took the job."""
        self._outcome: Outcome = (None, None)
        self._ended: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.answer: asyncio.Future[Outcome] = inbox.loop.create_future()
        """Outcome or AuthorTimeout. Cancelled if the caller gave up."""
        self.ran = False
        """True if the thread has finished the call."""
        self.session = session
        """Id of the session, for ``RunningCalls``."""
        self.opening = opening
        """True if the job's session is not open yet, so that it can be refused."""

    @property
    def waited_s(self) -> float:
        """Seconds since the submission."""
        return time.monotonic() - self._made

    def run(self) -> None:
        """Run the call on a thread, unless the caller has given up."""
        if not self.answer.done():
            try:
                self._outcome = self._function(), None
            except AUTHOR_ERRORS as error:
                self._outcome = None, error
            except BaseException as error:  # such as SystemExit, which would end more than this call
                self._outcome = None, RuntimeError(f"{type(error).__name__} was raised")
        self.ran = True

    def finish(self) -> None:
        """Send the outcome to the event loop. Called from the thread."""
        self._inbox.put(self)

    def deliver(self) -> None:
        """Pass the outcome to the caller, on the event loop."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ended is not None:
            self._ended.set()
        if not self.answer.done():
            self.answer.set_result(self._outcome)

    def check_deadline(self) -> None:
        """At the deadline, return AuthorTimeout to the caller and replace a thread that is still busy."""
        left = (self.began or self._made) + self._timeout - time.monotonic()
        if self.ran:
            return
        if left > 0:
            if left < math.inf:
                self._timer = self._inbox.loop.call_later(left, self.check_deadline)
            return
        if self.began is not None:
            self._inbox.abandon(self)
        if not self.answer.done():
            state = "no thread came free within" if self.began is None else "still running after"
            self.answer.set_result((None, AuthorTimeout(f"{state} {self._timeout:g} s")))

    def refuse(self) -> None:
        """Return ServerFull to the caller if no thread has taken the job."""
        if not self.answer.done() and self.waited_s > STALLED_S:
            reason = f"no thread of this server came free within {STALLED_S:g} s; open sessions elsewhere"
            self.answer.set_result((None, ServerFull(reason, retry_after=10)))

    async def ended(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until the thread has finished, even after the deadline.

        The caller has given up. If the thread is still busy, it is replaced.
        """
        if self.began is None and self.answer.done():
            return  # no thread will start it
        if not self.ran:
            if self.began is not None:
                self._inbox.abandon(self)
            self._ended = self._ended or asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._ended.wait()


class _Inbox:
    """Delivers finished jobs to one event loop, and checks the deadlines of jobs."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abandon: Callable[[Job], None]) -> None:
        self.loop = loop
        self.abandon = abandon
        """Called with a job that runs past its deadline."""
        self.scaling = False
        """True if this loop adjusts the number of threads."""
        self._finished: deque[Job] = deque()
        self._scheduled = False
        self._new: list[Job] = []

    def put(self, job: Job) -> None:
        """Deliver a finished job. Called from any thread."""
        self._finished.append(job)
        if self._scheduled:
            return  # the scheduled delivery includes this job
        self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._deliver)

    def watch(self, job: Job) -> None:
        """Check the deadline of a new job."""
        if not self._new:
            self.loop.call_later(WATCH_S, self._check)
        self._new.append(job)

    def _deliver(self) -> None:
        self._scheduled = False  # before the jobs are taken, so that a later job schedules again
        while self._finished:
            self._finished.popleft().deliver()

    def _check(self) -> None:
        new, self._new = self._new, []
        for job in new:
            job.check_deadline()


class ThreadPool:
    """At most ``limit`` daemon threads, so that code that never returns cannot keep the process alive.

    Jobs start in order. While a job waits, at least one thread is awake: the first waiting job wakes a
    thread, and a thread goes to sleep only after checking, under the same lock, that no job waits. If the
    awake threads do not keep up, the event loop wakes more.

    A thread whose job runs past its deadline might never return. It is replaced, up to a maximum number of
    threads. If its job does return, the thread ends.

    Args:
        limit: maximum number of threads.
        loop_share: limits the calls that run on the event loop. All pools of an event loop share it.
        calls: shows the running calls.
    """

    def __init__(
        self, limit: int = 64, loop_share: LoopShare | None = None, calls: RunningCalls | None = None
    ) -> None:
        self._limit = limit
        self._ceiling = max(limit * REPLACEMENT_FACTOR, MIN_CEILING)
        self._lock = threading.Lock()
        """Guards the next seven attributes."""
        self._jobs: deque[Job] = deque()
        self._taken = 0
        self._taken_at = 0.0
        """Time at which a thread last took a job."""
        self._started = 0
        self._asleep = 0
        """Number of threads that sleep and have not been woken."""
        self._abandoned: set[Job] = set()
        """Jobs past their deadline. Each occupies a thread."""
        self._stopped = False
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inbox: _Inbox | None = None
        self.loop_share = loop_share or LoopShare()
        self.calls = calls or RunningCalls()

    @property
    def size(self) -> int:
        """Number of threads."""
        return self._started

    @property
    def abandoned(self) -> int:
        """Number of threads with a job past its deadline."""
        return len(self._abandoned)

    @property
    def exhausted(self) -> bool:
        """True if no thread is free and either none was for ``STALLED_S`` seconds or none can ever be."""
        if len(self._abandoned) >= self._ceiling:
            return True
        full = not self._asleep and self._started >= self._allowed_threads()
        return full and time.monotonic() - self._taken_at > STALLED_S

    def submit(
        self,
        function: Callable[[], Any],
        timeout: float,
        session: bytes = b" " * ID_BYTES,
        opening: bool = False,
    ) -> Job:
        """Call ``function`` on a thread. The job's ``answer`` is its outcome.

        The outcome is AuthorTimeout if no thread becomes free within ``timeout`` seconds or the call takes
        longer. For a call of an opening it is ServerFull if no thread becomes free at all. Raises
        RuntimeError if the system cannot start a single thread.
        """
        loop = asyncio.get_running_loop()
        inbox = self._inbox
        if inbox is None or inbox.loop is not loop:
            inbox = self._inbox = _Inbox(loop, self._abandon)
        job = Job(function, timeout, inbox, session, opening)
        with self._lock:
            if not self._jobs:
                self._wake(1)
            self._jobs.append(job)
        inbox.watch(job)
        if not inbox.scaling:
            inbox.scaling = True
            loop.call_later(SCALE_EVERY_S, self._scale, inbox, self._taken)
        return job

    def stop(self) -> None:
        """Let the threads end once no job waits."""
        with self._lock:
            self._stopped = True
            self._wake(self._asleep)

    def _scale(self, inbox: _Inbox, taken: int) -> None:
        """Double the number of awake threads if they do not keep up.

        Args:
            inbox: inbox of the event loop that checks.
            taken: number of jobs taken at the previous check.
        """
        with self._lock:
            waiting, awake = len(self._jobs), self._started - self._asleep
            late = waiting and self._jobs[0].waited_s > SCALE_EVERY_S
            if late and self._taken - taken < QUICK_JOBS * awake:
                self._wake(min(waiting, awake))
            taken = self._taken
            for job in [job for job in self._jobs if job.opening] if late and self.exhausted else ():
                job.refuse()
        inbox.scaling = waiting > 0
        if inbox.scaling:
            inbox.loop.call_later(SCALE_EVERY_S, self._scale, inbox, taken)

    def _abandon(self, job: Job) -> None:
        with self._lock:
            if not job.ran:
                self._abandoned.add(job)

    def _allowed_threads(self) -> int:
        """Return the allowed number of threads. The caller holds the lock."""
        return min(self._limit + len(self._abandoned), self._ceiling)

    def _wake(self, number: int) -> None:
        """Wake or start threads, up to the limit. The caller holds the lock."""
        for _ in range(number):
            if self._asleep:
                self._asleep -= 1
                self._wake_ups.put(None)
            elif self._started < self._allowed_threads():
                try:
                    threading.Thread(target=self._work, name="agentrl-env", daemon=True).start()
                except RuntimeError:
                    if not self._started:
                        raise
                    return  # the existing threads take the job later
                self._started += 1

    def _work(self) -> None:
        done: Job | None = None
        memory, row = self.calls.row()
        while True:
            with self._lock:
                end = False
                if done in self._abandoned:
                    self._abandoned.remove(done)
                    end = self._started > self._allowed_threads()  # the thread has been replaced
                job = self._jobs.popleft() if self._jobs and not end else None
                end = end or (job is None and self._stopped)
                if job is not None:
                    self._taken += 1
                    self._taken_at = job.began = time.monotonic()
                elif end:
                    self._started -= 1
                else:
                    self._asleep += 1
            if done is not None:  # after the lock, so that a following job finds this thread free
                done.finish()
            if end:
                self.calls.release(memory, row)
                return
            if job is None:
                done = None  # so that a waiting thread keeps no environment in memory
                self._wake_ups.get()
            else:
                memory[row] = job.session
                job.run()
                memory[row.start] = NO_CALL
            done = job
