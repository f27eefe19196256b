"""Many servers behind one address: the same calls, each passed to the server that holds the session."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from pydantic_core import from_json, to_json

from agentrl_env.errors import (
    InvalidRequest,
    ServerDraining,
    SessionLost,
    StateUnavailable,
    StepPending,
    UnknownSession,
    UnknownTask,
    WireError,
)
from agentrl_env.fast_wire import StepItem, StepSaid
from agentrl_env.fleet.adoption import Adopter
from agentrl_env.fleet.failover import Keeper
from agentrl_env.fleet.opening import Opener
from agentrl_env.fleet.registry import BEAT_S, Roster
from agentrl_env.fleet.scheduler import Placement
from agentrl_env.fleet.store import FleetState, MemoryState, home
from agentrl_env.fleet.worker import Member
from agentrl_env.server.admin import VERSION, merge_lists, place_of
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.batching import ASK_AGAIN
from agentrl_env.session.single_flight import Once
from agentrl_env.types import SessionInfo
from agentrl_env.wire import (
    FleetInfo,
    ForkAnswer,
    ForkRequest,
    OpenRequest,
    SessionList,
    SessionQuery,
    TaskList,
    TranscriptQuery,
)

_RESULTS = b'{"results":['


class Fleet:
    """The sessions of all servers that dial in; a ``Service``.

    Args:
        state: what is shared with the other controllers; by default there are none.
        lost_after_s: seconds without a sign of life after which a server's sessions are lost.
        queue_s: seconds that an opening waits for room at least, whatever its client asks for.
        adoption_s: seconds that a session of a lost server waits for room; ``queue_s`` by default.
        task_limits: how many sessions of a task may be open in the whole fleet.
        client_limit: how many sessions one client may have open.
        resume: go on with the sessions of a server that is lost at another, where their tasks have
            ``snapshot`` and ``restore``. A step that was under way is played again, so that what it
            does in the world outside may happen twice.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self,
        *,
        state: FleetState | None = None,
        lost_after_s: float = 5.0,
        queue_s: float = 30.0,
        adoption_s: float | None = None,
        task_limits: Mapping[str, int] | None = None,
        client_limit: int | None = None,
        resume: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = Metrics()
        self.draining = False
        self.state: FleetState = state or MemoryState(clock)
        self.members: dict[str, Member] = {}
        self._queue_s = queue_s
        self._placement = Placement(self.members, task_limits=task_limits or {}, client_limit=client_limit)
        self.roster = Roster(
            self.members,
            self.state,
            lost_after_s=lost_after_s,
            changed=self._placement.serve,
            clock=clock,
        )
        self._opener = Opener(self.roster.find, self._placement, self.state, clock)
        self._openings: Once[bytes] = Once()
        self.resume = resume
        """Whether sessions outlive their servers."""
        patience_s = queue_s if adoption_s is None else adoption_s
        self._adopter = Adopter(self.roster, self._placement, self.state, patience_s, clock)
        self._keeper = Keeper(self.state, self._adopter.disown)
        if resume:
            self.roster.keeper = self._keeper

    def gauges(self) -> Mapping[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        members = self.members.values()
        return {
            "agentrl_fleet_servers": float(sum(member.linked for member in members)),
            "agentrl_sessions_open": float(sum(len(member.sessions) for member in members)),
            "agentrl_sessions_waiting": float(self._placement.waiting),
            "agentrl_sessions_capacity": float(sum(member.capacity for member in members)),
        }

    async def start(self) -> None:
        """Connect to the shared state, and begin to watch the servers. Raises ServeError."""
        await self.state.start()
        self.roster.start()

    def give_up(self) -> None:
        """Answer whoever waits that this controller ends; another may do."""
        words = "this controller is shutting down; ask another, or again"
        for member in self.members.values():
            member.refuse(partial(StateUnavailable, words, retry_after=1))
        self._placement.refuse_all(lambda _: True, ServerDraining(words))

    async def aclose(self) -> None:
        """Leave; the servers and their sessions go on."""
        self.draining = True
        self.roster.stop()
        self._adopter.stop()
        await self._keeper.aclose()
        await self.state.aclose()

    async def tasks(self) -> bytes:
        """Return a ``TaskList`` of what the servers serve."""
        await self.roster.wait_in_youth(lambda: bool(self.members))
        served = {name: task for member in self.members.values() for name, task in member.tasks.items()}
        return TaskList(tasks=tuple(served.values())).model_dump_json().encode()

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session on the least loaded server.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed.
        """
        name = request.request_id or secrets.token_urlsafe(12)
        opened = await self._openings.do(name, lambda: self._open(request, name))
        if self.resume:
            await self._keeper.written(SessionInfo.model_validate_json(opened).session_id)
        return opened

    async def step(self, session_id: str, step: StepSaid) -> bytes:
        """Return a ``StepResult``."""
        fields = b'"call":"step","session_id":%b,"seq":%d,"message":%b'
        return await self._ask(session_id, fields % (to_json(session_id), step.seq, step.message.json()))

    def never_waits(self, session_id: str) -> bool:
        """Return False: every step crosses a network."""
        return False

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error.

        The batch is split by server; a server that cannot be reached for now delays its own steps
        alone, where the caller wants an answer after ``wait_s`` seconds.
        """
        parts = self._parts(steps)
        results: list[bytes | None] = [None] * len(steps)

        async def play(positions: list[int]) -> None:
            items = [steps[position] for position in positions]
            for position, result in zip(positions, await self._play(items, wait_s), strict=True):
                results[position] = result

        playing = [asyncio.create_task(play(positions)) for positions in parts]
        if playing:
            late = None if wait_s is None else wait_s + BEAT_S
            _, pending = await asyncio.wait(playing, timeout=late)
            for task in pending:
                task.cancel()
        waiting = StepPending(ASK_AGAIN)
        return [self._error(waiting) if result is None else result for result in results]

    async def info(self, session_id: str) -> bytes:
        """Return a ``SessionInfo``."""
        return await self._pass_on("info", session_id)

    async def sessions(self, query: SessionQuery) -> bytes:
        """Return a ``SessionList``: one page of all servers' sessions, the newest first."""
        fields = b'"call":"sessions",' + query.model_dump_json().encode()[1:-1]
        asking = [member.ask(fields) for member in self.members.values() if member.linked]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        lists = [SessionList.model_validate_json(a) for a in answers if isinstance(a, bytes)]
        return merge_lists(lists, query).model_dump_json().encode()

    async def transcript(self, session_id: str, query: TranscriptQuery) -> bytes:
        """Return a ``Transcript``."""
        fields = query.model_dump_json().encode()[1:-1]
        return await self._pass_on("transcript", session_id, b"," + fields)

    async def fleet(self) -> bytes:
        """Return a ``FleetInfo``."""
        info = FleetInfo(
            kind="controller",
            name=place_of(os.getpid()),
            version=VERSION,
            draining=self.draining,
            waiting=self._placement.waiting,
            servers=tuple(member.summary() for member in self.members.values()),
        )
        return info.model_dump_json().encode()

    async def expert(self, session_id: str) -> bytes:
        """Return an ``ExpertAnswer``."""
        return await self._pass_on("expert", session_id)

    async def fork(self, session_id: str, request: ForkRequest) -> bytes:
        """Return a ``ForkAnswer``; forks live on the server of the session they come from."""
        request = request.model_copy(update={"request_id": request.request_id or secrets.token_urlsafe(12)})
        fields = request.model_dump_json().encode()[1:-1]
        answer = await self._pass_on("fork", session_id, b"," + fields)
        if self.resume:
            forks = ForkAnswer.model_validate_json(answer).sessions
            await self._keeper.written(*(fork.session_id for fork in forks))
        return answer

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent. One that is lost, or was never there, has ended already."""
        with suppress(SessionLost, UnknownSession):
            if self.resume:
                await self._adopter.close(session_id)
            else:
                await self._pass_on("close", session_id)

    async def _open(self, request: OpenRequest, name: str) -> bytes:
        if self.draining:
            raise ServerDraining("the controller is shutting down; open sessions at another")
        tasks = self.roster.tasks
        await self.roster.wait_in_youth(lambda: request.task in tasks)
        if request.task not in tasks:
            known = ", ".join(tasks) or "none"
            raise UnknownTask(f"no task {request.task!r} here; tasks: {known}")
        return await self._opener.open(request, name, max(request.wait_s, self._queue_s))

    def _parts(self, steps: Sequence[StepItem]) -> list[list[int]]:
        """Return which of the steps go to the same server; those of a session stay together."""
        parts: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            parts.setdefault(self._place(step.session_id), []).append(position)
        return list(parts.values())

    def _place(self, session_id: str) -> str:
        """Return a name that sessions of one server share."""
        if not self.resume:
            return home(session_id)
        member = self._adopter.here(session_id)
        return member.server_id if member is not None else session_id

    async def _play(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Play steps of one server's sessions; where that dies on the way, at those that go on with them."""
        items = b",".join(step.json() for step in steps)
        fields = b'"call":"step_many","wait_s":%b,"steps":[%b]' % (to_json(wait_s), items)
        try:
            first = steps[0].session_id
            member = await self._member_of(first)
            others = {step.session_id for step in steps} - {first} if self.resume else ()
            if any(self._place(other) != member.server_id for other in others):
                return await self.step_many(steps, wait_s)  # while it was found, they went different ways
            try:
                answer = await member.ask(fields)
                if self.resume and not await self._written_soon(steps):
                    return [self._error(StepPending(ASK_AGAIN))] * len(steps)
                return _split(answer, len(steps))
            except SessionLost:
                if not self.resume:
                    raise
            return await self.step_many(steps, wait_s)
        except WireError as error:
            return [self._error(error)] * len(steps)

    async def _written_soon(self, steps: Sequence[StepItem]) -> bool:
        try:
            await self._keeper.written(*(step.session_id for step in steps))
        except StateUnavailable:
            return False
        return True

    async def _pass_on(self, call: str, session_id: str, more: bytes = b"") -> bytes:
        fields = b'"call":"%b","session_id":%b%b' % (call.encode(), to_json(session_id), more)
        return await self._ask(session_id, fields)

    async def _ask(self, session_id: str, fields: bytes) -> bytes:
        """Make a call of one session; where its server dies on the way, at the one that goes on with it."""
        while True:
            member = await self._member_of(session_id)
            try:
                answer = await member.ask(fields)
                if self.resume:
                    await self._keeper.written(session_id)
                return answer
            except SessionLost:
                if not self.resume:
                    raise

    async def _member_of(self, session_id: str) -> Member:
        if self.resume:
            return await self._adopter.find(session_id)
        return await self.roster.find(home(session_id))

    def _error(self, error: WireError) -> bytes:
        self.metrics.errors[error.type] += 1
        return to_json(error.wire())


def _split(answer: bytes, number: int) -> list[bytes]:
    """Return the results of a batch, each as JSON."""
    parts = answer[len(_RESULTS) : -2].split(b",\n")
    if answer.startswith(_RESULTS) and len(parts) == number:
        return parts
    results = from_json(answer).get("results", [])
    if len(results) != number:
        raise InvalidRequest(f"a server answered {len(results)} of {number} steps")
    return [to_json(result) for result in results]
