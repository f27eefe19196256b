"""A controller's view of one server of its fleet: its tasks, its sessions, and calls over its link."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pydantic_core import from_json, to_json

from agentrl_env.errors import SessionLost, WireError, from_wire
from agentrl_env.server.telemetry.tracing import traceparent
from agentrl_env.types import ServerSummary, TaskInfo
from agentrl_env.wire import ANSWER_FRAME, Beat, Hello, SessionRow

SILENT_S = 3.0
"""Seconds without a heartbeat after which a server counts as silent (busy or lost)."""


@dataclass(slots=True)
class _Call:
    frame: bytes
    answer: asyncio.Future[bytes] = field(repr=False)


class Outbox:
    """Frames to send over one link.

    Calls wait here while the server reads slowly. A call whose caller has given up is not sent.
    """

    def __init__(self) -> None:
        self.closed = False
        """True once the link must end because the server is lost or has opened another link."""
        self._calls: OrderedDict[int, bytes] = OrderedDict()
        self._notices: deque[bytes] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._calls) + len(self._notices)

    def put_call(self, number: int, frame: bytes) -> None:
        """Add a call."""
        self._calls[number] = frame
        self._filled.set()

    def drop_call(self, number: int) -> None:
        """Remove a call that has not been sent."""
        self._calls.pop(number, None)

    def put_notice(self, frame: bytes) -> None:
        """Add a frame that is not a call. It is sent before all calls."""
        self._notices.append(frame)
        self._filled.set()

    def close(self) -> None:
        """End the link."""
        self.closed = True
        self._filled.set()

    async def take(self) -> bytes | None:
        """Wait for the next frame and return it, or None if the link must end."""
        while not (self.closed or self._calls or self._notices):
            self._filled.clear()
            await self._filled.wait()
        if self.closed:
            return None
        return self._notices.popleft() if self._notices else self._calls.popitem(last=False)[1]


class RemoteServer:
    """A server of the fleet. It outlives its links: calls in progress are sent again over the next link.

    Sending a call twice is safe: openings and forks carry a ``request_id``, steps carry a ``seq``, and the
    other calls are idempotent.

    Args:
        hello: first frame of the server.
        clock: returns the monotonic time in seconds.
    """

    def __init__(self, hello: Hello, clock: Callable[[], float] = time.monotonic) -> None:
        self.server_id = hello.server_id
        self.tasks: dict[str, TaskInfo] = {}
        self.sessions: dict[str, SessionRow] = {}
        self.held: Counter[tuple[str, str]] = Counter()
        """Number of open sessions by task and client."""
        self.opening = 0
        """Number of places that are reserved for openings in progress."""
        self.full = False
        """True after the answer ``server_full``, until the next heartbeat."""
        self.suspect = False
        """True if calls got no answer for some seconds. No session opens here until the next answer."""
        self.stale = False
        """True if the operator drains this server."""
        self.draining = False
        self.leaving = False
        self.steps = 0
        """Number of steps that the server has reported."""
        self._clock = clock
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._outbox: Outbox | None = None
        self._lost: Callable[[], WireError] | None = None
        self._asked = False
        """True if a call was made since the last answer."""
        self._answered = -math.inf
        self._mute_since: float | None = None
        self.greet(hello)

    def greet(self, hello: Hello) -> None:
        """Apply the first frame of a link."""
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
        """True while there is a link."""
        return self._outbox is not None

    @property
    def silent(self) -> bool:
        """True if heartbeats are late, because the server is busy or stuck, or the link is breaking."""
        return self._clock() - self.seen > SILENT_S

    @property
    def load(self) -> float:
        """Fraction of the capacity that is taken or reserved."""
        return (len(self.sessions) + self.opening) / self.capacity

    def has_room(self, task: str) -> bool:
        """Return True if a session of a task can be placed here."""
        ready = self.linked and not (self.full or self.suspect or self.stale or self.draining or self.leaving)
        return ready and task in self.tasks and self.load < 1

    def summary(self) -> ServerSummary:
        """Return the server's row in ``GET /v1/fleet``."""
        return ServerSummary(
            server_id=self.server_id,
            place=self.place,
            tasks=tuple(self.tasks),
            capacity=self.capacity,
            open=len(self.sessions),
            waiting=self.opening,
            draining=self.draining,
            stale=self.stale,
            heard_s=self._clock() - self.seen,
            version=self.version,
            steps=self.steps,
        )

    def link(self, outbox: Outbox) -> None:
        """Replace the link, and first send again the calls without an answer."""
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = outbox
        for number, call in self._calls.items():
            outbox.put_call(number, call.frame)

    def unlink(self, outbox: Outbox) -> None:
        """Handle a broken link. If it is the current link, calls wait for the next one."""
        if self._outbox is outbox:
            self._outbox = None

    def cut(self) -> None:
        """End the current link, on which the server does not answer."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    def hear_beat(self, beat: Beat) -> None:
        """Apply a heartbeat."""
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
        """Remove a session that has ended."""
        ended = self.sessions.pop(session_id, None)
        if ended is not None:
            decrement(self.held, (ended.task, ended.client))

    def hear_answer(self, frame: bytes) -> None:
        """Pass an answer to its caller. Raises ValueError if the frame is not an answer."""
        self.seen = self._answered = self._clock()
        self._asked = self.suspect = False
        match = ANSWER_FRAME.match(frame)
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
            if error is None:
                raise ValueError("not an error")
            call.answer.set_exception(error)

    async def call(self, name: str, request: bytes) -> bytes:
        """Make a call and return its result as JSON.

        Args:
            name: row of ``wire.CALLS``, or ``adopt``.
            request: the arguments, as a JSON object with at least one field.

        Raises the WireError that the server returns, or SessionLost if the server is lost.
        """
        if self._lost is not None:
            raise self._lost()
        number = next(self._numbers)
        span = traceparent()
        trace = b"" if span is None else b'"traceparent":%b,' % to_json(span)
        frame = b'{"id":%d,"call":"%b",%b%b' % (number, name.encode(), trace, request[1:])
        self._asked = True
        call = self._calls[number] = _Call(frame, asyncio.get_running_loop().create_future())
        if self._outbox is not None:
            self._outbox.put_call(number, frame)
        try:
            return await call.answer
        finally:
            del self._calls[number]
            if self._outbox is not None:
                self._outbox.drop_call(number)

    def mute_s(self) -> float:
        """Return the seconds for which this method has observed heartbeats but no answer."""
        now = self._clock()
        if not self._asked or not self.linked or self.silent:
            self._mute_since = None
        elif self._mute_since is None or self._mute_since < self._answered:
            self._mute_since = now
        return 0.0 if self._mute_since is None else now - self._mute_since

    def lose(self, reason: str) -> None:
        """Fail all present and future calls with SessionLost, and end the link."""
        self._lost = partial(SessionLost, reason, server=self.server_id)
        self.cut()
        self.sessions.clear()
        self.held.clear()
        self.fail_calls(self._lost)

    def fail_calls(self, error: Callable[[], WireError]) -> None:
        """Answer each call in progress with a new error."""
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error())


def decrement(counts: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    """Decrement a count. Remove zeros, because clients choose their names freely."""
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
