"""The sessions of one process: capacity with a fair queue, leases that expire, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from agentrl_env.errors import InvalidRequest, NotSupported, WireError
from agentrl_env.fast_wire import Said, StepItem
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.session_metrics import SLOW_STEP_S, SessionObserver
from agentrl_env.server.telemetry.tracing import spanned
from agentrl_env.session import Session
from agentrl_env.session.batching import Stepper
from agentrl_env.session.capacity import Places
from agentrl_env.session.checkpoint import go_on
from agentrl_env.session.session_table import SessionTable, SessionWatcher
from agentrl_env.session.single_flight import Once
from agentrl_env.session.tasks import Catalog
from agentrl_env.session.threads import Threads
from agentrl_env.types import Message, SessionInfo, SessionStatus, StepResult, TaskInfo, TaskSample
from agentrl_env.wire import OpenRequest, SessionRow, Standing, StepRequest

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

SWEEP_S = 1.0
"""How often expired leases are looked for."""
MAX_THREADS = 256


class SessionPool:
    """Opens and steps sessions of some tasks in this process; a ``SessionBackend``.

    Args:
        environments: the tasks.
        max_sessions: how many may be open at once; further ones wait their turn, or are refused.
        lease_s: seconds a session may be idle before it ends as ``expired``.
        oracle: whether ``expert`` may be called from outside.
        threads: how many calls of blocking author code may run at once; by default one for each
            session, up to ``MAX_THREADS``.
        slow_step_s: a step that takes longer is a warning in the log.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self,
        environments: Iterable[type[Environment]],
        *,
        max_sessions: int = 1024,
        lease_s: float = 900.0,
        oracle: bool = False,
        threads: int | None = None,
        slow_step_s: float = SLOW_STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = Metrics()
        self._observer = SessionObserver(self.metrics, slow_step_s)
        self.draining = False
        self.server_id = secrets.token_hex(6)
        """Begins every session's id, so that a controller can tell where a session lives."""
        self._oracle = oracle
        self._lease_s = lease_s
        self._clock = clock
        self._threads = Threads(threads or min(max_sessions, MAX_THREADS))
        self._catalog = Catalog(environments, threads=self._threads, oracle=oracle)
        self._slots = Places(max_sessions, self._see_quiet)
        self._table = SessionTable(clock)
        self.stepper = Stepper(self._table, self._retire)
        """Steps the sessions, and gives its answers as JSON."""
        self._openings: Once[SessionInfo] = Once()
        self._forkings: Once[list[SessionInfo]] = Once()
        self._adoptions: Once[None] = Once()
        self._sweeper: asyncio.Task[None] | None = None
        self._quiet: asyncio.Event | None = None

    @property
    def open_sessions(self) -> int:
        """How many sessions are running."""
        return len(self._table.live)

    def gauges(self) -> dict[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        return {
            "agentrl_sessions_open": float(self.open_sessions),
            "agentrl_sessions_waiting": float(self._slots.waiting),
            "agentrl_sessions_capacity": float(self._slots.total),
            "agentrl_threads_abandoned": float(self._threads.abandoned),
        }

    async def tasks(self) -> tuple[TaskInfo, ...]:
        """Return what is served; the first call opens what sessions share (``startup``)."""
        return await self._catalog.tasks()

    async def open(self, request: OpenRequest) -> SessionInfo:
        """Open a session; the same ``request_id`` again gives the same one.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed.
        """
        key = request.request_id or secrets.token_urlsafe(12)
        known = self._table.opened_as(key)
        if known is not None:
            return await self.info(known)
        return await self._openings.do(key, lambda: spanned("open", self._open(request)))

    async def step(self, session_id: str, seq: int | None, message: Message) -> StepResult:
        """Play one assistant message. Raises what ``Session.step`` does, and UnknownSession."""
        return StepResult.model_validate_json(await self.stepper.step(session_id, seq, Said.of(message)))

    async def step_many(
        self, steps: Sequence[StepRequest], wait_s: float | None = None
    ) -> list[StepResult | WireError]:
        """Step many sessions at once; those of one session in order.

        Args:
            steps: what to play.
            wait_s: answer after so many seconds, with StepPending for what is not ready.
        """
        return [
            answer if isinstance(answer, WireError) else StepResult.model_validate_json(answer)
            for answer in await self.stepper.step_many([StepItem.of(step) for step in steps], wait_s)
        ]

    def never_waits(self, session_id: str) -> bool:
        """Return whether ``step`` would be done without giving the event loop a turn."""
        entry = self._table.live.get(session_id)
        return entry is None or entry.session.inline

    async def info(self, session_id: str) -> SessionInfo:
        """Return how a session stands. Raises UnknownSession, SessionExpired."""
        session = self._table.find(session_id).session
        if session.status is SessionStatus.EXPIRED:
            session.refuse_ended()
        return session.info()

    def session(self, session_id: str) -> Session:
        """Return a session that is open or has ended lately. Raises UnknownSession."""
        return self._table.find(session_id).session

    def known(self) -> Iterator[tuple[Session, float | None]]:
        """Go through all sessions, with the time of their last call; None while one is under way."""
        return self._table.known()

    def now(self) -> float:
        """Return the time by the clock that sessions begin and last by, in seconds."""
        return self._clock()

    async def expert(self, session_id: str) -> Message:
        """Return the oracle's next move. Raises NotSupported without ``oracle``."""
        if not self._oracle:
            raise NotSupported("this server answers no expert calls; start it with --oracle")
        entry = self._table.find(session_id)
        self._table.enter(session_id, entry)
        try:
            return await entry.session.expert()
        finally:
            self.stepper.leave(session_id, entry)

    async def fork(self, session_id: str, n: int = 1, request_id: str | None = None) -> list[SessionInfo]:
        """Open ``n`` sessions that stand where a session stands; it may go on meanwhile.

        All of them open, or none. The same ``request_id`` again gives the same ones. A fork never
        waits for room: who forks holds a session, so two that waited might wait for one another.

        Raises UnknownSession, SessionEnded, SessionExpired, NotSupported, InvalidRequest,
        ServerFull, ServerDraining, EnvironmentFailed.
        """
        if n < 1:
            raise InvalidRequest(f"n must be at least 1, got {n}")
        key = f"{session_id}/{request_id or secrets.token_urlsafe(12)}"
        known = self._table.opened_as(_nth(key, 0))
        if known is None:
            return await self._forkings.do(key, lambda: self._fork(session_id, n, key))
        others = (self._table.opened_as(_nth(key, number)) for number in range(1, n))
        return [await self.info(fork) for fork in (known, *others) if fork is not None]

    async def adopt(self, session_id: str, client: str, standing: Standing) -> None:
        """Go on, under its id, with a session whose server is gone; where it is known here, do nothing.

        Raises UnknownTask, ServerFull, ServerDraining, EnvironmentFailed where it cannot be restored.
        """
        if not self._table.knows(session_id):
            await self._adoptions.do(session_id, lambda: self._adopt(session_id, client, standing))

    def row(self, session_id: str) -> SessionRow | None:
        """Return how an open session is reported; None where there is no such."""
        return self._table.row(session_id)

    async def close_session(self, session_id: str) -> None:
        """End a session and release what it holds; idempotent."""
        await spanned("close", self._end([session_id], SessionStatus.CANCELLED))

    async def expire_idle(self) -> int:
        """End every session that is idle past its lease; return how many."""
        closing = self._begin_expiring()
        if closing:
            await asyncio.wait(closing)
        return len(closing)

    async def drain(self, deadline_s: float, hand_over: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take no new sessions, let the open ones end within the deadline, then close them.

        An opening under way may still open its session, which then has the rest of the deadline;
        later its caller gets ServerDraining.

        Args:
            deadline_s: seconds.
            hand_over: is called before sessions that are still open are closed.
        """
        self.draining = True
        self._slots.refuse_all()
        self._quiet = asyncio.Event()
        self._see_quiet()
        if deadline_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), deadline_s)
        await self._slots.end_openings()
        if self._table.live and hand_over is not None:
            await hand_over()
        await self._end(list(self._table.live), SessionStatus.CANCELLED)

    def hurry(self) -> None:
        """Let a ``drain`` under way wait no longer."""
        if self._quiet is not None:
            self._quiet.set()

    def watch(self, watcher: SessionWatcher) -> tuple[SessionRow, ...]:
        """Tell a watcher of every session that opens and ends; return those that are open now."""
        return self._table.watch(watcher)

    def unwatch(self, watcher: SessionWatcher) -> None:
        """Tell a watcher no more."""
        self._table.unwatch(watcher)

    async def abandon(self) -> None:
        """End every session, because they were reported lost, and go on under a new id."""
        self.server_id = secrets.token_hex(6)
        reported = list(self._table.live)
        await self._end(reported, SessionStatus.CANCELLED)
        self._table.forget(reported)  # one of them may come back, from where it was kept

    async def aclose(self) -> None:
        """Close every session, and what they share. The pool is of no further use."""
        await self.drain(0.0)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._slots.all_released()
        await self._catalog.aclose()
        self._threads.stop()

    async def _open(self, request: OpenRequest) -> SessionInfo:
        environment = self._catalog.environment(request.task)
        await self.tasks()
        self._keep_sweeping()
        await self._slots.take(wait_s=request.wait_s)
        session = None
        with self._slots.opening():
            try:
                session = self._session(environment, await self._catalog.sample(request))
                await session.start()
                self._slots.refuse_late()
            except BaseException:
                self._slots.give_up(session)
                raise
            self._table.add(session, request.request_id, request.client)
        self._observer.opened(session, request.client)
        return session.info()

    async def _adopt(self, session_id: str, client: str, standing: Standing) -> None:
        environment = self._catalog.environment(standing.sample.task)
        await self.tasks()
        self._keep_sweeping()
        await self._slots.take()
        session = self._session(environment, standing.sample, session_id)
        go_on(session, standing, self._clock())
        with self._slots.opening():
            try:
                await session.start()
                self._slots.refuse_late()
            except BaseException:
                self._slots.give_up(session)
                raise
            self._table.add(session, None, client)
        self._observer.opened(session, client)

    async def _fork(self, session_id: str, n: int, key: str) -> list[SessionInfo]:
        entry = self._table.find(session_id)
        entry.session.refuse_fork()
        await self._slots.take(n)
        forks: list[Session] = []
        self._table.enter(session_id, entry)
        with self._slots.opening():
            try:
                forks = await entry.session.fork([self._new_id() for _ in range(n)])
                started = await asyncio.gather(*(fork.start() for fork in forks), return_exceptions=True)
                for outcome in started:
                    if isinstance(outcome, BaseException):
                        raise outcome
                self._slots.refuse_late()
            except BaseException:
                for number in range(n):
                    self._slots.give_up(forks[number] if number < len(forks) else None)
                raise
            finally:
                self.stepper.leave(session_id, entry)
            for number, fork in enumerate(forks):
                self._table.add(fork, _nth(key, number), entry.client)
                self._observer.opened(fork, entry.client)
        return [fork.info() for fork in forks]

    def _new_id(self) -> str:
        return f"{self.server_id}.{secrets.token_urlsafe(16)}"

    def _session(
        self, environment: type[Environment], sample: TaskSample, session_id: str | None = None
    ) -> Session:
        return Session(
            environment,
            sample,
            session_id=session_id or self._new_id(),
            threads=self._threads,
            clock=self._clock,
            observer=self._observer,
        )

    async def _end(self, session_ids: Sequence[str], status: SessionStatus) -> None:
        """Close sessions, all at the same time."""
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

    def _begin_expiring(self) -> list[asyncio.Task[None]]:
        closing = self._begin_end(self._table.idle_for(self._lease_s), SessionStatus.EXPIRED)
        self._table.forget_old()
        return closing

    def _retire(self, session_id: str) -> None:
        """Move a session that has ended aside; its slot is free once all it held is released."""
        entry = self._table.retire(session_id)
        if entry is None:
            return
        session = entry.session
        self._observer.ended(session, entry.client, self._clock() - session.begin)
        self._slots.leave(session)
        self._see_quiet()

    def _see_quiet(self) -> None:
        """Let a ``drain`` under way go on where no session is open, nor being opened."""
        if self._quiet is not None and not self._table.live and not self._slots.openings:
            self._quiet.set()

    def _keep_sweeping(self) -> None:
        loop = asyncio.get_running_loop()
        if self._sweeper is None or self._sweeper.done() or self._sweeper.get_loop() is not loop:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self._lease_s / 2))
            self._begin_expiring()  # a closing that takes long holds up no other session's lease


def _nth(key: str, number: int) -> str:
    """Return the name under which a fork's n-th session was opened."""
    return f"{key}/{number}"
