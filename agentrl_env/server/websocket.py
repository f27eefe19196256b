"""Wire protocol 1 over a WebSocket: the same calls as over HTTP, with ids, for many sessions on one socket.

A client sends ``{"id": 7, "call": "step", "session_id": ..., "seq": ..., "message": ...}`` and receives
``{"id": 7, "result": ...}`` or ``{"id": 7, "error": ...}``. Calls run concurrently and are answered as they
end. The steps of one session run in order. Sessions outlive the socket: a client that reconnects can repeat
its last ``seq`` to receive the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, cast

from pydantic_core import from_json, to_json
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from agentrl_env.errors import (
    BodyTooLarge,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    WireError,
)
from agentrl_env.fast_wire import UNREADABLE, FastFrame, decode_frame
from agentrl_env.server.api import Api, call_named, read
from agentrl_env.server.auth import OPERATOR, Caller, caller
from agentrl_env.server.limits import PAUSE_S, RECEIVE_S, SMALL_BYTES, Budget, Limits
from agentrl_env.server.telemetry.tracing import under_caller
from agentrl_env.session.observer import as_wire_error
from agentrl_env.wire import CANCEL, SOCKET_PROTOCOL, Frame

logger = logging.getLogger("agentrl_env")

CONNECTION = "agentrl.connection"
"""Key of the ``CountedWebSocket`` in the scope of a WebSocket."""
MAX_CALLS = 1024
"""Maximum number of calls in progress on one socket. No further call is read while it is reached."""
MAX_AGENT_CALLS = 64
"""The same limit for an agent, which has one session."""
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Maximum size of the answers that wait for a slow reader. No further call is read beyond it."""
MAX_FRAGMENTS = 16_384
"""Maximum number of fragments of one WebSocket message."""
MAX_PINGS = 1024
"""Maximum number of pings that are answered while the peer does not read."""


class Channel(Protocol):
    """The interface of a WebSocket in ASGI."""

    async def receive(self) -> Any:
        """Return the next message."""

    async def send(self, message: Any) -> None:
        """Send a message. Raises RuntimeError if the peer is gone."""


class CountedWebSocket(WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket protocol, with a deadline and a budget for the received messages.

    Args:
        limits: limits, of which ``body_s`` is used.
        options: options of uvicorn.
    """

    def __init__(self, limits: Limits, **options: Any) -> None:
        super().__init__(**options)
        self.budget: Budget | None = None
        """Budget of the caller. None before the caller is known."""
        self._within_s = limits.body_s
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection is closed."""
        self._timer: asyncio.TimerHandle | None = None
        self._messages = 0
        """Number of received messages."""
        self._size = 0
        """Bytes of the unfinished message."""
        self._held = 0
        """Bytes of the unfinished message that are charged to the budget."""
        self._pings = 0

    def join(self, budget: Budget, max_bytes: int) -> None:
        """Set the caller's budget and the size limit of its messages."""
        self.budget = budget
        self.conn.max_message_size = 2 * max_bytes  # up to this size, a typed error is returned

    async def drained(self) -> None:
        """Wait until the peer has read most of the sent data or has disconnected."""
        await self.writable.wait()

    def connection_lost(self, error: Exception | None) -> None:
        """Release the budget of the unfinished message."""
        if self.on_lost is not None:
            self.on_lost()
        if self._timer is not None:
            self._timer.cancel()
        self._size = 0
        self._hold()
        super().connection_lost(error)

    async def run_asgi(self) -> None:
        """Run the application with this connection in its scope."""
        cast(dict[str, Any], self.scope)[CONNECTION] = self
        await super().run_asgi()

    def data_received(self, data: bytes) -> None:
        """Receive bytes and count the bytes of the message that is still unfinished."""
        messages = self._messages
        super().data_received(data)
        if self.conn.reader.buffer or self.frames:
            begun = messages != self._messages
            self._size = len(self.conn.reader.buffer) if begun else self._size + len(data)
            self._hold()
            if self._timer is None:
                self._watch()
        elif self._size:
            self._size = 0
            self._hold()

    def send_receive_event_to_app(self) -> None:
        """Pass a message to the application."""
        self._messages += 1
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping, unless the peer reads no answers."""
        self._pings = 0 if self.writable.is_set() else self._pings + 1
        if self._pings > MAX_PINGS:
            self.transport.abort()
        else:
            super().handle_ping()

    def _hold(self) -> None:
        """Charge the unfinished message to the caller's budget, if it is large."""
        held = self._size if self._size > SMALL_BYTES else 0
        if self.budget is None or held == self._held:
            return
        try:
            if len(self.frames) > MAX_FRAGMENTS:
                raise InvalidRequest(f"a message can have at most {MAX_FRAGMENTS} fragments")
            if held > self._held:
                # An error here ends all calls of the socket. In CallSocket it ends only the message's call.
                self.budget.hold(held - self._held, begin=not self._held, times=2)
            else:
                self.budget.release(self._held - held)
            if not held:
                self.budget.received()
            self._held = held
        except WireError as error:
            self._fail(error)

    def _watch(self) -> None:
        """Fail the connection if the unfinished message is not completed in time."""
        check = (self._messages, self.read_paused)
        self._timer = self.loop.call_later(self._within_s, self._check, *check)

    def _check(self, messages: int, paused: bool) -> None:
        self._timer = None
        if not self.conn.reader.buffer and not self.frames:
            return
        if paused or self.read_paused or messages != self._messages:
            self._watch()
        else:
            self._fail(RequestTimeout(f"the message did not arrive within {self._within_s:g} s"))

    def _fail(self, error: WireError) -> None:
        """Send an error without a call's id, and close the connection."""
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.send_text(b'{"id":null,' + to_json(error.wire())[1:])
        self.conn.fail(CloseCode.POLICY_VIOLATION, error.type)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()


def websocket_endpoint(api: Api, limits: Limits) -> Callable[[WebSocket], Awaitable[None]]:
    """Return the endpoint of ``/v1/ws``."""

    async def endpoint(websocket: WebSocket) -> None:
        wanted = SOCKET_PROTOCOL in websocket.scope["subprotocols"]
        await websocket.accept(SOCKET_PROTOCOL if wanted else None)
        who = caller.get()
        agent = who.session_id is not None
        calls = MAX_AGENT_CALLS if agent else None
        connection = websocket.scope.get(CONNECTION)
        await CallSocket(api, websocket, limits.max_bytes(agent=agent), calls, connection, who).serve()

    return endpoint


class CallSocket:
    """Answers the calls of one WebSocket.

    Args:
        api: answers the calls.
        channel: the WebSocket.
        max_bytes: limit of a message.
        max_calls: maximum number of calls in progress. The default is ``MAX_CALLS``.
        connection: connection of the WebSocket. None for a controller's link.
        who: the caller.
    """

    def __init__(
        self,
        api: Api,
        channel: Channel,
        max_bytes: int,
        max_calls: int | None = None,
        connection: CountedWebSocket | None = None,
        who: Caller = OPERATOR,
    ) -> None:
        self._api = api
        self._channel = channel
        self._max_bytes = max_bytes
        self._max_calls = max_calls or MAX_CALLS
        self._connection = connection
        self._who = who
        self._budget = connection.budget if connection is not None else None
        self._calls: dict[asyncio.Task[None], int | str] = {}
        self._sending = asyncio.Lock()
        self._unsent = 0
        self._room = asyncio.Event()

    async def serve(self) -> None:
        """Read calls until the peer disconnects, then cancel the calls in progress."""
        try:
            while True:
                while len(self._calls) >= self._max_calls or self._unsent >= MAX_UNSENT_BYTES:
                    self._room.clear()
                    await self._room.wait()
                message = await self._channel.receive()
                if message["type"] == "websocket.disconnect":
                    return
                text = message.get("text")
                text = message["bytes"] if text is None else text
                if len(text) > SMALL_BYTES and self._budget is not None:
                    await self._take_large(text, self._budget)
                else:
                    await self._take(text)
        except WebSocketDisconnect:
            return
        finally:
            for call in self._calls:
                call.cancel()

    async def finish(self) -> None:
        """Wait until the calls in progress are answered."""
        if self._calls:
            await asyncio.wait(self._calls)

    async def run(self, call: str, text: str | bytes) -> bytes:
        """Make the call ``call`` and return its result as JSON. Raises WireError."""
        return await self._api.answer_checked(call_named(call), text, self._who)

    async def _take_large(self, text: str | bytes, budget: Budget) -> None:
        """Start the call of a large message, within the caller's budget."""
        try:
            budget.admit()
            budget.hold(len(text))
        except RateLimited as error:
            await self._send_error(_leading_id(text), error)
            await asyncio.sleep(PAUSE_S)
            return
        finally:
            budget.charge(RECEIVE_S * len(text))
        call = None
        try:
            await budget.turn()
            call = await self._take(text)
        finally:
            if call is None:
                budget.release(len(text))
            else:
                call.add_done_callback(lambda _: budget.release(len(text)))

    async def _take(self, text: str | bytes) -> asyncio.Task[None] | None:
        """Start the call of one message and return its task."""
        if len(text) > self._max_bytes:
            too_large = BodyTooLarge(f"the message exceeds the limit of {self._max_bytes} bytes")
            await self._send_error(_leading_id(text), too_large)
            return None
        try:
            self._api.check_values(text, self._who)
        except WireError as error:
            await self._send_error(_leading_id(text), error)
            return None
        frame: FastFrame | Frame
        try:
            frame = decode_frame(text)
        except UNREADABLE:
            try:
                frame = read(Frame, text)
            except InvalidRequest as error:
                await self._send_error(_id_of(text), error)
                return None
        if frame.call == CANCEL:
            self._cancel(frame.target)
            return None
        work = partial(self.run, frame.call, text)
        if frame.traceparent is not None:
            work = partial(under_caller, frame.traceparent, work)
        task = asyncio.create_task(self._answer(frame.id, work))
        self._calls[task] = frame.id
        task.add_done_callback(self._end)
        await asyncio.sleep(0)  # let a fast call send its answer before the next call is read
        return task

    def _cancel(self, target: int | str | None) -> None:
        """Cancel a call whose caller gave up, so that an opening leaves the queue."""
        for task, call_id in self._calls.items():
            if call_id == target:
                task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._calls.pop(task, None)
        self._room.set()

    async def _answer(self, call_id: int | str, work: Callable[[], Awaitable[bytes]]) -> None:
        try:
            result = await (work() if self._budget is None else self._budget.timed(work()))
            answer = f'{{"id":{_id_json(call_id)},"result":{result.decode()}}}'
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):  # the process or the socket ends
            raise
        except BaseException as error:  # without an answer the client would wait until its timeout
            await self._send_error(call_id, as_wire_error(error))
        else:
            await self._send(answer)

    async def _send_error(self, call_id: int | str | None, error: WireError) -> None:
        self._api.count(error)
        await self._send(f'{{"id":{_id_json(call_id)},{to_json(error.wire())[1:].decode()}')

    async def _send(self, text: str) -> None:
        """Send an answer after all earlier answers."""
        size = len(text)
        self._unsent += size
        budget = self._budget if size > SMALL_BYTES else None
        if budget is not None:
            budget.keep(size)
        try:
            async with self._sending:
                await self._channel.send({"type": "websocket.send", "text": text})
                if budget is not None and self._connection is not None:
                    await self._connection.drained()
        except (WebSocketDisconnect, RuntimeError):
            return  # serve() notices the disconnect too
        finally:
            self._unsent -= size
            self._room.set()
            if budget is not None:
                budget.release(size)


def _id_of(text: str | bytes) -> int | str | None:
    """Return the id of a malformed frame, if it has one."""
    try:
        fields = from_json(text)
    except ValueError:
        return None
    call_id = fields.get("id") if isinstance(fields, dict) else None
    valid = isinstance(call_id, int | str) and not isinstance(call_id, bool)
    return call_id if valid else None


def _leading_id(text: str | bytes) -> int | None:
    """Return the id of a frame that is too large to parse, if the id is its first field."""
    head = text[:64].encode() if isinstance(text, str) else text[:64]
    match = re.match(rb'\s*\{\s*"id"\s*:\s*(\d{1,18})\s*,', head)
    return int(match[1]) if match else None


def _id_json(call_id: int | str | None) -> str:
    return str(call_id) if isinstance(call_id, int) else to_json(call_id).decode()
