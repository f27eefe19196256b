"""The servers of a fleet: they join, send heartbeats, leave, and are declared lost."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from agentrl_env.errors import SessionLost, StateUnavailable, UnknownSession, WireError
from agentrl_env.fast_wire import UNREADABLE
from agentrl_env.fleet.remote_server import Outbox, RemoteServer
from agentrl_env.fleet.store import FleetStore
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.types import Counts, Durations, LostServer, SessionStatus, TaskCounts, TaskInfo
from agentrl_env.wire import Beat, Hello, SessionRequest, Welcome

T = TypeVar("T")
logger = logging.getLogger("agentrl_env")

BEAT_S = 1.0
"""Seconds between heartbeats."""
BLIND_FACTOR = 3
"""Factor on ``lost_after_s`` while the store, which knows the heartbeats to other controllers, is down."""
PROBE_S = 2.0
"""Probe a server that sends heartbeats but has not answered a call for this many seconds."""
MAX_REMEMBERED = 10_000
"""Maximum size of each set of names, which would otherwise grow as long as the controller runs."""
LOST_SHOWN, LOST_SHOWN_S = 100, 600.0
"""Maximum number of lost servers in the list, and seconds for which a server stays in it."""
MAX_SOURCES = 4096
"""Number of serving processes whose last report is kept, to compute the increase of the next one."""
_NO_TASK, _NO_DURATIONS = TaskCounts(), Durations()
_STATUSES = frozenset(status.value for status in SessionStatus)
LOST_STATUS = SessionLost.type
"""Status under which sessions of lost servers are counted."""
LOST = "the server that held the session is gone; open a new one"


def home(session_id: str) -> str:
    """Return the id of the server that opened a session."""
    return session_id.partition(".")[0]


class FleetCounts:
    """Adds the servers' counts to the metrics of a controller.

    A report contains totals since the start of a process, so a lost or repeated report does no harm. Only the
    increase since the previous report is added, so no sum decreases when a server is replaced.

    Args:
        metrics: metrics of the controller.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: OrderedDict[str, Counts] = OrderedDict()

    def add(self, server: RemoteServer, counts: Counts) -> None:
        """Add a report. Counts of tasks and tools that the server does not have are ignored."""
        before = self._last.pop(counts.source, None) or Counts(source=counts.source)
        self._last[counts.source] = counts
        if len(self._last) > MAX_SOURCES:
            self._last.popitem(last=False)
        server.steps = sum(task.steps for task in counts.tasks.values())
        self._metrics.step_seconds.add(counts.step_seconds, before.step_seconds)
        for name, task in server.tasks.items():
            now = counts.tasks.get(name)
            if now is not None:
                known = {status: count for status, count in now.ended.items() if status in _STATUSES}
                now = now.model_copy(update={"ended": known})
                self._metrics.add_task(name, now, before.tasks.get(name, _NO_TASK))
            earlier = before.tools.get(name, {})
            for tool, durations in counts.tools.get(name, {}).items():
                if tool in _tools(task):
                    self._metrics.add_tool(name, tool, durations, earlier.get(tool, _NO_DURATIONS))


class RecentNames:
    """A set of at most ``MAX_REMEMBERED`` names, which drops the oldest names first."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, *names: str) -> None:
        """Add names and mark them as the newest."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
            if len(self._names) > MAX_REMEMBERED:
                self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        """Remove a name, if it is there."""
        self._names.pop(name, None)


class Registry:
    """The servers that are linked to this controller.

    A server without heartbeats at any controller is declared lost by all controllers, permanently. If it
    reconnects, it ends its sessions and takes a new id.

    Args:
        store: shared with the other controllers.
        lost_after_s: seconds without a heartbeat after which a server's sessions are lost.
        stuck_after_s: the same limit for a server whose link is open, if it is longer. Such a server is
            busy, and its watchdog kills it if it gets stuck.
        on_room: called when a server might have room.
        metrics: metrics of the controller, to which the servers' counts are added.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self,
        store: FleetStore,
        *,
        lost_after_s: float,
        stuck_after_s: float = 0.0,
        on_room: Callable[[], None],
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers: dict[str, RemoteServer] = {}
        self.tasks: dict[str, TaskInfo] = {}
        """Every task that a server has ever offered."""
        self.routing = Routing(self)
        """Finds the server of a session."""
        self._store = store
        self._lost_after_s = lost_after_s
        self._stuck_after_s = max(lost_after_s, stuck_after_s)
        self._on_room = on_room
        self._clock = clock
        self._metrics = metrics or Metrics()
        self._counts = FleetCounts(self._metrics)
        self._orphans: OrderedDict[str, str] = OrderedDict()
        """Task of each session of a lost server that other servers can continue, by session id."""
        self._recently_lost: OrderedDict[str, tuple[LostServer, float]] = OrderedDict()
        """Lost servers with the time of the loss, oldest first."""
        self._started = -math.inf
        """Time from which on servers could connect."""
        self._awake = -math.inf
        """Time of the end of this process's last suspension, during which it received no heartbeats."""
        self._joined = asyncio.Condition()
        self._lost = RecentNames()
        """Servers that this controller has declared lost, kept even if the store forgets them."""
        self._left = RecentNames()
        """Servers that have announced their shutdown and left."""
        self._unreported: set[str] = set()
        """Lost servers that are not yet recorded in the store."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        """Probes of servers that have not answered for a while."""
        self._reported: dict[str, float] = {}
        """Time of the last heartbeat of each server that is recorded in the store."""
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to watch the servers."""
        self._started = self._clock()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        tasks = [*self._probes.values(), *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, hello: Hello, outbox: Outbox) -> bool:
        """Accept the link of a server, or return False if its sessions were declared lost."""
        with suppress(StateUnavailable):  # open sessions continue without the store
            if await self.is_lost(hello.server_id):
                return False
            await self._store.report_alive(hello.server_id)
        welcome = Welcome(beat_s=BEAT_S, keep=self.routing.survives)
        outbox.put_notice(b'{"welcome":%b}' % welcome.model_dump_json().encode())
        server = self.servers.get(hello.server_id)
        if server is None:
            server = self.servers[hello.server_id] = RemoteServer(hello, self._clock)
            logger.info("server %s joined: %s", hello.server_id, ", ".join(server.tasks))
        else:
            before = set(server.sessions)
            server.greet(hello)
            self.routing.ended(hello.server_id, before - set(server.sessions))
        self.tasks.update(server.tasks)
        server.link(outbox)
        self._on_room()
        async with self._joined:
            self._joined.notify_all()
        return True

    def is_taken(self, hello: Hello) -> bool:
        """Return True if another process with an open link has the server's id."""
        server = self.servers.get(hello.server_id)
        return server is not None and server.linked and server.place != hello.place

    def unlink(self, server_id: str, outbox: Outbox) -> None:
        """Handle the end of a link. Remove the server if it has announced its shutdown."""
        server = self.servers.get(server_id)
        if server is not None:
            server.unlink(outbox)
            if server.leaving and not server.linked:
                self._left.add(server_id)
                self._remove(server_id, "the server that held the session was stopped; open a new one")

    def hear_beat(self, server_id: str, beat: Beat) -> None:
        """Apply a heartbeat."""
        server = self.servers.get(server_id)
        if server is not None:
            server.hear_beat(beat)
            if beat.counts is not None:
                self._counts.add(server, beat.counts)
            self.routing.ended(server_id, beat.ended)
            self._on_room()

    def hear_answer(self, server_id: str, frame: bytes) -> None:
        """Pass an answer to its caller. Raises ValueError if the frame is not an answer."""
        server = self.servers.get(server_id)
        if server is not None:
            server.hear_answer(frame)

    async def lose(self, server_id: str, reason: str) -> None:
        """Declare a server and its sessions lost, for every controller."""
        server = self.servers.get(server_id)
        self._lost.add(server_id)
        self._unreported.add(server_id)
        with suppress(StateUnavailable):  # the periodic check records it later
            await self._report_lost(server_id)
        if server is not None:
            fate = "and other servers continue its" if self.routing.survives else "and so are its"
            words = "server %s is lost %s %d sessions: %s"
            logger.warning(words, server_id, fate, len(server.sessions), reason)
            self._show_lost(server, reason)
            self._remove(server_id, LOST)

    def has_left(self, server_id: str) -> bool:
        """Return True if a server has announced its shutdown and left."""
        return server_id in self._left

    async def is_lost(self, server_id: str) -> bool:
        """Return True, and remove the server, if it has shut down or any controller declared it lost."""
        lost = server_id in self._lost or server_id in self._left or await self._store.is_lost(server_id)
        if lost:
            server = self.servers.get(server_id)
            if server is not None and server_id not in self._left:
                self._show_lost(server, "another controller declared it lost")
            self._remove(server_id, LOST)
        return lost

    def recently_lost(self) -> tuple[LostServer, ...]:
        """Return the servers that were lost in the last ``LOST_SHOWN_S`` seconds, newest first."""
        now = self._clock()
        ages = [(server, now - at) for server, at in reversed(self._recently_lost.values())]
        return tuple(server.model_copy(update={"lost_s": age}) for server, age in ages if age < LOST_SHOWN_S)

    async def find(self, server_id: str) -> RemoteServer:
        """Return a server.

        Raises SessionLost, UnknownSession, or StateUnavailable if only another controller has a link.
        """
        server = self.servers.get(server_id)
        if server is not None:
            return server
        if await self.is_lost(server_id):
            raise SessionLost(LOST, server=server_id)
        # The server might connect soon: the controller has just started, or the link broke.
        for wait_s in (self._startup_s, self._lost_after_s):
            await self._wait_for(lambda: server_id in self.servers, wait_s)
            server = self.servers.get(server_id)
            if server is not None:
                return server
            if not await self._is_alive(server_id):
                raise SessionLost(LOST, server=server_id)
        reason = "this controller has no link to the session's server; call another one, or try again"
        raise StateUnavailable(reason, retry_after=1)

    async def wait_at_startup(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while servers still connect to a controller that has just started."""
        await self._wait_for(condition, self._startup_s)

    async def check(self) -> None:
        """Declare servers without heartbeats at any controller lost. Raises StateUnavailable."""
        for server_id in list(self._unreported):
            await self._report_lost(server_id)
        for server in list(self.servers.values()):
            silent_s = self._clock() - max(server.seen, self._awake)
            if await self.is_lost(server.server_id):
                continue
            limit_s = self._stuck_after_s if server.linked else self._lost_after_s
            mute_s = server.mute_s()
            if mute_s > 2 * self._lost_after_s:
                await self.lose(server.server_id, f"heartbeats, but no answer for {mute_s:.0f} s")
                continue
            if mute_s > min(PROBE_S, self._lost_after_s / 2):
                self._probe(server)
            if silent_s < limit_s:
                await self._report_alive(server)
            elif await self._heard_elsewhere(server, silent_s):
                server.cut()  # the server is alive, but not on this link
            else:
                await self.lose(server.server_id, f"no heartbeat for {limit_s:g} s")

    async def checked(self, server: RemoteServer, answer: bytes, read: Callable[[bytes], T]) -> T:
        """Return ``read(answer)``. If it fails, declare the server lost.

        Raises SessionLost if the answer is malformed.
        """
        try:
            return read(answer)
        except UNREADABLE:
            await self.lose(server.server_id, "it sent a malformed answer")
            raise SessionLost(LOST, server=server.server_id) from None

    def _probe(self, server: RemoteServer) -> None:
        """Make a call that every server answers immediately, because calls of sessions can take long."""
        server.suspect = True

        async def ask() -> None:
            with suppress(WireError):
                await server.call("fleet", b'{"probe":true}')
                self._on_room()

        if server.server_id not in self._probes:
            probe = self._probes[server.server_id] = asyncio.create_task(ask())
            probe.add_done_callback(lambda _: self._probes.pop(server.server_id, None))

    async def _report_lost(self, server_id: str) -> None:
        await self._store.report_lost(server_id)
        self._unreported.discard(server_id)

    async def _report_alive(self, server: RemoteServer) -> None:
        """Report a heartbeat that is newer than the last report."""
        if self._reported.get(server.server_id) != server.seen:
            seen = server.seen
            await self._store.report_alive(server.server_id)
            self._reported[server.server_id] = seen

    async def _heard_elsewhere(self, server: RemoteServer, silent_s: float) -> bool:
        """Return True if another controller receives heartbeats. Without the store, wait longer."""
        try:
            return await self._store.is_alive(server.server_id, self._lost_after_s)
        except StateUnavailable:
            return silent_s < BLIND_FACTOR * self._lost_after_s

    async def _is_alive(self, server_id: str) -> bool:
        """Return True if another controller receives heartbeats, else declare the server lost.

        Raises UnknownSession.
        """
        if await self._store.is_alive(server_id, self._lost_after_s):
            return True
        if not await self._store.knows(server_id):
            raise UnknownSession("no such session; it never existed or ended long ago")
        await self.lose(server_id, "no controller receives its heartbeats")
        return False

    @property
    def _startup_s(self) -> float:
        """The seconds left in which servers are expected to connect after the start."""
        return self._started + self._lost_after_s - self._clock()

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        if seconds <= 0 or condition():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._joined:
                await self._joined.wait_for(condition)

    def count_lost(self, session_id: str) -> None:
        """Count a session of a lost server that no other server continues. Idempotent."""
        if task := self._orphans.pop(session_id, None):
            self._metrics.ended[task, LOST_STATUS] += 1

    def _count_orphans(self, server: RemoteServer) -> None:
        """Count the sessions of a lost server, or remember them if others can continue them."""
        for row in server.sessions.values():
            if row.task in server.tasks:
                self._orphans[row.session_id] = row.task
                if not self.routing.survives or "fork" not in server.tasks[row.task].capabilities:
                    self.count_lost(row.session_id)
        while len(self._orphans) > MAX_REMEMBERED:
            self._orphans.popitem(last=False)

    def _show_lost(self, server: RemoteServer, reason: str) -> None:
        self._count_orphans(server)
        lost = LostServer(
            server_id=server.server_id,
            place=server.place,
            tasks=tuple(server.tasks),
            open=len(server.sessions),
            reason=reason,
        )
        self._recently_lost[server.server_id] = lost, self._clock()
        if len(self._recently_lost) > LOST_SHOWN:
            self._recently_lost.popitem(last=False)

    def _remove(self, server_id: str, reason: str) -> None:
        self._reported.pop(server_id, None)
        server = self.servers.pop(server_id, None)
        if server is not None:
            server.lose(reason)
            self._on_room()

    async def _watch(self) -> None:
        loop, pause = asyncio.get_running_loop(), min(BEAT_S, self._lost_after_s / 4)
        while True:
            begin = loop.time()
            await asyncio.sleep(pause)
            if loop.time() - begin > pause + BEAT_S:
                self._awake = self._clock()
            try:
                await self.check()
            except StateUnavailable as error:
                logger.warning("%s", error)


class Routing:
    """Finds the server of each session by the server id in the session's id.

    Args:
        registry: the servers.
    """

    survives = False
    """True if sessions survive the loss of their server."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def group(self, session_id: str) -> str:
        """Return a key that all sessions of one server share. Batches are split by it."""
        return home(session_id)

    async def find(self, session_id: str) -> RemoteServer:
        """Return the server that holds a session. Raises SessionLost, UnknownSession, StateUnavailable."""
        return await self._registry.find(home(session_id))

    async def close(self, session_id: str) -> None:
        """End a session. Raises SessionLost, UnknownSession, StateUnavailable."""
        await close_session(await self.find(session_id), session_id)

    async def confirm(self, session_ids: Iterable[str]) -> None:
        """Wait until answers of sessions can be passed on. Raises SessionLost, StateUnavailable."""

    def hear(self, server_id: str, frame: bytes) -> None:
        """Handle any other kind of frame. Raises ValueError if it is malformed."""
        raise ValueError("unknown kind of frame")

    def ended(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Handle the end of sessions."""

    def interrupted(self, session_ids: Iterable[str]) -> None:
        """Handle the loss of a server during calls of sessions."""

    async def blame(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Handle the death of a server that got stuck in a call of one of these sessions."""

    def takes_turns(self, session_id: str) -> bool:
        """Return True if the steps of a session wait for steps of other sessions."""
        return False

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncIterator[RemoteServer | None]:
        """Wait until a session can make a call. Yield its server if the server has changed while waiting."""
        yield None

    async def aclose(self) -> None:
        """Finish or cancel the work in progress."""


async def close_session(server: RemoteServer, session_id: str) -> None:
    """End a session on the server that holds it."""
    await server.call("close", SessionRequest(session_id=session_id).model_dump_json().encode())


def _tools(task: TaskInfo) -> set[str]:
    return {"respond", *(spec.function.name for spec in task.tools)}
