"""Sessions of a server: retries that cannot step twice, and steps that share requests."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from agentrl_env.client.batching import EARLY_ANSWER_S, Batcher, QueuedStep
from agentrl_env.client.transport import (
    FailoverTransport,
    HttpTransport,
    Response,
    ServerTransport,
    Transport,
)
from agentrl_env.client.websocket import WebSocketTransport
from agentrl_env.errors import (
    CallTimeout,
    ClientClosed,
    ProtocolError,
    RateLimited,
    ServerUnreachable,
    StateUnavailable,
    Unauthorized,
    WireError,
    from_wire,
)
from agentrl_env.types import Message, StepResult
from agentrl_env.wire import PROTOCOL_VERSION, STEP, STEP_MANY, Call, Error, OpenBatch, OpenRequest, TaskList

M = TypeVar("M", bound=BaseModel)

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
RETRIED = (502, 503, 504)


class _BatchAnswer(BaseModel):
    results: list[Annotated[StepResult | Error, Field(union_mode="left_to_right")]]


class HttpBackend:
    """The sessions of the server at ``url``; a ``SessionBackend``.

    Connects lazily, once per event loop. Every call is safe to repeat (``seq`` numbers steps, ``request_id``
    names openings), so that lost answers and restarts are retried.

    Args:
        url: address of the server. With ``http://`` and ``https://`` the first call uses HTTP, later ones the
            WebSocket that the server announces; with ``ws://`` and ``wss://`` all calls use the WebSocket.
        token: its token, without the white space around it; the variable AGENTRL_TOKEN by default.
        timeout: seconds for one call, retries included.
        patience: seconds that a server may be unreachable before a call fails.
        max_connections: HTTP requests that may be under way at once.
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
        given = token if token is not None else os.environ.get("AGENTRL_TOKEN", "")
        self._token = given.strip()  # a file that holds a token ends with a line break
        if not (self._token.isascii() and self._token.isprintable()):
            raise Unauthorized(
                "the token has a character that no HTTP header can carry; read it from its file"
            )
        self._timeout = timeout
        self._patience = min(patience, timeout)
        self._max_connections = max_connections
        self._lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = WeakKeyDictionary()
        self._closed_on: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lanes": None, "_closed_on": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lanes=WeakKeyDictionary(), _closed_on=WeakSet())

    async def call(self, call: Call, request: BaseModel) -> Any:
        """Make a call; return its answer."""
        session_id = getattr(request, "session_id", None)
        body = request.model_dump_json(exclude_none=True).encode()
        answer = await self._send(call, body, session_id, _queue_s(request))
        if call.answer is None:
            return None
        parsed = self._read(call.answer, answer)
        if isinstance(parsed, TaskList) and parsed.protocol != PROTOCOL_VERSION:
            versions = f"protocol {parsed.protocol}, this client {PROTOCOL_VERSION}"
            raise ProtocolError(f"{self.url} speaks {versions}")
        return parsed

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message; concurrent steps share a request."""
        return await self._lane().batcher.step(session_id, seq, message)

    async def aclose(self) -> None:
        """Close the connections of this event loop; calls on it raise ClientClosed from then on."""
        self._closed_on.add(asyncio.get_running_loop())
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.transport.aclose()

    async def _send_batch(self, steps: Sequence[QueuedStep]) -> list[StepResult | WireError]:
        """Send queued steps in one request; return their results in order."""
        body = b'{"wait_s":%a,"steps":[%b]}' % (EARLY_ANSWER_S, b",".join(step.body for step in steps))
        answer = self._read(_BatchAnswer, await self._send(STEP_MANY, body))
        if len(answer.results) != len(steps):
            raise ProtocolError(f"{self.url} answered {len(answer.results)} of {len(steps)} steps")
        return [
            self._of_step(step, result)
            if isinstance(result, StepResult)
            else _known_error(result.model_dump())
            for step, result in zip(steps, answer.results, strict=True)
        ]

    async def _send_one(self, step: QueuedStep) -> StepResult:
        return self._of_step(step, self._read(StepResult, await self._send(STEP, step.body, step.session_id)))

    async def _send(
        self, call: Call, body: bytes, session_id: str | None = None, extra_s: float = 0.0
    ) -> bytes:
        """Make a call until it is answered; return the body of the answer.

        Raises the WireError that is answered, ServerUnreachable, CallTimeout, ProtocolError.
        """
        transport = self._lane().transport
        end, pause = time.monotonic() + self._timeout + extra_s, MIN_PAUSE_S
        unreachable_since: float | None = None
        while True:
            left, requested_s = end - time.monotonic(), 0.0
            try:
                response = await transport.send(call, body, session_id, timeout=left)
            except TimeoutError as error:
                words = f"{self.url} did not answer {call.method} {call.path} within {self._timeout:g} s"
                raise CallTimeout(words) from error
            except OSError as error:
                # Not since the call began: a server that was busy may have closed the connection.
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > self._patience:
                    reason = str(error) or "connection closed"
                    words = f"no environment server answers at {self.url} ({reason}); is it running?"
                    raise ServerUnreachable(words) from error
            else:
                requested_s = _retry_after(response)
                again = requested_s > 0 or _is_temporary(response)
                if not again or time.monotonic() + requested_s + pause > end:
                    return self._body(response, call)
            await asyncio.sleep(requested_s + pause * random.SystemRandom().uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_PAUSE_S)

    def _body(self, response: Response, call: Call) -> bytes:
        if response.status < 300:
            return response.body
        error = _error_of(response)
        if error is None:
            words = f"it answered {call.method} {call.path} with {response.status}"
            raise ProtocolError(f"{self.url} is no environment server: {words}")
        raise error

    def _of_step(self, step: QueuedStep, result: StepResult) -> StepResult:
        if (result.session_id, result.seq) != (step.session_id, step.seq):
            asked = f"step {step.seq} of session {step.session_id}"
            raise ProtocolError(f"{self.url} answered {asked} with the result of another step")
        return result

    def _read(self, model: type[M], body: bytes) -> M:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise ProtocolError(f"{self.url} answered something that is not a {model.__name__}") from error

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            if loop in self._closed_on:
                raise ClientClosed(f"the client of {self.url} is closed; connect another")
            transports = [self._transport(url) for url in self._urls]
            transport = transports[0] if len(transports) == 1 else FailoverTransport(transports)
            lane = self._lanes[loop] = _Lane(transport, Batcher(self._send_batch, self._send_one))
        return lane

    def _transport(self, url: str) -> Transport:
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        socket = WebSocketTransport(url, headers=headers)
        if url.startswith("ws"):
            return socket
        http = HttpTransport(url, headers=headers, max_connections=self._max_connections)
        return ServerTransport(http, socket)


class _Lane(NamedTuple):
    """Connections and queued steps of one event loop."""

    transport: Transport
    batcher: Batcher


def _queue_s(request: BaseModel) -> float:
    """Return the seconds that an opening may wait in the server's queue."""
    if isinstance(request, OpenBatch):
        return max((item.wait_s for item in request.sessions), default=0.0)
    return request.wait_s if isinstance(request, OpenRequest) else 0.0


def _known_error(body: object) -> WireError:
    error = from_wire(body)
    if error is None:
        raise ProtocolError("the server answered an error of no known form")
    return error


def _error_of(response: Response) -> WireError | None:
    try:
        return from_wire(from_json(response.body))
    except ValueError:
        return None


def _retry_after(response: Response) -> float:
    """Return the seconds to wait after a RateLimited answer."""
    error = _error_of(response) if response.status == RateLimited.status else None
    if error is None:
        return 0.0
    seconds = error.details.get("retry_after")
    if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
        return float(seconds)
    return MAX_PAUSE_S


def _is_temporary(response: Response) -> bool:
    """Return whether a proxy answered for an absent server, or a controller lacks its shared state."""
    if response.status not in RETRIED:
        return False
    error = _error_of(response)
    return error is None or isinstance(error, StateUnavailable)
