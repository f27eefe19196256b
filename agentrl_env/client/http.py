"""Sessions of a server over a network, with safe retries and batched steps."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from agentrl_env.client.credentials import public_url
from agentrl_env.client.transport import (
    FailoverTransport,
    HttpTransport,
    Response,
    ServerTransport,
    Transport,
    WebSocketTransport,
)
from agentrl_env.errors import (
    BodyTooLarge,
    CallTimeout,
    ClientClosed,
    InvalidRequest,
    ProtocolError,
    RateLimited,
    ServerUnreachable,
    StateUnavailable,
    StepPending,
    Unauthorized,
    WireError,
    from_wire,
)
from agentrl_env.fast_wire import message_to_json
from agentrl_env.types import Message, StepResult
from agentrl_env.wire import (
    PROTOCOL_VERSION,
    STEP,
    STEP_MANY,
    Call,
    Error,
    OpenBatch,
    OpenRequest,
    TaskList,
    is_header_value,
)

M = TypeVar("M", bound=BaseModel)

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
RETRIED = (502, 503, 504)
MIN_STEPS = 32
"""Minimum size that batches grow to, since the requests of smaller batches cost more time than they save."""
MAX_STEPS = 128
MAX_BYTES = 1024 * 1024
MAX_UNDER_WAY = 4
"""Maximum number of batches in progress. Further steps queue and fill the next batches."""
EARLY_ANSWER_S = 0.25
"""Seconds until a batch is answered. Steps that are not done are requested again one by one."""
MAX_SLOW = 4096

SendBatch = Callable[[Sequence["QueuedStep"]], Awaitable[list[StepResult | WireError]]]
SendAlone = Callable[["QueuedStep"], Awaitable[StepResult]]


class _BatchAnswer(BaseModel):
    results: list[Annotated[StepResult | Error, Field(union_mode="left_to_right")]]


class HttpBackend:
    """A ``SessionBackend`` with the sessions of the server at ``url``.

    It connects lazily, once per event loop. Every call is safe to repeat (``seq`` identifies steps and
    ``request_id`` openings), so calls are retried after lost answers and restarts.

    Args:
        url: address of the server. With ``http://`` and ``https://``, the first call uses HTTP, and later
            calls use the WebSocket that the server announces. With ``ws://`` and ``wss://``, all calls use
            the WebSocket.
        token: token of the server. Surrounding white space is removed. By default the variable
            AGENTRL_TOKEN is used.
        timeout: seconds for one call, including retries.
        patience: seconds for which a server can be unreachable before a call fails.
        max_connections: limit of concurrent HTTP requests.
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
                raise ServerUnreachable(
                    f"{public_url(one)!r} is not an http://, https://, ws:// or wss:// URL"
                )
        self.url = ",".join(self._urls)
        self._shown = ",".join(map(public_url, self._urls))
        given = token if token is not None else os.environ.get("AGENTRL_TOKEN", "")
        self._token = given.strip()  # a token file ends with a line break
        if not is_header_value(self._token):
            raise Unauthorized(
                "the token has a character that is not allowed in an HTTP header; read it from its file"
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
        """Make a call and return its answer."""
        session_id = getattr(request, "session_id", None)
        body = request.model_dump_json(exclude_none=True).encode()
        answer = await self._send(call, body, session_id, _queue_s(request))
        if call.answer is None:
            return None
        parsed = self._read(call.answer, answer)
        if isinstance(parsed, TaskList) and parsed.protocol != PROTOCOL_VERSION:
            versions = f"protocol {parsed.protocol}, this client {PROTOCOL_VERSION}"
            raise ProtocolError(f"{self._shown} speaks {versions}")
        return parsed

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message. Concurrent steps share a request."""
        return await self._lane().batcher.step(session_id, seq, message)

    async def aclose(self) -> None:
        """Close the connections of this event loop. Later calls on this loop raise ClientClosed."""
        self._closed_on.add(asyncio.get_running_loop())
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.transport.aclose()

    async def _send_batch(self, steps: Sequence[QueuedStep]) -> list[StepResult | WireError]:
        """Send queued steps in one request and return their results in order."""
        body = b'{"wait_s":%a,"steps":[%b]}' % (EARLY_ANSWER_S, b",".join(step.body for step in steps))
        answer = self._read(_BatchAnswer, await self._send(STEP_MANY, body))
        if len(answer.results) != len(steps):
            raise ProtocolError(f"{self._shown} answered {len(answer.results)} of {len(steps)} steps")
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
        """Repeat a call until it is answered, and return the body of the answer.

        Raises the WireError in the answer, ServerUnreachable, CallTimeout, ProtocolError.
        """
        transport = self._lane().transport
        end, pause = time.monotonic() + self._timeout + extra_s, MIN_PAUSE_S
        unreachable_since: float | None = None
        while True:
            left, requested_s = end - time.monotonic(), 0.0
            try:
                response = await transport.send(call, body, session_id, timeout=left)
            except TimeoutError as error:
                words = f"{self._shown} did not answer {call.method} {call.path} within {self._timeout:g} s"
                raise CallTimeout(words) from error
            except OSError as error:
                # Not counted from the start of the call: a busy server might have closed the connection.
                unreachable_since = unreachable_since or time.monotonic()
                if time.monotonic() - unreachable_since > self._patience:
                    reason = str(error) or "connection closed"
                    words = f"no environment server answers at {self._shown} ({reason}); is it running?"
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
        error = response.error()
        if error is None:
            if response.status == BodyTooLarge.status:  # a proxy has its own limit
                raise BodyTooLarge(f"{self._shown} accepts no request of this size")
            words = f"it answered {call.method} {call.path} with {response.status}"
            raise ProtocolError(f"{self._shown} is not an environment server: {words}")
        raise error

    def _of_step(self, step: QueuedStep, result: StepResult) -> StepResult:
        if (result.session_id, result.seq) != (step.session_id, step.seq):
            asked = f"step {step.seq} of session {step.session_id}"
            raise ProtocolError(f"{self._shown} answered {asked} with the result of another step")
        return result

    def _read(self, model: type[M], body: bytes) -> M:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise ProtocolError(f"{self._shown} answered something that is not a {model.__name__}") from error

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(loop)
        if lane is None:
            if loop in self._closed_on:
                raise ClientClosed(f"the client of {self._shown} is closed; connect another")
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


@dataclass(slots=True)
class QueuedStep:
    """A step waiting to be sent."""

    session_id: str
    seq: int
    body: bytes
    answer: asyncio.Future[StepResult] = field(repr=False)


class Batcher:
    """Queue of the steps of one event loop.

    Steps of one tick of the event loop share two requests, so that the server plays one half while the client
    reads the answers of the other. While ``MAX_UNDER_WAY`` batches are in progress, further steps are queued.
    A single step is sent alone. A batch is answered early, and its slower steps are requested again one by
    one, with the same ``seq``. Their sessions are left out of batches until they are fast again, so that a
    slow tool delays no other session.
    """

    def __init__(
        self,
        send_batch: SendBatch,
        send_alone: SendAlone,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send_batch = send_batch
        self._send_alone = send_alone
        self._clock = clock
        self._queue: deque[QueuedStep] = deque()
        self._under_way = 0
        self._scheduled = False
        self._slow: dict[str, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Send one step, batched with other steps if there are any.

        Raises the errors of sending, or InvalidRequest if the message cannot be encoded as JSON.
        """
        loop = asyncio.get_running_loop()
        try:
            text = message_to_json(message)
        except PydanticSerializationError as error:
            raise InvalidRequest(f"the message cannot be sent as JSON: {error}") from error
        body = b'{"session_id":%b,"seq":%d,"message":%b}' % (to_json(session_id), seq, text)
        item = QueuedStep(session_id, seq, body, loop.create_future())
        if session_id in self._slow:
            return await self._step_alone(item)
        self._queue.append(item)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush)
        return await item.answer

    def _flush(self) -> None:
        self._scheduled = False
        number = min(max(MIN_STEPS, (len(self._queue) + 1) // 2), MAX_STEPS)
        while self._queue and self._under_way < MAX_UNDER_WAY:
            items = self._take(number)
            if items:
                self._under_way += 1
                self._spawn(self._deliver(items) if len(items) > 1 else self._deliver_single(items[0]))

    def _take(self, number: int) -> list[QueuedStep]:
        items: list[QueuedStep] = []
        size = 0
        while self._queue and len(items) < number and size < MAX_BYTES:
            item = self._queue.popleft()
            if not item.answer.done():
                items.append(item)
                size += len(item.body)
        return items

    async def _deliver(self, items: list[QueuedStep]) -> None:
        try:
            results = await self._send_batch(items)
            pending = [isinstance(result, StepPending) for result in results]
            # If most steps are late, the server is busy and the sessions are not slow.
            some_are_slow = 2 * sum(pending) < len(items)
            for item, result, late in zip(items, results, pending, strict=True):
                if late:
                    self._spawn(self._deliver_alone(item, some_are_slow))
                else:
                    _settle(item, result)
        except BodyTooLarge:  # no step was played, and at least one step is too large by itself
            for item in items:
                self._spawn(self._deliver_alone(item, False))
        except Exception as error:
            for item in items:
                _settle(item, error)
        finally:
            self._under_way -= 1
            self._flush()

    async def _deliver_single(self, item: QueuedStep) -> None:
        """Send a single step. A late step no longer counts as a batch in progress."""
        counted = [True]

        def end() -> None:
            if counted:
                counted.clear()
                self._under_way -= 1
                self._flush()

        late = asyncio.get_running_loop().call_later(EARLY_ANSWER_S, end)
        try:
            _settle(item, await self._send_alone(item))
        except Exception as error:
            _settle(item, error)
        finally:
            late.cancel()
            end()

    async def _deliver_alone(self, item: QueuedStep, slow: bool) -> None:
        if slow:
            self._slow[item.session_id] = None
            if len(self._slow) > MAX_SLOW:
                del self._slow[next(iter(self._slow))]
        try:
            _settle(item, await self._send_alone(item))
        except Exception as error:
            _settle(item, error)

    async def _step_alone(self, item: QueuedStep) -> StepResult:
        begin = self._clock()
        result = await self._send_alone(item)
        if result.final or self._clock() - begin < EARLY_ANSWER_S:
            self._slow.pop(item.session_id, None)
        return result

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Lane(NamedTuple):
    """Connections and queued steps of one event loop."""

    transport: Transport
    batcher: Batcher


def _queue_s(request: BaseModel) -> float:
    """Return the seconds that an opening can wait in the server's queue."""
    if isinstance(request, OpenBatch):
        return max((item.wait_s for item in request.sessions), default=0.0)
    return request.wait_s if isinstance(request, OpenRequest) else 0.0


def _known_error(body: object) -> WireError:
    error = from_wire(body)
    if error is None:
        raise ProtocolError("the server answered with an error in an unknown form")
    return error


def _retry_after(response: Response) -> float:
    """Return the seconds to wait after a RateLimited answer."""
    error = response.error() if response.status == RateLimited.status else None
    if error is None:
        return 0.0
    seconds = error.details.get("retry_after")
    if isinstance(seconds, int | float) and 0 <= seconds < math.inf:
        return float(seconds)
    return MAX_PAUSE_S


def _is_temporary(response: Response) -> bool:
    """Return True if a proxy answered for an absent server, or a controller has lost the shared state."""
    if response.status not in RETRIED:
        return False
    error = response.error()
    return error is None or isinstance(error, StateUnavailable)


def _settle(item: QueuedStep, result: StepResult | Exception) -> None:
    if item.answer.done():
        return
    if isinstance(result, StepResult):
        item.answer.set_result(result)
    else:
        item.answer.set_exception(result)
