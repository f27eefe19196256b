"""What an operator sees: the server, its sessions in pages, and one session's transcript."""

from __future__ import annotations

import heapq
import os
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

from agentrl_env.errors import InvalidRequest
from agentrl_env.session import Session
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import (
    FleetInfo,
    ServerSummary,
    SessionList,
    SessionQuery,
    SessionSummary,
    Transcript,
    TranscriptTurn,
)

VERSION = version("agentrl-kit")


def list_sessions(
    known: Iterable[tuple[Session, float | None]],
    query: SessionQuery,
    *,
    server: str,
    now: float,
    epoch: float,
) -> SessionList:
    """Return one page of a process's sessions, the newest first.

    Args:
        known: the sessions, each with the time of its last call; None while one is under way.
        query: which of them.
        server: the id of the server that this process is.
        now: the time, by the clock of the sessions.
        epoch: what makes seconds since 1970 of that clock's.

    Raises InvalidRequest.
    """
    task, status = query.task, query.status
    wanted = [
        (epoch + session.begin, session.session_id, session, since)
        for session, since in known
        if (task is None or session.sample.task == task) and (status is None or session.status is status)
    ]
    wanted.sort(reverse=True)  # quick: what is known comes nearly in order
    begin = bisect_left(wanted, True, key=_is_after(query.after))
    page = wanted[begin : begin + query.limit]
    rows = tuple(_summary(session, server, since, now, began) for began, _, session, since in page)
    return SessionList(sessions=rows, total=len(wanted), next=_next(rows, len(wanted) - begin))


def merge_lists(lists: Sequence[SessionList], query: SessionQuery) -> SessionList:
    """Return the page that the same page of several servers' lists makes."""
    found = [row for part in lists for row in part.sessions]
    rows = tuple(heapq.nlargest(query.limit, found, key=lambda row: (row.began, row.session_id)))
    further = len(found) + sum(part.next is not None for part in lists)
    return SessionList(sessions=rows, total=sum(part.total for part in lists), next=_next(rows, further))


def transcript(session: Session, after: int | None) -> Transcript:
    """Return how a session stands and its kept turns after one; None: all, and how it began."""
    first = after is None
    return Transcript(
        session_id=session.session_id,
        sample=session.sample,
        status=session.status,
        turn=session.turn,
        reward=session.total,
        messages=session.opening if first else (),
        tools=session.info().tools if first else (),
        turns=tuple(
            TranscriptTurn(message=said, result=result)
            for said, result in session.turns
            if after is None or result.seq > after
        ),
    )


def place_of(pid: int) -> str:
    """Return what people, and a controller with workers of its own, know a process by: host and number."""
    return f"{socket.gethostname()} {pid}"


async def describe_server(pool: SessionPool) -> FleetInfo:
    """Return the fleet that a server is by itself."""
    gauges, place = pool.gauges(), place_of(os.getpid())
    server = ServerSummary(
        server_id=pool.server_id,
        place=place,
        tasks=tuple(task.name for task in await pool.tasks()),
        capacity=int(gauges["agentrl_sessions_capacity"]),
        open=int(gauges["agentrl_sessions_open"]),
        waiting=int(gauges["agentrl_sessions_waiting"]),
        draining=pool.draining,
        version=VERSION,
    )
    return FleetInfo(
        kind="server",
        name=place,
        version=VERSION,
        draining=pool.draining,
        waiting=server.waiting,
        servers=(server,),
    )


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
        reward=session.total,
        began=began,
        age_s=now - session.begin,
        idle_s=None if since is None else now - since,
    )


def _next(rows: Sequence[SessionSummary], there: int) -> str | None:
    """Return where the page after these rows begins, of so many that there are."""
    return f"{rows[-1].began!r}/{rows[-1].session_id}" if rows and there > len(rows) else None


def _is_after(place: str | None) -> Callable[[tuple[Any, ...]], bool]:
    """Return what tells whether a session comes after a place in the list: a time and an id."""
    if place is None:
        return lambda row: True
    time, _, session_id = place.partition("/")
    try:
        last = (float(time), session_id)
    except ValueError:
        raise InvalidRequest(f"after: {place!r} is not the 'next' of a page before") from None
    return lambda row: row[:2] < last
