"""The service of a fleet: forwards each call of the protocol to the server that holds the session."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from pydantic import BaseModel
from pydantic_core import to_json

from agentrl_env.errors import (
    ServerDraining,
    SessionLost,
    StateUnavailable,
    StepPending,
    UnknownServer,
    UnknownSession,
    WireError,
)
from agentrl_env.fast_wire import FastBatch, FastStep, Step, encode
from agentrl_env.fleet.registry import BEAT_S, Registry
from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.fleet.scheduler import Opener, Placement
from agentrl_env.fleet.session_failover import Failover
from agentrl_env.fleet.store import FleetStore, MemoryStore
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.listing import merge_lists
from agentrl_env.session.observer import as_wire_error
from agentrl_env.session.pool import STEP_PENDING, VERSION, place_of
from agentrl_env.session.single_flight import SingleFlight
from agentrl_env.types import FleetInfo, SessionInfo
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
    StepBatch,
    TaskList,
    Transcript,
    TranscriptRequest,
    choose_task,
    payload_digest,
)

LIST_S = 2.0
"""Seconds to wait for a server's list of sessions. The sessions of a slower server are omitted."""
SHUTTING_DOWN = "the controller is shutting down; open sessions at another"


class FleetService:
    """A ``Service`` with the sessions of all servers that have a link to this controller.

    Args:
        store: state that the controllers share. By default this is the only controller.
        lost_after_s: seconds without a heartbeat after which a server's sessions are lost.
        stuck_after_s: as for ``Registry``.
        queue_s: minimum number of seconds that an opening waits for a place.
        adoption_s: seconds that a session of a lost server waits for a place. By default ``queue_s``.
        task_limits: maximum number of sessions of a task in the whole fleet.
        client_limit: maximum number of sessions of one client.
        resume: continue the sessions of a lost server on another one, if their tasks have ``snapshot``
            and ``restore``. A step that was in progress is repeated, so its effects outside the session's
            own state might happen twice.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        store: FleetStore | None = None,
        lost_after_s: float = 5.0,
        stuck_after_s: float = 0.0,
        queue_s: float = 30.0,
        adoption_s: float | None = None,
        task_limits: Mapping[str, int] | None = None,
        client_limit: int | None = None,
        resume: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.store: FleetStore = store or MemoryStore(clock)
        self._queue_s = queue_s
        self.metrics = Metrics()
        """Counters of the controller, including the sums over its servers."""
        self.registry = Registry(
            self.store,
            lost_after_s=lost_after_s,
            stuck_after_s=stuck_after_s,
            on_room=lambda: self._placement.serve(),
            metrics=self.metrics,
            clock=clock,
        )
        self.metrics.servers = lambda: [server.summary() for server in self.registry.servers.values()]
        self.servers = self.registry.servers
        """Servers by id."""
        self._placement = Placement(self.servers, task_limits=task_limits or {}, client_limit=client_limit)
        self._opener = Opener(self.registry, self._recall, self._placement, self.store, clock)
        self._openings: SingleFlight[bytes] = SingleFlight()
        self._playing: set[asyncio.Task[bytes]] = set()
        if resume:
            wait_s = queue_s if adoption_s is None else adoption_s
            self.registry.routing = Failover(self.registry, self._placement, self.store, wait_s, clock)
        self._routing = self.registry.routing

    @property
    def resumes(self) -> bool:
        """True if sessions survive the loss of their server."""
        return self._routing.survives

    def use_token(self, token: str) -> None:
        """Use the operator token to seal the entries that the controllers share in the store."""
        self._opener.seal_key = token.encode()

    def gauges(self) -> Mapping[str, float]:
        """Return the gauges of ``/metrics``."""
        servers = self.servers.values()
        return {
            "agentrl_fleet_servers": float(sum(server.linked for server in servers)),
            "agentrl_fleet_servers_lost": float(len(self.registry.recently_lost())),
            "agentrl_sessions_open": float(sum(len(server.sessions) for server in servers)),
            "agentrl_sessions_waiting": float(self._placement.waiting),
            "agentrl_sessions_capacity": float(sum(server.capacity for server in servers)),
        }

    def check_ready(self) -> None:
        """Raise ServerDraining if no session can be opened."""
        if self.draining:
            raise ServerDraining(SHUTTING_DOWN)

    async def start(self) -> None:
        """Connect to the store and start to watch the servers. Raises ServeError."""
        await self.store.start()
        self.registry.start()

    def fail_waiting(self) -> None:
        """Answer all calls in progress with errors, so that callers turn to another controller."""
        reason = "this controller is shutting down; call another one, or try again"
        for server in self.servers.values():
            server.fail_calls(partial(StateUnavailable, reason, retry_after=1))
        self._placement.fail_waiting(partial(ServerDraining, reason))

    async def aclose(self) -> None:
        """Disconnect. The servers and their sessions continue."""
        self.draining = True
        await self.registry.stop()
        playing = list(self._playing)
        for step in playing:
            step.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        await self._routing.aclose()
        await self.store.aclose()

    async def tasks(self, request: EmptyRequest = EMPTY) -> TaskList:
        """Return the tasks of all servers."""
        await self.registry.wait_at_startup(lambda: bool(self.servers))
        tasks = {name: task for server in self.servers.values() for name, task in server.tasks.items()}
        return TaskList(tasks=tuple(tasks.values()))

    async def open(self, request: OpenRequest) -> bytes:
        """Open a session on the least loaded server. A repeated ``request_id`` returns the same session.

        Raises UnknownTask, UnknownSample, ServerFull, ServerDraining, EnvironmentFailed, and
        IdempotencyConflict if the ``request_id`` was used for another request.
        """
        key = request.request_id or secrets.token_urlsafe(12)
        bound = request.model_copy(update={"digest": request.digest or payload_digest(request)})
        # Of two requests with one key, even at two controllers, the one that claims the key wins.
        return await self._openings.run(f"{bound.digest} {key}", lambda: self._open(bound, key))

    async def step(self, request: Step) -> bytes:
        """Play one assistant message and return the StepResult as JSON."""
        return await self._forward("step", request.session_id, _step_json(request))

    async def step_many(self, request: FastBatch | StepBatch) -> list[bytes | WireError]:
        """Step many sessions and return the result or the error of each step.

        The batch is split by server. With ``wait_s``, a server without a link delays only its own steps.
        """
        return await self._step_many(request.steps, request.wait_s)

    async def info(self, request: SessionRequest) -> bytes:
        """Return the state of a session."""
        return await self._forward("info", request.session_id, _json(request))

    async def sessions(self, request: SessionQuery) -> SessionList:
        """Return the sessions of all servers, newest first."""
        text = _json(request)

        async def ask(server: RemoteServer) -> SessionList | None:
            """Return the sessions of a server, or None if it does not answer in time."""
            with suppress(WireError, TimeoutError):
                async with asyncio.timeout(LIST_S):
                    answer = await server.call("sessions", text)
                return await self.registry.checked(server, answer, SessionList.model_validate_json)
            return None

        linked = [server for server in self.servers.values() if server.linked]
        lists = await asyncio.gather(*map(ask, linked))
        return merge_lists([found for found in lists if found is not None], request)

    async def transcript(self, request: TranscriptRequest) -> bytes:
        """Return the last turns of a session."""
        return await self._forward("transcript", request.session_id, _json(request))

    async def drain_server(self, request: DrainRequest) -> FleetInfo:
        """Stop or resume placing new sessions on a server. The other controllers follow.

        Raises UnknownServer.
        """
        server = self.servers.get(request.server_id)
        if server is None:
            raise UnknownServer(f"no server {request.server_id!r} in this fleet; GET /v1/fleet lists them")
        server.stale = request.draining
        with suppress(WireError, TimeoutError):  # the server is busy, or too old to have this call
            async with asyncio.timeout(LIST_S):
                await server.call("drain_server", _json(request))
            server.draining = request.draining  # as its next heartbeat reports
        self._placement.serve()
        return await self.fleet()

    async def fleet(self, request: FleetQuery = FLEET_NOW) -> FleetInfo:
        """Return the servers."""
        return FleetInfo(
            kind="controller",
            name=place_of(os.getpid()),
            version=VERSION,
            draining=self.draining,
            waiting=self._placement.waiting,
            servers=tuple(server.summary() for server in self.servers.values()),
            lost=self.registry.recently_lost(),
            counts=self.metrics.by_task(),
        )

    async def expert(self, request: SessionRequest) -> bytes:
        """Return the next message of the task's expert."""
        return await self._forward("expert", request.session_id, _json(request))

    async def fork(self, request: ForkRequest) -> bytes:
        """Open sessions that continue from the state of a session, on the same server."""
        key, digest = request.request_id or secrets.token_urlsafe(12), str(request.n)
        keep = f"{request.session_id}/{key}" if self.resumes and request.request_id else None
        if keep and (known := await self._opener.recall(keep, digest)) is not None:
            return b'{"sessions":[%b]}' % b",".join(known)
        named = request.model_copy(update={"request_id": key})
        answer = await self._forward("fork", request.session_id, _json(named))
        if self.resumes:
            forks = [fork.session_id for fork in ForkAnswer.model_validate_json(answer).sessions]
            await self._routing.confirm(forks)
            if keep:
                await self._opener.remember(keep, digest, forks)
        return answer

    async def close(self, request: SessionRequest) -> None:
        """End a session. Idempotent: a lost or unknown session counts as ended."""
        with suppress(SessionLost, UnknownSession):
            await self._routing.close(request.session_id)

    async def _open(self, request: OpenRequest, key: str) -> bytes:
        if self.draining:
            raise ServerDraining(SHUTTING_DOWN)
        tasks = self.registry.tasks
        await self.registry.wait_at_startup(lambda: request.task in tasks or bool(tasks and not request.task))
        request = request.model_copy(update={"task": choose_task(request.task, tasks)})
        opened = await self._opener.open(request, key, max(request.wait_s, self._queue_s))
        if self.resumes:
            session_id = SessionInfo.model_validate_json(opened).session_id
            await self._routing.confirm([session_id])
            if request.request_id is not None:
                await self._opener.remember(key, request.digest, [session_id])
        return opened

    async def _recall(self, session_ids: Sequence[str]) -> list[bytes] | None:
        """Return the state of the sessions that a request opened, or None if one of them is lost."""
        calls = [self.info(SessionRequest(session_id=session_id)) for session_id in session_ids]
        try:
            return list(await asyncio.gather(*calls))
        except (SessionLost, UnknownSession):
            return None

    async def _forward(self, call: str, session_id: str, request: bytes) -> bytes:
        """Forward a call to the session's server. If the server is lost, repeat the call at the next one."""
        while True:
            server = await self._routing.find(session_id)
            try:
                async with self._routing.turn(session_id) as moved:
                    server = moved or server
                    answer = await server.call(call, request)
                    await self.registry.checked(server, answer, _READ[call])
                    await self._routing.confirm([session_id])
                return answer
            except SessionLost:
                if not self.resumes:
                    raise
                self._routing.interrupted([session_id])

    async def _step_in_turn(self, step: Step) -> bytes:
        """Play a step in a separate task, which continues if the caller stops waiting for the result."""

        def end(playing: asyncio.Task[bytes]) -> None:
            self._playing.discard(playing)
            if not playing.cancelled():
                playing.exception()  # mark it as retrieved, even if the caller is gone

        playing = asyncio.create_task(self._forward("step", step.session_id, _step_json(step)))
        self._playing.add(playing)
        playing.add_done_callback(end)
        return await asyncio.shield(playing)

    async def _step_many(self, steps: Sequence[Step], wait_s: float | None) -> list[bytes | WireError]:
        groups: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            groups.setdefault(self._routing.group(step.session_id), []).append(position)
        results: list[bytes | WireError] = [StepPending(STEP_PENDING)] * len(steps)

        async def play(positions: list[int]) -> None:
            group = [steps[position] for position in positions]
            for position, result in zip(positions, await self._step_group(group, wait_s), strict=True):
                results[position] = result

        playing = [asyncio.create_task(play(positions)) for positions in groups.values()]
        try:
            if playing:
                await asyncio.wait(playing, timeout=None if wait_s is None else wait_s + BEAT_S)
        finally:
            for task in playing:
                task.cancel()
        for task in playing:
            if task.done():
                task.result()
        return results

    async def _step_group(self, steps: Sequence[Step], wait_s: float | None) -> list[bytes | WireError]:
        """Play steps of sessions on one server. If the server is lost, split the steps again."""
        items = b",".join(map(_step_json, steps))
        request = b'{"wait_s":%b,"steps":[%b]}' % (to_json(wait_s), items)
        session_ids = {step.session_id for step in steps}
        try:
            server = await self._routing.find(steps[0].session_id)
            if self._routing.takes_turns(steps[0].session_id):  # such a session is alone in its group
                return [await self._step_in_turn(steps[0])]
            if self.resumes:
                others = session_ids - {steps[0].session_id}
                if any(self._routing.group(other) != server.server_id for other in others):
                    return await self._step_many(steps, wait_s)  # they have moved to several servers
            try:
                answer = await server.call("step_many", request)
                results = await self.registry.checked(server, answer, partial(_split, len(steps)))
                try:
                    await self._routing.confirm(session_ids)
                except StateUnavailable:
                    return [StepPending(STEP_PENDING)] * len(steps)
                return results
            except SessionLost:
                if not self.resumes:
                    raise
                self._routing.interrupted(session_ids)
            return await self._step_many(steps, wait_s)
        except Exception as error:
            return [as_wire_error(error)] * len(steps)


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


_RESULTS, _JSON = msgspec.json.Decoder(_Results), msgspec.json.Decoder(msgspec.Raw)


def _json(request: BaseModel) -> bytes:
    return request.model_dump_json().encode()


def _step_json(step: Step) -> bytes:
    """Return a step as JSON, without the id of the frame in which a client sent it."""
    if isinstance(step, FastStep):
        step = FastStep(step.session_id, step.seq, step.message)
    return encode(step)


def _split(number: int, answer: bytes) -> list[bytes | WireError]:
    """Return the results of a batch, each as JSON. Raises ValueError or MsgspecError."""
    parts: list[bytes | WireError] = [_object(result) for result in _RESULTS.decode(answer).results]
    if len(parts) != number:
        raise ValueError("not one result for each step")
    return parts


def _object(answer: bytes | msgspec.Raw) -> bytes:
    """Return an answer after checking that it is a JSON object. Its content affects only its session."""
    text = bytes(answer)
    if not text.startswith(b"{"):
        raise ValueError("not an object")
    return text


_READ: dict[str, Callable[[bytes], object]] = {
    "step": lambda answer: _object(_JSON.decode(answer)),
    "info": SessionInfo.model_validate_json,
    "transcript": Transcript.model_validate_json,
    "expert": ExpertAnswer.model_validate_json,
    "fork": ForkAnswer.model_validate_json,
}
"""Readers that check the answer of each call. All but the reader of steps parse it completely."""
