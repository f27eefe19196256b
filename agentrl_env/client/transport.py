"""Transports: calls to one server over HTTP or a WebSocket, and to several controllers with failover."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import httpx
from pydantic_core import from_json, to_json
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from agentrl_env.errors import (
    AgentRLError,
    BodyTooLarge,
    ProtocolError,
    ServerDraining,
    ServerUnreachable,
    StateUnavailable,
    WireError,
    from_wire,
)
from agentrl_env.wire import (
    ANSWER_FRAME,
    OPEN,
    OPEN_MANY,
    SOCKET_HEADER,
    SOCKET_PATH,
    SOCKET_PROTOCOL,
    Call,
)

CONNECT_TIMEOUT_S = 5.0
ATTEMPT_TIMEOUT_S = 10.0
"""Seconds until a call is also sent to another controller, which waits for a running step as well."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Maximum size of one answer, which limits the memory that a broken server can fill."""
MAX_CHUNKS, MIN_CHUNK_BYTES = 10_000, 16
"""An answer with more chunks than this must have this average chunk size, since each chunk takes time."""
RECONNECT_S = 60.0
"""Seconds until opening a failed WebSocket is tried again."""
PING_INTERVAL_S, PING_TIMEOUT_S = 20.0, 60.0


class Response(NamedTuple):
    """HTTP status and body of an answer."""

    status: int
    body: bytes

    def error(self) -> WireError | None:
        """Return the error in the body, or None if it has no known form."""
        try:
            return from_wire(from_json(self.body))
        except ValueError:
            return None


class Transport(Protocol):
    """Carries calls to one server, from one event loop."""

    async def send(self, call: Call, body: bytes, session_id: str | None, *, timeout: float) -> Response:
        """Make a call whose request is ``body`` as JSON.

        Raises TimeoutError, OSError, ProtocolError, ServerUnreachable.
        """

    async def aclose(self) -> None:
        """Close the connections."""


class HttpTransport:
    """Calls to one server over HTTP.

    Args:
        url: address of the server.
        headers: headers of every request.
        max_connections: maximum number of concurrent requests.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], max_connections: int) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"content-type": "application/json", "accept-encoding": "identity", **headers},
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            verify=ssl.create_default_context() if url.startswith("https") else False,
            trust_env=False,
        )
        # An opening can wait until another session ends, so it must leave connections for other steps.
        self._openings = asyncio.Semaphore(max(1, max_connections // 2))
        self.offers_socket = False
        """True if the server has announced its WebSocket."""

    async def send(self, call: Call, body: bytes, session_id: str | None, *, timeout: float) -> Response:
        """Make a call. See ``Transport``."""
        async with asyncio.timeout(timeout):
            if call not in (OPEN, OPEN_MANY):
                return await self._send(call, body, session_id)
            async with self._openings:
                return await self._send(call, body, session_id)

    async def _send(self, call: Call, body: bytes, session_id: str | None) -> Response:
        path = call.path if session_id is None else call.path.replace("{id}", quote(session_id, safe=""))
        if self._client.is_closed:
            raise ServerUnreachable("this client is closed")
        try:
            content = body if call.body else None
            async with self._client.stream(call.method, path, content=content) as response:
                answer = await _read(response)
        except httpx.ConnectTimeout as error:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        except httpx.NetworkError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        except httpx.RemoteProtocolError as error:
            if "disconnected" in str(error) or "closed connection" in str(error):
                raise ConnectionResetError(str(error)) from error
            raise ProtocolError(f"the answer is not HTTP/1.1: {error}") from error
        except httpx.HTTPError as error:
            raise ProtocolError(f"the answer is not HTTP/1.1: {error}") from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise ServerUnreachable("this client is closed") from error
        self.offers_socket = SOCKET_HEADER in response.headers
        return Response(response.status_code, answer)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def _read(response: httpx.Response) -> bytes:
    """Return the body of an answer. Raises ProtocolError if it exceeds the limits."""
    body, pieces = bytearray(), 0
    async for piece in response.aiter_raw():
        body += piece
        pieces += 1
        if len(body) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if pieces > MAX_CHUNKS and len(body) < pieces * MIN_CHUNK_BYTES:
            raise ProtocolError(f"the answer comes in more than {MAX_CHUNKS} chunks of a few bytes")
    return bytes(body)


class WebSocketTransport:
    """Calls to one server over one WebSocket, which is opened on demand and reopened if it is lost."""

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
        """Make a call and return its answer in the form of an HTTP answer.

        Raises TimeoutError, OSError if the connection fails, ProtocolError if the server has no WebSocket,
        ServerUnreachable after ``aclose``.
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
        """Open the connection if it is closed. Raises the errors of ``send``."""
        async with self._connecting:
            if self._closed:
                raise ServerUnreachable("this client is closed")
            if not self.connected:
                self._connection = _Connection(await self._open())

    async def aclose(self) -> None:
        """Close the connection. Calls in progress raise ConnectionError."""
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
            raise ProtocolError(f"the server has no WebSocket for environments ({error})") from error
        except InvalidHandshake as error:
            raise ProtocolError(f"the server has no WebSocket for environments ({error})") from error
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error


class _Connection:
    """An open WebSocket and the calls in progress on it."""

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
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieve it, since it is not raised if the call could not be sent

    async def aclose(self) -> None:
        """Close the connection. Calls in progress raise ConnectionError."""
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


def _parse(text: bytes) -> tuple[int | None, Response]:
    """Split an answer into the id of its call and the response."""
    match = ANSWER_FRAME.match(text)
    if match is not None:
        number, body = int(match[1]), text[match.end() : -1]
        return number, Response(200, body) if match[2] == b"result" else _error(b'{"error":%b}' % body)
    try:  # the fields might be in another order
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
    return ProtocolError(f"the server has no WebSocket for environments ({error})")


class ServerTransport:
    """Calls to one server over its WebSocket if one can be opened, else over HTTP.

    Args:
        http: used until an answer announces the WebSocket.
        socket: used from then on.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self, http: HttpTransport, socket: WebSocketTransport, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._http = http
        self._socket = socket
        self._clock = clock
        self._not_before = 0.0

    async def send(self, call: Call, body: bytes, session_id: str | None, *, timeout: float) -> Response:
        """Make a call. See ``Transport``."""
        if self._http.offers_socket and await self._wait_for_socket(timeout):
            return await self._socket.send(call, body, session_id, timeout=timeout)
        return await self._http.send(call, body, session_id, timeout=timeout)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._socket.aclose()
        await self._http.aclose()

    async def _wait_for_socket(self, timeout: float) -> bool:
        if self._socket.connected:
            return True
        if self._clock() < self._not_before:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._socket.connect()
        except (OSError, AgentRLError):  # HTTP either works or reports the reason
            self._not_before = self._clock() + RECONNECT_S
        return self._socket.connected


class FailoverTransport:
    """Calls to a fleet with several controllers.

    Repeating a call is safe: it returns the same answer at any controller.

    Args:
        transports: one for each controller. Calls start with a random controller.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._preferred = random.SystemRandom().randrange(len(transports))

    async def send(self, call: Call, body: bytes, session_id: str | None, *, timeout: float) -> Response:
        """Make a call. Raises an error of the transports after all have failed, or at the timeout."""
        loop = asyncio.get_running_loop()
        end, failures = loop.time() + timeout, 0
        while True:
            at, left = self._preferred, end - loop.time()
            # An opening can wait in a queue, so each controller gets a share of the time.
            longest = timeout / len(self._transports) if call in (OPEN, OPEN_MANY) else ATTEMPT_TIMEOUT_S
            try:
                response = await self._transports[at].send(call, body, session_id, timeout=min(left, longest))
            except TimeoutError:
                if loop.time() >= end:
                    raise
                failures = 0
            except OSError:
                failures += 1
                if failures == len(self._transports):
                    raise
            else:
                failures += 1
                if failures == len(self._transports) or not _is_local_refusal(response):
                    return response
            if at == self._preferred:
                self._preferred = (at + 1) % len(self._transports)

    async def aclose(self) -> None:
        """Close the connections."""
        for transport in self._transports:
            await transport.aclose()


def _is_local_refusal(response: Response) -> bool:
    """Return True if another controller might accept the call: this one drains or lost the shared state."""
    if response.status not in (502, 503, 504):
        return False
    error = response.error()  # None for the answer of a proxy
    return error is None or isinstance(error, ServerDraining | StateUnavailable)
