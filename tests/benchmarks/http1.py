"""A small HTTP/1.1 client with constant work per request, so that benchmarks measure the servers.

General clients search their pool on every request, which dominates with thousands of waiting requests.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit
from weakref import WeakSet

from agentrl_env.errors import ProtocolError, ServerUnreachable

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """Status and body of a response."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._buffer = bytearray()
        self._status = 0
        self._length: int | None = None
        self._chunked = False
        self._keep = True
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Buffer an answer and deliver it when it is complete."""
        self._buffer += data
        try:
            if self._status or self._read_head():
                self._read_body()
        except (ValueError, IndexError):
            self._fail(ProtocolError("the answer is not HTTP/1.1"))

    def eof_received(self) -> None:
        """Complete an answer without a length at the end of the connection."""
        if self._status and self._length is None and not self._chunked:
            self._deliver(bytes(self._buffer[self._body_at :]))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the pending request."""
        self._fail(error or ConnectionResetError("the server closed the connection"))

    def request(self, data: bytes) -> asyncio.Future[HttpResponse]:
        """Send a request. Return a future of its answer, which can raise ConnectionError."""
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._body_at = 0, 0
        if self.closed or self._transport is None:
            self._answer.set_exception(ConnectionResetError("the connection is closed"))
        else:
            self._transport.write(data)
        return self._answer

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        status = int(first.split(b" ", 2)[1])
        if status < 200:  # an interim answer, followed by the final one
            del self._buffer[: end + 4]
            return self._read_head()
        self._status, self._body_at = status, end + 4
        self._length, self._chunked, self._keep = None, False, first.startswith(b"HTTP/1.1")
        if status in (204, 304):
            self._length = 0
        for line in lines:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    self._length = int(value)
                case b"transfer-encoding":
                    self._chunked = b"chunked" in value.lower()
                case b"connection":
                    self._keep = self._keep and value.strip().lower() != b"close"
        return True

    def _read_body(self) -> None:
        if self._chunked:
            body = _dechunk(self._buffer, self._body_at)
            if body is not None:
                self._deliver(body)
        elif self._length is not None and len(self._buffer) - self._body_at >= self._length:
            self._deliver(bytes(self._buffer[self._body_at : self._body_at + self._length]))

    def _deliver(self, body: bytes) -> None:
        self._buffer.clear()
        status, self._status = self._status, 0
        if not self._keep:
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(HttpResponse(status=status, body=body))

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class Http1Client:
    """Sends requests to one server over at most ``max_connections`` connections of one event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str], max_connections: int) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        lines = [f"host: {parts.netloc.rpartition('@')[2]}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = ("\r\n".join(lines) + "\r\ncontent-length: ").encode("latin-1")
        self._slots = asyncio.Semaphore(max_connections)
        self._free: list[Connection] = []
        self._connections: WeakSet[Connection] = WeakSet()
        self._closed = False

    async def request(self, method: str, path: str, body: bytes = b"", *, timeout: float) -> HttpResponse:
        """Send one request and return its answer.

        Raises TimeoutError after ``timeout`` seconds, OSError if the connection fails,
        ProtocolError if the answer is not HTTP, ServerUnreachable after ``aclose``.
        """
        if self._closed:
            raise ServerUnreachable("this client is closed")
        start = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("ascii")
        data = b"%b%b%d\r\n\r\n%b" % (start, self._head, len(body), body)
        async with asyncio.timeout(timeout), self._slots:
            return await self._exchange(data)

    async def aclose(self) -> None:
        """Close all connections. Pending requests raise ConnectionError."""
        self._closed = True
        for connection in list(self._connections):
            connection.close()
        self._free.clear()
        await asyncio.sleep(0)

    async def _exchange(self, data: bytes) -> HttpResponse:
        connection = self._idle() or await self._connect()
        try:
            answer = await connection.request(data)
        except BaseException:
            connection.close()  # a late answer must not be mistaken for the next answer
            raise
        if not connection.closed:
            self._free.append(connection)
        return answer

    def _idle(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from error
        self._connections.add(connection)
        return connection


def _dechunk(buffer: bytearray, at: int) -> bytes | None:
    """Return a chunked body, or None if it is incomplete."""
    body = bytearray()
    while (end := buffer.find(b"\r\n", at)) >= 0:
        size = int(bytes(buffer[at:end]).split(b";")[0], 16)
        if size == 0:
            # Trailers end with an empty line, which follows immediately without trailers.
            return bytes(body) if buffer.find(b"\r\n\r\n", end) >= 0 else None
        if len(buffer) < end + 2 + size + 2:
            return None
        body += buffer[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return None
