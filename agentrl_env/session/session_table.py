"""Which sessions are open, which of them are idle since when, and which have ended lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from agentrl_env.errors import UnknownSession
from agentrl_env.session import Session
from agentrl_env.session.history import KEPT_TURNS, History
from agentrl_env.wire import SessionRow

KEPT_SESSIONS = 4096
"""How many ended sessions are remembered, so that a lost last answer can be asked for again."""
KEPT_S = 600.0
"""For how many seconds they are."""
ENDED_ANSWERS = 2
"""The last turns of an ended session that are kept whatever they take: an answer may have to be repeated."""
ENDED_TURNS_BYTES = 32 * 1024
"""What the turns of one that has ended may take beyond that; the oldest go first."""


class SessionWatcher(Protocol):
    """Hears of every session that opens and ends."""

    def opened(self, row: SessionRow) -> None:
        """A session is open."""

    def ended(self, session_id: str) -> None:
        """A session has ended."""


@dataclass(slots=True)
class Entry:
    """One session's row."""

    session: Session
    request_id: str | None = None
    """The name its opening was asked for under."""
    client: str = ""
    """Who asked."""
    users: int = 0
    """Calls under way in the session; while there are any, its lease does not run."""


class SessionTable:
    """Every session a pool knows, by id.

    Args:
        clock: seconds, monotonic.
        kept_sessions: how many ended sessions are remembered.
        kept_s: for how many seconds they are.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        kept_sessions: int = KEPT_SESSIONS,
        kept_s: float = KEPT_S,
    ) -> None:
        self.live: dict[str, Entry] = {}
        self._clock = clock
        self._kept_sessions = kept_sessions
        self._kept_s = kept_s
        self._idle: dict[str, float] = {}
        """Since when; those without a call for longest come first."""
        self._ended: OrderedDict[str, tuple[Entry, float]] = OrderedDict()
        self._requests: dict[str, str] = {}
        self._watchers: list[SessionWatcher] = []

    def watch(self, watcher: SessionWatcher) -> tuple[SessionRow, ...]:
        """Tell a watcher from now on; return what is open now."""
        self._watchers.append(watcher)
        return tuple(_row(session_id, entry) for session_id, entry in self.live.items())

    def unwatch(self, watcher: SessionWatcher) -> None:
        """Tell a watcher no more."""
        self._watchers.remove(watcher)

    def add(self, session: Session, request_id: str | None, client: str = "") -> None:
        """Enter a session that has just opened; its lease begins."""
        entry = self.live[session.session_id] = Entry(session, request_id, client)
        for watcher in self._watchers:
            watcher.opened(_row(session.session_id, entry))
        self._idle[session.session_id] = self._clock()
        if request_id is not None:
            self._requests[request_id] = session.session_id

    def find(self, session_id: str) -> Entry:
        """Return a session that is open or has ended lately. Raises UnknownSession."""
        entry = self.live.get(session_id)
        if entry is None:
            ended = self._ended.get(session_id)
            if ended is None:
                raise UnknownSession("no such session; it never existed or ended long ago")
            entry = ended[0]
        return entry

    def row(self, session_id: str) -> SessionRow | None:
        """Return how an open session is reported; None where there is no such."""
        entry = self.live.get(session_id)
        return None if entry is None else _row(session_id, entry)

    def knows(self, session_id: str) -> bool:
        """Return whether a session is open or has ended lately."""
        return session_id in self.live or session_id in self._ended

    def forget(self, session_ids: Iterable[str]) -> None:
        """Drop sessions that have ended."""
        for session_id in session_ids:
            self._drop(session_id)

    def opened_as(self, request_id: str) -> str | None:
        """Return the id of the session that was opened under a request's name."""
        return self._requests.get(request_id)

    def enter(self, session_id: str, entry: Entry) -> None:
        """Stop the lease while a call is under way."""
        entry.users += 1
        self._idle.pop(session_id, None)

    def leave(self, session_id: str, entry: Entry) -> None:
        """Let the lease begin anew after the last call under way."""
        entry.users -= 1
        if entry.users == 0 and session_id in self.live:
            self._idle[session_id] = self._clock()

    def touch(self, session_id: str, entry: Entry) -> None:
        """Let the lease begin anew after a call that was over at once."""
        if entry.users == 0 and self._idle.pop(session_id, None) is not None:
            self._idle[session_id] = self._clock()

    def idle_for(self, seconds: float) -> list[str]:
        """Return the open sessions without a call for so long, the longest first."""
        horizon = self._clock() - seconds
        found: list[str] = []
        for session_id, since in self._idle.items():
            if since > horizon:
                break
            found.append(session_id)
        return found

    def retire(self, session_id: str) -> Entry | None:
        """Move a session that has ended aside; None where that was done before."""
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
        """Go through all sessions, with the time of their last call; None while one is under way."""
        for session_id, entry in self.live.items():
            yield entry.session, self._idle.get(session_id)
        for entry, since in self._ended.values():
            yield entry.session, since

    def ended(self) -> Iterator[Session]:
        """Go through the sessions that have ended and are remembered."""
        return (entry.session for entry, _ in self._ended.values())

    def forget_old(self) -> None:
        """Drop ended sessions that are too old or too many."""
        horizon = self._clock() - self._kept_s
        while self._ended:
            session_id, (_, since) = next(iter(self._ended.items()))
            if since > horizon and len(self._ended) <= self._kept_sessions:
                return
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        entry, _ = self._ended.pop(session_id, (None, 0.0))
        if entry is not None and entry.request_id is not None:
            self._requests.pop(entry.request_id, None)


def _shorten(session: Session) -> None:
    """Let an ended session keep no more turns than may be asked for: there are thousands of them."""
    turns = session.turns.tail(KEPT_TURNS)
    kept = size = 0
    for said, answer in reversed(turns):
        size += len(said) + len(answer)
        if kept >= ENDED_ANSWERS and size > ENDED_TURNS_BYTES:
            break
        kept += 1
    if kept < len(turns):
        session.turns = History.of(turns[-kept:])


def _row(session_id: str, entry: Entry) -> SessionRow:
    return SessionRow(session_id=session_id, task=entry.session.sample.task, client=entry.client)
