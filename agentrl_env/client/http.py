"""Sessions over HTTP or a WebSocket: retries that cannot step twice, steps that travel together."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json, to_json

from agentrl_env.client.batching import EARLY_ANSWER_S, Batcher, QueuedStep
from agentrl_env.client.failover import FailoverTransport
from agentrl_env.client.picking import PickingTransport
from agentrl_env.client.transport import Call, Http1Transport, HttpResponse, Transport
from agentrl_env.client.websocket import SocketTransport
from agentrl_env.errors import (
    CallTimeout,
    ProtocolError,
    RateLimited,
    ServerUnreachable,
    StateUnavailable,
    WireError,
    from_wire,
)
from agentrl_env.types import Message, SessionInfo, StepResult, TaskInfo
from agentrl_env.wire import PROTOCOL_VERSION, ExpertAnswer, ForkAnswer, OpenRequest, StepRequest, TaskList

M = TypeVar("M", bound=BaseModel)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
TRY_AGAIN = (502, 503, 504)


class _ErrorBody(BaseModel):
    error: dict[str, Any]


class _BatchAnswer(BaseModel):
    results: list[Annotated[StepResult | _ErrorBody, Field(union_mode="left_to_right")]]


class HttpBackend:
    """The sessions of the server at ``url``; a ``SessionBackend``.

    Connects lazily, once for each event loop it is used from. Every call is safe to repeat (``seq``
    numbers steps, ``request_id`` names openings), so lost answers and restarts are retried.

    Args:
        url: where the server is. With ``http://`` or ``https://`` lone steps take its WebSocket, once
            it has offered one; with ``ws://`` or ``wss://`` everything does.
        token: what it wants to see; the variable AGENTRL_TOKEN by default.
        timeout: seconds any one call may take, retries included.
        patience: seconds a server may be out of reach before a call gives up.
        max_connections: how many HTTP requests may be under way at once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 120.0,
        patience: float = 5.0,
        max_connections: int = 128,
    ) -> None:
        self._urls = [one.strip().rstrip("/") for one in url.split(",")]
        for one in self._urls:
            parts = urlsplit(one)
            if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
                raise ServerUnreachable(f"{one!r} is not an http://, https://, ws:// or wss:// URL")
        self.url = ",".join(self._urls)
        self._token = token if token is not None else os.environ.get("AGENTRL_TOKEN")
        self._timeout = timeout
        self._patience = min(patience, timeout)
        self._max_connections = max_connections
        self._lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lanes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lanes=WeakKeyDictionary())

    async def tasks(self) -> tuple[TaskInfo, ...]:
        """Return what is served. Raises ProtocolError where the server speaks another version."""
        served = _read(
            TaskList, await self._call(Call(name="tasks", method="GET", path="/v1/tasks")), self.url
        )
        if served.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self.url} speaks protocol {served.protocol}, this client {PROTOCOL_VERSION}"
            )
        return served.tasks

    async def open(self, request: OpenRequest) -> SessionInfo:
        """Open a session, waiting in the server's fair queue for ``wait_s``."""
        body = request.model_dump_json().encode()
        answer = await self._call(
            Call(name="open", method="POST", path="/v1/sessions", body=body), request.wait_s
        )
        return _read(SessionInfo, answer, self.url)

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message; steps asked for at the same time share a request."""
        return await self._lane().batcher.step(session_id, seq, message)

    async def step_many(self, steps: Sequence[StepRequest]) -> list[StepResult | WireError]:
        """Step many sessions; those of one session in order."""
        results: list[StepResult | WireError | None] = [None] * len(steps)
        groups: dict[str, list[int]] = {}
        for position, step in enumerate(steps):
            groups.setdefault(step.session_id, []).append(position)

        async def play(positions: list[int]) -> None:
            for position in positions:
                step = steps[position]
                try:
                    results[position] = await self.step(step.session_id, step.seq, step.message)
                except WireError as error:
                    results[position] = error

        await asyncio.gather(*map(play, groups.values()))
        return [result for result in results if result is not None]

    async def info(self, session_id: str) -> SessionInfo:
        """Return how a session stands."""
        return _read(SessionInfo, await self._call(_of_session("info", "GET", session_id)), self.url)

    async def expert(self, session_id: str) -> Message:
        """Return the oracle's next move."""
        answer = await self._call(_of_session("expert", "POST", session_id, "/expert"))
        return _read(ExpertAnswer, answer, self.url).message

    async def fork(self, session_id: str, n: int = 1, request_id: str | None = None) -> list[SessionInfo]:
        """Open ``n`` sessions that stand where a session stands."""
        body = to_json({"n": n, "request_id": request_id or secrets.token_urlsafe(12)})
        answer = await self._call(_of_session("fork", "POST", session_id, "/fork", body))
        return list(_read(ForkAnswer, answer, self.url).sessions)

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent."""
        await self._call(_of_session("close", "DELETE", session_id))

    async def aclose(self) -> None:
        """Hang up the connections of this event loop."""
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.transport.aclose()

    async def _send_batch(self, items: Sequence[QueuedStep]) -> list[StepResult | WireError]:
        """Send queued steps in one request; the results in order."""
        head = b'{"wait_s":%a,"steps":[' % EARLY_ANSWER_S
        body = head + b",".join(item.body for item in items) + b"]}"
        answer = _read(
            _BatchAnswer, await self._call(_whole("step_many", "POST", "/v1/step", body)), self.url
        )
        if len(answer.results) != len(items):
            raise ProtocolError(f"{self.url} answered {len(answer.results)} of {len(items)} steps")
        return [
            result if isinstance(result, StepResult) else _error(result.model_dump())
            for result in answer.results
        ]

    async def _send_alone(self, item: QueuedStep) -> StepResult:
        answer = await self._call(_of_session("step", "POST", item.session_id, "/step", item.body))
        return _read(StepResult, answer, self.url)

    async def _call(self, call: Call, extra_s: float = 0.0) -> bytes:
        """Make a call until it is answered; return the body of a good answer.

        Raises the WireError that was answered, ServerUnreachable, CallTimeout, ProtocolError.
        """
        transport, begin = self._lane().transport, time.monotonic()
        end, pause = begin + self._timeout + extra_s, FIRST_PAUSE_S
        while True:
            left, asked = end - time.monotonic(), 0.0
            try:
                response = await transport.send(call, timeout=left)
            except TimeoutError as error:
                raise CallTimeout(
                    f"{self.url} did not answer {call.method} {call.path} within {self._timeout:g} s"
                ) from error
            except OSError as error:
                if time.monotonic() - begin > self._patience:
                    raise ServerUnreachable(
                        f"no environment server answers at {self.url} ({error or 'hung up'}); is it running?"
                    ) from error
            else:
                asked = _asked_to_wait(response)
                again = asked > 0 or _worth_another_try(response)
                if not again or time.monotonic() + asked + pause > end:
                    return self._good(response, f"{call.method} {call.path}")
            await asyncio.sleep(asked + pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _good(self, response: HttpResponse, call: str) -> bytes:
        if response.status < 300:
            return response.body
        error = _error_of(response)
        if error is None:
            raise ProtocolError(
                f"{self.url} is no environment server: it answered {call} with {response.status}"
            )
        raise error

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            lane = self._lanes[loop] = _Lane(self)
        return lane

    def _transport(self) -> Transport:
        transports = [self._transport_to(url) for url in self._urls]
        return transports[0] if len(transports) == 1 else FailoverTransport(transports)

    def _transport_to(self, url: str) -> Transport:
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        socket = SocketTransport(url, headers=headers)
        if url.startswith("ws"):
            return socket
        http = Http1Transport(url, headers=headers, max_connections=self._max_connections)
        return PickingTransport(http, socket)


class _Lane:
    """What a backend has in one event loop."""

    def __init__(self, backend: HttpBackend) -> None:
        self.transport = backend._transport()
        self.batcher = Batcher(backend._send_batch, backend._send_alone)


def _of_session(name: str, method: str, session_id: str, rest: str = "", body: bytes = b"") -> Call:
    path = f"/v1/sessions/{quote(session_id, safe='')}{rest}"
    return Call(name=name, method=method, path=path, body=body, session_id=session_id)


def _whole(name: str, method: str, path: str, body: bytes = b"") -> Call:
    """Return a call that is not about one session."""
    return Call(name=name, method=method, path=path, body=body)


def _read(model: type[M], body: bytes, url: str) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise ProtocolError(f"{url} answered something that is not a {model.__name__}") from error


def _error(body: object) -> WireError:
    error = from_wire(body)
    if error is None:
        raise ProtocolError("the server answered an error of no known form")
    return error


def _error_of(response: HttpResponse) -> WireError | None:
    try:
        return from_wire(from_json(response.body))
    except ValueError:
        return None


def _asked_to_wait(response: HttpResponse) -> float:
    """Return for how many seconds a server wants to be left alone by a client that asks too much."""
    error = _error_of(response) if response.status == RateLimited.status else None
    return float(error.details.get("retry_after", LONGEST_PAUSE_S)) if error is not None else 0.0


def _worth_another_try(response: HttpResponse) -> bool:
    """Whether a proxy answered for a server that is away, or a controller is cut off for a while."""
    if response.status not in TRY_AGAIN:
        return False
    error = _error_of(response)
    return error is None or isinstance(error, StateUnavailable)
