"""AgentRL's workers behind a controller. Each worker becomes a server of the fleet.

A worker registers by its heartbeats. The controller then creates a ``SessionPool`` for it, which is linked
to the controller like any other server. The pool's task passes every assistant message to the worker. Steps,
leases, limits, queues, listings and failures therefore work as in all other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Protocol
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.routing import Route

from agentrl_env.bridges.agentrl.server import CUSTOM, STATUS_KEY, endpoint_of
from agentrl_env.environment import Environment, check_class
from agentrl_env.errors import AgentRLError, DefinitionError, InvalidRequest, ServerFull
from agentrl_env.schema import echo
from agentrl_env.server.api import Api, read
from agentrl_env.server.app import call_at_end
from agentrl_env.server.auth import as_bearer, bearer_token, caller
from agentrl_env.server.controller_link import ControllerLinks
from agentrl_env.server.middleware import AGENTRL_PATH
from agentrl_env.server.telemetry.metrics import Metrics, SessionMetrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.tools import Done, Reply
from agentrl_env.types import Message, TaskSample, ToolSpec

logger = logging.getLogger("agentrl_env")

START, SESSIONS = "start_sample", "get_sessions"
PROBE_S = 5.0
"""Seconds between checks that the worker still has the session, during a long call."""
CALL_S = 600.0
"""Maximum seconds of a worker's turn. A later answer is dropped, and the session fails."""
CANCEL_S = 30.0
"""Maximum seconds for a worker to end a session. The session keeps its place until then."""
LOST_S = 30.0
"""Seconds without a heartbeat after which a worker's sessions are lost. Workers send one every 8 s."""
LIMITS = ("task limit reached", "agent context limit")
FAILURES = ("task error", "cancelled", "unknown")
"""Statuses of sessions without a meaningful reward."""


class WorkerFailed(AgentRLError):
    """An AgentRL worker did not play a turn. The session has failed and has no reward."""


class Heartbeat(BaseModel):
    """Registration of a worker, repeated periodically."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    address: str = ""
    concurrency: int = Field(ge=1)
    indices: list[int | str]


class Transport(Protocol):
    """Sends calls to one worker."""

    async def call(self, endpoint: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """Return the answer to a call. Raises WorkerFailed, or ServerFull if the worker has no place."""

    async def aclose(self) -> None:
        """Release all resources."""


class HttpTransport:
    """Calls to a worker that listens on an address.

    Args:
        address: base URL of the worker's API.
    """

    def __init__(self, address: str) -> None:
        self._http = httpx.AsyncClient(base_url=address, limits=httpx.Limits(max_connections=None))

    async def call(self, endpoint: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """Return the answer to a call. Raises WorkerFailed, or ServerFull if the worker has no place."""
        try:
            response = await self._http.request(
                "GET" if endpoint == SESSIONS else "POST",
                endpoint,
                json=body,
                timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if endpoint == START:
                raise ServerFull("the worker does not answer; another worker might", retry_after=1) from error
            raise WorkerFailed(f"the worker did not answer {endpoint}: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise WorkerFailed(f"the worker did not answer {endpoint}: {reason}") from error
        return read_answer(endpoint, response.status_code, response.text, response.content)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def read_answer(endpoint: str, code: int, reason: str, body: bytes) -> Any:
    """Return a worker's answer. Raises WorkerFailed, or ServerFull if the worker has no room."""
    if code == 406:
        raise ServerFull("the worker has no room for another session", retry_after=1)
    if code != 200:
        raise WorkerFailed(f"the worker answered {code} to {endpoint}: {reason[:300]}")
    try:
        return httpx.Response(200, content=body).json() if body else None
    except ValueError as error:
        raise WorkerFailed(f"the worker's answer to {endpoint} is not JSON") from error


class WorkerTask(Environment):
    """A task that an AgentRL worker plays."""

    blocking = False
    splits = ("train",)
    max_turns = 1_000_000  # the worker's task sets the limit
    tool_timeout = CALL_S + 30
    reset_timeout = CALL_S + 30
    transport: ClassVar[Transport]
    indices: ClassVar[dict[str, int | str]]
    """Indices of the worker by name."""
    takes_custom: ClassVar[bool]

    @classmethod
    def samples(cls, split: str) -> Any:
        """Return an empty sample for each index. The samples have names unless the indices count from 0."""
        counted = list(cls.indices.values()) == list(range(len(cls.indices)))
        return [{}] * len(cls.indices) if counted else {name: {} for name in cls.indices}

    async def reset(self, sample: TaskSample, rng: Any) -> list[Message]:
        """Start the session on the worker."""
        self.number = secrets.randbits(53)
        self.earned = 0.0
        self.ended: Reply | None = None
        self.alive = True
        body: dict[str, Any] = {"session_id": self.number, **self._choice(sample)}
        try:
            answer = await self._call(START, body)
        except ServerFull:
            self.alive = False
            raise
        first = self._reply(answer)
        self.tools = [_tool(tool) for tool in answer.get("tools") or ()]
        if isinstance(first, Done):
            self.ended = first
            return []
        return list(first.content)  # type: ignore[arg-type]

    def session_tools(self) -> Sequence[ToolSpec]:
        """Return the tools that the worker offers in the session."""
        return self.tools

    async def answer_message(self, message: Message) -> Reply:
        """Pass a message to the worker."""
        if self.ended is not None:  # the session ended in reset
            return self.ended
        body = {"session_id": self.number, "messages": [message.wire()]}
        answer = await self._call("interact", body)
        if not isinstance(answer, dict) or not isinstance(answer.get("env_out"), dict):
            raise WorkerFailed("the worker's answer to interact has no env_out")
        return self._reply(answer["env_out"])

    async def close(self) -> None:
        """End the session on the worker if it is still running."""
        if self.alive:
            with suppress(WorkerFailed):
                await self.transport.call("cancel", {"session_id": self.number}, CANCEL_S)

    async def _call(self, endpoint: str, body: Mapping[str, Any]) -> Any:
        """Send a call to the worker. Raises WorkerFailed if the worker has dropped the session.

        A worker never answers if its task returns an invalid result.
        """
        calling = asyncio.ensure_future(self.transport.call(endpoint, body, CALL_S))
        missed = 0
        try:
            while not (await asyncio.wait((calling,), timeout=PROBE_S))[0]:
                missed = missed + 1 if await self._is_dropped() else 0
                if missed > 1:
                    raise WorkerFailed("the worker has dropped the session without an answer; see its log")
        finally:
            calling.cancel()
        return calling.result()

    async def _is_dropped(self) -> bool:
        try:
            sessions = await self.transport.call(SESSIONS, None, PROBE_S)
        except (WorkerFailed, ServerFull):
            return False  # the call itself reports the error
        return isinstance(sessions, dict) and str(self.number) not in sessions

    def _choice(self, sample: TaskSample) -> dict[str, Any]:
        """Return the index or custom task of a sample."""
        index = sample.index
        if sample.data or index is None:
            if not self.takes_custom:
                raise WorkerFailed(f"task {self.name!r} rejects custom samples: -1 is not among its indices")
            custom = sample.data if index is None else {**sample.data, "index": index}
            return {"index": CUSTOM, "custom_task": custom}
        return {"index": self.indices[str(index)]}

    def _reply(self, out: Any) -> Reply:
        """Return a worker's answer to a turn. Raises WorkerFailed if its task has failed.

        AgentRL reports the total reward of the episode so far, so a step's reward is the difference.
        """
        try:
            answer = _Answer.model_validate(out)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise WorkerFailed(f"the worker's answer is malformed: {first['loc']}: {first['msg']}") from error
        self.alive = not answer.finish
        if answer.finish and answer.status in FAILURES:
            raise WorkerFailed(
                f"the worker's task ended with the status {answer.status!r}; see the worker's log"
            )
        truncated = answer.status in LIMITS
        if answer.finish and answer.reward is None and not truncated:
            raise WorkerFailed("the worker's task ended without a reward; a reward of 0 must be sent too")
        numbers = {key: float(value) for key, value in answer.metric.items() if _is_number(value)}
        total = answer.reward or 0.0
        reward = total - self.earned if answer.finish or total or answer.metric else 0.0
        self.earned += reward
        info: dict[str, Any] = {STATUS_KEY: answer.status} if answer.finish else {}
        if others := {key: value for key, value in answer.metric.items() if key not in numbers}:
            info["metrics"] = others
        if any(message.role in ("system", "developer", "assistant") for message in answer.messages[:1]):
            info["full_history"] = True
        if not answer.finish:
            if not answer.messages:
                raise WorkerFailed("the worker's task continues but has sent no message")
            return Reply(list(answer.messages), reward=reward, metrics=numbers, info=info)
        return Done(list(answer.messages), reward=reward, metrics=numbers, info=info, truncated=truncated)


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    messages: tuple[Message, ...] = ()
    status: str
    finish: bool
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    metric: Annotated[dict[str, Any], BeforeValidator(lambda value: value or {})] = Field(
        default_factory=dict
    )


def _tool(given: Any) -> ToolSpec:
    """Return a tool given in the format of OpenAI or Anthropic. Workers accept both."""
    if isinstance(given, dict) and "input_schema" in given:
        given = {"function": {**given, "parameters": given["input_schema"]}}
    try:
        return ToolSpec.model_validate(given)
    except ValidationError as error:
        raise WorkerFailed(f"a tool of the worker's task is malformed: {error.errors()[0]['msg']}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class _Registry(Protocol):
    async def lose(self, server_id: str, reason: str) -> None: ...


class Worker:
    """A registered worker, as a server of the fleet.

    Args:
        heartbeat: the worker's registration.
        transport: sends calls to the worker.
    """

    def __init__(self, heartbeat: Heartbeat, transport: Transport) -> None:
        self.heartbeat = heartbeat
        self.seen = time.monotonic()
        self._transport = transport
        named = {str(index): index for index in heartbeat.indices if index != CUSTOM}
        body = {
            "__doc__": f"Task {heartbeat.name} of an AgentRL worker.",
            "name": heartbeat.name,
            "transport": transport,
            "indices": named,
            "takes_custom": CUSTOM in heartbeat.indices,
        }
        try:
            self._task = check_class(type("AgentRLWorkerTask", (WorkerTask,), body))
        except DefinitionError as error:
            raise InvalidRequest(f"the task cannot be registered: {error}") from error
        metrics = Metrics()
        self.pool = SessionPool(
            [self._task], max_sessions=heartbeat.concurrency, observer=SessionMetrics(metrics)
        )
        self._metrics = metrics
        self._links: ControllerLinks | None = None

    async def join(self, url: str, token: str | None) -> None:
        """Join the fleet of a controller. Ends earlier sessions of the worker, which have no owner."""
        with suppress(WorkerFailed):
            await self._transport.call("cancel_all_with_notice", None, CANCEL_S)
        await self.pool.tasks()
        self._links = ControllerLinks(self.pool, self._metrics, [url], token)
        await self._links.start()

    async def lose(self, registry: _Registry, reason: str) -> None:
        """Leave the fleet immediately. All sessions are lost."""
        if self._links is not None:
            await self._links.abort()
            await registry.lose(self.pool.server_id, reason)
        await self.pool.aclose()
        await self._transport.aclose()


class Workers:
    """The AgentRL workers of one controller.

    Args:
        registry: marks servers as lost.
    """

    def __init__(self, registry: _Registry) -> None:
        self._registry = registry
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self.closing: list[Callable[[], Awaitable[None]]] = []
        """Functions that are called at the end."""

    def __contains__(self, key: str) -> bool:
        return key in self._workers

    def hear(self, key: str, beat: Heartbeat, make: Any, url: str, token: str | None) -> None:
        """Process a heartbeat. The first heartbeat of a worker registers it.

        Args:
            key: identifies the worker.
            beat: the heartbeat.
            make: returns the transport for a new worker.
            url: address of this controller, to which the worker's server connects.
            token: the token that the worker presented.

        Raises InvalidRequest.
        """
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = Worker(beat, make())
            self._run(self._join(key, worker, url, token))
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
        elif (beat.name, beat.indices) != (worker.heartbeat.name, worker.heartbeat.indices):
            raise InvalidRequest(f"the worker at {key} is registered with another task or other indices")
        worker.seen = time.monotonic()

    async def lose(self, key: str, reason: str) -> None:
        """Mark a worker and its sessions as lost."""
        worker = self._workers.pop(key, None)
        if worker is not None:
            logger.warning("AgentRL worker %s of task %s is lost: %s", key, worker.heartbeat.name, reason)
            await worker.lose(self._registry, reason)

    async def aclose(self) -> None:
        """Forget all workers and cancel their sessions."""
        tasks = [*self._tasks, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in list(self._workers):
            await self.lose(key, "the controller is shutting down")
        for close in self.closing:
            await close()

    async def _join(self, key: str, worker: Worker, url: str, token: str | None) -> None:
        try:
            await worker.join(url, token)
            logger.info("AgentRL worker %s joined with task %s", key, worker.heartbeat.name)
        except AgentRLError as error:
            logger.warning("AgentRL worker %s cannot join: %s", key, error)
            await self.lose(key, str(error))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for key, worker in list(self._workers.items()):
                if time.monotonic() - worker.seen > LOST_S:
                    self._run(self.lose(key, f"no heartbeat for {LOST_S:g} s"))

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def mount(app: FastAPI, api: Api) -> None:
    """Add the endpoints for AgentRL's workers to a controller's application."""
    registry: _Registry | None = getattr(api.service, "registry", None)
    if registry is None:
        return
    workers = Workers(registry)

    async def receive_heartbeat(request: Request) -> None:
        body = await request.body()
        api.check_values(body, caller.get())
        beat = read(Heartbeat, body)
        if urlsplit(beat.address).scheme not in ("http", "https"):
            raise InvalidRequest(f"address: {echo(beat.address)} is not an http:// URL of a worker")
        host, port = request.scope["server"]
        url = host if port is None else f"http://{f'[{host}]' if ':' in host else host}:{port}"
        shown = as_bearer(request.headers.get("authorization", "").encode("latin-1"))
        token = bearer_token(shown).decode("latin-1") or None
        workers.hear(beat.address, beat, partial(HttpTransport, beat.address), url, token)

    async def cancel_notice(request: Request) -> None:
        """Do nothing. The controller already waits for the end of a session."""

    calls = {"receive_heartbeat": receive_heartbeat, "cancel_notice": cancel_notice}
    for name, call in calls.items():
        app.router.routes.append(Route(f"{AGENTRL_PATH}{name}", endpoint_of(api, call), methods=["POST"]))
    call_at_end(app, workers.aclose)
    if not api.secured and find_spec("grpc") is not None:  # a stream has no token
        from agentrl_env.bridges.agentrl import grpc

        grpc.mount(app, workers)
