"""Failover on the controller: keeps checkpoints of sessions, and lets servers adopt sessions of lost ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from agentrl_env.errors import (
    ServerDraining,
    ServerFull,
    SessionLost,
    StateUnavailable,
    UnknownSession,
    WireError,
)
from agentrl_env.fleet.registry import LOST, Registry, Routing, close_session, home
from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.fleet.scheduler import Placement, ignore_errors
from agentrl_env.fleet.store import CLAIM_S, FleetStore
from agentrl_env.server.failover import SealedCheckpoint, last_turns, read_frame
from agentrl_env.session.history import MAX_TURNS

logger = logging.getLogger("agentrl_env")

RECORD_S = 3600.0
"""Seconds for which a checkpoint is kept after the last step."""
FORGET_S = 5.0
"""Seconds for which the last answer of an ended session may be under way."""
RETRY_S = 0.25
CONFIRM_S = 5.0
"""Seconds that a caller waits until the checkpoint of its answer is stored."""
MAX_DEATHS = 3
"""Number of servers that may die with a session between two steps: the next step may be what kills them."""
MOVED = "another server has continued the session"


class Record(Struct, frozen=True):
    """Last checkpoint of a session, in the store."""

    holder: str
    """Id of the server that holds the session."""
    last: SealedCheckpoint
    """Without its checkpoint where the session has ended."""
    deaths: int = 0
    """Number of its servers that have died since its last step."""


class Records:
    """The records of a store. Only the holder of a session changes them.

    Args:
        store: shared with the other controllers.
    """

    def __init__(self, store: FleetStore) -> None:
        self._store = store

    async def find(self, session_id: str) -> Record | None:
        """Return the record of a session; one that is malformed is removed. Raises SessionLost."""
        record, version = await self._read(session_id)
        if record is None and version:
            await self._store.write(session_id, None, version, 0)
            raise SessionLost("the stored state of the session is malformed; open a new one")
        return record

    async def keep(self, server_id: str, new: SealedCheckpoint) -> bool:
        """Store a checkpoint, unless a later one is stored; return False where the holder is another."""
        while True:
            record, version = await self._read(new.session_id)
            if record is not None and record.holder != server_id:
                return False
            if record is not None and record.last.seq > new.seq:
                return True
            joined = replace(new, turns=_joined(record.last if record else None, new))
            if await self._write(Record(server_id, joined), version):
                return True

    async def move(self, session_id: str, holder: str, server_id: str, *, died: bool) -> bool:
        """Make another server the holder; return False where the record has changed meanwhile."""
        record, version = await self._read(session_id)
        if record is None or record.holder != holder:
            return False
        return await self._write(replace(record, holder=server_id, deaths=record.deaths + died), version)

    async def forget(self, session_id: str, holder: str) -> None:
        """Remove the checkpoint of a session that has ended; the holder of one that moved stays known."""
        while True:
            record, version = await self._read(session_id)
            if record is None or record.holder != holder:
                return
            if holder == home(session_id):
                written = await self._store.write(session_id, None, version, 0)
            else:
                last = replace(record.last, checkpoint=Raw(b"null"), seal="", turns=())
                written = await self._write(replace(record, last=last), version, CLAIM_S)
            if written:
                return

    async def _read(self, session_id: str) -> tuple[Record | None, str]:
        text, version = await self._store.read(session_id)
        try:
            record = None if text is None else msgspec.json.decode(text, type=Record)
        except (msgspec.MsgspecError, RecursionError):
            return None, version
        return (record if record and record.last.session_id == session_id else None), version

    async def _write(self, record: Record, version: str, ttl_s: float = RECORD_S) -> bool:
        return await self._store.write(record.last.session_id, msgspec.json.encode(record), version, ttl_s)


class Failover(Routing):
    """Routing with failover: sessions of a lost server continue on others, each on one at a time.

    The store names one holder of each session. A controller that moves a session changes the holder first
    and asks the new server then, which may be repeated; so controllers need not agree on which of them moves
    it, and any of them may die meanwhile.

    Args:
        registry: the servers.
        placement: reserves places.
        store: keeps the records.
        wait_s: seconds that a session waits for a place until it is lost.
        clock: seconds, monotonic.
    """

    survives = True

    def __init__(
        self,
        registry: Registry,
        placement: Placement,
        store: FleetStore,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(registry)
        self.records = Records(store)
        self._placement = placement
        self._wait_s = wait_s
        self._clock = clock
        self._adoptions: dict[str, asyncio.Task[RemoteServer]] = {}
        self._writes: dict[str, asyncio.Task[bool]] = {}
        """Last write of each session, until it is done; one that failed stays for ``confirm``."""
        self._ended: deque[tuple[float, str, str]] = deque()
        self._closing: set[asyncio.Task[None]] = set()

    def group(self, session_id: str) -> str:
        """Return a key that the sessions of one server share, to split batches."""
        server = self._holder(session_id)
        return server.server_id if server is not None else session_id

    async def find(self, session_id: str) -> RemoteServer:
        """Return the server that holds a session; where that is lost, another one adopts it first.

        Raises SessionLost, UnknownSession, StateUnavailable.
        """
        server = self._holder(session_id)
        if server is not None:
            return server
        if await self.records.find(session_id) is None:
            if not await self._registry.is_lost(home(session_id)):
                await self._registry.wait_at_startup(lambda: self._holder(session_id) is not None)
            return self._holder(session_id) or await super().find(session_id)
        adoption = self._adoptions.get(session_id)
        if adoption is None:
            # It goes on without its callers, so that repeated requests do not start it anew.
            adoption = self._adoptions[session_id] = asyncio.create_task(self._adopt(session_id))
            adoption.add_done_callback(lambda task: self._end_adoption(session_id, task))
        return await asyncio.shield(adoption)

    async def close(self, session_id: str) -> None:
        """End a session; one whose server is lost is not adopted for that."""
        server = self._holder(session_id)
        if server is None:
            record = await self.records.find(session_id)
            if record is None:
                server = await super().find(session_id)
            else:
                await self.records.forget(session_id, record.holder)
                server = self._registry.servers.get(record.holder)
        if server is not None:
            await close_session(server, session_id)

    async def confirm(self, session_ids: Iterable[str]) -> None:
        """Wait until the checkpoints of sessions are stored: an answer that a client has is never undone.

        Raises SessionLost where a session has moved, StateUnavailable where the store takes too long.
        """
        writes = {name: self._writes[name] for name in session_ids if name in self._writes}
        if not writes:
            return
        _, late = await asyncio.wait(writes.values(), timeout=CONFIRM_S)
        if late:
            raise StateUnavailable("the session's checkpoint is not stored yet; ask again", retry_after=1)
        for session_id, task in writes.items():
            if not task.result():
                if self._writes.get(session_id) is task:
                    del self._writes[session_id]
                raise SessionLost(MOVED)

    def hear(self, server_id: str, frame: bytes) -> None:
        """Store a checkpoint that a server has sent. Raises ValueError where the frame is malformed."""
        sealed = read_frame(frame)
        if server_id not in self._registry.servers:
            return
        if not sealed.usable:
            self._forget(server_id, sealed.session_id)
        else:
            self._write(sealed.session_id, lambda: self._keep(server_id, sealed))

    def ended(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Forget sessions that have ended, later: should the last answer be lost, another server gives it."""
        due = asyncio.get_running_loop().time() + FORGET_S
        self._ended.extend((due, session_id, server_id) for session_id in session_ids)

    def sweep(self) -> None:
        """Forget the sessions that are due."""
        now = asyncio.get_running_loop().time()
        while self._ended and self._ended[0][0] <= now:
            _, session_id, server_id = self._ended.popleft()
            self._forget(server_id, session_id)

    async def aclose(self) -> None:
        """Cancel adoptions, which another controller may repeat, and finish writing."""
        for task in (*self._adoptions.values(), *self._closing):
            task.cancel()
        for _, session_id, server_id in self._ended:
            self._forget(server_id, session_id)
        if self._writes:
            _, late = await asyncio.wait(self._writes.values(), timeout=CONFIRM_S)
            for write in late:
                write.cancel()

    def _holder(self, session_id: str) -> RemoteServer | None:
        """Return the server of a session, as far as this controller has heard."""
        servers = self._registry.servers
        there = servers.get(home(session_id))
        return there or next((server for server in servers.values() if session_id in server.sessions), None)

    def _write(self, session_id: str, work: Callable[[], Awaitable[bool]]) -> None:
        """Write to the store, after the session's write before."""

        async def run(before: asyncio.Task[bool] | None) -> bool:
            if before is not None:
                await asyncio.wait((before,))
            while True:
                try:
                    return await work()
                except StateUnavailable:
                    await asyncio.sleep(RETRY_S)

        def end(write: asyncio.Task[bool]) -> None:
            if self._writes.get(session_id) is write and (write.cancelled() or write.result()):
                del self._writes[session_id]

        write = self._writes[session_id] = asyncio.create_task(run(self._writes.get(session_id)))
        write.add_done_callback(end)

    async def _keep(self, server_id: str, sealed: SealedCheckpoint) -> bool:
        kept = await self.records.keep(server_id, sealed)
        if not kept:
            await self._disown(sealed.session_id, server_id)
        return kept

    def _forget(self, server_id: str, session_id: str) -> None:
        async def forget() -> bool:
            await self.records.forget(session_id, server_id)
            return True

        self._write(session_id, forget)

    async def _disown(self, session_id: str, server_id: str) -> None:
        """End a session on a server that is not its holder."""
        server = self._registry.servers.get(server_id)
        if server is None or await self._registry.is_lost(server_id):
            return
        server.forget(session_id)
        closing = asyncio.create_task(ignore_errors(close_session(server, session_id)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _end_adoption(self, session_id: str, adoption: asyncio.Task[RemoteServer]) -> None:
        del self._adoptions[session_id]
        if not adoption.cancelled() and adoption.exception() is not None:
            logger.warning("session %s could not be continued: %s", session_id, adoption.exception())

    async def _adopt(self, session_id: str) -> RemoteServer:
        end = self._clock() + self._wait_s
        while (record := await self.records.find(session_id)) is not None:
            holder = await self._alive(record.holder)
            if holder is not None and (record.holder == home(session_id) or not record.last.usable):
                return holder
            if holder is not None and await self._ask(holder, record):
                return holder
            if not record.last.usable:
                break
            died = holder is None and not self._registry.has_left(record.holder)
            if died and record.deaths + 1 >= MAX_DEATHS:
                await self.records.forget(session_id, record.holder)
                reason = f"{MAX_DEATHS} servers that held the session died one after another; open a new one"
                raise SessionLost(reason)
            server = await self._move(record, end, died=died)
            if server is not None:
                return server
        raise SessionLost(LOST, server=home(session_id))

    async def _alive(self, server_id: str) -> RemoteServer | None:
        with suppress(SessionLost, UnknownSession):
            return await self._registry.find(server_id)
        return None

    async def _move(self, record: Record, end: float, *, died: bool) -> RemoteServer | None:
        """Move a session to a server with room; return None to try again."""
        session_id, group = record.last.session_id, (record.last.task, record.last.client)
        try:
            server = await self._placement.take(*group, end - self._clock())
        except ServerDraining as error:  # this controller is shutting down
            raise StateUnavailable(error.message, retry_after=1) from error
        if server is None:
            raise await self._no_room(session_id, record.holder)
        try:
            if not await self.records.move(session_id, record.holder, server.server_id, died=died):
                return None
            # No other server writes from here on, so that this is the last checkpoint of any answer.
            last = await self.records.find(session_id)
            adopted = last is not None and last.last.usable and await self._ask(server, last)
        finally:
            self._placement.release(group, server)
        if not adopted:
            if self._clock() >= end and (server.full or server.draining):
                raise await self._no_room(session_id, server.server_id)
            return None
        last = await self.records.find(session_id)
        if last is None or last.holder != server.server_id or not last.last.usable:
            await self._disown(session_id, server.server_id)  # it was closed meanwhile
            return None
        logger.info("session %s continues on server %s", session_id, server.server_id)
        return server

    async def _no_room(self, session_id: str, holder: str) -> SessionLost:
        await self.records.forget(session_id, holder)
        return SessionLost("the session's server is gone, and no other has room; open a new one")

    async def _ask(self, server: RemoteServer, record: Record) -> bool:
        """Let a server adopt a session; idempotent. Raises SessionLost where no server can restore it."""
        try:
            await server.call("adopt", msgspec.json.encode(record.last))
            return True
        except ServerFull:
            server.full = True
        except ServerDraining:
            server.draining = True
        except SessionLost:
            return False
        except StateUnavailable:
            raise
        except WireError as error:
            await self.records.forget(record.last.session_id, record.holder)
            reason = f"the session's server is gone, and another cannot go on: {error}"
            raise SessionLost(reason) from error
        return False


def _joined(known: SealedCheckpoint | None, new: SealedCheckpoint) -> tuple[tuple[str, str, str], ...]:
    """Return the last turns: those that are stored, and the new ones, which may overlap."""
    missing = new.seq - (known.seq if known else -1)
    turns = new.turns
    if known is not None and missing <= len(turns):
        turns = known.turns + turns[len(turns) - missing :]
    return last_turns(turns[-MAX_TURNS:])
