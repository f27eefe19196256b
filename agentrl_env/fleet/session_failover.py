"""Failover on the controller: keeps checkpoints of sessions and moves sessions off lost servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentrl_env.errors import (
    ServerDraining,
    ServerFull,
    SessionLost,
    StateUnavailable,
    UnknownSession,
    WireError,
)
from agentrl_env.fleet.registry import LOST, RecentNames, Registry, Routing, close_session, home
from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.fleet.scheduler import Placement, ignore_errors
from agentrl_env.fleet.store import CLAIM_S, FleetStore
from agentrl_env.server.failover import Checkpoint, last_turns, read_frame
from agentrl_env.session.session import MAX_TURNS

logger = logging.getLogger("agentrl_env")

RECORD_S = 3600.0
"""Seconds for which a checkpoint is kept after the last step."""
FORGET_S = 5.0
"""Seconds within which the last answer of an ended session arrives."""
RETRY_S = 0.25
APART_S = 5.0
"""Seconds that a suspect session waits for a server on which no other suspect session runs."""
CONFIRM_S = 5.0
"""Seconds that a caller waits for the checkpoint of its answer to be stored."""
MAX_DEATHS = 3
"""Maximum number of servers that may die during one step of a session, since the step might be the cause.
At the last attempt such sessions take turns, so that a session is not blamed for another's step. If the
watchdog has identified the step that got its server stuck, no further attempt is made."""


class Record(Struct, frozen=True):
    """The stored checkpoint of a session. Only the session's holder changes it."""

    holder: str
    """Id of the server that holds the session."""
    last: Checkpoint
    """The last checkpoint. It has no state if the session has ended."""
    deaths: int = 0
    """Number of servers that have died during the session's next step."""


class Records:
    """The records in the store that all controllers share."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store

    async def find(self, session_id: str) -> Record | None:
        """Return the record of a session. A malformed record is removed, and SessionLost is raised."""
        record, version = await self._read(session_id)
        if record is None and version:
            await self._store.write(session_id, None, version, 0)
            raise SessionLost("the stored state of the session is malformed; open a new one")
        return record

    async def keep(self, server_id: str, new: Checkpoint) -> bool:
        """Store a checkpoint unless a later one is stored. Return False if another server is the holder."""

        def change(old: Record | None) -> Record:
            turns = new.turns
            if old is not None:
                missing = new.seq - old.last.seq
                if missing < 0:
                    return old
                if missing <= len(turns):  # the earlier turns are already stored
                    turns = old.last.turns + turns[len(turns) - missing :]
            return Record(server_id, replace(new, turns=last_turns(turns[-MAX_TURNS:])))

        record = await self._change(new.session_id, server_id, change)
        return record is not None and record.holder == server_id

    async def move(self, session_id: str, holder: str, server_id: str, *, died: bool) -> Record | None:
        """Change the holder and return the record, or None if the holder was already changed."""

        def change(old: Record | None) -> Record | None:
            return old and replace(old, holder=server_id, deaths=old.deaths + died)

        record = await self._change(session_id, holder, change)
        return record if record is not None and record.holder == server_id else None

    async def blame(self, session_id: str, holder: str, deaths: int) -> bool:
        """Set the number of server deaths during a session's next step."""
        await self._change(session_id, holder, lambda old: old and replace(old, deaths=deaths))
        return True

    async def forget(self, session_id: str, holder: str) -> bool:
        """Remove the checkpoint of an ended session. If the session had moved, its holder is kept."""

        def change(old: Record | None) -> Record | None:
            if old is None or holder == home(session_id):
                return None
            return replace(old, last=replace(old.last, state=None, turns=()))

        await self._change(session_id, holder, change)
        return True

    async def _change(
        self, session_id: str, holder: str, change: Callable[[Record | None], Record | None]
    ) -> Record | None:
        """Compare and set a record unless another server is the holder. Return the stored record."""
        while True:
            old, version = await self._read(session_id)
            new = old if old is not None and old.holder != holder else change(old)
            if new is old:
                return old
            text = None if new is None else msgspec.json.encode(new)
            ttl_s = CLAIM_S if new is None or new.last.state is None else RECORD_S
            if await self._store.write(session_id, text, version, ttl_s):
                return new

    async def _read(self, session_id: str) -> tuple[Record | None, str]:
        text, version = await self._store.read(session_id)
        with suppress(msgspec.MsgspecError, RecursionError):
            record = msgspec.json.decode(text or b"null", type=Record)
            if record.last.session_id == session_id:
                return record, version
        return None, version


class Failover(Routing):
    """Routing with failover: each session of a lost server continues on exactly one other server.

    The store names one holder of each session. To move a session, a controller changes the holder and then
    calls the new server. Both steps can be repeated, so controllers need not agree on which of them moves the
    session, and any of them may die in between.

    Args:
        registry: the servers.
        placement: reserves places.
        store: keeps the records.
        wait_s: seconds that a session waits for a place before it is lost.
        clock: returns the monotonic time in seconds.
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
        self._suspects: set[str] = set()
        """Sessions that are lost at the next death of their server, until their step is done."""
        self._one_suspect = asyncio.Lock()
        self._interrupted = RecentNames()
        """Sessions whose server was lost during a call. Their next adoption counts the death."""
        self._sticky = RecentNames()
        """Tasks of sessions that got their server stuck."""
        self._unproven: dict[str, str] = {}
        """Servers of the other interrupted sessions of these tasks, by session, until the step is done."""
        self._explained = RecentNames()
        """Lost servers for which the session that got them stuck is known."""
        self._writes: dict[str, asyncio.Task[bool]] = {}
        """Last write of each session, until it is done. A failed write stays for ``confirm``."""
        self._ended: dict[tuple[str, str], asyncio.TimerHandle] = {}
        """Timers that forget ended sessions, by server and session."""
        self._closing: set[asyncio.Task[None]] = set()
        self._confirmed = RecentNames()
        """Moved sessions, each with the server that the store names as its holder."""

    def group(self, session_id: str) -> str:
        """Return a key that all sessions of one server share. Batches are split by it."""
        server = self._holder(session_id)
        return server.server_id if server is not None and session_id not in self._suspects else session_id

    async def find(self, session_id: str) -> RemoteServer:
        """Return the server that holds a session. If it is lost, another server first adopts the session.

        Raises SessionLost, UnknownSession, StateUnavailable.
        """
        server, record = await self._locate(session_id)
        if server is not None:
            return server
        if record is None:
            self._interrupted.discard(session_id)
            if not await self._registry.is_lost(home(session_id)):
                await self._registry.wait_at_startup(lambda: self._holder(session_id) is not None)
            try:
                return self._holder(session_id) or await super().find(session_id)
            except SessionLost:
                self._registry.count_lost(session_id)
                raise
        adoption = self._adoptions.get(session_id)
        if adoption is None:
            # It continues without its callers, so that repeated requests do not restart it.
            adoption = self._adoptions[session_id] = asyncio.create_task(self._adopt(session_id))
            adoption.add_done_callback(lambda task: self._end_adoption(session_id, task))
        return await asyncio.shield(adoption)

    async def close(self, session_id: str) -> None:
        """End a session. A session whose server is lost is not adopted first."""
        server, record = await self._locate(session_id)
        if server is None:
            if record is not None:
                await self.records.forget(session_id, record.holder)
            server = await super().find(session_id)
        await close_session(server, session_id)

    async def confirm(self, session_ids: Iterable[str]) -> None:
        """Wait until the checkpoints of sessions are stored, so that no delivered answer is ever undone.

        Raises SessionLost if a session has moved, or StateUnavailable if the store takes too long.
        """
        writes = {name: self._writes[name] for name in session_ids if name in self._writes}
        if not writes:
            return
        _, late = await asyncio.wait(writes.values(), timeout=CONFIRM_S)
        if late:
            raise StateUnavailable("the session's checkpoint is not stored yet; try again", retry_after=1)
        for session_id, write in writes.items():
            if not write.result():
                if self._writes.get(session_id) is write:
                    del self._writes[session_id]
                raise SessionLost("another server has continued the session")

    def hear(self, server_id: str, frame: bytes) -> None:
        """Store a checkpoint that a server has sent. Raises ValueError if the frame is malformed."""
        checkpoint = read_frame(frame)
        if server_id in self._registry.servers:
            if checkpoint.state is not None:
                self._write(checkpoint.session_id, lambda: self._keep(server_id, checkpoint))
            else:
                self._forget(server_id, checkpoint.session_id)

    def ended(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Forget ended sessions after a delay, so that another server can repeat a lost last answer."""
        later = asyncio.get_running_loop().call_later
        for session_id in session_ids:
            self._ended[server_id, session_id] = later(FORGET_S, self._forget, server_id, session_id)

    def interrupted(self, session_ids: Iterable[str]) -> None:
        """Remember the sessions whose calls might have killed their server."""
        self._interrupted.add(*session_ids)

    async def blame(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Record which session got a server stuck. If there are several candidates, they take turns."""
        blamed = list(session_ids)
        if not blamed:
            return
        self._explained.add(server_id)
        for session_id in blamed:
            with suppress(SessionLost, StateUnavailable):
                if (record := await self.records.find(session_id)) is not None:
                    self._sticky.add(record.last.task)
            sure = len(blamed) == 1 or session_id in self._suspects
            deaths = MAX_DEATHS if sure else MAX_DEATHS - 1
            self._write(session_id, partial(self.records.blame, session_id, server_id, deaths))
        await asyncio.wait([self._writes[session_id] for session_id in blamed], timeout=CONFIRM_S)

    def takes_turns(self, session_id: str) -> bool:
        """Return True if the steps of a session wait for the steps of other suspects."""
        return session_id in self._suspects

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncIterator[RemoteServer | None]:
        """Wait for the calls of other suspects, if the session is a suspect."""
        if not self.takes_turns(session_id):
            yield None
            return
        async with self._one_suspect:
            yield await self.find(session_id)

    async def aclose(self) -> None:
        """Cancel adoptions, which another controller can repeat, and finish the writes."""
        cancelled: list[asyncio.Task[Any]] = [*self._adoptions.values(), *self._closing]
        for task in cancelled:
            task.cancel()
        for server_id, session_id in list(self._ended):
            self._forget(server_id, session_id)
        if self._writes:
            _, late = await asyncio.wait(self._writes.values(), timeout=CONFIRM_S)
            for write in late:
                write.cancel()
            cancelled += late
        # Let cancelled calls return their connections before the store is closed.
        await asyncio.gather(*cancelled, return_exceptions=True)

    def _holder(self, session_id: str) -> RemoteServer | None:
        """Return the server of a session, as far as this controller knows without reading the store.

        A session's id proves which server opened it. Only the store proves which server continues it.
        """
        servers = self._registry.servers
        if (there := servers.get(home(session_id))) is not None:
            return there
        claiming = (server for server in servers.values() if session_id in server.sessions)
        return next((one for one in claiming if f"{session_id} {one.server_id}" in self._confirmed), None)

    async def _locate(self, session_id: str) -> tuple[RemoteServer | None, Record | None]:
        """Return the server of a session, or the session's record if the server is unknown or not linked."""
        server = self._holder(session_id)
        if server is not None or (record := await self.records.find(session_id)) is None:
            return server, None
        self._confirmed.add(f"{session_id} {record.holder}")
        return self._holder(session_id), record

    def _write(self, session_id: str, work: Callable[[], Awaitable[bool]]) -> None:
        """Write to the store after the session's previous write."""

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

    async def _keep(self, server_id: str, checkpoint: Checkpoint) -> bool:
        kept = await self.records.keep(server_id, checkpoint)
        if kept:
            self._clear(checkpoint.session_id)
        else:
            await self._disown(checkpoint.session_id, server_id)
        return kept

    def _forget(self, server_id: str, session_id: str) -> None:
        if timer := self._ended.pop((server_id, session_id), None):
            timer.cancel()
        self._clear(session_id)
        self._write(session_id, lambda: self.records.forget(session_id, server_id))

    def _clear(self, session_id: str) -> None:
        """Clear the suspicions about a session whose step is done or that is lost."""
        self._suspects.discard(session_id)
        self._unproven.pop(session_id, None)

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
        self._interrupted.discard(session_id)
        error = None if adoption.cancelled() else adoption.exception()
        if isinstance(error, SessionLost):
            self._registry.count_lost(session_id)
        if error is not None:  # omit its text, which might quote the environment
            why = getattr(error, "type", type(error).__name__)
            logger.warning("session %s could not be continued: %s", session_id, why)

    async def _adopt(self, session_id: str) -> RemoteServer:
        """Let a server adopt a session and return the server. Raises SessionLost, StateUnavailable."""
        end = self._clock() + self._wait_s
        while (record := await self.records.find(session_id)) is not None:
            session_ended, holder = record.last.state is None, None
            with suppress(SessionLost, UnknownSession):
                holder = await self._registry.find(record.holder)
            if holder is not None and (record.holder == home(session_id) or session_ended):
                return holder
            if session_ended:
                break
            if holder is not None and await self._ask(holder, record):
                return holder
            if record.deaths >= MAX_DEATHS:
                raise await self._lose(record, "its step got the session's server stuck; open a new one")
            died = (
                holder is None
                and session_id in self._interrupted
                and record.holder not in self._explained
                and not self._registry.has_left(record.holder)
            )
            last = record.deaths + 1 >= MAX_DEATHS
            if died and last and session_id in self._suspects:
                reason = f"{MAX_DEATHS} servers that held the session died one after another; open a new one"
                raise await self._lose(record, reason)
            server = await self._move(record, end, died=died and not last)
            if server is not None:
                if self._is_unproven(record):  # set it again, since the checkpoint of the adoption cleared it
                    self._unproven[session_id] = server.server_id
                if record.deaths + died + 1 >= MAX_DEATHS:
                    self._suspects.add(session_id)
                return server
        raise SessionLost(LOST, server=home(session_id))

    async def _move(self, record: Record, end: float, *, died: bool) -> RemoteServer | None:
        """Move a session to a server with room. Return None to try again."""
        session_id, group = record.last.session_id, (record.last.task, record.last.client)
        try:
            server = await self._take(record, end)
        except ServerDraining as error:  # this controller is shutting down
            raise StateUnavailable(error.message, retry_after=1) from error
        if server is None:
            raise await self._lose(
                record, "the session's server is gone, and no other has room; open a new one"
            )
        try:
            # From here on no other server writes, so this checkpoint covers every delivered answer.
            moved = await self.records.move(session_id, record.holder, server.server_id, died=died)
            if moved is None or moved.last.state is None or not await self._ask(server, moved):
                return None
        finally:
            self._placement.release(group, server)
        stored = await self.records.find(session_id)
        if stored is None or stored.holder != server.server_id or stored.last.state is None:
            await self._disown(session_id, server.server_id)  # it was closed while it moved
            return None
        self._confirmed.add(f"{session_id} {server.server_id}")
        logger.info("session %s continues on server %s", session_id, server.server_id)
        return server

    async def _take(self, record: Record, end: float) -> RemoteServer | None:
        """Reserve a place. If possible, steps that might get their server stuck go to different servers."""
        session_id, group = record.last.session_id, (record.last.task, record.last.client)
        unproven = self._is_unproven(record)
        patience = self._clock() + APART_S
        while (server := await self._placement.take(*group, end - self._clock())) is not None and unproven:
            others = {where for name, where in self._unproven.items() if name != session_id}
            if server.server_id not in others or self._clock() > min(patience, end):
                self._unproven[session_id] = server.server_id
                break
            self._placement.release(group, server)
            await asyncio.sleep(RETRY_S)
        return server

    def _is_unproven(self, record: Record) -> bool:
        """Return True if a session was interrupted in a step and its task has got servers stuck before."""
        return record.last.session_id in self._interrupted and record.last.task in self._sticky

    async def _ask(self, server: RemoteServer, record: Record) -> bool:
        """Let a server adopt a session. Idempotent. Raises SessionLost if no server can restore it."""
        try:
            await server.call("adopt", msgspec.json.encode(record.last))
            return True
        except (ServerFull, ServerDraining):
            server.full = True  # until its next heartbeat
            return False
        except SessionLost:
            return False
        except StateUnavailable:
            raise
        except WireError as error:
            reason = f"the session's server is gone, and another cannot continue it: {error}"
            raise await self._lose(record, reason) from error

    async def _lose(self, record: Record, reason: str) -> SessionLost:
        self._clear(record.last.session_id)
        await self.records.forget(record.last.session_id, record.holder)
        return SessionLost(reason)
