"""A bounded set of threads for code that may block, fed by an event loop.

A hop to a thread and back costs more than most tools take. So a thread that is awake takes one job after
another, and what has ended meanwhile is told to the event loop together. More threads wake where jobs
wait that take longer than a hop.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

LOOK_S = 0.002
"""How often it is looked whether the jobs that wait need more threads."""
QUICK_JOBS = 20
"""A thread that takes as many jobs between two looks has quick ones: a second would not help."""
WATCH_S = 0.02
"""How often new jobs are gone through for those that have not ended; these get a timer."""


class AuthorTimeout(Exception):
    """The author's code did not return in time."""


Outcome = tuple[Any, BaseException | None]
"""What a call has returned, or raised."""


class Job:
    """A call on a thread. Its deadline runs anew from when a thread takes it."""

    __slots__ = (
        "_began",
        "_function",
        "_loop",
        "_made",
        "_outcome",
        "_over",
        "_seconds",
        "_tell",
        "_timer",
        "ended",
    )

    def __init__(
        self,
        function: Callable[[], Any],
        seconds: float,
        tell: Callable[[Outcome], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._tell: Callable[[Outcome], None] | None = tell
        self._loop = loop
        self._made = time.monotonic()
        self._began: float | None = None
        self._outcome: Outcome = (None, None)
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        """Whether it has run to its end, or never will; until then ``over`` can be waited for."""

    def run(self) -> None:
        """Run it, on a thread, unless nobody waits for it any more."""
        if self._tell is None:
            return
        self._began = time.monotonic()
        try:
            self._outcome = (self._function(), None)
        except BaseException as error:
            self._outcome = (None, error)

    def end(self) -> None:
        """Tell, on the event loop, that it has run."""
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)
        if self._tell is not None:
            tell, self._tell = self._tell, None
            tell(self._outcome)

    def give_up(self) -> None:
        """Tell nobody any more; it does not begin where it has not begun."""
        self._tell = None

    def watch(self) -> None:
        """Tell AuthorTimeout at the deadline."""
        if self.ended or self._tell is None:
            return
        left = (self._began or self._made) + self._seconds - time.monotonic()
        if left > 0:
            if left < math.inf:
                self._timer = self._loop.call_later(left, self.watch)
            return
        tell, self._tell = self._tell, None
        idle = f"no thread came free within {self._seconds:g} s"
        busy = f"still running after {self._seconds:g} s"
        tell((None, AuthorTimeout(idle if self._began is None else busy)))

    async def settle(self, seconds: float) -> None:
        """Wait until it has ended, even where it was given up; at most so many seconds."""
        if self.ended:
            return
        if self._over is None:
            self._over = self._loop.create_future()
        await asyncio.wait((self._over,), timeout=seconds)


class _Mailbox:
    """Where threads leave the jobs that have ended, for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ended: deque[Job] = deque()
        self._called = False

    def put(self, job: Job) -> None:
        self._ended.append(job)

    def deliver(self) -> None:
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop is closed: nobody is left to hear the answer

    def _deliver(self) -> None:
        self._called = False  # before the jobs: what is put from here on calls again
        try:
            while self._ended:
                self._ended.popleft().end()
        finally:
            if self._ended:  # one that could not be told holds up no other
                self.loop.call_soon(self._deliver)


class Threads:
    """At most ``limit`` daemon threads: code that never returns cannot keep the process alive.

    Jobs are taken first come, first served.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._jobs: deque[tuple[Job, _Mailbox]] = deque()
        self._bells: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """What threads sleep on: True is for work, False for the end."""
        self._lock = threading.Lock()
        self._started = 0
        self._awake = 0
        """Threads that do not sleep, and bells that were rung for those that still do."""
        self._mailbox: _Mailbox | None = None
        self._new: list[Job] = []
        self._looking = self._watching = False
        self._submitted = self._taken = self._seen = 0

    def start(self, function: Callable[[], Any], seconds: float, tell: Callable[[Outcome], None]) -> Job:
        """Call ``function`` on a thread, and ``tell`` the event loop what it has returned or raised.

        That is AuthorTimeout where no thread comes free within ``seconds``, or where it runs for
        longer than that.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox, self._new, self._looking, self._watching = _Mailbox(loop), [], False, False
        job = Job(function, seconds, tell, loop)
        self._jobs.append((job, self._mailbox))
        self._new.append(job)
        self._submitted += 1
        if len(self._jobs) <= 1:  # looked at only now: who took the one before may sleep already
            self._wake(1)
        if not self._looking:
            self._looking = True
            loop.call_later(LOOK_S, self._look)
        if not self._watching:
            self._watching = True
            loop.call_later(WATCH_S, self._watch)
        return job

    def stop(self) -> None:
        """Let idle threads end; busy ones end when no job waits."""
        with self._lock:
            for _ in range(self._started):
                self._bells.put(False)
            self._started = 0

    def _look(self) -> None:
        """Double the threads where those that are awake do not get on."""
        waiting = len(self._jobs)
        taken = self._submitted - waiting
        # Jobs from before the last look still wait, and few were taken since.
        if taken < self._seen and taken - self._taken < QUICK_JOBS * max(1, self._awake):
            self._wake(min(waiting, max(1, self._awake)))
        self._taken, self._seen = taken, self._submitted
        self._looking = waiting > 0
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _watch(self) -> None:
        self._watching = False
        for job in self._new:
            job.watch()
        self._new.clear()

    def _wake(self, number: int) -> None:
        with self._lock:
            for _ in range(number):
                if self._awake < self._started:
                    self._bells.put(True)
                elif self._started < self._limit:
                    self._started += 1
                    threading.Thread(target=self._work, name="agentrl-env", daemon=True).start()
                else:
                    return
                self._awake += 1

    def _work(self) -> None:
        while True:
            mailbox = self._run_next()
            with self._lock:  # else a job that comes now might find nobody to wake
                last = not self._jobs
                if last:
                    self._awake -= 1
            if mailbox is not None:  # after that, the next job may be there: it must find this one free
                mailbox.deliver()
            if last and not self._bells.get():
                return

    def _run_next(self) -> _Mailbox | None:
        """Run the job that has waited longest; return where it was put."""
        try:
            job, mailbox = self._jobs.popleft()
        except IndexError:
            return None
        job.run()
        mailbox.put(job)
        return mailbox
