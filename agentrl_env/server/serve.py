"""The serving process: bind, announce, serve, and end in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from agentrl_env.environment import Environment
from agentrl_env.errors import EnvironmentFailed, ServeError
from agentrl_env.server.app import create_app
from agentrl_env.server.gate import MAX_BODY_BYTES
from agentrl_env.server.pool import SessionPool
from agentrl_env.server.service import PoolService
from agentrl_env.server.targets import load_targets

_UNIX = "unix:"


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handlers: a drained server must still answer steps."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EnvServer:
    """Tasks served over HTTP from the running event loop.

    Args:
        targets: folders, ``file.py:Class``, ``module:Class``, or Environment classes.
        host: the address to bind, or ``unix:PATH`` for a socket in the file system.
        port: 0 picks a free one.
        max_sessions: how many sessions may be open at once.
        token: what callers must show; needed for an address that is not loopback.
        insecure: allow such an address without a token.
        oracle: answer ``expert`` calls.
        lease_s: seconds a session may be idle.
        drain_s: seconds that open sessions get to end when the server stops.
        threads: as for ``SessionPool``.

    Raises TargetError and ServeError with one clear sentence.
    """

    def __init__(
        self,
        targets: Sequence[str | type[Environment]],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        max_sessions: int = 1024,
        token: str | None = None,
        insecure: bool = False,
        oracle: bool = False,
        lease_s: float = 900.0,
        drain_s: float = 30.0,
        threads: int | None = None,
    ) -> None:
        _refuse_open_door(host, token, insecure)
        environments = load_targets(targets)
        self.names = [environment.name for environment in environments]
        self.pool = SessionPool(
            environments, max_sessions=max_sessions, lease_s=lease_s, oracle=oracle, threads=threads
        )
        self._drain_s = drain_s
        self._socket = _bind(host, port)
        self.url = _url(host, self._socket)
        config = uvicorn.Config(
            create_app(PoolService(self.pool), token=token),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=75,
            ws_max_size=2 * MAX_BODY_BYTES,  # what is over the limit itself gets a typed answer
            ws_ping_interval=20.0,
            ws_ping_timeout=60.0,
            ws_per_message_deflate=False,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are answered. Raises ServeError where a task's startup fails."""
        try:
            await self.pool.tasks()
        except EnvironmentFailed as error:
            self._socket.close()
            raise ServeError(error.message) from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                raise ServeError("the server did not start; see the log above")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Drain, then stop; idempotent."""
        if self._serving is None:
            self._socket.close()
            return
        await self.pool.drain(self._drain_s)
        self._server.should_exit = True
        await asyncio.wait((self._serving,))
        if self.url.startswith(_UNIX):
            with contextlib.suppress(OSError):  # not its folder: whoever made it removes it
                os.unlink(self.url.removeprefix(_UNIX))

    def hurry(self) -> None:
        """End without waiting for open sessions."""
        self._drain_s = 0.0
        self.pool.hurry()


def serve(
    targets: Sequence[str | type[Environment]],
    *,
    announce: Callable[[str], None] | None = None,
    **options: object,
) -> None:
    """Serve until SIGINT or SIGTERM; the first drains, a second one hurries.

    Args:
        targets: as for ``EnvServer``.
        announce: is given the one line that says the server is ready; printed by default.
        options: of ``EnvServer``.
    """
    server = EnvServer(targets, **options)  # type: ignore[arg-type]
    factory = server._server.config.get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(server, announce or _print_now))


def _print_now(line: str) -> None:
    print(line, flush=True)  # whoever started the server waits for this line


async def _serve(server: EnvServer, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            server.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await server.start()
    # Steps make many short-lived objects and few cycles: frequent full collections cost a third of
    # the throughput and most of the tail latency.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    announce(f"serving {', '.join(server.names)} at {server.url}")
    await stop.wait()
    await server.stop()


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
