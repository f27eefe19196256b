"""The table of sessions: capacity with a fair queue, leases that expire, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_env.dataset import Dataset
from agentrl_env.errors import (
    DefinitionError,
    EnvironmentFailed,
    NotSupported,
    ServerDraining,
    ServerFull,
    StepPending,
    UnknownSession,
    UnknownTask,
    WireError,
)
from agentrl_env.runner import AUTHOR_ERRORS, FairSlots, Runner, Threads
from agentrl_env.server.metrics import Metrics
from agentrl_env.session import Session
from agentrl_env.tools import toolset
from agentrl_env.types import Message, SessionInfo, SessionStatus, StepResult, TaskInfo
from agentrl_env.wire import OpenRequest, StepRequest

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

logger = logging.getLogger("agentrl_env")

KEPT_SESSIONS = 4096
"""How many ended sessions are remembered, so that a lost last answer can be asked for again."""
KEPT_S = 600.0
"""For how many seconds they are."""
SWEEP_S = 1.0


@dataclass(slots=True)
class _Entry:
    session: Session
    request_id: str | None = None
    users: int = 0
    """Calls under way in the session; while there are any, its lease does not run."""


@dataclass(slots=True)
class _Opening:
    task: asyncio.Task[SessionInfo]
    callers: int = 0


class SessionPool:
    """Opens and steps sessions of some tasks in this process; a ``SessionBackend``.

    Args:
        environments: the tasks.
        max_sessions: how many may be open at once; further ones wait their turn, or are refused.
        lease_s: seconds a session may be idle before it ends as ``expired``.
        oracle: whether ``expert`` may be called from outside.
        threads: how many calls of blocking author code may run at once.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self,
        environments: Iterable[type[Environment]],
        *,
        max_sessions: int = 1024,
        lease_s: float = 900.0,
        oracle: bool = False,
        threads: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._classes: dict[str, type[Environment]] = {}
        for environment in environments:
            if environment.name in self._classes:
                raise DefinitionError(f"two tasks are named {environment.name!r}; rename one")
            toolset(environment)
            self._classes[environment.name] = environment
            self._datasets[environment.name] = Dataset(environment)
        self.metrics = Metrics()
        self.draining = False
        self._hurried = False
        self._oracle = oracle
        self._lease_s = lease_s
        self._clock = clock
        self._threads = Threads(threads)
        self._slots = FairSlots(max_sessions)
        self._live: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._ended: OrderedDict[str, tuple[_Entry, float]] = OrderedDict()
        self._openings: dict[str, _Opening] = {}
        self._requests: dict[str, str] = {}
        self._starting: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._infos: tuple[TaskInfo, ...] = ()

    @property
    def open_sessions(self) -> int:
        """How many sessions are running."""
        return len(self._live)

    def gauges(self) -> dict[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        return {
            "agentrl_sessions_open": float(len(self._live)),
            "agentrl_sessions_waiting": float(self._slots.waiting),
            "agentrl_sessions_capacity": float(self._slots.total),
        }

    async def start(self) -> None:
        """Open what sessions share (``Environment.startup``); once, and by itself on first use."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._startup())
        await asyncio.shield(self._starting)

    async def tasks(self) -> tuple[TaskInfo, ...]:
        """Return what is served."""
        await self.start()
        return self._infos

    async def open(self, request: OpenRequest) -> SessionInfo:
        """Open a session; the same ``request_id`` again gives the same one.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed.
        """
        key = request.request_id or secrets.token_urlsafe(12)
        if key in self._requests:
            return await self.info(self._requests[key])
        opening = self._openings.get(key)
        if opening is None:
            opening = _Opening(asyncio.create_task(self._open(request)))
            self._openings[key] = opening
            opening.task.add_done_callback(lambda _: self._openings.pop(key, None))
        opening.callers += 1
        try:
            return await asyncio.shield(opening.task)
        finally:
            opening.callers -= 1
            if opening.callers == 0 and not opening.task.done():
                opening.task.cancel()  # whoever asked is gone

    async def step(self, session_id: str, seq: int | None, message: Message) -> StepResult:
        """Play one assistant message. Raises what ``Session.step`` does, and UnknownSession."""
        entry = self._entry(session_id)
        begin = self._clock()
        fresh = entry.session.turn
        self._enter(session_id, entry)
        try:
            result = await entry.session.step(message, seq)
        finally:
            self._leave(session_id, entry)
        if result.seq > fresh:
            self.metrics.step_taken(entry.session.sample.task, self._clock() - begin)
        return result

    async def step_many(
        self, steps: Sequence[StepRequest], wait_s: float | None = None
    ) -> list[StepResult | WireError]:
        """Step many sessions at once; those of one session in order.

        Args:
            steps: what to play.
            wait_s: answer after so many seconds, with StepPending for what is not ready.
        """
        results: list[StepResult | WireError | None] = [None] * len(steps)
        groups: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            groups.setdefault(step.session_id, []).append(position)
        waiting: list[asyncio.Task[None]] = []
        for session_id, positions in groups.items():
            group = self._step_group(steps, positions, results)
            if self._never_waits(session_id):
                await group
            else:
                waiting.append(asyncio.create_task(group))
        if waiting:
            await asyncio.wait(waiting, timeout=wait_s)
        pending = StepPending("the step is still under way; ask again with the same seq")
        return [pending if result is None else result for result in results]

    async def info(self, session_id: str) -> SessionInfo:
        """Return how a session stands. Raises UnknownSession, SessionExpired."""
        session = self._entry(session_id).session
        if session.status is SessionStatus.EXPIRED:
            session.refuse_ended()
        return session.info()

    async def expert(self, session_id: str) -> Message:
        """Return the oracle's next move. Raises NotSupported without ``oracle``."""
        if not self._oracle:
            raise NotSupported("this server answers no expert calls; start it with --oracle")
        entry = self._entry(session_id)
        self._enter(session_id, entry)
        try:
            return await entry.session.expert()
        finally:
            self._leave(session_id, entry)

    async def close_session(self, session_id: str) -> None:
        """End a session and release what it holds; idempotent."""
        entry = self._live.get(session_id)
        if entry is not None:
            await self._end(session_id, entry, SessionStatus.CANCELLED)

    async def expire_idle(self) -> int:
        """End every session that is idle past its lease; return how many."""
        now, expired = self._clock(), []
        for session_id, since in self._idle.items():
            if now - since < self._lease_s:
                break
            expired.append(session_id)
        ends = [self._end(name, self._live[name], SessionStatus.EXPIRED) for name in expired]
        await asyncio.gather(*ends)
        self._forget_old()
        return len(expired)

    async def drain(self, deadline_s: float) -> None:
        """Take no new sessions, let the open ones end within the deadline, then close them."""
        self.draining = True
        self._slots.refuse_all()
        end = self._clock() + deadline_s
        while self._live and not self._hurried and self._clock() < end:
            await asyncio.sleep(min(0.05, deadline_s))
        await asyncio.gather(
            *(
                self._end(session_id, entry, SessionStatus.CANCELLED)
                for session_id, entry in list(self._live.items())
            )
        )

    def hurry(self) -> None:
        """Let a ``drain`` under way wait no longer."""
        self._hurried = True

    async def aclose(self) -> None:
        """Close every session, and what they share. The pool is of no further use."""
        await self.drain(0.0)
        if self._sweeper is not None and not self._sweeper.done():
            self._sweeper.cancel()
        closing = [entry.session.released for entry, _ in self._ended.values()]
        await asyncio.gather(*(task for task in closing if task is not None and not task.done()))
        if self._starting is not None:
            self._starting = None
            for environment in self._classes.values():
                await self._shutdown(environment)
        self._threads.stop()

    async def _startup(self) -> None:
        for environment in self._classes.values():
            await self._run(environment, environment.startup, environment.reset_timeout)
        self._infos = tuple([await self._describe(environment) for environment in self._classes.values()])

    async def _shutdown(self, environment: type[Environment]) -> None:
        try:
            await self._run(environment, environment.shutdown, environment.reset_timeout)
        except AUTHOR_ERRORS as error:
            logger.warning("shutdown of task %s failed", environment.name, exc_info=error)

    async def _describe(self, environment: type[Environment]) -> TaskInfo:
        dataset = self._datasets[environment.name]
        expert = self._oracle and environment.overrides("expert")
        return TaskInfo(
            name=environment.name,
            description=environment.description(),
            splits=await self._run(environment, dataset.info, environment.reset_timeout),
            tools=environment.tool_specs(),
            max_turns=environment.max_turns,
            capabilities=("expert",) if expert else (),
        )

    async def _run(
        self, environment: type[Environment], function: Callable[..., Any], timeout: float, *args: Any
    ) -> Any:
        runner = Runner(blocking=environment.blocking, threads=self._threads)
        return await runner.call(function, timeout, *args)

    async def _open(self, request: OpenRequest) -> SessionInfo:
        if request.task not in self._classes:
            known = ", ".join(self._classes) or "none"
            raise UnknownTask(f"no task {request.task!r} here; tasks: {known}")
        await self.start()
        self._keep_sweeping()
        taken = not self.draining and await self._slots.acquire(request.wait_s)
        if self.draining:
            if taken:
                self._slots.release()
            raise ServerDraining("the server is shutting down; open sessions elsewhere")
        if not taken:
            total = self._slots.total
            raise ServerFull(f"all {total} sessions of this server are taken", retry_after=1)
        try:
            session = await self._begin(request)
        except BaseException:
            self._slots.release()
            raise
        entry = _Entry(session, request.request_id)
        self._live[session.session_id] = entry
        self._idle[session.session_id] = self._clock()
        if request.request_id is not None:
            self._requests[request.request_id] = session.session_id
        return session.info()

    async def _begin(self, request: OpenRequest) -> Session:
        environment = self._classes[request.task]
        wanted = (request.split, request.index, request.seed, request.sample)
        choose = self._datasets[request.task].sample
        try:
            sample = await self._run(environment, choose, environment.reset_timeout, *wanted)
        except WireError:
            raise
        except AUTHOR_ERRORS as error:
            logger.warning("samples of task %s failed", request.task, exc_info=error)
            raise EnvironmentFailed(
                f"samples of task {request.task!r} failed: {type(error).__name__}: {error}"
            ) from error
        session = Session(
            environment,
            sample,
            session_id=secrets.token_urlsafe(16),
            threads=self._threads,
            clock=self._clock,
        )
        try:
            await session.start()
        except asyncio.CancelledError:
            await session.close()
            raise
        return session

    async def _step_group(
        self,
        steps: Sequence[StepRequest],
        positions: list[int],
        results: list[StepResult | WireError | None],
    ) -> None:
        for position in positions:
            step = steps[position]
            try:
                results[position] = await self.step(step.session_id, step.seq, step.message)
            except WireError as error:
                results[position] = error

    def _never_waits(self, session_id: str) -> bool:
        entry = self._live.get(session_id)
        return entry is None or entry.session.inline

    def _entry(self, session_id: str) -> _Entry:
        entry = self._live.get(session_id)
        if entry is None:
            ended = self._ended.get(session_id)
            if ended is None:
                raise UnknownSession("no such session; it never existed or ended long ago")
            entry = ended[0]
        return entry

    def _enter(self, session_id: str, entry: _Entry) -> None:
        entry.users += 1
        self._idle.pop(session_id, None)

    def _leave(self, session_id: str, entry: _Entry) -> None:
        entry.users -= 1
        if entry.session.status.final:
            self._retire(session_id, entry)
        elif entry.users == 0:
            self._idle[session_id] = self._clock()

    async def _end(self, session_id: str, entry: _Entry, status: SessionStatus) -> None:
        closing = entry.session.begin_close(status)
        self._retire(session_id, entry)
        await asyncio.shield(closing)

    def _retire(self, session_id: str, entry: _Entry) -> None:
        """Move a session that has ended out of the way; its slot is free once all is released."""
        if self._live.pop(session_id, None) is None:
            return
        self._idle.pop(session_id, None)
        self._ended[session_id] = (entry, self._clock())
        session = entry.session
        self.metrics.ended[session.sample.task, session.status] += 1
        if session.released is None or session.released.done():
            self._slots.release()
        else:
            session.released.add_done_callback(lambda _: self._slots.release())
        self._forget_old()

    def _forget_old(self) -> None:
        horizon = self._clock() - KEPT_S
        while self._ended:
            session_id, (entry, since) = next(iter(self._ended.items()))
            if since > horizon and len(self._ended) <= KEPT_SESSIONS:
                return
            del self._ended[session_id]
            if entry.request_id is not None:
                self._requests.pop(entry.request_id, None)

    def _keep_sweeping(self) -> None:
        loop = asyncio.get_running_loop()
        if self._sweeper is None or self._sweeper.done() or self._sweeper.get_loop() is not loop:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_S, self._lease_s / 2))
            await self.expire_idle()
