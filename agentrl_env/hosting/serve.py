"""The serving process: bind, announce, serve, and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Unpack

import uvicorn

from agentrl_env.bridges.agentrl import server as agentrl_calls
from agentrl_env.bridges.agentrl import worker as agentrl_workers
from agentrl_env.bridges.mcp import server as mcp
from agentrl_env.bridges.openenv import server as openenv
from agentrl_env.environment import Environment
from agentrl_env.errors import EnvironmentFailed, ServeError
from agentrl_env.hosting.loader import load_targets
from agentrl_env.server.app import create_app
from agentrl_env.server.auth import check_characters, is_link_token
from agentrl_env.server.controller_link import ControllerLinks
from agentrl_env.server.limits import Limits
from agentrl_env.server.sockets import Listener, Tls
from agentrl_env.server.telemetry.metrics import SLOW_STEP_S, Metrics, SessionMetrics
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.watchdog import Watchdog
from agentrl_env.session.loop_watch import warn_of_blocks
from agentrl_env.session.pool import PoolOptions, SessionPool
from agentrl_env.session.threads import RunningCalls

logger = logging.getLogger("agentrl_env")
lifecycle = logging.getLogger("agentrl_env.process")
"""Logs the drain and the end of the process, which text logs also show by default."""

GC_THRESHOLDS = (100_000, 10, 5)
"""Thresholds of the garbage collector. Steps create many short-lived objects and few cycles. With the default
thresholds, collections cost a third of the throughput and most of the tail latency. With much higher ones,
the cycles of malformed calls accumulate."""
BRIDGES = (agentrl_calls.mount, agentrl_workers.mount, mcp.mount, openenv.mount)
"""The additional protocols of servers and controllers."""
NOWHERE = "none"
"""Host of a server that listens on no address. Only its controllers reach it."""


class EnvServer:
    """Tasks served over HTTP from the running event loop.

    Args:
        targets: folders, ``file.py:Class``, ``module:Class``, or Environment classes.
        host: address to bind, ``unix:PATH`` for a socket in the file system, or ``none``.
        port: port to bind; 0 picks a free one.
        token: operator token, required beyond loopback. With the link token of a fleet, the server joins the
            fleet's controllers and cannot be called directly.
        insecure: permit an address beyond loopback without a token.
        tls: encrypts the connections.
        drain_s: seconds that open sessions get to end when the server stops.
        controllers: addresses of the controllers to connect to.
        slow_step_s: steps that take longer are logged as warnings.
        limits: limits of one caller.
        tracing: makes OpenTelemetry spans.
        sessions: options of ``SessionPool``, such as ``max_sessions``.

    Raises TargetError, ServeError.
    """

    def __init__(
        self,
        targets: Sequence[str | type[Environment]],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        insecure: bool = False,
        tls: Tls | None = None,
        drain_s: float = 30.0,
        controllers: Sequence[str] = (),
        slow_step_s: float = SLOW_STEP_S,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
        **sessions: Unpack[PoolOptions],
    ) -> None:
        check_characters(token or "")
        own = token
        if token and is_link_token(token):
            if not controllers:
                words = "a link token only permits a server to join a fleet"
                raise ServeError(f"{words}; give --controller, or a token of its own")
            own = secrets.token_urlsafe()  # holders of the link token must not call the server
        environments = load_targets(targets)
        self.names = [environment.name for environment in environments]
        security: dict[str, Any] = {"token": own, "insecure": insecure, "tls": tls}
        self._listener = None if host == NOWHERE else Listener(host, port, **security)
        self.url = self._listener.url if self._listener else ""
        self.metrics = Metrics()
        self._limits = limits or Limits()
        self.pool = SessionPool(
            environments,
            observer=SessionMetrics(self.metrics, slow_step_s, tracing=tracing is not None),
            message_loop_s=self._limits.message_loop_s,
            history_bytes=self._limits.max_history_bytes,
            **sessions,
        )
        self._app = create_app(
            self.pool, self.metrics, token=own, limits=self._limits, tracing=tracing, bridges=BRIDGES
        )
        self._links = (
            ControllerLinks(self.pool, self.metrics, controllers, token, tracing) if controllers else None
        )
        if self._listener is None and self._links is None:
            raise ServeError("a server with --host none needs a controller: give --controller URL")
        self._drain_s = drain_s
        self._loop_watch = warn_of_blocks()

    @property
    def announcement(self) -> str:
        """The line that announces that the server is ready, with its address."""
        where = f" at {self.url}" if self.url else ""
        through = " through its controller" if self._links is not None else ""
        return f"serving {', '.join(self.names)}{where}{through}"

    @property
    def drain_notice(self) -> str:
        """A text about the sessions that a drain waits for. Empty if there are none."""
        return sessions_get(self.pool.open_sessions, self._drain_s)

    async def start(self) -> None:
        """Start answering requests. Raises ServeError if the startup of a task fails."""
        self._loop_watch.start()
        try:
            await self.pool.tasks()
        except EnvironmentFailed as error:
            await self.stop()
            raise ServeError(error.message) from error
        if self._listener is not None:
            await self._listener.start(self._app, self._limits, self.metrics)
        if self._links is not None:
            await self._links.start()

    async def stop(self) -> None:
        """Drain, then stop. Idempotent."""
        hand_over = self._links.hand_over if self._links is not None else None
        draining = asyncio.ensure_future(self.pool.drain(self._drain_s, hand_over))
        if self._links is not None:
            await asyncio.sleep(0)  # let the drain start
            await self._links.announce_drain()
        await draining
        if self._links is not None:
            await self._links.stop()
        if self._listener is not None:
            await self._listener.stop()
        await self.pool.aclose()
        self._loop_watch.stop()

    def stop_waiting(self) -> None:
        """End a drain without waiting for open sessions."""
        self._drain_s = 0.0
        self.pool.stop_waiting()


class Running(Protocol):
    """A process that serves until it is stopped."""

    @property
    def announcement(self) -> str:
        """The line that announces that the process is ready."""

    @property
    def drain_notice(self) -> str:
        """A text about the sessions that a drain waits for. Empty if there are none."""

    async def start(self) -> None:
        """Start answering requests."""

    async def stop(self) -> None:
        """Drain, then stop."""

    def stop_waiting(self) -> None:
        """End a drain immediately."""


def serve(
    targets: Sequence[str | type[Environment]],
    *,
    announce: Callable[[str], None] | None = None,
    watchdog: Watchdog | None = None,
    **options: object,
) -> None:
    """Serve until SIGINT or SIGTERM. The first signal drains, a second stops immediately.

    Args:
        targets: as for ``EnvServer``.
        announce: called with the line that announces that the server is ready. By default it is printed.
        watchdog: the started watchdog of this process. It watches the event loop from now on.
        options: options of ``EnvServer``.
    """
    if watchdog is not None:
        options["calls"] = RunningCalls(watchdog.calls)
    server = EnvServer(targets, **options)  # type: ignore[arg-type]
    run_until_stopped(server, announce or print_now, watchdog)


def run_until_stopped(
    server: Running, announce: Callable[[str], None], watchdog: Watchdog | None = None
) -> None:
    """Run a server on its own event loop until SIGINT or SIGTERM. A second signal stops immediately."""
    factory = uvicorn.Config("").get_loop_factory()  # uvloop if it is installed
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(server, announce, watchdog))


def sessions_get(number: int, drain_s: float) -> str:
    """Return a text about the open sessions that a drain waits for, or "" if there are none."""
    if not number:
        return ""
    if not drain_s:
        return f"{number} open sessions end"
    return f"{number} open sessions get {drain_s:g} s to end; a second signal ends them at once"


def print_now(line: str) -> None:
    """Print a line unbuffered, because a parent process might wait for it."""
    print(line, flush=True)


async def _serve(server: Running, announce: Callable[[str], None], watchdog: Watchdog | None) -> None:
    stop = asyncio.Event()

    def log(event: str, **facts: str) -> None:
        lifecycle.info(event, extra={"facts": {"pid": os.getpid(), **facts}})

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log("stopping at once", signal=number.name)
            server.stop_waiting()
            return
        stop.set()
        log("draining", signal=number.name, what=server.drain_notice or "no session is open")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
    else:
        await starting
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        announce(server.announcement)
        logger.info("started", extra={"facts": {"what": server.announcement, "pid": os.getpid()}})
    beating = asyncio.create_task(watchdog.keep_beating()) if watchdog is not None else None
    await stopping
    await server.stop()
    if beating is not None:
        beating.cancel()
    log("stopped")
