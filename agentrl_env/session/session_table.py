"""The table of a pool: open sessions, their idle times, and recently ended sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from agentrl_env.errors import UnknownSession
from agentrl_env.session.session import History, Session
from agentrl_env.session.single_flight import check_digest
from agentrl_env.wire import SessionRow

MAX_ENDED = 4096
"""Maximum number of ended sessions that are kept, so that a lost last answer can be repeated."""
ENDED_S = 600.0
"""Seconds for which ended sessions are kept."""
ENDED_ANSWERS = 2
"""Number of last turns that an ended session keeps regardless of their size."""
ENDED_TURNS_BYTES = 32 * 1024
"""Maximum size of the other turns of an ended session. The oldest turns are dropped first."""


class SessionWatcher(Protocol):
    """Receives every session that opens and ends."""

    def opened(self, row: SessionRow) -> None:
        """Receive a session that has opened."""

    def ended(self, session_id: str) -> None:
        """Receive the id of a session that has ended."""


@dataclass(slots=True)
class Entry:
    """One session of the table."""

    session: Session
    request_id: str | None = None
    """Idempotency key of the opening."""
    client: str = ""
    """Name of the caller that opened it."""
    users: int = 0
    """Number of calls in progress. The lease does not run during a call."""


class SessionTable:
    """All sessions of a pool, by id.

    Args:
        clock: returns the monotonic time in seconds.
        max_ended: maximum number of ended sessions that are kept.
        ended_s: seconds for which ended sessions are kept.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_ended: int = MAX_ENDED,
        ended_s: float = ENDED_S,
    ) -> None:
        self.live: dict[str, Entry] = {}
        self._clock = clock
        self._max_ended = max_ended
        self._ended_s = ended_s
        self._idle: dict[str, float] = {}
        """Start of the idle time of each session, earliest first."""
        self._ended: OrderedDict[str, tuple[Entry, float]] = OrderedDict()
        self._requests: dict[str, tuple[str, str]] = {}
        """Session id and request digest by idempotency key."""
        self._watchers: list[SessionWatcher] = []

    def watch(self, watcher: SessionWatcher) -> tuple[SessionRow, ...]:
        """Add a watcher and return the open sessions."""
        self._watchers.append(watcher)
        return tuple(_row(session_id, entry) for session_id, entry in self.live.items())

    def unwatch(self, watcher: SessionWatcher) -> None:
        """Remove a watcher."""
        self._watchers.remove(watcher)

    def add(self, session: Session, request_id: str | None, client: str = "", digest: str = "") -> None:
        """Add an opened session and start its lease."""
        entry = self.live[session.session_id] = Entry(session, request_id, client)
        for watcher in self._watchers:
            watcher.opened(_row(session.session_id, entry))
        self._idle[session.session_id] = self._clock()
        if request_id is not None:
            self._requests[request_id] = (session.session_id, digest)

    def find(self, session_id: str) -> Entry:
        """Return a session that is open or has ended recently. Raises UnknownSession."""
        entry = self.live.get(session_id)
        if entry is None:
            ended = self._ended.get(session_id)
            if ended is None:
                raise UnknownSession("no such session; it never existed or ended long ago")
            entry = ended[0]
        return entry

    def row(self, session_id: str) -> SessionRow | None:
        """Return the row of an open session, or None if there is none."""
        entry = self.live.get(session_id)
        return None if entry is None else _row(session_id, entry)

    def knows(self, session_id: str) -> bool:
        """Return True if a session is open or has ended recently."""
        return session_id in self.live or session_id in self._ended

    def forget(self, session_ids: Iterable[str]) -> None:
        """Drop ended sessions."""
        for session_id in session_ids:
            self._drop(session_id)

    def opened_as(self, request_id: str, digest: str) -> str | None:
        """Return the id of the session that was opened with an idempotency key.

        Raises IdempotencyConflict if the request had another digest.
        """
        session_id, first = self._requests.get(request_id, (None, digest))
        check_digest(digest, first)
        return session_id

    def enter(self, session_id: str, entry: Entry) -> None:
        """Stop the lease while a call is in progress."""
        entry.users += 1
        self._idle.pop(session_id, None)

    def leave(self, session_id: str, entry: Entry) -> None:
        """Restart the lease after the last call in progress."""
        entry.users -= 1
        if entry.users == 0 and session_id in self.live:
            self._idle[session_id] = self._clock()

    def touch(self, session_id: str, entry: Entry) -> None:
        """Restart the lease after a call that ended immediately."""
        if entry.users == 0 and self._idle.pop(session_id, None) is not None:
            self._idle[session_id] = self._clock()

    def idle_since(self, horizon: float) -> list[str]:
        """Return the open sessions that have been idle since before ``horizon``, longest first."""
        found: list[str] = []
        for session_id, since in self._idle.items():
            if since > horizon:
                break
            found.append(session_id)
        return found

    def retire(self, session_id: str) -> Entry | None:
        """Move an ended session out of ``live`` and return it, or None if it was already moved."""
        entry = self.live.pop(session_id, None)
        if entry is not None:
            self._idle.pop(session_id, None)
            _shorten(entry.session)
            self._ended[session_id] = (entry, self._clock())
            self.forget_old()
            for watcher in self._watchers:
                watcher.ended(session_id)
        return entry

    def known(self) -> Iterator[tuple[Session, float | None]]:
        """Iterate over all sessions with the time of their last call, which is None during a call."""
        for session_id, entry in self.live.items():
            yield entry.session, self._idle.get(session_id)
        for entry, since in self._ended.values():
            yield entry.session, since

    def forget_old(self) -> None:
        """Drop ended sessions that are too old or exceed the maximum number."""
        horizon = self._clock() - self._ended_s
        while self._ended:
            session_id, (_, since) = next(iter(self._ended.items()))
            if since > horizon and len(self._ended) <= self._max_ended:
                return
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        entry, _ = self._ended.pop(session_id, (None, 0.0))
        if entry is not None and entry.request_id is not None:
            self._requests.pop(entry.request_id, None)


def _shorten(session: Session) -> None:
    """Drop the older turns of an ended session."""
    turns = session.history.tail()
    kept = size = 0
    for message, result in reversed(turns):
        size += len(message) + len(result)
        if kept >= ENDED_ANSWERS and size > ENDED_TURNS_BYTES:
            break
        kept += 1
    if kept < len(turns):
        session.history = History.of(turns[-kept:])


def _row(session_id: str, entry: Entry) -> SessionRow:
    return SessionRow(session_id=session_id, task=entry.session.sample.task, client=entry.client)
