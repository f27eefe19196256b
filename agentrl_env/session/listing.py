"""Views for operators: pages of sessions, and transcripts."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentrl_env.errors import InvalidRequest
from agentrl_env.session.session import Session
from agentrl_env.types import SessionStatus
from agentrl_env.wire import (
    SessionList,
    SessionQuery,
    SessionSummary,
    Transcript,
    TranscriptTurn,
)


def list_sessions(
    known: Iterable[tuple[Session, float | None]],
    query: SessionQuery,
    *,
    server: str,
    now: float,
    epoch: float,
) -> SessionList:
    """Return one page of the sessions of a process, newest first.

    Args:
        known: the sessions with the time of their last call, which is None during a call.
        query: filters and the page.
        server: id of the process.
        now: time of the sessions' clock.
        epoch: Unix time at the clock's zero.

    Raises InvalidRequest.
    """
    task, status, search = query.task, query.status, query.search.lower()
    wanted = [
        (epoch + session.began, session.session_id, session, since)
        for session, since in known
        if (task is None or session.sample.task == task)
        and (status is None or session.status is status)
        and (not search or search in _searched_text(session))
    ]
    wanted.sort(reverse=True)  # fast: the table is nearly sorted
    begin = bisect_left(wanted, True, key=_is_after(query.after))
    page = wanted[begin : begin + query.limit]
    rows = tuple(_summary(session, server, since, now, began) for began, _, session, since in page)
    return SessionList(sessions=rows, total=len(wanted), next=_next(rows, len(wanted) - begin))


def merge_lists(lists: Sequence[SessionList], query: SessionQuery) -> SessionList:
    """Merge the same page of several servers into one."""
    found = [row for part in lists for row in part.sessions]
    rows = tuple(heapq.nlargest(query.limit, found, key=lambda row: (row.began, row.session_id)))
    further = len(found) + sum(part.next is not None for part in lists)
    return SessionList(sessions=rows, total=sum(part.total for part in lists), next=_next(rows, further))


def transcript(session: Session, after: int | None) -> Transcript:
    """Return the turns after turn ``after``. None returns all stored turns and the opening."""
    first = after is None
    return Transcript(
        session_id=session.session_id,
        sample=session.sample,
        status=session.status,
        turn=session.turn,
        reward=_finite(session.episode_return),
        messages=session.opening if first else (),
        tools=session.info().tools if first else (),
        turns=tuple(
            TranscriptTurn(message=message, result=result)
            for message, result in session.history
            if after is None or result.seq > after
        ),
    )


def _searched_text(session: Session) -> str:
    """Return the text of a session that searches are matched against."""
    sample = session.sample
    return f"{session.session_id} {sample.task} {sample.split} {sample.index} seed {sample.seed}".lower()


def _reason(session: Session) -> str:
    """Return the exception of a failed environment, or an empty text if no step failed."""
    last = session.history.last if session.status is SessionStatus.FAILED_ENVIRONMENT else None
    return str(last.info.get("error", {}).get("message", "")) if last is not None else ""


def _summary(session: Session, server: str, since: float | None, now: float, began: float) -> SessionSummary:
    sample = session.sample
    return SessionSummary(
        session_id=session.session_id,
        server=server,
        task=sample.task,
        split=sample.split,
        index=sample.index,
        seed=sample.seed,
        status=session.status,
        turn=session.turn,
        reward=_finite(session.episode_return),
        began=began,
        age_s=now - session.began,
        idle_s=None if since is None else now - since,
        error=_reason(session),
    )


def _finite(reward: float) -> float:
    """Return a sum of rewards, or the largest float if the sum is infinite, because JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, reward))


def _next(rows: Sequence[SessionSummary], there: int) -> str | None:
    """Return the start of the next page, or None if all ``there`` rows are on this page."""
    return f"{rows[-1].began!r}/{rows[-1].session_id}" if rows and there > len(rows) else None


def _is_after(place: str | None) -> Callable[[tuple[Any, ...]], bool]:
    """Return a predicate that is true for rows after ``place``, which contains a time and an id."""
    if place is None:
        return lambda row: True
    time, _, session_id = place.partition("/")
    try:
        last = (float(time), session_id)
    except ValueError:
        raise InvalidRequest(f"after: {place!r} is not the 'next' of a previous page") from None
    return lambda row: row[:2] < last
