"""A session whose server is lost: found where it went, or given to another server that goes on with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from pydantic import TypeAdapter
from pydantic_core import to_json

from agentrl_env.errors import (
    ServerDraining,
    ServerFull,
    SessionLost,
    StateUnavailable,
    UnknownSession,
    WireError,
)
from agentrl_env.fleet.registry import LOST, Roster
from agentrl_env.fleet.scheduler import Placement
from agentrl_env.fleet.store import FleetState, KeptSession, home
from agentrl_env.fleet.worker import Member
from agentrl_env.wire import Kept

logger = logging.getLogger("agentrl_env")

MAX_DEATHS = 3
"""How many servers may die with a session that took no step meanwhile: its next may be what kills them."""
_TURN: TypeAdapter[tuple[str, str, str]] = TypeAdapter(tuple[str, str, str])


class Adopter:
    """Lets other servers go on with the sessions of servers that are lost, each at most once at a time.

    A session that is kept has one holder, by the shared state. Whoever gives it on changes the holder
    first and asks the new one then; asking twice changes nothing. So controllers need not agree on who
    of them does it, and any of them may die on the way.

    A step that was under way is played again, on state from before it: what it does in the world
    outside may happen twice.

    Args:
        roster: the servers.
        placement: who has room.
        state: what is kept.
        queue_s: seconds that a session waits for room until it is lost.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        roster: Roster,
        placement: Placement,
        state: FleetState,
        queue_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster = roster
        self._placement = placement
        self._state = state
        self._queue_s = queue_s
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[Member]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def here(self, session_id: str) -> Member | None:
        """Return the server that has a session, as far as this controller has heard."""
        members = self._roster.members
        there = members.get(home(session_id))
        return there or next((m for m in members.values() if session_id in m.sessions), None)

    async def find(self, session_id: str) -> Member:
        """Return the server that has a session; where its own is lost, another one adopts it first.

        Raises SessionLost, UnknownSession, StateUnavailable.
        """
        member = self.here(session_id)
        if member is not None:
            return member
        if await self._state.kept(session_id) is None:
            if not await self._roster.is_gone(home(session_id)):
                await self._roster.wait_in_youth(lambda: self.here(session_id) is not None)
            return self.here(session_id) or await self._roster.find(home(session_id))
        adopting = self._under_way.get(session_id)
        if adopting is None:
            # It goes on without its callers: one that asks again and again must not begin it anew.
            adopting = self._under_way[session_id] = asyncio.create_task(self._adopt(session_id))
            adopting.add_done_callback(lambda task: self._end(session_id, task))
        return await asyncio.shield(adopting)

    async def close(self, session_id: str) -> None:
        """End a session wherever it is; one whose server is lost is not adopted for that.

        Raises SessionLost, UnknownSession, StateUnavailable.
        """
        member = self.here(session_id)
        if member is None:
            known = await self._state.kept(session_id)
            if known is None:
                member = await self._roster.find(home(session_id))
            else:
                await self._state.forget_kept(session_id, known.holder)
                member = self._roster.members.get(known.holder)
        if member is not None:
            await _close(member, session_id)

    async def disown(self, session_id: str, server_id: str) -> None:
        """Let a server end a session that was given to another meanwhile."""
        member = self._roster.members.get(server_id)
        if member is None or await self._roster.is_gone(server_id):
            return
        member.forget(session_id)
        closing = asyncio.create_task(_close_at_last(member, session_id))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def stop(self) -> None:
        """Give up what is under way; another controller may go on."""
        for task in (*self._under_way.values(), *self._closing):
            task.cancel()

    def _end(self, session_id: str, adopting: asyncio.Task[Member]) -> None:
        del self._under_way[session_id]
        if not adopting.cancelled() and adopting.exception() is not None:
            logger.warning("session %s could not be gone on with: %s", session_id, adopting.exception())

    async def _adopt(self, session_id: str) -> Member:
        end = self._clock() + self._queue_s
        while (known := await self._state.kept(session_id)) is not None:
            member = await self._alive(known.holder)
            if member is not None and (known.holder == home(session_id) or known.kept is None):
                return member
            if member is not None and await self._ask(member, session_id, known):
                return member
            if known.kept is None:
                break
            died = member is None and not self._roster.has_left(known.holder)
            if died and known.deaths + 1 >= MAX_DEATHS:
                await self._state.forget_kept(session_id, known.holder)
                words = f"{MAX_DEATHS} servers that held the session died one after another; open a new one"
                raise SessionLost(words)
            member = await self._give(session_id, known, end, died=died)
            if member is not None:
                return member
        raise SessionLost(LOST, server=home(session_id))

    async def _alive(self, server_id: str) -> Member | None:
        with suppress(SessionLost, UnknownSession):
            return await self._roster.find(server_id)
        return None

    async def _give(self, session_id: str, known: KeptSession, end: float, *, died: bool) -> Member | None:
        """Give a session to a server with room; None where the holder was another, or that one failed."""
        head = await self._read(session_id, known)
        try:
            place = await self._placement.take(head.task, head.client, end - self._clock())
        except ServerDraining as error:  # the controller, which is about to end
            raise StateUnavailable(error.message, retry_after=1) from error
        if place is None:
            raise await self._no_room(session_id, known.holder)
        try:
            if not await self._state.move(session_id, known.holder, place.server_id, died=died):
                return None
            # From now on nobody else writes, so what is kept is the last that anybody was answered.
            last = await self._state.kept(session_id)
            given = last is not None and last.kept is not None and await self._ask(place, session_id, last)
        finally:
            self._placement.release((head.task, head.client), place)
        if not given:
            if self._clock() >= end and (place.full or place.draining):
                raise await self._no_room(session_id, place.server_id)
            return None
        last = await self._state.kept(session_id)
        if last is None or last.holder != place.server_id or last.kept is None:
            await self.disown(session_id, place.server_id)  # it was closed meanwhile
            return None
        logger.info("session %s goes on at server %s", session_id, place.server_id)
        return place

    async def _read(self, session_id: str, known: KeptSession) -> Kept:
        """Return what is kept of a session. Raises SessionLost where it is malformed."""
        try:
            kept = Kept.model_validate_json(known.kept or b"")
            turns = tuple(_TURN.validate_json(turn) for turn in known.turns)
        except ValueError as error:
            await self._state.forget_kept(session_id, known.holder)
            raise SessionLost("what was kept of the session is malformed; open a new one") from error
        return kept.model_copy(update={"session_id": session_id, "turns": turns})

    async def _no_room(self, session_id: str, holder: str) -> SessionLost:
        """Return what a session ends with that nobody can go on with, now or later."""
        await self._state.forget_kept(session_id, holder)
        return SessionLost("the session's server is gone, and no other has room; open a new one")

    async def _ask(self, member: Member, session_id: str, known: KeptSession) -> bool:
        """Let a server adopt a session, where it has not yet; return whether it has it.

        Raises SessionLost where no server can: the state cannot be restored.
        """
        kept = await self._read(session_id, known)  # parsed, so that the call holds only what a call may
        try:
            await member.ask(b'"call":"adopt",%b' % kept.model_dump_json().encode()[1:-1])
            return True
        except ServerFull:
            member.full = True
        except ServerDraining:
            member.draining = True
        except SessionLost:
            return False
        except StateUnavailable:
            raise
        except WireError as error:
            await self._state.forget_kept(session_id, known.holder)
            raise SessionLost(f"the session's server is gone, and another cannot go on: {error}") from error
        return False


async def _close(member: Member, session_id: str) -> None:
    await member.ask(b'"call":"close","session_id":%b' % to_json(session_id))


async def _close_at_last(member: Member, session_id: str) -> None:
    """Close a session that nobody asks for any more."""
    with suppress(WireError):
        await _close(member, session_id)
