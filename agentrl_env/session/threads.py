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
REPLACED = 4
"""There are at most so many times more threads than may be busy, where jobs never come back."""
LEAST_CEILING = 64
"""There may be so many in any case."""
WATCH_S = 0.02
"""How often new jobs are gone through for those that have not ended; these get a timer."""


class AuthorTimeout(Exception):
    """The author's code did not return in time."""


Outcome = tuple[Any, BaseException | None]
"""What a call has returned, or raised."""


AUTHOR_ERRORS = (Exception, SystemExit)
"""What authors' code may raise without harm to the process it runs in."""


def attempt(function: Callable[[], Any]) -> Outcome:
    """Return what a call of author code has returned, or which of AUTHOR_ERRORS it has raised."""
    try:
        return function(), None
    except AUTHOR_ERRORS as error:
        return None, error


class Job:
    """A call on a thread. Its deadline runs anew from when a thread takes it."""

    __slots__ = (
        "_began",
        "_function",
        "_made",
        "_mailbox",
        "_outcome",
        "_over",
        "_seconds",
        "_tell",
        "_timer",
        "ended",
        "ran",
    )

    def __init__(
        self,
        function: Callable[[], Any],
        seconds: float,
        tell: Callable[[Outcome], None],
        mailbox: _Mailbox,
    ) -> None:
        self._function = function
        self._seconds = seconds
        self._tell: Callable[[Outcome], None] | None = tell
        self._mailbox = mailbox
        self._made = time.monotonic()
        self._began: float | None = None
        self._outcome: Outcome = (None, None)
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        """Whether it has run to its end, or never will; until then ``over`` can be waited for."""
        self.ran = False
        """Whether its thread is done with it."""

    def run(self) -> None:
        """Run it, on a thread, unless nobody waits for it any more."""
        if self._tell is not None:
            self._began = time.monotonic()
            try:
                self._outcome = attempt(self._function)
            except BaseException as error:  # of a kind that would end more than this call
                self._outcome = (None, RuntimeError(f"{type(error).__name__} was raised"))
        self.ran = True

    def tell_soon(self) -> None:
        """Have the event loop told that it has run; from any thread."""
        self._mailbox.put(self)

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
        """Tell AuthorTimeout at the deadline, and have a thread that is still busy replaced."""
        if self.ended:
            return
        left = (self._began or self._made) + self._seconds - time.monotonic()
        if left > 0:
            if left < math.inf:
                self._timer = self._mailbox.loop.call_later(left, self.watch)
            return
        if self._began is not None:
            self._mailbox.abandon(self)
        if self._tell is None:
            return
        tell, self._tell = self._tell, None
        idle = f"no thread came free within {self._seconds:g} s"
        busy = f"still running after {self._seconds:g} s"
        tell((None, AuthorTimeout(idle if self._began is None else busy)))

    @property
    def waited(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self._made

    async def settle(self, seconds: float) -> None:
        """Wait until it has ended, even where it was given up; at most so many seconds."""
        if self.ended:
            return
        if self._over is None:
            self._over = self._mailbox.loop.create_future()
        await asyncio.wait((self._over,), timeout=seconds)


class _Mailbox:
    """Where threads leave the jobs that have ended, for one event loop; it sees to their deadlines too."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abandon: Callable[[Job], None]) -> None:
        self.loop = loop
        self.abandon = abandon
        """Is told of a job that runs past its deadline."""
        self.looking = False
        """Whether this loop looks after the jobs that wait."""
        self._ended: deque[Job] = deque()
        self._called = False
        self._new: list[Job] = []

    def put(self, job: Job) -> None:
        """Have a job told that has run; from any thread."""
        self._ended.append(job)
        if self._called:
            return  # what was called for is still to come, and will find this one
        self._called = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return  # the loop is closed: nobody is left to hear the answer

    def watch(self, job: Job) -> None:
        """Tell a job AuthorTimeout at its deadline."""
        if not self._new:
            self.loop.call_later(WATCH_S, self._watch)
        self._new.append(job)

    def _deliver(self) -> None:
        self._called = False  # before the jobs: what is put from here on calls again
        try:
            while self._ended:
                self._ended.popleft().end()
        finally:
            if self._ended:  # one that could not be told holds up no other
                self.loop.call_soon(self._deliver)

    def _watch(self) -> None:
        new, self._new = self._new, []
        for job in new:
            job.watch()


class Threads:
    """At most ``limit`` daemon threads: code that never returns cannot keep the process alive.

    Jobs are taken first come, first served. While one waits, a thread is awake: the first that comes
    to wait wakes one, and a thread goes to sleep only where it sees, under the same lock, that none
    waits. Where those that are awake do not get on, the event loop wakes more.

    A thread whose job runs past its deadline may never come back. It is replaced, up to ``ceiling``
    threads in all; where it does come back, it ends.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._ceiling = max(limit * REPLACED, LEAST_CEILING)
        self._lock = threading.Lock()
        """Held for whatever is read or changed of the next six."""
        self._jobs: deque[Job] = deque()
        self._taken = 0
        self._started = 0
        self._asleep = 0
        """Threads for which no bell has been rung."""
        self._abandoned: set[Job] = set()
        """Jobs that still run past their deadline; each keeps a thread."""
        self._stopped = False
        self._bells: queue.SimpleQueue[None] = queue.SimpleQueue()
        """What threads sleep on; each is for one of them."""
        self._mailbox: _Mailbox | None = None

    @property
    def abandoned(self) -> int:
        """How many threads are busy with jobs that run past their deadline."""
        return len(self._abandoned)

    def start(self, function: Callable[[], Any], seconds: float, tell: Callable[[Outcome], None]) -> Job:
        """Call ``function`` on a thread, and ``tell`` the event loop what it has returned or raised.

        That is AuthorTimeout where no thread comes free within ``seconds``, or where it runs for
        longer than that. Raises RuntimeError where the system has not a single thread to give.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailbox
        if mailbox is None or mailbox.loop is not loop:
            mailbox = self._mailbox = _Mailbox(loop, self._abandon)
        job = Job(function, seconds, tell, mailbox)
        with self._lock:
            if not self._jobs:
                self._wake(1)
            self._jobs.append(job)
        mailbox.watch(job)
        if not mailbox.looking:
            mailbox.looking = True
            loop.call_later(LOOK_S, self._look, mailbox, self._taken)
        return job

    def stop(self) -> None:
        """Let threads end as soon as no job waits."""
        with self._lock:
            self._stopped = True
            self._wake(self._asleep)

    def _look(self, mailbox: _Mailbox, taken: int) -> None:
        """Double the threads where those that are awake do not get on.

        Args:
            mailbox: of the event loop that looks.
            taken: how many jobs had been taken when it looked last.
        """
        with self._lock:
            waiting, awake = len(self._jobs), self._started - self._asleep
            if waiting and self._jobs[0].waited > LOOK_S and self._taken - taken < QUICK_JOBS * awake:
                self._wake(min(waiting, awake))
            taken = self._taken
        mailbox.looking = waiting > 0
        if mailbox.looking:
            mailbox.loop.call_later(LOOK_S, self._look, mailbox, taken)

    def _abandon(self, job: Job) -> None:
        """Count a job's thread as lost until the job ends after all."""
        with self._lock:
            if not job.ran:
                self._abandoned.add(job)

    def _allowed(self) -> int:
        """Return how many threads there may be; the lock is held."""
        return min(self._limit + len(self._abandoned), self._ceiling)

    def _wake(self, number: int) -> None:
        """Wake threads, as far as there are any; the lock is held."""
        for _ in range(number):
            if self._asleep:
                self._asleep -= 1
                self._bells.put(None)
            elif self._started < self._allowed():
                try:
                    threading.Thread(target=self._work, name="agentrl-env", daemon=True).start()
                except RuntimeError:
                    if not self._started:
                        raise
                    return  # those that there are will get to it
                self._started += 1

    def _work(self) -> None:
        done: Job | None = None
        while True:
            with self._lock:
                end = False
                if done in self._abandoned:
                    self._abandoned.remove(done)
                    end = self._started > self._allowed()  # it was replaced: others see to what waits
                job = self._jobs.popleft() if self._jobs and not end else None
                end = end or (job is None and self._stopped)
                if job is not None:
                    self._taken += 1
                elif end:
                    self._started -= 1
                else:
                    self._asleep += 1
            if done is not None:  # told only now: the job that follows from it must find this thread free
                done.tell_soon()
            if end:
                return
            if job is None:
                self._bells.get()
            else:
                job.run()
            done = job
