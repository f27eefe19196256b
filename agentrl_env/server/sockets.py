"""Listening sockets: bind an address first, and serve an application on it later."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import uvicorn
from pydantic_core import to_json
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl_env.errors import (
    HeadersTooLarge,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    ServeError,
    WireError,
)
from agentrl_env.server.auth import MIN_TOKEN_CHARS, MIN_TOKEN_VARIETY, NEW_TOKEN, check_characters, is_weak
from agentrl_env.server.embedded import EmbeddedServer
from agentrl_env.server.limits import OPERATOR_FACTOR, RETRY_S, Limits
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.websocket import CountedWebSocket

OnHttp2 = Callable[[asyncio.Transport, bytes, Callable[[], None]], None]
"""Takes over an HTTP/2 connection: receives its transport, its first bytes and a callback for its end."""
_HTTP2 = b"PRI * HTTP/2.0\r\n"
_UNIX = "unix:"
DEAD_PEER_S = 60
"""Seconds without an acknowledgement after which the system closes a connection."""
MAX_FILES = 65_536
LINGER_S = 1.0
"""Seconds within which a refused client can close the connection itself."""


class _Peers:
    """The connections of each address, oldest first.

    Args:
        limit: maximum number of connections of one address.
        metrics: counts the open and the refused connections.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._of: dict[str, dict[_HttpProtocol, None]] = {}

    def add(self, address: str, connection: _HttpProtocol) -> bool:
        """Add a connection. Return False if there are too many and none of them can be closed."""
        connections = self._of.setdefault(address, {})
        if len(connections) >= self._limit:
            self._metrics.refusals["max_connections"] += 1
            oldest = next((one for one in connections if one.waiting), None)
            if oldest is None:
                return False
            oldest.make_room()
            self.remove(address, oldest)
        connections[connection] = None
        self._metrics.connections += 1
        return True

    def remove(self, address: str, connection: _HttpProtocol) -> None:
        """Remove a closed connection. Idempotent."""
        connections = self._of.get(address, {})
        if connection in connections:
            del connections[connection]
            self._metrics.connections -= 1
            if not connections:
                del self._of[address]


def _too_many() -> RateLimited:
    words = "max_connections: this address has too many connections; close some"
    return RateLimited(words, retry_after=RETRY_S, budget="max_connections")


class _HttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with a size limit for headers, and deadlines for headers and body.

    Args:
        limits: ``max_header_bytes``, ``head_s``, ``body_s`` and ``idle_s``.
        peers: connections of each address.
        on_http2: takes over HTTP/2 connections.
        options: options of uvicorn.
    """

    def __init__(
        self, limits: Limits, peers: _Peers, on_http2: OnHttp2 | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._on_http2 = on_http2
        self._limits = limits
        self._peers = peers
        self._head_bytes = 0
        """Bytes of the headers, or of the chunk extensions and trailers after the last part of the body."""
        self._reading_head = False
        self._reading_body = False
        self._upgraded = False
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._timer = self.loop.call_later(self._limits.idle_s, transport.close)
        if not self._peers.add(self._address, self):
            self._refuse(_too_many())

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._peers.remove(self._address, self)
        super().connection_lost(error)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def waiting(self) -> bool:
        """True if no request is in progress, or the peer has not sent the whole request."""
        if self._upgraded:
            return False
        return self._reading_head or self._reading_body or self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._on_http2 is not None and self.parser_is_new and data.startswith(_HTTP2):
            self._hand_over(self._on_http2, data)
            return
        if not self._reading_head and not self._reading_body:
            self._reading_head, self._head_bytes = True, 0
            self._stop_timer()
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._reading_head and not self._reading_body:
            return
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
        elif self._timer is None and self.transport.get_protocol() is self:
            self._start_timer()

    @property
    def parser_is_new(self) -> bool:
        """True before the first request of the connection."""
        return self.cycle is None and not self._reading_head

    def _hand_over(self, on_http2: OnHttp2, data: bytes) -> None:
        """Hand the connection over to another protocol, which reports its end."""
        self._upgraded = True
        self._stop_timer()
        self.connections.discard(self)
        on_http2(self.transport, data, partial(self._peers.remove, self._address, self))

    def on_headers_complete(self) -> None:
        self._reading_head, self._reading_body = False, True
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_headers()
        elif self.parser.should_upgrade() and _has_body(self.headers):
            # After the upgrade the body would never be read, and the handshake would never end.
            self._refuse(InvalidRequest("a request that upgrades the connection must not have a body"))
        if not self._refused:
            super().on_headers_complete()

    def make_room(self) -> None:
        """Close the ``waiting`` connection."""
        if self._reading_head or self._reading_body:
            self._refuse(_too_many())
        else:
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        if not self._refused:
            super().handle_websocket_upgrade()
            websocket = self.transport.get_protocol()
            if isinstance(websocket, CountedWebSocket):
                self._upgraded = True
                websocket.on_lost = partial(self._peers.remove, self._address, self)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading_body = False
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()

    def _start_timer(self) -> None:
        """Start the timer that refuses the request if its headers or its body do not arrive in time."""
        part, within_s = "headers", self._limits.head_s
        if self._reading_body:
            part, within_s = "body", self._limits.body_s
        late = RequestTimeout(f"the {part} did not arrive within {within_s:g} s")
        self._timer = self.loop.call_later(within_s, self._refuse, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_headers(self) -> None:
        self._refuse(HeadersTooLarge(f"the headers exceed {self._limits.max_header_bytes} bytes"))

    def _refuse(self, error: WireError) -> None:
        """Answer a request without reading the rest of it, and close the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        last = self.cycle
        begun = last is not None and (
            last.response_started if self._reading_body else not last.response_complete
        )
        if not begun:
            body = to_json(error.wire())
            head = b"HTTP/1.1 %d %b\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
            head += b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        # Closing with unread bytes would send a reset, which can overtake the answer.
        if self.transport.get_extra_info("ssl_object") is None:  # TLS cannot close only one direction
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in headers
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificate and private key of a listener.

    Args:
        cert: PEM file with the certificate, followed by the certificates of its issuers.
        key: PEM file with the private key. By default the key is also read from ``cert``.
    """

    cert: Path
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context of new connections. Raises ServeError if the files are unusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the files into a context. Raises ServeError if they are unusable."""
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = f"{self.cert} and {self.key}" if self.key else f"{self.cert}"
            raise ServeError(
                f"cannot serve TLS with {files} ({error}); --tls-cert takes a PEM file with the certificate "
                "chain, --tls-key one with its unencrypted private key"
            ) from error


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


class Listener:
    """An address that is bound immediately and served later, from the running event loop.

    Args:
        host: address to bind, or ``unix:PATH`` for a socket in the file system.
        port: port to bind; 0 picks a free one.
        token: operator token, required beyond loopback.
        insecure: permit an address beyond loopback without a token. None if the program has no such option.
        tls: encrypts the connections.

    Raises ServeError.
    """

    def __init__(
        self, host: str, port: int, *, token: str | None, insecure: bool | None, tls: Tls | None = None
    ) -> None:
        check_characters(token or "")
        _check_exposure(host, token, insecure)
        self._tls, self._context = tls, tls.context() if tls is not None else None
        self._socket = _bind(host, port)
        self.url = _url(host, self._socket, "http" if tls is None else "https")
        self._server: EmbeddedServer | None = None

    def reload_certificate(self) -> None:
        """Read the certificate files again for new connections. Raises ServeError."""
        if self._tls is not None and self._context is not None:
            self._tls.load_into(self._context)

    async def start(self, app: ASGIApp, limits: Limits, metrics: Metrics, *, lifespan: bool = True) -> None:
        """Start serving, and return once requests are answered. ``metrics`` counts the connections.

        The lifespan of an application runs once, even if several listeners serve it.

        HTTP/2 connections go to the application's ``state.on_http2``, if it has one.
        """
        on_http2 = getattr(getattr(app, "state", None), "on_http2", None)
        _raise_file_limit()
        _detect_dead_peers(self._socket)
        context = self._context
        peers = _Peers(OPERATOR_FACTOR * limits.max_connections, metrics)
        config = uvicorn.Config(
            app,
            http=lambda **options: _HttpProtocol(limits, peers, on_http2, **options),  # type: ignore[arg-type]
            ws=lambda **options: CountedWebSocket(limits, **options),  # type: ignore[arg-type]
            log_config=None,
            log_level="critical",  # the middleware logs bugs, and malformed requests are not logged
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=math.ceil(limits.idle_s),
            ws_max_size=2 * limits.max_body_bytes,  # up to this size, a typed error is returned
            ws_ping_interval=20.0,
            ws_ping_timeout=60.0,
            ws_per_message_deflate=False,
            lifespan="on" if lifespan else "off",
            ssl_context_factory=None if context is None else lambda config, default: context,
        )
        self._server = EmbeddedServer(config)  # because a draining server still answers steps
        await self._server.start(self._socket)

    async def stop(self) -> None:
        """Answer the requests in progress, then stop. Idempotent."""
        if self._server is None:
            self._socket.close()
            return
        await self._server.stop()
        if self.url.startswith(_UNIX):
            with contextlib.suppress(OSError):
                os.unlink(self.url.removeprefix(_UNIX))


def _url(host: str, bound: socket.socket, scheme: str) -> str:
    if bound.family == socket.AF_UNIX:
        return host
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{bound.getsockname()[1]}"


def _bind(host: str, port: int) -> socket.socket:
    if host.startswith(_UNIX):
        return _bind_file(host.removeprefix(_UNIX))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio disables Nagle's algorithm, which would cost 40 ms a step.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except (OSError, OverflowError) as error:
        bound.close()
        raise ServeError(
            f"cannot listen on {host}:{port} ({error}); choose another port, or 0 for a free one"
        ) from error
    bound.setblocking(False)
    return bound


def _bind_file(path: str) -> socket.socket:
    """Listen on a socket in the file system. The permissions of its folder protect it."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        os.chmod(path, 0o666)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ServeError(f"cannot listen on {path} ({error}); choose an unused path") from error
    bound.setblocking(False)
    return bound


def _check_exposure(host: str, token: str | None, insecure: bool | None) -> None:
    if insecure or _is_loopback(host) or (token and not is_weak(token)):
        return
    if token:
        raise ServeError(
            f"refusing to serve on {host} with a token that can be guessed: it needs {MIN_TOKEN_CHARS} "
            f"characters, {MIN_TOKEN_VARIETY} of them different; make one with {NEW_TOKEN} and give "
            "--token-file token.txt"
        )
    option = "" if insecure is None else ", or --insecure to admit every caller that can reach it"
    raise ServeError(
        f"refusing to serve on {host} without a token; give --token-file (or AGENTRL_TOKEN){option}"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith(_UNIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _detect_dead_peers(listening: socket.socket) -> None:
    """Enable TCP keepalive, so that the system detects peers that have vanished."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_S),
        ("TCP_KEEPINTVL", DEAD_PEER_S // 4),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                listening.setsockopt(socket.IPPROTO_TCP, option, value)


def _raise_file_limit() -> None:
    """Raise the limit of open file descriptors as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
