"""Many servers behind one address: the same calls, each passed to the server that holds the session."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pydantic_core import from_json, to_json

from agentrl_env.controller.member import Member, Outbox
from agentrl_env.controller.opening import Opener
from agentrl_env.controller.queue import Placement
from agentrl_env.controller.state import FleetState, MemoryState
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
from agentrl_env.server.inspection import VERSION, merge_lists
from agentrl_env.server.metrics import Metrics
from agentrl_env.server.once import Once
from agentrl_env.types import TaskInfo
from agentrl_env.wire import (
    Beat,
    FleetInfo,
    ForkRequest,
    Hello,
    OpenRequest,
    SessionList,
    SessionQuery,
    StepBody,
    StepRequest,
    TaskList,
    TranscriptQuery,
    Welcome,
)

logger = logging.getLogger("agentrl_env")

BEAT_S = 1.0
"""How often a server gives a sign of life."""
BLIND_PATIENCE = 3
"""How many times as long a silent server is waited for where other controllers cannot be asked."""
LOST = "the server that held the session is gone; open a new one"
_RESULTS = b'{"results":['


class Fleet:
    """The sessions of all servers that dial in; a ``Service``.

    Args:
        state: what is shared with the other controllers; by default there are none.
        lost_after_s: seconds without a sign of life after which a server's sessions are lost.
        queue_s: seconds that an opening waits for room at least, whatever its client asks for.
        task_limits: how many sessions of a task may be open in the whole fleet.
        client_limit: how many sessions one client may have open.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(
        self,
        *,
        state: FleetState | None = None,
        lost_after_s: float = 5.0,
        queue_s: float = 30.0,
        task_limits: Mapping[str, int] | None = None,
        client_limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = Metrics()
        self.draining = False
        self.state: FleetState = state or MemoryState(clock)
        self.members: dict[str, Member] = {}
        self._lost_after_s = lost_after_s
        self._queue_s = queue_s
        self._clock = clock
        self._begin = -math.inf
        self._tasks: dict[str, TaskInfo] = {}
        self._placement = Placement(self.members, task_limits=task_limits or {}, client_limit=client_limit)
        self._opener = Opener(self.members, self._placement, self.state, clock)
        self._openings: Once[bytes] = Once()
        self._arrival = asyncio.Condition()
        self._lost_here: set[str] = set()
        """Servers declared dead while the shared state could not be told."""
        self._watching: asyncio.Task[None] | None = None

    def gauges(self) -> Mapping[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        members = self.members.values()
        return {
            "agentrl_fleet_servers": float(sum(member.linked for member in members)),
            "agentrl_sessions_open": float(sum(len(member.sessions) for member in members)),
            "agentrl_sessions_waiting": float(self._placement.waiting),
            "agentrl_sessions_capacity": float(sum(member.capacity for member in members)),
        }

    async def start(self, own_url: str) -> None:
        """Join the other controllers, and begin to look after the servers."""
        await self.state.start(own_url)
        self._begin = self._clock()
        self._watching = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        """Leave; the servers and their sessions go on."""
        self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        await self.state.aclose()

    async def tasks(self) -> bytes:
        """Return a ``TaskList`` of what the servers serve."""
        if not self.members:
            await self._wait_for(lambda: bool(self.members))
        served = {name: task for member in self.members.values() for name, task in member.tasks.items()}
        return TaskList(tasks=tuple(served.values())).model_dump_json().encode()

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session on the least loaded server.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed.
        """
        name = request.request_id or secrets.token_urlsafe(12)
        request = request.model_copy(update={"request_id": name})
        return await self._openings.do(name, lambda: self._open(request, name))

    async def step(self, session_id: str, body: StepBody) -> bytes:
        """Return a ``StepResult``."""
        member = await self._member_of(session_id)
        message = body.message.model_dump_json().encode()
        fields = b'"call":"step","session_id":%b,"seq":%d,"message":%b'
        return await member.ask(fields % (to_json(session_id), body.seq, message))

    def never_waits(self, session_id: str) -> bool:
        """Return False: every step crosses a network."""
        return False

    async def step_many(self, steps: Sequence[StepRequest], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error.

        The batch is split by server; a server that cannot be reached for now delays its own steps
        alone, where the caller wants an answer after ``wait_s`` seconds.
        """
        parts: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            parts.setdefault(_server_of(step.session_id), []).append(position)
        results: list[bytes | None] = [None] * len(steps)

        async def play(positions: list[int]) -> None:
            items = [steps[position] for position in positions]
            for position, result in zip(positions, await self._play(items, wait_s), strict=True):
                results[position] = result

        playing = [asyncio.create_task(play(positions)) for positions in parts.values()]
        if playing:
            late = None if wait_s is None else wait_s + BEAT_S
            _, pending = await asyncio.wait(playing, timeout=late)
            for task in pending:
                task.cancel()
        waiting = StepPending("the step is still under way; ask again with the same seq")
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
            name=f"{socket.gethostname()} {os.getpid()}",
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
        return await self._pass_on("fork", session_id, b"," + fields)

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent. One that is lost, or was never there, has ended already."""
        try:
            await self._pass_on("close", session_id)
        except (SessionLost, UnknownSession):
            return

    async def join(self, hello: Hello, outbox: Outbox) -> bool:
        """Take in a server that dials; False where its sessions were reported lost before."""
        controllers: tuple[str, ...] = ()
        with suppress(StateUnavailable):  # what is open goes on without
            if await self._is_lost(hello.server_id):
                self._drop(hello.server_id, LOST)
                return False
            await self.state.saw(hello.server_id)
            controllers = await self.state.controllers()
        welcome = Welcome(beat_s=BEAT_S, controllers=controllers)
        outbox.put(b'{"welcome":%b}' % welcome.model_dump_json().encode())
        member = self.members.get(hello.server_id)
        if member is None:
            member = self.members[hello.server_id] = Member(hello, self._clock)
            logger.info("server %s joined: %s", hello.server_id, ", ".join(member.tasks))
        else:
            member.greet(hello)
        self._tasks.update(member.tasks)
        member.link(outbox)
        self._placement.serve()
        async with self._arrival:
            self._arrival.notify_all()
        return True

    def part(self, server_id: str, outbox: Outbox) -> None:
        """Take note that a link is gone. A server that has said good-bye is gone with it."""
        member = self.members.get(server_id)
        if member is not None:
            member.unlink(outbox)
            if member.leaving and not member.linked:
                self._drop(server_id, "the server that held the session was stopped; open a new one")

    async def hear_beat(self, server_id: str, beat: Beat) -> None:
        """Take in a server's sign of life."""
        member = self.members.get(server_id)
        if member is not None:
            member.hear_beat(beat)
            self._placement.serve()

    def hear_answer(self, server_id: str, frame: bytes) -> None:
        """Hand a server's answer to whoever asked. Raises ValueError where it is none."""
        member = self.members.get(server_id)
        if member is not None:
            member.hear_answer(frame)

    async def lose(self, server_id: str, why: str) -> None:
        """Declare a server dead: its sessions end as lost, for every controller."""
        member = self.members.get(server_id)
        self._lost_here.add(server_id)
        with suppress(StateUnavailable):  # then it is told later
            await self.state.lose(server_id)
            self._lost_here.discard(server_id)
        if member is not None:
            logger.warning("server %s is lost with %d sessions: %s", server_id, len(member.sessions), why)
            self._drop(server_id, LOST)

    async def look(self) -> None:
        """Declare the servers dead that no controller has heard of for too long."""
        for server_id in list(self._lost_here):
            await self.state.lose(server_id)
            self._lost_here.discard(server_id)
        for member in list(self.members.values()):
            silent_s = self._clock() - member.seen
            if await self._is_lost(member.server_id):
                self._drop(member.server_id, LOST)
            elif silent_s < self._lost_after_s:
                await self.state.saw(member.server_id)
            elif not await self._seen_elsewhere(member, silent_s):
                await self.lose(member.server_id, f"no sign of life for {self._lost_after_s:g} s")

    async def _seen_elsewhere(self, member: Member, silent_s: float) -> bool:
        """Return whether another controller hears a server; where nobody can say so, give it longer."""
        try:
            return await self.state.seen(member.server_id, self._lost_after_s)
        except StateUnavailable:
            return silent_s < BLIND_PATIENCE * self._lost_after_s

    async def _is_lost(self, server_id: str) -> bool:
        return server_id in self._lost_here or await self.state.is_lost(server_id)

    async def _open(self, request: OpenRequest, name: str) -> bytes:
        if self.draining:
            raise ServerDraining("the controller is shutting down; open sessions at another")
        if request.task not in self._tasks:
            await self._wait_for(lambda: request.task in self._tasks)
        if request.task not in self._tasks:
            known = ", ".join(self._tasks) or "none"
            raise UnknownTask(f"no task {request.task!r} here; tasks: {known}")
        return await self._opener.open(request, name, max(request.wait_s, self._queue_s))

    async def _play(self, steps: Sequence[StepRequest], wait_s: float | None) -> list[bytes]:
        """Play steps of one server's sessions."""
        try:
            member = await self._member_of(steps[0].session_id)
            items = b",".join(step.model_dump_json().encode() for step in steps)
            fields = b'"call":"step_many","wait_s":%b,"steps":[%b]' % (to_json(wait_s), items)
            return _split(await member.ask(fields), len(steps))
        except WireError as error:
            return [self._error(error)] * len(steps)

    async def _pass_on(self, call: str, session_id: str, more: bytes = b"") -> bytes:
        member = await self._member_of(session_id)
        return await member.ask(b'"call":"%b","session_id":%b%b' % (call.encode(), to_json(session_id), more))

    async def _member_of(self, session_id: str) -> Member:
        """Return the server that holds a session. Raises SessionLost, UnknownSession."""
        server_id = _server_of(session_id)
        member = self.members.get(server_id)
        if member is not None:
            return member
        if not await self._is_lost(server_id):
            # It may be that the server has not dialled yet, after this controller began.
            await self._wait_for(lambda: server_id in self.members)
            member = self.members.get(server_id)
            if member is not None:
                return member
            if not await self.state.knows(server_id):
                raise UnknownSession("no such session; it never existed or ended long ago")
        raise SessionLost(LOST, server=server_id)

    async def _wait_for(self, there: Callable[[], bool]) -> None:
        """Wait for something to arrive, as long as servers may still be on their way."""
        left = self._begin + self._lost_after_s - self._clock()
        if left <= 0 or there():
            return
        try:
            async with asyncio.timeout(left), self._arrival:
                await self._arrival.wait_for(there)
        except TimeoutError:
            return

    def _drop(self, server_id: str, reason: str) -> None:
        member = self.members.pop(server_id, None)
        if member is not None:
            member.lose(reason)
            self._placement.serve()

    def _error(self, error: WireError) -> bytes:
        self.metrics.errors[error.type] += 1
        return to_json(error.wire())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT_S, self._lost_after_s / 4))
            try:
                await self.look()
                await self.state.controllers()
            except StateUnavailable as error:
                logger.warning("%s", error)


def _server_of(session_id: str) -> str:
    return session_id.partition(".")[0]


def _split(answer: bytes, number: int) -> list[bytes]:
    """Return the results of a batch, each as JSON."""
    parts = answer[len(_RESULTS) : -2].split(b",\n")
    if answer.startswith(_RESULTS) and len(parts) == number:
        return parts
    results = from_json(answer).get("results", [])
    if len(results) != number:
        raise InvalidRequest(f"a server answered {len(results)} of {number} steps")
    return [to_json(result) for result in results]
