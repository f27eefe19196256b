"""Wire protocol 1 over one WebSocket: the calls of HTTP with correlation ids, many sessions on one socket.

A client sends ``{"id": 7, "call": "step", "session_id": ..., "seq": ..., "message": ...}`` and receives
``{"id": 7, "result": ...}`` or ``{"id": 7, "error": ...}``. Calls run concurrently and are answered as they
end; the steps of one session run in order. Sessions outlive the socket: a client that reconnects repeats
its last ``seq`` and receives the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec
from pydantic_core import from_json, to_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl_env.errors import BodyTooLarge, InternalError, InvalidRequest, WireError
from agentrl_env.fast_wire import UNREADABLE, FastBatch, FastStep
from agentrl_env.server.api import Api, call_named, read
from agentrl_env.server.telemetry.tracing import under_caller
from agentrl_env.wire import CANCEL, SOCKET_PROTOCOL, STEP, STEP_MANY, Frame

logger = logging.getLogger("agentrl_env")

MAX_CALLS = 1024
"""Calls of one socket that may be under way; beyond that none is read."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Size of the answers that may wait for a slow reader; beyond that no call is read."""
_Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[str, msgspec.Meta(max_length=128)]
_Traceparent = Annotated[str, msgspec.Meta(max_length=128)]


class _StepFrame(FastStep, frozen=True, gc=False, tag_field="call", tag="step", kw_only=True):
    id: _Id
    traceparent: _Traceparent | None = None


class _BatchFrame(FastBatch, frozen=True, gc=False, tag_field="call", tag="step_many", kw_only=True):
    id: _Id
    traceparent: _Traceparent | None = None


_decode_step_frame = msgspec.json.Decoder(_StepFrame | _BatchFrame).decode


class Channel(Protocol):
    """A WebSocket as ASGI presents it."""

    async def receive(self) -> Any:
        """Return the next message."""

    async def send(self, message: Any) -> None:
        """Send a message. Raises RuntimeError where the peer is gone."""


def websocket_endpoint(api: Api, max_bytes: int) -> Callable[[WebSocket], Awaitable[None]]:
    """Return the endpoint of ``/v1/ws``; ``max_bytes`` limits a message."""

    async def endpoint(websocket: WebSocket) -> None:
        wanted = SOCKET_PROTOCOL in websocket.scope["subprotocols"]
        await websocket.accept(SOCKET_PROTOCOL if wanted else None)
        await CallSocket(api, websocket, max_bytes).serve()

    return endpoint


class CallSocket:
    """Answers the calls of one WebSocket.

    Args:
        api: answers the calls.
        channel: the WebSocket.
        max_bytes: limit of a message.
        max_calls: limit of the calls under way; ``MAX_CALLS`` by default.
    """

    def __init__(self, api: Api, channel: Channel, max_bytes: int, max_calls: int | None = None) -> None:
        self._api = api
        self._channel = channel
        self._max_bytes = max_bytes
        self._max_calls = max_calls or MAX_CALLS
        self._calls: dict[asyncio.Task[None], int | str] = {}
        self._sending = asyncio.Lock()
        self._unsent = 0
        self._room = asyncio.Event()

    async def serve(self) -> None:
        """Read calls until the peer disconnects; then cancel those under way."""
        try:
            while True:
                while len(self._calls) >= self._max_calls or self._unsent >= MAX_UNSENT_BYTES:
                    self._room.clear()
                    await self._room.wait()
                message = await self._channel.receive()
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
        """Wait until the calls under way are answered."""
        if self._calls:
            await asyncio.wait(self._calls)

    async def run(self, frame: Frame, text: str | bytes) -> bytes:
        """Make a call that is not a well-formed step; return its result as JSON. Raises WireError."""
        return await self._api.answer_json(call_named(frame.call), text)

    async def _take(self, text: str | bytes) -> None:
        """Begin the call of one message."""
        if len(text) > self._max_bytes:
            too_large = BodyTooLarge(f"the message is over the limit of {self._max_bytes} bytes")
            await self._send_error(_leading_id(text), too_large)
            return
        frame: Any
        try:
            self._api.check_size(text)
        except WireError as error:
            await self._send_error(_leading_id(text), error)
            return
        try:
            frame = _decode_step_frame(text)
            work = partial(self._api.answer, STEP if isinstance(frame, FastStep) else STEP_MANY, frame)
        except UNREADABLE:
            try:
                frame = _envelope(text)
            except InvalidRequest as error:
                await self._send_error(_id_of(text), error)
                return
            if frame.call == CANCEL:
                self._cancel(frame.target)
                return
            work = partial(self.run, frame, text)
        if frame.traceparent is not None:
            work = partial(under_caller, frame.traceparent, work)
        task = asyncio.create_task(self._answer(frame.id, work))
        self._calls[task] = frame.id
        task.add_done_callback(self._end)
        await asyncio.sleep(0)  # the answer of a fast call counts before the next call is read

    def _cancel(self, target: int | str | None) -> None:
        """Cancel a call whose caller has gone, so that an opening leaves the queue."""
        for task, call_id in self._calls.items():
            if call_id == target:
                task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._calls.pop(task, None)
        self._room.set()

    async def _answer(self, call_id: int | str, work: Callable[[], Awaitable[bytes]]) -> None:
        try:
            answer = f'{{"id":{_id_json(call_id)},"result":{(await work()).decode()}}}'
        except WireError as error:
            await self._send_error(call_id, error)
        except Exception as error:
            logger.exception("a bug in the server")
            await self._send_error(call_id, InternalError(f"a bug in the server: {type(error).__name__}"))
        else:
            await self._send(answer)

    async def _send_error(self, call_id: int | str | None, error: WireError) -> None:
        self._api.count(error)
        await self._send(f'{{"id":{_id_json(call_id)},{to_json(error.wire())[1:].decode()}')

    async def _send(self, text: str) -> None:
        """Send an answer after those before it."""
        self._unsent += len(text)
        try:
            async with self._sending:
                await self._channel.send({"type": "websocket.send", "text": text})
        except (WebSocketDisconnect, RuntimeError):
            return  # serve() notices the disconnect too
        finally:
            self._unsent -= len(text)
            self._room.set()


def _envelope(text: str | bytes) -> Frame:
    """Return the envelope of a frame. Raises InvalidRequest."""
    return read(Frame, text)


def _id_of(text: str | bytes) -> int | str | None:
    """Return the id of a malformed frame, where it has one."""
    try:
        fields = from_json(text)
    except ValueError:
        return None
    call_id = fields.get("id") if isinstance(fields, dict) else None
    valid = isinstance(call_id, int | str) and not isinstance(call_id, bool)
    return call_id if valid else None


def _leading_id(text: str | bytes) -> int | None:
    """Return the id of a frame that is too large to parse, where it comes first."""
    head = text[:64].encode() if isinstance(text, str) else text[:64]
    match = re.match(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*,', head)
    return int(match[1]) if match else None


def _id_json(call_id: int | str | None) -> str:
    return str(call_id) if isinstance(call_id, int) else to_json(call_id).decode()
