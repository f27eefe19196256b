"""Calls over one WebSocket: many under way at once, each answered by its id."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from pydantic_core import from_json, to_json
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from agentrl_env.client.transport import CONNECT_TIMEOUT_S, Call, HttpResponse
from agentrl_env.errors import BodyTooLarge, ProtocolError, ServerUnreachable, from_wire
from agentrl_env.wire import SOCKET_PATH, SOCKET_PROTOCOL

PING_S = 20.0
"""How often a connection is asked for a sign of life; one that gives none until the third is dropped."""
_ANSWER = re.compile(rb'\{"id":(\d+),"(result|error)":')


class SocketConnection(asyncio.Protocol):
    """One WebSocket connection, from its handshake on."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        """Done once calls can be sent; ConnectionError or the refusal where they never can."""
        self._protocol = ClientProtocol(
            parse_uri(url), subprotocols=[Subprotocol(SOCKET_PROTOCOL)], max_size=None
        )
        self._headers = headers
        self._answers: dict[int, asyncio.Future[HttpResponse]] = {}
        self._sizes: dict[int, int] = {}
        self._parts: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._silent = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        request = self._protocol.connect()
        request.headers.update(self._headers)
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Take in frames; answer pings, and settle the calls that have their answer."""
        self._silent = 0
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._on_handshake(event)
            elif isinstance(event, Frame):
                self._on_frame(event)
        if self._protocol.handshake_exc is not None and not self.opened.done():
            self.opened.set_exception(_no_socket(self._protocol.handshake_exc))
        self._flush()
        if self._protocol.state in (State.CLOSING, State.CLOSED):
            self.close()

    def eof_received(self) -> None:
        """Let the handshake see the end."""
        self._protocol.receive_eof()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits; a message over the server's limit is told so to its own caller alone."""
        if self._timer is not None:
            self._timer.cancel()
        if self._protocol.close_rcvd and self._protocol.close_rcvd.code == CloseCode.MESSAGE_TOO_BIG:
            self._refuse_largest()
        lost = ConnectionResetError(f"the WebSocket was closed ({error or 'by the server'})")
        if not self.opened.done():
            self.opened.set_exception(lost)
        if not self.opened.cancelled():
            self.opened.exception()  # it may be that nobody waits for it any more
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(lost)

    async def ask(self, number: int, frame: bytes) -> HttpResponse:
        """Send one call and return its answer. Raises ConnectionError."""
        if self.closed:
            raise ConnectionResetError("the WebSocket is closed")
        answer: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._sizes[number] = len(frame)
        try:
            self._protocol.send_text(frame)
            self._flush()
            return await answer
        finally:
            del self._answers[number], self._sizes[number]

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def _on_handshake(self, response: Response) -> None:
        if self.opened.done():
            return
        if self._protocol.state is State.OPEN:
            self.opened.set_result(None)
            self._timer = asyncio.get_running_loop().call_later(PING_S, self._look_after)
        else:
            self.opened.set_exception(_refusal(response, self._protocol.handshake_exc))
            self.close()

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            if frame.fin:
                text = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._on_answer(text)

    def _on_answer(self, text: bytes) -> None:
        number, response = _read(text)
        answer = self._answers.get(number) if number is not None else None
        if answer is not None and not answer.done():  # else its caller has gone
            answer.set_result(response)

    def _refuse_largest(self) -> None:
        if self._sizes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            if not self._answers[largest].done():
                words = f"a message of {self._sizes[largest]} bytes is over the server's limit"
                self._answers[largest].set_exception(BodyTooLarge(words))

    def _look_after(self) -> None:
        """Ping; hang up where nothing was heard for three pings."""
        self._silent += 1
        if self._silent > 3:
            self.close()
            return
        self._protocol.send_ping(b"")
        self._flush()
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._look_after)

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._protocol.data_to_send()))


class SocketTransport:
    """Calls to one server over one WebSocket, opened when it is needed and again when it was lost."""

    def __init__(self, url: str, *, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        secure = parts.scheme in ("wss", "https")
        scheme = "wss" if secure else "ws"
        self._tls = ssl.create_default_context() if secure else None
        self._url = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{SOCKET_PATH}"
        self._host, self._port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._headers = headers
        self._numbers = itertools.count(1)
        self._connection: SocketConnection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def send(self, call: Call, *, timeout: float) -> HttpResponse:
        """Make one call and return its answer, in the form that HTTP would give it.

        Raises TimeoutError after ``timeout`` seconds, OSError where there is no connection or it
        broke, ProtocolError where the server has no WebSocket, ServerUnreachable after ``aclose``.
        """
        number = next(self._numbers)
        head = b'{"id":%d,"call":"%b"' % (number, call.name.encode())
        if call.session_id is not None and call.name != "step":  # a step's body names its session
            head += b',"session_id":%b' % to_json(call.session_id)
        fields = call.body[1:] if len(call.body) > 2 else b"}"
        frame = b"%b%b%b" % (head, b"," if len(fields) > 1 else b"", fields)
        async with asyncio.timeout(timeout):
            connection = self._connection
            if connection is None or connection.closed or self._closed:
                connection = await self.connect()
            return await connection.ask(number, frame)

    async def aclose(self) -> None:
        """Hang up; whoever still waits for an answer gets a ConnectionError."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        await asyncio.sleep(0)

    @property
    def connected(self) -> bool:
        """Whether a call could be sent right now."""
        return self._connection is not None and not self._connection.closed

    async def connect(self) -> SocketConnection:
        """Open the connection where it is not; raises what ``send`` does."""
        async with self._connecting:
            if self._closed:
                raise ServerUnreachable("this client is closed")
            if self._connection is None or self._connection.closed:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._connection = await self._open()
            return self._connection

    async def _open(self) -> SocketConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: SocketConnection(self._url, self._headers), self._host, self._port, ssl=self._tls
        )
        try:
            await connection.opened
        except BaseException:
            connection.close()
            raise
        return connection


def _read(text: bytes) -> tuple[int | None, HttpResponse]:
    """Split an answer into its call's number and what HTTP would have answered."""
    match = _ANSWER.match(text)
    if match is None:
        return _read_slowly(text)
    number, body = int(match[1]), text[match.end() : -1]
    if match[2] == b"result":
        return number, HttpResponse(status=200, body=body)
    return number, _error(b'{"error":%b}' % body)


def _read_slowly(text: bytes) -> tuple[int | None, HttpResponse]:
    """Read an answer whose fields come in another order than ours."""
    try:
        answer = from_json(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
        return None, HttpResponse(status=500, body=b"")
    if "error" in answer:
        return answer["id"], _error(to_json({"error": answer["error"]}))
    return answer["id"], HttpResponse(status=200, body=to_json(answer.get("result")))


def _error(body: bytes) -> HttpResponse:
    error = from_wire(from_json(body))
    return HttpResponse(status=error.status if error else 500, body=body)


def _refusal(response: Response, reason: Exception | None) -> Exception:
    """Return the error that a refused handshake stands for."""
    try:
        error = from_wire(from_json(response.body or b""))
    except ValueError:
        error = None
    if error is not None:
        return error
    if response.status_code in (502, 503, 504):
        return ConnectionRefusedError(f"a proxy answered {response.status_code}")
    return _no_socket(reason or response.status_code)


def _no_socket(reason: object) -> ProtocolError:
    return ProtocolError(f"no WebSocket of an environment server is there ({reason})")
