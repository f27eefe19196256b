"""An opening, from its request to a session: given to one server, and to another where that one fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pydantic_core import to_json

from agentrl_env.errors import (
    ServerDraining,
    ServerFull,
    SessionLost,
    StateUnavailable,
    UnknownSession,
    WireError,
)
from agentrl_env.fleet.scheduler import Placement
from agentrl_env.fleet.store import FleetState
from agentrl_env.fleet.worker import Member
from agentrl_env.types import SessionInfo
from agentrl_env.wire import OpenRequest

PAUSE_S = 0.1


class Opener:
    """Opens sessions on the servers of a fleet, each under its name exactly once.

    The name of an opening (its ``request_id``) is claimed for a server before that one is asked, so
    that whoever asks again, at this controller or another, gets the session that is there.

    Args:
        find: returns a server by its id, as ``Roster.find``.
        placement: who has room.
        state: the claims.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        find: Callable[[str], Awaitable[Member]],
        placement: Placement,
        state: FleetState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._placement = placement
        self._state = state
        self._clock = clock
        self._closing: set[asyncio.Task[None]] = set()

    async def open(self, request: OpenRequest, name: str, wait_s: float) -> bytes:
        """Return a ``SessionInfo``.

        Raises ServerFull where no room came free in time, StateUnavailable, and what a server answers.
        """
        end = self._clock() + wait_s
        while True:
            try:
                opened = await self._try(request, name, end)
            except StateUnavailable:
                if self._clock() >= end:
                    raise
                await asyncio.sleep(PAUSE_S)
                continue
            if opened is not None:
                return opened
            if self._clock() >= end:
                raise _full(request)

    async def _try(self, request: OpenRequest, name: str, end: float) -> bytes | None:
        """Open it where it belongs, or where there is room; None where that server could not."""
        claimed = await self._state.claimed(name)
        if claimed is not None:
            return await self._open_at(claimed, request, name)
        place = await self._place(request, end)
        try:
            claimed = await self._state.claim(name, place.server_id)
            return await self._open_at(claimed, request, name)
        finally:
            self._placement.release((request.task, request.client), place)

    async def _open_at(self, server_id: str, request: OpenRequest, name: str) -> bytes | None:
        """Return the session at the server that has the claim; None, and no claim, where it has none."""
        with suppress(SessionLost, UnknownSession):
            member = await self._find(server_id)
            try:
                return await self._ask(member, request, name)
            except ServerFull:
                member.full = True
            except ServerDraining:
                member.draining = True
        await self._state.unclaim(name, server_id)
        return None

    async def _ask(self, member: Member, request: OpenRequest, name: str) -> bytes:
        # It waits here if anywhere: in a server's own queue it would be out of reach of the others.
        asked = request.model_copy(update={"wait_s": 0.0, "request_id": name})
        fields = asked.model_dump_json().encode()[1:-1]
        asking = asyncio.ensure_future(member.ask(b'"call":"open",' + fields))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if request.request_id is not None:
                asking.cancel()  # whoever has named it may ask again, anywhere; else its lease ends it
            else:
                asking.add_done_callback(lambda opened: self._close(member, opened))
            raise

    def _close(self, member: Member, opened: asyncio.Future[bytes]) -> None:
        """Close a session whose caller was gone before it was open."""
        if opened.cancelled() or opened.exception() is not None:
            return
        session_id = SessionInfo.model_validate_json(opened.result()).session_id
        closing = member.ask(b'"call":"close","session_id":' + to_json(session_id))
        task = asyncio.ensure_future(_whatever(closing))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _place(self, request: OpenRequest, end: float) -> Member:
        """Return a server with a place kept for a session, once there is one."""
        member = await self._placement.take(request.task, request.client, end - self._clock())
        if member is None:
            raise _full(request)
        return member


def _full(request: OpenRequest) -> ServerFull:
    words = f"no server has room for a session of {request.task!r}, or a limit is reached"
    return ServerFull(words, retry_after=1)


async def _whatever(asking: Awaitable[bytes]) -> None:
    try:
        await asking
    except WireError:
        return
