"""The servers of a fleet, as they come, fall silent, and go."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from agentrl_env.errors import SessionLost, StateUnavailable, UnknownSession
from agentrl_env.fleet.failover import Keeper
from agentrl_env.fleet.store import FleetState
from agentrl_env.fleet.worker import Member, Outbox
from agentrl_env.types import TaskInfo
from agentrl_env.wire import Beat, Hello, KeptHead, Welcome

logger = logging.getLogger("agentrl_env")

BEAT_S = 1.0
"""How often a server gives a sign of life."""
BLIND_PATIENCE = 3
"""How many times as long a silent server is waited for where other controllers cannot be asked."""
LOST = "the server that held the session is gone; open a new one"


class Roster:
    """Takes servers in, and gives up those that no controller hears of.

    What is given up stays so, at every controller: a server that comes back ends its sessions, and
    has a new id.

    Args:
        members: the servers, as they are now.
        state: what is shared with the other controllers.
        lost_after_s: seconds without a sign of life after which a server's sessions are lost.
        changed: is called when there may be room.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        members: dict[str, Member],
        state: FleetState,
        *,
        lost_after_s: float,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = members
        self.tasks: dict[str, TaskInfo] = {}
        """What has ever been served."""
        self._state = state
        self._lost_after_s = lost_after_s
        self._changed = changed
        self._clock = clock
        self._begin = self._awake = -math.inf
        """Since when servers may dial; and since when this process has not slept, and could hear them."""
        self._arrival = asyncio.Condition()
        self._lost_here: set[str] = set()
        """Servers that this controller has given up; it stays so where the shared state forgets."""
        self.keeper: Keeper | None = None
        """Takes in where sessions stand; None: their servers are not to tell."""
        self._noted: dict[str, float] = {}
        """Of each server the sign of life that the shared state was last told of."""
        self._left: set[str] = set()
        """Servers that have said good-bye to this controller."""
        self._untold: set[str] = set()
        """Those of them that the shared state could not be told of."""
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look after the servers."""
        self._begin = self._clock()
        self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Look after them no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def join(self, hello: Hello, outbox: Outbox) -> bool:
        """Take in a server that dials; False where its sessions were reported lost before."""
        with suppress(StateUnavailable):  # what is open goes on without
            if await self._is_lost(hello.server_id):
                self._drop(hello.server_id, LOST)
                return False
            await self._state.saw(hello.server_id)
        welcome = Welcome(beat_s=BEAT_S, keep=self.keeper is not None)
        outbox.tell(b'{"welcome":%b}' % welcome.model_dump_json().encode())
        member = self.members.get(hello.server_id)
        if member is None:
            member = self.members[hello.server_id] = Member(hello, self._clock)
            logger.info("server %s joined: %s", hello.server_id, ", ".join(member.tasks))
        else:
            before = set(member.sessions)
            member.greet(hello)
            self._forget(hello.server_id, before - set(member.sessions))
        self.tasks.update(member.tasks)
        member.link(outbox)
        self._changed()
        async with self._arrival:
            self._arrival.notify_all()
        return True

    def is_taken(self, hello: Hello) -> bool:
        """Return whether a server's id is that of another process, which has a link."""
        member = self.members.get(hello.server_id)
        return member is not None and member.linked and member.place != hello.place

    def part(self, server_id: str, outbox: Outbox) -> None:
        """Take note that a link is gone. A server that has said good-bye is gone with it."""
        member = self.members.get(server_id)
        if member is not None:
            member.unlink(outbox)
            if member.leaving and not member.linked:
                self._left.add(server_id)
                self._drop(server_id, "the server that held the session was stopped; open a new one")

    async def hear_beat(self, server_id: str, beat: Beat) -> None:
        """Take in a server's sign of life."""
        member = self.members.get(server_id)
        if member is not None:
            member.hear_beat(beat)
            self._forget(server_id, beat.ended)
            self._changed()

    def hear_kept(self, server_id: str, head: KeptHead, kept: bytes, turns: Sequence[bytes]) -> None:
        """Take in where a session stands."""
        if self.keeper is not None and server_id in self.members:
            self.keeper.keep(server_id, head, kept, turns)

    def hear_answer(self, server_id: str, frame: bytes) -> None:
        """Hand a server's answer to whoever asked. Raises ValueError where it is none."""
        member = self.members.get(server_id)
        if member is not None:
            member.hear_answer(frame)

    async def lose(self, server_id: str, why: str) -> None:
        """Declare a server dead: its sessions end as lost, for every controller."""
        member = self.members.get(server_id)
        self._lost_here.add(server_id)
        self._untold.add(server_id)
        with suppress(StateUnavailable):  # then it is told later
            await self._state.lose(server_id)
            self._untold.discard(server_id)
        if member is not None:
            logger.warning("server %s is lost with %d sessions: %s", server_id, len(member.sessions), why)
            self._drop(server_id, LOST)

    def has_left(self, server_id: str) -> bool:
        """Return whether a server has said good-bye, rather than died."""
        return server_id in self._left

    async def is_gone(self, server_id: str) -> bool:
        """Return whether a server was declared dead, here or by another controller."""
        gone = await self._is_lost(server_id)
        if gone:
            self._drop(server_id, LOST)
        return gone

    async def look(self) -> None:
        """Declare the servers dead that no controller has heard of for too long."""
        for server_id in list(self._untold):
            await self._state.lose(server_id)
            self._untold.discard(server_id)
        for member in list(self.members.values()):
            silent_s = self._clock() - max(member.seen, self._awake)
            if await self.is_gone(member.server_id):
                continue
            if silent_s < self._lost_after_s:
                await self._note(member)
            elif await self._seen_elsewhere(member, silent_s):
                member.cut()  # it lives, and cannot be heard over this line
            else:
                await self.lose(member.server_id, f"no sign of life for {self._lost_after_s:g} s")

    async def _note(self, member: Member) -> None:
        """Tell the other controllers that a server lives, where it was heard since they were last told."""
        if self._noted.get(member.server_id) != member.seen:
            heard = member.seen
            await self._state.saw(member.server_id)
            self._noted[member.server_id] = heard

    async def _seen_elsewhere(self, member: Member, silent_s: float) -> bool:
        """Return whether another controller hears a server; where nobody can say so, give it longer."""
        try:
            return await self._state.seen(member.server_id, self._lost_after_s)
        except StateUnavailable:
            return silent_s < BLIND_PATIENCE * self._lost_after_s

    async def _is_lost(self, server_id: str) -> bool:
        return server_id in self._lost_here or server_id in self._left or await self._state.is_lost(server_id)

    async def find(self, server_id: str) -> Member:
        """Return a server.

        Raises SessionLost, UnknownSession, StateUnavailable where another controller may do.
        """
        member = self.members.get(server_id)
        if member is not None:
            return member
        if await self._is_lost(server_id):
            raise SessionLost(LOST, server=server_id)
        # It may be that the server has not dialled yet, after this controller began or the line broke.
        for wait_s in (self._youth_s, self._lost_after_s):
            await self._wait_for(lambda: server_id in self.members, wait_s)
            member = self.members.get(server_id)
            if member is not None:
                return member
            if not await self._is_alive(server_id):
                raise SessionLost(LOST, server=server_id)
        words = "this controller has no line to the session's server; ask another, or again"
        raise StateUnavailable(words, retry_after=1)

    async def wait_in_youth(self, there: Callable[[], bool]) -> None:
        """Wait for something, as long as servers may still be on their way to a new controller."""
        await self._wait_for(there, self._youth_s)

    async def _is_alive(self, server_id: str) -> bool:
        """Return whether another controller hears a server; else it is given up, for every controller.

        Raises UnknownSession where there never was such a server.
        """
        if await self._state.seen(server_id, self._lost_after_s):
            return True
        if not await self._state.knows(server_id):
            raise UnknownSession("no such session; it never existed or ended long ago")
        await self.lose(server_id, "no controller hears it")
        return False

    @property
    def _youth_s(self) -> float:
        """For how long servers may still be on their way, after this controller began."""
        return self._begin + self._lost_after_s - self._clock()

    async def _wait_for(self, there: Callable[[], bool], seconds: float) -> None:
        """Wait for something to arrive."""
        if seconds <= 0 or there():
            return
        try:
            async with asyncio.timeout(seconds), self._arrival:
                await self._arrival.wait_for(there)
        except TimeoutError:
            return

    def _drop(self, server_id: str, reason: str) -> None:
        self._noted.pop(server_id, None)
        member = self.members.pop(server_id, None)
        if member is not None:
            member.lose(reason)
            self._changed()

    async def _watch(self) -> None:
        loop, pause = asyncio.get_running_loop(), min(BEAT_S, self._lost_after_s / 4)
        while True:
            begin = loop.time()
            await asyncio.sleep(pause)
            if loop.time() - begin > pause + BEAT_S:
                self._awake = self._clock()
            try:
                await self.look()
                if self.keeper is not None:
                    self.keeper.forget_ended()
            except StateUnavailable as error:
                logger.warning("%s", error)

    def _forget(self, server_id: str, session_ids: Iterable[str]) -> None:
        if self.keeper is not None:
            self.keeper.ended(server_id, session_ids)
