"""The sessions of one process: capacity with a fair queue, leases, batches and draining."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypedDict

from agentrl_env.errors import NotSupported, ServerDraining, ServerFull, StepPending, UnknownServer, WireError
from agentrl_env.fast_wire import FastBatch, Step
from agentrl_env.session import listing
from agentrl_env.session.capacity import DRAINING, Capacity, check_limits
from agentrl_env.session.observer import NO_OBSERVER, Observer, as_wire_error
from agentrl_env.session.session import MAX_BYTES, MESSAGE_LOOP_S, Session
from agentrl_env.session.session_table import Entry, SessionTable, SessionWatcher
from agentrl_env.session.single_flight import SingleFlight
from agentrl_env.session.tasks import Tasks
from agentrl_env.session.threads import RunningCalls
from agentrl_env.types import FleetInfo, ServerSummary, SessionInfo, SessionStatus, TaskSample
from agentrl_env.wire import (
    EMPTY,
    FLEET_NOW,
    DrainRequest,
    EmptyRequest,
    ExpertAnswer,
    FleetQuery,
    ForkAnswer,
    ForkRequest,
    OpenRequest,
    SessionList,
    SessionQuery,
    SessionRequest,
    SessionRow,
    StepBatch,
    TaskList,
    Transcript,
    TranscriptRequest,
    payload_digest,
    server_id_of,
)

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

VERSION = version("agentrl-kit")
SWEEP_S = 1.0
"""Seconds between checks for expired leases."""
MAX_THREADS = 256
CHUNK = 128
"""Steps of a batch that start together, before their threads run. Larger chunks only evict the caches."""
CHUNK_TIMEOUT_S = 0.002
STALE = "the operator is draining this server; open sessions elsewhere"
STEP_PENDING = "the step is still in progress; request it again with the same seq"


class PoolOptions(TypedDict, total=False):
    """Options of ``SessionPool`` that a server passes on."""

    max_sessions: int
    lease_s: float
    oracle: bool
    threads: int | None
    calls: RunningCalls | None


class SessionPool:
    """A ``Service`` that opens and steps sessions of some tasks in this process.

    Args:
        environments: the tasks.
        max_sessions: maximum number of open sessions. Further openings wait or are refused.
        lease_s: seconds that a session may be idle before it ends as ``expired``.
        oracle: answer ``expert`` calls.
        threads: maximum number of concurrent calls of a task's blocking author code. By default one per
            session, up to ``MAX_THREADS``.
        observer: counts, logs and traces.
        message_loop_s: as for ``Session``.
        clock: returns the monotonic time in seconds.
        history_bytes: size of the turns that a session keeps.
        calls: shows the running calls.

    Raises ServeError if no session could be open.
    """

    def __init__(
        self,
        environments: Iterable[type[Environment]],
        *,
        max_sessions: int = 1024,
        lease_s: float = 900.0,
        oracle: bool = False,
        threads: int | None = None,
        observer: Observer = NO_OBSERVER,
        message_loop_s: float = MESSAGE_LOOP_S,
        clock: Callable[[], float] = time.monotonic,
        history_bytes: int = MAX_BYTES,
        calls: RunningCalls | None = None,
    ) -> None:
        check_limits(max_sessions, lease_s)
        self.draining = False
        self._take_id()
        self._oracle = oracle
        self._lease_s = lease_s
        self._observer = observer
        self._message_loop_s = message_loop_s
        self._clock = clock
        self._history_bytes = history_bytes
        self._epoch = time.time() - clock()
        limit = threads or min(max_sessions, MAX_THREADS)
        self._tasks = Tasks(environments, threads=limit, oracle=oracle, calls=calls)
        self._capacity = Capacity(max_sessions, self._check_quiet)
        self._table = SessionTable(clock)
        self._openings: SingleFlight[SessionInfo] = SingleFlight()
        self._forks: SingleFlight[list[SessionInfo]] = SingleFlight()
        self._adoptions: SingleFlight[None] = SingleFlight()
        self._stale = False
        self._sweeper: asyncio.Task[None] | None = None
        self._quiet: asyncio.Event | None = None

    @property
    def accepts_sessions(self) -> bool:
        """False if the server is shutting down or the operator drains it."""
        return not (self.draining or self._stale)

    @property
    def open_sessions(self) -> int:
        """Number of running sessions."""
        return len(self._table.live)

    def environment(self, task: str) -> type[Environment]:
        """Return the class of a task. Raises UnknownTask."""
        return self._tasks.environment(task)

    def gauges(self) -> dict[str, float]:
        """Return the gauges of ``/metrics``."""
        return {
            "agentrl_sessions_open": float(self.open_sessions),
            "agentrl_sessions_waiting": float(self._capacity.waiting),
            "agentrl_sessions_capacity": float(self._capacity.total),
            "agentrl_threads_abandoned": float(self._tasks.abandoned_threads),
        }

    def check_ready(self) -> None:
        """Raise ServerDraining or ServerFull if no session can be opened."""
        if not self.accepts_sessions:
            raise ServerDraining(DRAINING if self.draining else STALE)
        blocking = self._tasks.blocking
        if blocking and all(map(self._tasks.exhausted, blocking)):
            raise self._no_thread(*blocking)

    async def tasks(self, request: EmptyRequest = EMPTY) -> TaskList:
        """Return the tasks. The first call runs their ``startup``. Raises EnvironmentFailed."""
        return TaskList(tasks=await self._tasks.describe())

    async def open(self, request: OpenRequest) -> SessionInfo:
        """Open a session. A repeated ``request_id`` returns the same session.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed, and
        IdempotencyConflict if the ``request_id`` was used for another request.
        """
        key = request.request_id or secrets.token_urlsafe(12)
        digest = request.digest or payload_digest(request)
        known = self._table.opened_as(key, digest)
        if known is not None:
            return await self.info(SessionRequest(session_id=known))
        opening = partial(self._open, request, digest)
        return await self._openings.run(key, lambda: self._observer.traced("open", opening(), None), digest)

    async def step(self, request: Step) -> bytes:
        """Play one assistant message and return the StepResult as JSON.

        Raises UnknownSession and the errors of ``Session.step``.
        """
        entry = self._table.find(request.session_id)
        self._table.enter(request.session_id, entry)
        try:
            submitted = entry.session.submit(request.message, request.seq)
            return submitted if isinstance(submitted, bytes) else await entry.session.result_of(submitted)
        finally:
            self._leave(request.session_id, entry)

    async def step_many(self, request: FastBatch | StepBatch) -> list[bytes | WireError]:
        """Step many sessions concurrently. Steps of one session run in order.

        Returns the StepResult as JSON or the error of each step, which is StepPending if the step is not done
        after ``wait_s`` seconds.
        """
        batch = _Batch(request.steps)
        for begin in range(0, len(batch.steps), CHUNK):
            if begin:
                await asyncio.sleep(0)  # other callers get a turn
            for position in range(begin, min(begin + CHUNK, len(batch.steps))):
                self._submit(batch, position)
            if batch.pending >= CHUNK and batch.quick:
                batch.quick = await batch.finished(CHUNK_TIMEOUT_S)
        await batch.finished(request.wait_s)
        pending = StepPending(STEP_PENDING)
        return [pending if answer is None else answer for answer in batch.answers]

    async def info(self, request: SessionRequest) -> SessionInfo:
        """Return the state of a session. Raises UnknownSession, SessionExpired."""
        session = self.session(request.session_id)
        if session.status is SessionStatus.EXPIRED:
            session.check_running()
        return session.info()

    async def sessions(self, request: SessionQuery) -> SessionList:
        """Return the sessions that are open or have ended recently, newest first."""
        return listing.list_sessions(
            self._table.known(), request, server=self.server_id, now=self._clock(), epoch=self._epoch
        )

    async def transcript(self, request: TranscriptRequest) -> Transcript:
        """Return the last turns of a session. Raises UnknownSession."""
        return listing.transcript(self.session(request.session_id), request.after)

    async def drain_server(self, request: DrainRequest) -> FleetInfo:
        """Stop or resume opening new sessions here. Raises UnknownServer for another server's id."""
        if request.server_id != self.server_id:
            raise UnknownServer(f"this server is not {request.server_id!r}; GET /v1/fleet lists its id")
        self._stale = request.draining
        return await self.fleet()

    async def fleet(self, request: FleetQuery = FLEET_NOW) -> FleetInfo:
        """Return this server as a fleet of one."""
        place, counts = place_of(os.getpid()), dict(self._observer.counts())
        server = ServerSummary(
            server_id=self.server_id,
            place=place,
            tasks=tuple(task.name for task in (await self.tasks()).tasks),
            capacity=self._capacity.total,
            open=self.open_sessions,
            waiting=self._capacity.waiting,
            draining=self.draining,
            stale=self._stale,
            version=VERSION,
            steps=sum(task.steps for task in counts.values()),
        )
        return FleetInfo(
            kind="server",
            name=place,
            version=VERSION,
            draining=self.draining,
            waiting=server.waiting,
            servers=(server,),
            counts=counts,
        )

    async def expert(self, request: SessionRequest) -> ExpertAnswer:
        """Return the next message of the task's expert. Raises NotSupported without ``oracle``."""
        if not self._oracle:
            raise NotSupported("this server answers no expert calls; start it with --oracle")
        entry = self._table.find(request.session_id)
        self._table.enter(request.session_id, entry)
        try:
            return ExpertAnswer(message=await entry.session.expert())
        finally:
            self._leave(request.session_id, entry)

    async def fork(self, request: ForkRequest) -> ForkAnswer:
        """Open ``n`` sessions that continue from the state of a session, which can also continue itself.

        Either all of them open or none. A repeated ``request_id`` returns the same sessions. A fork never
        waits for capacity, because its caller holds a session, and two waiting callers could deadlock.

        Raises UnknownSession, SessionEnded, SessionExpired, NotSupported, ServerFull, ServerDraining,
        EnvironmentFailed, and IdempotencyConflict if the ``request_id`` was used with another ``n``.
        """
        session_id, n = request.session_id, request.n
        key = f"{session_id}/{request.request_id or secrets.token_urlsafe(12)}"
        known = [self._table.opened_as(f"{key}/{number}", str(n)) for number in range(n)]
        if known[0] is None:
            forks = await self._forks.run(key, lambda: self._fork(session_id, n, key), str(n))
        else:
            forks = [await self.info(SessionRequest(session_id=fork)) for fork in known if fork is not None]
        return ForkAnswer(sessions=tuple(forks))

    async def close(self, request: SessionRequest) -> None:
        """End a session and release its resources. Idempotent."""
        ending = self._end([request.session_id], SessionStatus.CANCELLED)
        await self._observer.traced("close", ending, None)

    def session(self, session_id: str) -> Session:
        """Return a session that is open or has ended recently. Raises UnknownSession."""
        return self._table.find(session_id).session

    def row(self, session_id: str) -> SessionRow | None:
        """Return the row of an open session, or None if there is none."""
        return self._table.row(session_id)

    def now(self) -> float:
        """Return the time of the sessions' clock, in seconds."""
        return self._clock()

    async def adopt(
        self, session_id: str, client: str, sample: TaskSample, prepare: Callable[[Session], None]
    ) -> None:
        """Open a session under a given id, unless this pool already knows it.

        Args:
            session_id: the id.
            client: name of the caller that opened it.
            sample: problem of the episode.
            prepare: calls ``continue_from`` on the new session.

        Raises UnknownTask, ServerFull, ServerDraining, EnvironmentFailed.
        """
        if not self._table.knows(session_id):
            work = partial(self._adopt, session_id, client, sample, prepare)
            await self._adoptions.run(session_id, work)

    def watch(self, watcher: SessionWatcher) -> tuple[SessionRow, ...]:
        """Add a watcher of opening and ending sessions, and return the open sessions."""
        return self._table.watch(watcher)

    def unwatch(self, watcher: SessionWatcher) -> None:
        """Remove a watcher."""
        self._table.unwatch(watcher)

    async def drain(self, timeout_s: float, hand_over: Callable[[], Awaitable[None]] | None = None) -> None:
        """Refuse new sessions, let the open ones end within the timeout, then close the rest.

        An opening in progress can still open its session within the timeout.

        Args:
            timeout_s: seconds to wait for open sessions.
            hand_over: called before sessions that are still open are closed.
        """
        self.draining = True
        self._capacity.refuse_new()
        self._quiet = asyncio.Event()
        self._check_quiet()
        if timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._quiet.wait()
        await self._capacity.cancel_openings()
        if self._table.live and hand_over is not None:
            await hand_over()
        await self._end(list(self._table.live), SessionStatus.CANCELLED)

    def stop_waiting(self) -> None:
        """Stop waiting for open sessions in a running ``drain``."""
        if self._quiet is not None:
            self._quiet.set()

    async def abandon(self) -> None:
        """End all sessions and take a new id, after a controller has declared the sessions lost."""
        self._take_id()
        lost = list(self._table.live)
        await self._end(lost, SessionStatus.CANCELLED)
        self._table.forget(lost)  # a lost session can come back from its checkpoint

    async def aclose(self) -> None:
        """Close all sessions and run ``shutdown`` of the tasks. The pool cannot be used afterwards."""
        await self.drain(0.0)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._capacity.all_closed()
        await self._tasks.aclose()
        for threads in self._tasks.threads.values():
            threads.stop()

    async def _open(self, request: OpenRequest, digest: str) -> SessionInfo:
        environment = self._tasks.environment(request.task)
        if self._stale:
            raise ServerDraining(STALE)
        if self._tasks.exhausted(environment.name):
            raise self._no_thread(environment.name)
        await self._tasks.describe()
        await self._capacity.take(wait_s=request.wait_s)

        async def start(made: list[Session]) -> None:
            made.append(self._session(environment, await self._tasks.sample(request)))
            await made[0].start()

        (session,) = await self._start([request.request_id], request.client, start, digest)
        return session.info()

    async def _adopt(
        self, session_id: str, client: str, sample: TaskSample, prepare: Callable[[Session], None]
    ) -> None:
        environment = self._tasks.environment(sample.task)
        await self._tasks.describe()
        await self._capacity.take()

        async def start(made: list[Session]) -> None:
            made.append(self._session(environment, sample, session_id))
            prepare(made[0])
            await made[0].start()

        await self._start([None], client, start)

    async def _fork(self, session_id: str, n: int, key: str) -> list[SessionInfo]:
        entry = self._table.find(session_id)
        entry.session.check_fork()
        await self._capacity.take(n)
        self._table.enter(session_id, entry)

        async def start(made: list[Session]) -> None:
            made += await entry.session.fork([self._new_id() for _ in range(n)])
            started = await asyncio.gather(*(fork.start() for fork in made), return_exceptions=True)
            for outcome in started:
                if isinstance(outcome, BaseException):
                    raise outcome

        try:
            keys = [f"{key}/{number}" for number in range(n)]
            forks = await self._start(keys, entry.client, start, str(n))
        finally:
            self._leave(session_id, entry)
        return [fork.info() for fork in forks]

    async def _start(
        self,
        request_ids: Sequence[str | None],
        client: str,
        start: Callable[[list[Session]], Coroutine[Any, Any, None]],
        digest: str = "",
    ) -> list[Session]:
        """Start one session per request id, in places that were already taken, and add them to the table.

        If one fails to start, all are closed and their places are released.
        """
        self._keep_sweeping()
        made: list[Session] = []
        with self._capacity.opening():
            try:
                await start(made)
                self._capacity.check_open()
            except BaseException:
                for number in range(len(request_ids)):
                    self._capacity.discard(made[number] if number < len(made) else None)
                raise
            for session, request_id in zip(made, request_ids, strict=True):
                self._table.add(session, request_id, client, digest)
        for session in made:
            self._observer.opened(session, client)
        return made

    def _no_thread(self, *tasks: str) -> ServerFull:
        number = sum(self._tasks.threads[task].size for task in tasks)
        reason = f"all {number} threads of this server run author code that does not return"
        where = f"(task {', '.join(tasks)}); open sessions elsewhere, or restart it"
        return ServerFull(f"{reason} {where}", retry_after=10)

    def _take_id(self) -> None:
        self.server_key = secrets.token_urlsafe()
        """A secret of this process and its controllers, which proves that the id belongs to this server."""
        self.server_id = server_id_of(self.server_key)
        """Prefix of every session id. A controller uses it to find the server of a session."""

    def _new_id(self) -> str:
        return f"{self.server_id}.{secrets.token_urlsafe(16)}"

    def _session(
        self, environment: type[Environment], sample: TaskSample, session_id: str | None = None
    ) -> Session:
        return Session(
            environment,
            sample,
            session_id=session_id or self._new_id(),
            threads=self._tasks.threads[environment.name],
            clock=self._clock,
            observer=self._observer,
            message_loop_s=self._message_loop_s,
            history_bytes=self._history_bytes,
        )

    def _submit(self, batch: _Batch, position: int) -> None:
        """Start one step of a batch."""
        step = batch.steps[position]
        try:
            entry = self._table.find(step.session_id)
            submitted = entry.session.submit(step.message, step.seq)
        except Exception as error:
            batch.answers[position] = as_wire_error(error)
            return
        if isinstance(submitted, bytes):
            batch.answers[position] = submitted
            self._table.touch(step.session_id, entry)
            if entry.session.status.final:
                self._retire(step.session_id)
        else:
            self._table.enter(step.session_id, entry)
            batch.pending += 1
            submitted.add_done_callback(partial(self._finish, batch, position, entry))

    def _finish(self, batch: _Batch, position: int, entry: Entry, task: asyncio.Future[bytes]) -> None:
        session = entry.session
        try:
            batch.answers[position] = session.outcome(task)
        except BaseException as error:  # of the step's task, so it cannot be the end of the process
            batch.answers[position] = as_wire_error(error)
        finally:
            self._leave(session.session_id, entry)
            batch.finish_one()

    def _leave(self, session_id: str, entry: Entry) -> None:
        """Restart a session's lease, or retire it if it has ended."""
        self._table.leave(session_id, entry)
        if entry.session.status.final:
            self._retire(session_id)

    async def _end(self, session_ids: Sequence[str], status: SessionStatus) -> None:
        """Close sessions concurrently."""
        closing = self._begin_end(session_ids, status)
        if closing:
            await asyncio.wait(closing)

    def _begin_end(self, session_ids: Sequence[str], status: SessionStatus) -> list[asyncio.Task[None]]:
        closing: list[asyncio.Task[None]] = []
        for session_id in session_ids:
            entry = self._table.live.get(session_id)
            if entry is not None:
                closing.append(entry.session.begin_close(status))
                self._retire(session_id)
        return closing

    def _expire(self, now: float) -> list[asyncio.Task[None]]:
        closing = self._begin_end(self._table.idle_since(now - self._lease_s), SessionStatus.EXPIRED)
        self._table.forget_old()
        return closing

    def _retire(self, session_id: str) -> None:
        """Remove an ended session from the live ones. Its place is free once its environment is closed."""
        entry = self._table.retire(session_id)
        if entry is None:
            return
        session = entry.session
        self._observer.ended(session, entry.client, self._clock() - session.began)
        self._capacity.leave(session)
        self._check_quiet()

    def _check_quiet(self) -> None:
        """Let a running ``drain`` continue if no session is open or opening."""
        if self._quiet is not None and not self._table.live and not self._capacity.openings:
            self._quiet.set()

    def _keep_sweeping(self) -> None:
        loop = asyncio.get_running_loop()
        if self._sweeper is None or self._sweeper.done() or self._sweeper.get_loop() is not loop:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        last = self._clock()
        while True:
            await asyncio.sleep(min(SWEEP_S, self._lease_s / 2))
            # Use the time of the previous sweep: steps that arrived while this process was frozen or
            # busy have been read since. Not awaited, since a slow close must not delay other leases.
            self._expire(last)
            last = self._clock()


class _Batch:
    """Steps that are answered together."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.answers: list[bytes | WireError | None] = [None] * len(steps)
        self.pending = 0
        self.quick = True
        """True if every chunk so far has ended within ``CHUNK_TIMEOUT_S``."""
        self._done: asyncio.Future[None] | None = None

    def finish_one(self) -> None:
        """Count an ended step."""
        self.pending -= 1
        if self.pending == 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def finished(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds until no step is pending. Return True if none is."""
        if self.pending:
            self._done = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if timeout is None or timeout == math.inf else timeout):
                    await self._done
        return self.pending == 0


def place_of(pid: int) -> str:
    """Return the host name and process id, which identify a process to operators and ``--workers``."""
    return f"{socket.gethostname()} {pid}"
