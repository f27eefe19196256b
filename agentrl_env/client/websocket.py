"""Calls over one WebSocket: many under way at once, matched by id."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic_core import from_json, to_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from agentrl_env.client.transport import CONNECT_TIMEOUT_S, MAX_ANSWER_BYTES, Response
from agentrl_env.errors import AgentRLError, BodyTooLarge, ProtocolError, ServerUnreachable, from_wire
from agentrl_env.wire import ANSWER_FRAME, SOCKET_PATH, SOCKET_PROTOCOL, Call

PING_INTERVAL_S, PING_TIMEOUT_S = 20.0, 60.0


class _Connection:
    """One open WebSocket and the calls under way on it."""

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket
        self._answers: dict[int, asyncio.Future[Response]] = {}
        self._sizes: dict[int, int] = {}
        self.closed = False
        self._reading = asyncio.create_task(self._read())

    async def call(self, number: int, frame: bytes) -> Response:
        """Send a call and return its answer. Raises ConnectionError, BodyTooLarge."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._answers[number], self._sizes[number] = answer, len(frame)
        try:
            await self._websocket.send(frame, text=True)
            return await answer
        except asyncio.CancelledError:
            if not self.closed:
                with contextlib.suppress(ConnectionClosed):
                    await self._websocket.send(
                        b'{"id":%d,"call":"cancel","target":%d}' % (number, number), text=True
                    )
            raise
        except ConnectionClosed as error:
            raise ConnectionResetError(f"the WebSocket was closed ({error})") from error
        finally:
            del self._answers[number], self._sizes[number]

    async def aclose(self) -> None:
        """Close the connection; calls under way raise ConnectionError."""
        self.closed = True
        self._reading.cancel()
        self._websocket.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        lost: Exception = ConnectionResetError("the WebSocket was closed")
        try:
            while True:
                number, response = _parse(await self._websocket.recv(decode=False))
                answer = self._answers.get(number) if number is not None else None
                if answer is not None and not answer.done():
                    answer.set_result(response)
        except ConnectionClosed as error:
            lost = ConnectionResetError(f"the WebSocket was closed ({error})")
            if error.rcvd is not None and error.rcvd.code == CloseCode.MESSAGE_TOO_BIG:
                self._refuse_largest()
            elif error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG:
                lost = ProtocolError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        except ValueError as error:
            lost = ProtocolError(f"the server sent a frame that is not an answer ({error})"[:500])
            self._websocket.transport.abort()
        finally:
            self.closed = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(lost)

    def _refuse_largest(self) -> None:
        if self._sizes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            if not self._answers[largest].done():
                size = self._sizes[largest]
                error = BodyTooLarge(f"a message of {size} bytes is over the server's limit")
                self._answers[largest].set_exception(error)


class WebSocketTransport:
    """Calls to one server over one WebSocket, which is opened when needed, and again when it was lost."""

    def __init__(self, url: str, *, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        scheme = "wss" if parts.scheme in ("wss", "https") else "ws"
        self._url = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{SOCKET_PATH}"
        self._headers = dict(headers)
        self._numbers = itertools.count(1)
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    @property
    def connected(self) -> bool:
        """True if a call can be sent without connecting."""
        return self._connection is not None and not self._connection.closed

    async def send(self, call: Call, body: bytes, session_id: str | None, *, timeout: float) -> Response:
        """Make a call and return its answer, as HTTP would answer it.

        Raises TimeoutError, OSError where the connection fails, ProtocolError where the server has no
        WebSocket, ServerUnreachable after ``aclose``.
        """
        number = next(self._numbers)
        fields = body[1:] if len(body) > 2 else b"}"
        comma = b"," if len(fields) > 1 else b""
        frame = b'{"id":%d,"call":"%b"%b%b' % (number, call.name.encode(), comma, fields)
        async with asyncio.timeout(timeout):
            if self._connection is None or self._connection.closed:
                await self.connect()
            assert self._connection is not None
            return await self._connection.call(number, frame)

    async def connect(self) -> None:
        """Open the connection where it is not open. Raises what ``send`` does."""
        async with self._connecting:
            if self._closed:
                raise ServerUnreachable("this client is closed")
            if not self.connected:
                self._connection = _Connection(await self._open())

    async def aclose(self) -> None:
        """Close the connection; calls under way raise ConnectionError."""
        self._closed = True
        if self._connection is not None:
            await self._connection.aclose()

    async def _open(self) -> ClientConnection:
        try:
            return await connect(
                self._url,
                subprotocols=[Subprotocol(SOCKET_PROTOCOL)],
                additional_headers=self._headers,
                compression=None,
                open_timeout=CONNECT_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=PING_TIMEOUT_S,
                max_size=MAX_ANSWER_BYTES,
                max_queue=None,
                proxy=None,
            )
        except InvalidStatus as error:
            raise _refusal(error) from error
        except InvalidMessage as error:
            if isinstance(error.__cause__, EOFError):
                raise ConnectionResetError("the server closed the connection") from error
            raise ProtocolError(f"no WebSocket of an environment server is there ({error})") from error
        except InvalidHandshake as error:
            raise ProtocolError(f"no WebSocket of an environment server is there ({error})") from error
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error


def _parse(text: bytes) -> tuple[int | None, Response]:
    """Split an answer into the id of its call and the response."""
    match = ANSWER_FRAME.match(text)
    if match is not None:
        number, body = int(match[1]), text[match.end() : -1]
        return number, Response(200, body) if match[2] == b"result" else _error(b'{"error":%b}' % body)
    try:  # the fields are in another order
        answer = from_json(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
        return None, Response(500, b"")
    if "error" in answer:
        return answer["id"], _error(to_json({"error": answer["error"]}))
    return answer["id"], Response(200, to_json(answer.get("result")))


def _error(body: bytes) -> Response:
    error = from_wire(from_json(body))
    return Response(error.status if error else 500, body)


def _refusal(error: InvalidStatus) -> AgentRLError | OSError:
    """Return the error of a refused handshake."""
    response = error.response
    with contextlib.suppress(ValueError):
        refused = from_wire(from_json(response.body or b""))
        if refused is not None:
            return refused
    if response.status_code in (502, 503, 504):
        return ConnectionRefusedError(f"a proxy answered {response.status_code}")
    return ProtocolError(f"no WebSocket of an environment server is there ({error})")
