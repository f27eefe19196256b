"""One server, as a controller knows it: what it serves, what it holds, and the calls it is asked."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pydantic_core import from_json, to_json

from agentrl_env.errors import InternalError, SessionLost, WireError, from_wire
from agentrl_env.server.telemetry.tracing import traceparent
from agentrl_env.types import TaskInfo
from agentrl_env.wire import Beat, Hello, ServerSummary, SessionRow

_ANSWER = re.compile(rb'\{"id":(\d+),"(result|error)":')


@dataclass(slots=True)
class _Call:
    frame: bytes
    answer: asyncio.Future[bytes] = field(repr=False)


class Outbox:
    """Calls on their way to one server, over one link.

    A server that reads slowly lets them wait here; those whose callers are gone by then are not sent.
    """

    def __init__(self) -> None:
        self.closed = False
        """Whether the link is to end: the server is lost, or has opened another."""
        self._frames: OrderedDict[int, bytes] = OrderedDict()
        self._notices: deque[bytes] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._frames) + len(self._notices)

    def put(self, number: int, frame: bytes) -> None:
        """Add a call."""
        self._frames[number] = frame
        self._filled.set()

    def drop(self, number: int) -> None:
        """Take a call back where it has not been sent."""
        self._frames.pop(number, None)

    def tell(self, notice: bytes) -> None:
        """Add what is no call."""
        self._notices.append(notice)
        self._filled.set()

    def close(self) -> None:
        """Let the link end."""
        self.closed = True
        self._filled.set()

    async def take(self) -> bytes | None:
        """Return what is to be sent next, once there is something; None where the link is to end."""
        while not (self.closed or self._frames or self._notices):
            self._filled.clear()
            await self._filled.wait()
        if self.closed:
            return None
        return self._notices.popleft() if self._notices else self._frames.popitem(last=False)[1]


class Member:
    """A server of the fleet. It outlives its links: calls under way are sent again over the next.

    Sending twice is safe: openings and forks carry a ``request_id``, steps a ``seq``, and nothing
    else changes anything.

    Args:
        hello: what the server said of itself.
        clock: seconds, monotonic.
    """

    def __init__(self, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        self.server_id = hello.server_id
        self.tasks: dict[str, TaskInfo] = {}
        self.sessions: dict[str, SessionRow] = {}
        self.held: Counter[tuple[str, str]] = Counter()
        """How many sessions it holds, by task and client."""
        self.opening = 0
        """Sessions that it is being asked to open."""
        self.full = False
        """It refused a session for want of room; until its next beat."""
        self.draining = False
        self.leaving = False
        self._clock = clock
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._outbox: Outbox | None = None
        self._lost: Callable[[], WireError] | None = None
        self.greet(hello)

    def greet(self, hello: Hello) -> None:
        """Take in what the server says at the begin of a link."""
        self.tasks = {task.name: task for task in hello.tasks}
        self.capacity = hello.capacity
        self.place, self.version = hello.place, hello.version
        self.draining = hello.draining
        self.sessions = {row.session_id: row for row in hello.sessions}
        self.held = Counter((row.task, row.client) for row in hello.sessions)
        self.full = False
        self.seen = self._clock()

    @property
    def linked(self) -> bool:
        """Whether there is a link to it now."""
        return self._outbox is not None

    @property
    def load(self) -> float:
        """Share of its capacity that is taken or promised."""
        return (len(self.sessions) + self.opening) / self.capacity

    def has_room(self, task: str) -> bool:
        """Whether a session of a task may be placed here."""
        ready = self.linked and not (self.full or self.draining or self.leaving)
        return ready and task in self.tasks and self.load < 1

    def summary(self) -> ServerSummary:
        """Return what an operator sees of it."""
        return ServerSummary(
            server_id=self.server_id,
            place=self.place,
            tasks=tuple(self.tasks),
            capacity=self.capacity,
            open=len(self.sessions),
            waiting=self.opening,
            draining=self.draining,
            heard_s=self._clock() - self.seen,
            version=self.version,
        )

    def link(self, outbox: Outbox) -> None:
        """Send over this link from now on, first what has no answer yet; one before it ends."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = outbox
        for number, call in self._calls.items():
            outbox.put(number, call.frame)

    def unlink(self, outbox: Outbox) -> None:
        """Take note that a link is gone; where it is still the present one, calls wait for the next."""
        if self._outbox is outbox:
            self._outbox = None

    def cut(self) -> None:
        """End the present link: the server does not answer on it."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def hear_beat(self, beat: Beat) -> None:
        """Take in what has changed on the server."""
        self.seen = self._clock()
        for row in beat.opened:
            if row.session_id not in self.sessions:
                self.sessions[row.session_id] = row
                self.held[row.task, row.client] += 1
        for session_id in beat.ended:
            self.forget(session_id)
        self.full = False
        self.draining, self.leaving = beat.draining, beat.leaving

    def forget(self, session_id: str) -> None:
        """Count a session no more."""
        ended = self.sessions.pop(session_id, None)
        if ended is not None:
            take_one(self.held, (ended.task, ended.client))

    def hear_answer(self, frame: bytes) -> None:
        """Hand an answer to whoever asked; raises ValueError where it is none."""
        self.seen = self._clock()
        match = _ANSWER.match(frame)
        if match is None:
            raise ValueError("not an answer")
        call = self._calls.get(int(match[1]))
        if call is None or call.answer.done():
            return
        body = frame[match.end() : -1]
        if match[2] == b"result":
            call.answer.set_result(body)
        else:
            error = from_wire({"error": from_json(body)})
            call.answer.set_exception(error or InternalError("a server answered an error of no known form"))

    async def ask(self, fields: bytes) -> bytes:
        """Make a call, given as JSON fields without braces; return its result as JSON.

        Raises the WireError that the server answers, SessionLost where it dies.
        """
        if self._lost is not None:
            raise self._lost()
        number = next(self._numbers)
        span = traceparent()
        trace = b"" if span is None else b',"traceparent":%b' % to_json(span)
        call = _Call(b'{"id":%d,%b%b}' % (number, fields, trace), asyncio.get_running_loop().create_future())
        self._calls[number] = call
        if self._outbox is not None:
            self._outbox.put(number, call.frame)
        try:
            return await call.answer
        finally:
            del self._calls[number]
            if self._outbox is not None:
                self._outbox.drop(number)

    def lose(self, reason: str) -> None:
        """End every call under way, and all to come, as lost; a server that still talks is hung up."""
        self._lost = partial(SessionLost, reason, server=self.server_id)
        self.cut()
        self.sessions.clear()
        self.held.clear()
        self.refuse(self._lost)

    def refuse(self, error: Callable[[], WireError]) -> None:
        """Answer every call under way with an error, each with its own."""
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error())


def take_one(counts: Counter[tuple[str, str]], of: tuple[str, str]) -> None:
    """Count one less; what has come to nothing is forgotten, for callers make up names as they like."""
    counts[of] -= 1
    if counts[of] <= 0:
        del counts[of]
