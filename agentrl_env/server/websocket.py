"""Wire v1 over one WebSocket: the calls of HTTP with correlation ids, many sessions on one socket.

A caller sends ``{"id": 7, "call": "step", "session_id": ..., "seq": ..., "message": ...}`` and gets
``{"id": 7, "result": ...}`` or ``{"id": 7, "error": ...}``. Calls run at the same time and are
answered as they end; the steps of one session are played and answered in order. Sessions are leases
and outlive the socket: whoever comes back sends the same ``seq`` again and gets its answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.errors import BodyTooLarge, InternalError, InvalidRequest, WireError
from agentrl_env.fast_wire import UNREADABLE, StepItem, StepItems, StepSaid
from agentrl_env.server.bodies import explain, step_items_json, step_many_json
from agentrl_env.server.service import Service
from agentrl_env.server.telemetry.tracing import under_caller
from agentrl_env.wire import (
    SOCKET_PROTOCOL,
    CloseCall,
    ExpertCall,
    ForkCall,
    ForkRequest,
    InfoCall,
    OpenCall,
    OpenRequest,
    SessionQuery,
    SessionsCall,
    SocketCall,
    StepCall,
    StepManyCall,
    TasksCall,
    TranscriptCall,
    TranscriptQuery,
)

M = TypeVar("M", bound=BaseModel)
logger = logging.getLogger("agentrl_env")
_INT64 = 2**63

MAX_CALLS = 1024
"""Calls of one socket that may be under way or wait to be answered; beyond that none is read."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Answers that may wait for a slow reader; beyond that no call is read."""


def socket_endpoint(service: Service, max_bytes: int) -> Callable[[WebSocket], Awaitable[None]]:
    """Return what serves ``/v1/ws``; ``max_bytes`` is the largest message it takes."""

    async def endpoint(websocket: WebSocket) -> None:
        wanted = SOCKET_PROTOCOL in websocket.scope["subprotocols"]
        await websocket.accept(SOCKET_PROTOCOL if wanted else None)
        await CallSocket(service, websocket, max_bytes).serve()

    return endpoint


_Id = Annotated[int, msgspec.Meta(ge=-_INT64, le=_INT64 - 1)] | Annotated[str, msgspec.Meta(max_length=128)]


_Traceparent = Annotated[str, msgspec.Meta(max_length=128)]


class _StepFrame(StepItem, frozen=True, gc=False, tag_field="call", tag="step", kw_only=True):
    """A ``StepCall``."""

    id: _Id
    traceparent: _Traceparent | None = None


class _StepManyFrame(StepItems, frozen=True, gc=False, tag_field="call", tag="step_many", kw_only=True):
    """A ``StepManyCall``."""

    id: _Id
    traceparent: _Traceparent | None = None


_STEP_FRAME = msgspec.json.Decoder(_StepFrame | _StepManyFrame).decode


class Line(Protocol):
    """A WebSocket, or what looks like one: messages as ASGI has them."""

    async def receive(self) -> Any:
        """Return the next message."""

    async def send(self, message: Any) -> None:
        """Send one; RuntimeError where the caller is gone."""


class CallSocket:
    """One WebSocket and the calls that it carries."""

    calls: ClassVar[TypeAdapter[Any]] = TypeAdapter(SocketCall)
    """What may be asked."""

    def __init__(
        self, service: Service, websocket: Line, max_bytes: int, max_calls: int | None = None
    ) -> None:
        self._service = service
        self._websocket = websocket
        self._max_bytes = max_bytes
        self._max_calls = max_calls or MAX_CALLS
        self._calls: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._unsent = 0
        self._room = asyncio.Event()

    async def serve(self) -> None:
        """Read calls until the caller is gone; what then waits for an answer is given up."""
        try:
            while True:
                await self._wait_for_room()
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                await self._take(message["bytes"] if text is None else text)
        except WebSocketDisconnect:
            return
        finally:
            for call in self._calls:
                call.cancel()

    async def finish(self) -> None:
        """Return once the calls that are under way now are answered."""
        if self._calls:
            await asyncio.wait(self._calls)

    async def _wait_for_room(self) -> None:
        while len(self._calls) >= self._max_calls or self._unsent >= MAX_UNSENT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def _take(self, text: str | bytes) -> None:
        """Begin one call; answer it right here where that takes no waiting."""
        if len(text) > self._max_bytes:
            too_large = BodyTooLarge(f"the message is over the limit of {self._max_bytes} bytes")
            await self._send_error(_id_at_begin(text), too_large)
            return
        try:
            call = self._read(text)
        except ValidationError as error:
            await self._take_malformed(text, error)
        else:
            work = partial(self._run, call, text)
            if call.traceparent is not None:
                work = partial(under_caller, call.traceparent, work)
            if isinstance(call, _StepFrame) and self._service.never_waits(call.session_id):
                await self._answer(call.id, work)
            else:
                await self._begin(call.id, work)

    def _read(self, text: str | bytes) -> Any:
        """Return the call that a message is. Raises ValidationError."""
        try:
            return _STEP_FRAME(text)
        except UNREADABLE:
            return self.calls.validate_json(text)

    async def _take_malformed(self, text: str | bytes, error: ValidationError) -> None:
        """Refuse a call, by its id where it has one; of a batch the sound items are played."""
        try:
            raw = from_json(text)
        except ValueError:
            raw = None
        fields = raw if isinstance(raw, dict) else {}
        call_id = fields.get("id")
        if isinstance(call_id, bool) or not isinstance(call_id, int | str):
            await self._send_error(None, InvalidRequest(explain(error)))
        elif fields.get("call") == "step_many" and isinstance(fields.get("steps"), list):
            await self._begin(call_id, partial(step_many_json, self._service, text))
        else:
            await self._send_error(call_id, InvalidRequest(explain(error)))

    async def _begin(self, call_id: int | str, work: Callable[[], Awaitable[bytes]]) -> None:
        task = asyncio.create_task(self._answer(call_id, work))
        self._calls.add(task)
        task.add_done_callback(self._end)
        await asyncio.sleep(0)  # a quick one's answer counts before the next call is read

    def _end(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._room.set()

    async def _run(self, call: Any, text: str | bytes) -> bytes:
        """Make one call; return its result as JSON."""
        service = self._service
        match call:
            case _StepFrame():
                return await service.step(call.session_id, StepSaid(call.seq, call.message))
            case _StepManyFrame():
                return await step_items_json(service, call.steps, call.wait_s)
            case StepCall():
                return await service.step(call.session_id, StepSaid.of(call))
            case StepManyCall():
                return await step_many_json(service, text)
            case OpenCall():
                return await service.open(_plain(OpenRequest, call))
            case InfoCall():
                return await service.info(call.session_id)
            case CloseCall():
                await service.close_session(call.session_id)
                return b"null"
            case ExpertCall():
                return await service.expert(call.session_id)
            case ForkCall():
                return await service.fork(call.session_id, _plain(ForkRequest, call))
            case TasksCall():
                return await service.tasks()
            case SessionsCall():
                return await service.sessions(_plain(SessionQuery, call))
            case TranscriptCall():
                return await service.transcript(call.session_id, _plain(TranscriptQuery, call))
        raise InvalidRequest(f"no such call: {type(call).__name__}")

    async def _answer(self, call_id: int | str, work: Callable[[], Awaitable[bytes]]) -> None:
        try:
            text = f'{{"id":{_id(call_id)},"result":{(await work()).decode()}}}'
        except WireError as error:
            await self._send_error(call_id, error)
        except Exception as error:
            logger.exception("a bug in the server")
            await self._send_error(call_id, InternalError(f"a bug in the server: {type(error).__name__}"))
        else:
            await self._send(text)

    async def _send_error(self, call_id: int | str | None, error: WireError) -> None:
        self._service.metrics.errors[error.type] += 1
        await self._send(f'{{"id":{_id(call_id)},{to_json(error.wire())[1:].decode()}')

    async def _send(self, text: str) -> None:
        """Send an answer once the caller has read enough of those before it, in their order."""
        self._unsent += len(text)
        try:
            async with self._sending:
                await self._websocket.send({"type": "websocket.send", "text": text})
        except (WebSocketDisconnect, RuntimeError):
            return  # the caller is gone: serve() hears of it too
        finally:
            self._unsent -= len(text)
            self._room.set()


def _plain(model: type[M], call: BaseModel) -> M:
    """Return a call as HTTP would have carried it: a service that passes it on gives it an id of its own."""
    return model.model_construct(**{name: getattr(call, name) for name in model.model_fields})


def _id_at_begin(text: str | bytes) -> int | None:
    """Return the id of a call that is too large to be read, where it comes first."""
    head = text[:64].encode() if isinstance(text, str) else text[:64]
    match = re.match(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*,', head)
    return int(match[1]) if match else None


def _id(call_id: int | str | None) -> str:
    return str(call_id) if isinstance(call_id, int) else to_json(call_id).decode()
