"""Listening: an address bound before anything starts, and an application served on it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from agentrl_env.errors import ServeError
from agentrl_env.server.connections import Connections, allow_many_files, find_vanished

_UNIX = "unix:"


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: a drained server must still answer steps."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """An address that is taken at once, and served from the running event loop later.

    Args:
        host: the address to bind, or ``unix:PATH`` for a socket in the file system.
        port: 0 picks a free one.
        token: what callers must show; needed for an address that is not loopback.
        insecure: allow such an address without a token.

    Raises ServeError with one clear sentence.
    """

    def __init__(self, host: str, port: int, *, token: str | None, insecure: bool) -> None:
        _refuse_open_door(host, token, insecure)
        self._socket = _bind(host, port)
        self.url = _url(host, self._socket)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp, connections: Connections) -> None:
        """Return once requests are answered."""
        allow_many_files()
        find_vanished(self._socket)
        config = uvicorn.Config(
            app,
            http=connections.http,  # type: ignore[arg-type]
            ws=connections.websocket,  # type: ignore[arg-type]
            log_config=None,
            log_level="critical",  # callers' bad bytes are not worth a line; bugs are logged at the gate
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=math.ceil(connections.limits.idle_s),
            ws_max_size=2
            * connections.limits.max_body_bytes,  # what is over the limit itself gets a typed answer
            ws_ping_interval=20.0,
            ws_ping_timeout=60.0,
            ws_per_message_deflate=False,
        )
        self._server = _Server(config)
        self._connections = connections
        self._watching = asyncio.create_task(connections.watch())
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                raise ServeError("the server did not start; see the log above")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Answer what is under way, then stop; idempotent."""
        if self._serving is None or self._server is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await asyncio.wait((self._serving,))
        if self._watching is not None:
            self._watching.cancel()
        if self.url.startswith(_UNIX):
            with contextlib.suppress(OSError):  # not its folder: whoever made it removes it
                os.unlink(self.url.removeprefix(_UNIX))


def _url(host: str, bound: socket.socket) -> str:
    if bound.family == socket.AF_UNIX:
        return host
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"


def _bind(host: str, port: int) -> socket.socket:
    if host.startswith(_UNIX):
        return _bind_file(host.removeprefix(_UNIX))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, or asyncio does not know it for TCP and leaves Nagle's algorithm on: 40 ms a step.
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
    """Listen on a socket in the file system, open to whoever may enter its folder."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        os.chmod(path, 0o666)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ServeError(f"cannot listen on {path} ({error}); choose a path that is free") from error
    bound.setblocking(False)
    return bound


def _refuse_open_door(host: str, token: str | None, insecure: bool) -> None:
    if token or insecure or _is_loopback(host):
        return
    raise ServeError(
        f"refusing to serve on {host} without a token; give --token (or AGENTRL_TOKEN), "
        "or --insecure if everybody who can reach it may use it"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.startswith(_UNIX):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
