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
"""Interval of heartbeats."""
BLIND_FACTOR = 3
"""Factor on ``lost_after_s`` while the store cannot tell whether another controller hears a server."""
PROBE_S = 2.0
"""Seconds without an answer, while there are heartbeats, after which a server is asked whether it answers."""
MAX_REMEMBERED = 10_000
"""Names in each set that would grow as long as the controller runs."""
LOST_SHOWN, LOST_SHOWN_S = 100, 600.0
"""Lost servers that are listed, and seconds for which they are."""
MAX_SOURCES = 4096
"""Number of serving processes whose last report is kept, to know what the next one adds."""
_NO_TASK, _NO_DURATIONS = TaskCounts(), Durations()
_STATUSES = frozenset(status.value for status in SessionStatus)
LOST_STATUS = SessionLost.type
"""Status under which sessions of lost servers are counted; none of them has ended by itself."""
LOST = "the server that held the session is gone; open a new one"


def home(session_id: str) -> str:
    """Return the id of the server that opened a session."""
    return session_id.partition(".")[0]


class FleetCounts:
    """Adds what servers count to the metrics of a controller.

    Reports are sums since the start of a process, so that a lost or repeated one does no harm, and only
    what a report adds to the one before it is counted, so that no sum falls where a server is replaced.

    Args:
        metrics: of the controller.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: OrderedDict[str, Counts] = OrderedDict()

    def add(self, server: RemoteServer, counts: Counts) -> None:
        """Add a report; what it says of other tasks and tools than the server's is left out."""
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
    """A set of the names that were added last; beyond ``MAX_REMEMBERED`` it drops the oldest ones."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, *names: str) -> None:
        """Add names, as the newest ones."""
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

    A server that no controller hears is declared lost, by all controllers and for good: where it comes
    back it ends its sessions and takes a new id.

    Args:
        store: shared with the other controllers.
        lost_after_s: seconds without a heartbeat after which a server's sessions are lost.
        stuck_after_s: the same over a link that is open, where that is longer: such a server is busy, and
            its watchdog kills it where it stays so.
        on_room: callback when a server may have room.
        metrics: of the controller; what the servers count is added to them.
        clock: seconds, monotonic.
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
        """Tasks of the sessions of lost servers that others can continue."""
        self._recently_lost: OrderedDict[str, tuple[LostServer, float]] = OrderedDict()
        """Lost servers, and when, oldest first."""
        self._started = -math.inf
        """Time since when servers can connect."""
        self._awake = -math.inf
        """Time since when this process has not been suspended, so that it could hear servers."""
        self._joined = asyncio.Condition()
        self._lost = RecentNames()
        """Servers that this controller has declared lost, whether or not the store still knows."""
        self._left = RecentNames()
        """Servers that have shut down in order."""
        self._unreported: set[str] = set()
        """Lost servers that the store could not be told of."""
        self._probes: dict[str, asyncio.Task[None]] = {}
        """Calls to servers that have not answered for a while."""
        self._reported: dict[str, float] = {}
        """Last heartbeat of each server that the store was told of."""
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the servers."""
        self._started = self._clock()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        tasks = [*self._probes.values(), *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, hello: Hello, outbox: Outbox) -> bool:
        """Accept the link of a server; return False where its sessions were declared lost before."""
        with suppress(StateUnavailable):  # open sessions go on without the store
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
        """Return whether a server's id belongs to another process that has a link."""
        server = self.servers.get(hello.server_id)
        return server is not None and server.linked and server.place != hello.place

    def unlink(self, server_id: str, outbox: Outbox) -> None:
        """Handle the end of a link; a server that has announced its shutdown is removed."""
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
        """Pass an answer to its caller. Raises ValueError where the frame is no answer."""
        server = self.servers.get(server_id)
        if server is not None:
            server.hear_answer(frame)

    async def lose(self, server_id: str, reason: str) -> None:
        """Declare a server and its sessions lost, for every controller."""
        server = self.servers.get(server_id)
        self._lost.add(server_id)
        self._unreported.add(server_id)
        with suppress(StateUnavailable):  # the watch reports it later
            await self._report_lost(server_id)
        if server is not None:
            fate = "others continue its" if self.routing.survives else "so are its"
            words = "server %s is lost, %s %d sessions: %s"
            logger.warning(words, server_id, fate, len(server.sessions), reason)
            self._show_lost(server, reason)
            self._remove(server_id, LOST)

    def has_left(self, server_id: str) -> bool:
        """Return whether a server has shut down in order."""
        return server_id in self._left

    async def is_lost(self, server_id: str) -> bool:
        """Return whether a server was declared lost, by any controller, or has shut down; then remove it."""
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

        Raises SessionLost, UnknownSession, and StateUnavailable where only another controller has a link.
        """
        server = self.servers.get(server_id)
        if server is not None:
            return server
        if await self.is_lost(server_id):
            raise SessionLost(LOST, server=server_id)
        # The server may still be about to connect: the controller is new, or the link broke.
        for wait_s in (self._startup_s, self._lost_after_s):
            await self._wait_for(lambda: server_id in self.servers, wait_s)
            server = self.servers.get(server_id)
            if server is not None:
                return server
            if not await self._is_alive(server_id):
                raise SessionLost(LOST, server=server_id)
        reason = "this controller has no link to the session's server; ask another, or again"
        raise StateUnavailable(reason, retry_after=1)

    async def wait_at_startup(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, as long as servers may still be about to connect to a new controller."""
        await self._wait_for(condition, self._startup_s)

    async def check(self) -> None:
        """Declare the servers lost that no controller has heard for too long. Raises StateUnavailable."""
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
                server.cut()  # alive, but not over this link
            else:
                await self.lose(server.server_id, f"no heartbeat for {limit_s:g} s")

    async def checked(self, server: RemoteServer, answer: bytes, read: Callable[[bytes], T]) -> T:
        """Return what ``read`` makes of an answer; a server whose answer it cannot read is put aside.

        Raises SessionLost then.
        """
        try:
            return read(answer)
        except UNREADABLE:
            await self.lose(server.server_id, "it answered a call with something else than an answer")
            raise SessionLost(LOST, server=server.server_id) from None

    def _probe(self, server: RemoteServer) -> None:
        """Make a call that every server answers at once, since those of sessions may take long."""
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
        """Return whether another controller hears a server; without the store, wait longer."""
        try:
            return await self._store.is_alive(server.server_id, self._lost_after_s)
        except StateUnavailable:
            return silent_s < BLIND_FACTOR * self._lost_after_s

    async def _is_alive(self, server_id: str) -> bool:
        """Return whether another controller hears a server; else declare it lost. Raises UnknownSession."""
        if await self._store.is_alive(server_id, self._lost_after_s):
            return True
        if not await self._store.knows(server_id):
            raise UnknownSession("no such session; it never existed or ended long ago")
        await self.lose(server_id, "no controller hears it")
        return False

    @property
    def _startup_s(self) -> float:
        """Seconds for which servers may still be about to connect."""
        return self._started + self._lost_after_s - self._clock()

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        if seconds <= 0 or condition():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._joined:
                await self._joined.wait_for(condition)

    def count_lost(self, session_id: str) -> None:
        """Count a session of a lost server that no other server continues; idempotent."""
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
    """Finds the server of each session: the one that opened it, named in the session's id.

    Args:
        registry: the servers.
    """

    survives = False
    """True if sessions survive the loss of their server."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def group(self, session_id: str) -> str:
        """Return a key that the sessions of one server share, to split batches."""
        return home(session_id)

    async def find(self, session_id: str) -> RemoteServer:
        """Return the server that holds a session. Raises SessionLost, UnknownSession, StateUnavailable."""
        return await self._registry.find(home(session_id))

    async def close(self, session_id: str) -> None:
        """End a session. Raises SessionLost, UnknownSession, StateUnavailable."""
        await close_session(await self.find(session_id), session_id)

    async def confirm(self, session_ids: Iterable[str]) -> None:
        """Wait until answers of sessions may be passed on. Raises SessionLost, StateUnavailable."""

    def hear(self, server_id: str, frame: bytes) -> None:
        """Handle a further kind of frame. Raises ValueError where it is malformed."""
        raise ValueError("no such frame")

    def ended(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Handle the end of sessions."""

    def interrupted(self, session_ids: Iterable[str]) -> None:
        """Handle the loss of a server during calls of sessions."""

    async def blame(self, server_id: str, session_ids: Iterable[str]) -> None:
        """Handle that a server got stuck in the call of one of these sessions, and was killed."""

    def takes_turns(self, session_id: str) -> bool:
        """Return whether the steps of a session wait for those of others."""
        return False

    @asynccontextmanager
    async def turn(self, session_id: str) -> AsyncIterator[RemoteServer | None]:
        """Wait until a call of a session may be made; yield its server where that has changed meanwhile."""
        yield None

    async def aclose(self) -> None:
        """Finish or cancel what is under way."""


async def close_session(server: RemoteServer, session_id: str) -> None:
    """End a session on the server that holds it."""
    await server.call("close", SessionRequest(session_id=session_id).model_dump_json().encode())


def _tools(task: TaskInfo) -> set[str]:
    return {"respond", *(spec.function.name for spec in task.tools)}
