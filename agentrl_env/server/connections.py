"""Connections that keep a server waiting are hung up; what a caller may send before it is heard is bounded.

The protocols are uvicorn's. Here is what they lack: a limit on headers, deadlines for headers and
bodies, and an end for callers that take nothing of their answers or have vanished.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from agentrl_env.errors import HeadersTooLarge, RequestTimeout, WireError
from agentrl_env.server.limits import Limits
from agentrl_env.server.telemetry.metrics import Metrics

SWEEP_S = 0.5
"""How often overdue connections are looked for."""
VANISHED_S = 60
"""After how many seconds the system gives up a peer that acknowledges nothing."""
MANY_FILES = 65_536
LINGER_S = 1.0
"""How long a caller that was refused may take to hang up itself."""
_IDLE, _HEAD, _BODY, _ANSWER, _REFUSED = "idle", "head", "body", "answer", "refused"


class Connections:
    """The open connections of a server; makes their protocols, and hangs up the overdue.

    Args:
        limits: of one caller.
        metrics: where it counts.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self._metrics = metrics
        self._open: set[_Watched] = set()

    def __len__(self) -> int:
        return len(self._open)

    def http(self, **options: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Http(self, **options)

    def websocket(self, **options: Any) -> asyncio.Protocol:
        """Return the protocol of a connection that has become a WebSocket."""
        return _WebSocket(self, **options)

    def count(self, error: WireError) -> None:
        """Count an error that is answered before the application hears of the request."""
        self._metrics.errors[error.type] += 1

    def add(self, connection: _Watched) -> None:
        """Look after a connection."""
        self._open.add(connection)

    def discard(self, connection: _Watched) -> None:
        """Look after it no more."""
        self._open.discard(connection)

    async def watch(self) -> None:
        """Hang up the overdue, again and again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(loop.time())

    def sweep(self, now: float) -> None:
        """Hang up whatever is overdue."""
        for connection in list(self._open):
            reason = connection.overdue(now)
            if reason is not None:
                self._metrics.hung_up[reason] += 1
                connection.hang_up(reason)


class _Watched:
    """What is known of every connection: whether its caller takes what waits for it."""

    transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._limits = connections.limits
        self._unsent = 0
        self._unsent_since = 0.0

    def overdue(self, now: float) -> str | None:
        """Return why the connection is to be hung up, or None."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        return "unread_answer" if now - self._unsent_since > self._limits.read_s else None

    def hang_up(self, reason: str) -> None:
        """Close, without waiting for what is not sent."""
        self.transport.abort()


class _Http(_Watched, HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        _Watched.__init__(self, connections)
        HttpToolsProtocol.__init__(self, **options)
        self._state = _IDLE
        self._since = self.loop.time()
        self._read = 0
        """Bytes of the headers that are being read; while a body is, those since the last of it."""
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(cast(asyncio.Transport, transport))

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)

    def handle_websocket_upgrade(self) -> None:
        self._connections.discard(self)
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._state == _IDLE:
            self._enter(_HEAD)
        self._read += len(data)
        super().data_received(data)
        if self._read > self._limits.max_header_bytes and self._state in (_HEAD, _BODY):
            self._refuse_headers()

    def on_message_begin(self) -> None:
        if self._state != _HEAD:  # else its first bytes came alone
            self._enter(_HEAD)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_headers()
        if not self._refused:
            self._enter(_BODY)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._read = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._enter(_ANSWER)
            super().on_message_complete()
            self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._rest()

    def overdue(self, now: float) -> str | None:
        if not self.transport.is_closing():
            if self.flow.read_paused:  # it is the server that lets the caller wait
                self._since = now
            waited = now - self._since
            if self._state == _HEAD and waited > self._limits.head_s:
                return "slow_headers"
            if self._state == _BODY and waited > self._limits.body_s:
                return "slow_body"
            if self._state == _IDLE and waited > self._limits.idle_s:
                return "idle"
            if self._state == _REFUSED and waited > LINGER_S:
                return "refused"
        return super().overdue(now)

    def hang_up(self, reason: str) -> None:
        if reason in ("unread_answer", "refused"):
            self.transport.abort()
        elif reason == "idle":
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"the request did not arrive in time: {reason.replace('_', ' ')}"))

    def _refuse_headers(self) -> None:
        self._refuse(HeadersTooLarge(f"the headers are over {self._limits.max_header_bytes} bytes"))

    def _refuse(self, error: WireError) -> None:
        """Answer a request that is not read to its end, and close."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._connections.count(error)
        last = self.cycle
        begun = last is not None and (
            last.response_started if self._state == _BODY else not last.response_complete
        )
        if not begun:
            body = to_json(error.wire())
            head = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
            head += b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        # A close while bytes are unread would be a reset, which can overtake the answer.
        self.transport.write_eof()
        self._enter(_REFUSED)

    def _rest(self) -> None:
        """Take note that all requests are answered."""
        if self._state == _ANSWER and self.cycle is not None and self.cycle.response_complete:
            self._enter(_IDLE)

    def _enter(self, state: str) -> None:
        self._state, self._since, self._read = state, self.loop.time(), 0


class _WebSocket(_Watched, WebSocketsSansIOProtocol):
    """One WebSocket; whether its peer lives, uvicorn's pings find out."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        _Watched.__init__(self, connections)
        WebSocketsSansIOProtocol.__init__(self, **options)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)


def find_vanished(listening: socket.socket) -> None:
    """Let the system find out which peers of a listening socket have vanished without a word."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", VANISHED_S),
        ("TCP_KEEPINTVL", VANISHED_S // 4),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):
                listening.setsockopt(socket.IPPROTO_TCP, option, value)


def allow_many_files() -> None:
    """Let the process open as many connections as it may be allowed to without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
