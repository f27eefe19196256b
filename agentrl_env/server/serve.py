"""The serving process: bind, announce, serve, and end in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import uvicorn

from agentrl_env.environment import Environment
from agentrl_env.errors import EnvironmentFailed, ServeError
from agentrl_env.server.app import create_app
from agentrl_env.server.auth import is_link_token
from agentrl_env.server.connections import Connections
from agentrl_env.server.controller_link import Dialer
from agentrl_env.server.limits import Limits
from agentrl_env.server.loader import load_targets
from agentrl_env.server.service import PoolService
from agentrl_env.server.sockets import Listener
from agentrl_env.server.telemetry.session_metrics import SLOW_STEP_S
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.session.pool import SessionPool

logger = logging.getLogger("agentrl_env")

NOWHERE = "none"
"""The host of a server that listens on no address and is reached through its controllers alone."""


class EnvServer:
    """Tasks served over HTTP from the running event loop.

    Args:
        targets: folders, ``file.py:Class``, ``module:Class``, or Environment classes.
        host: the address to bind, ``unix:PATH`` for a socket in the file system, or ``none``.
        port: 0 picks a free one.
        max_sessions: how many sessions may be open at once.
        token: what callers must show; needed for an address that is not loopback. A fleet's, as
            ``link_token`` makes it, only lets this server dial: then nobody may call it directly.
        insecure: allow such an address without a token.
        oracle: answer ``expert`` calls.
        lease_s: seconds a session may be idle.
        drain_s: seconds that open sessions get to end when the server stops.
        threads: as for ``SessionPool``.
        controllers: addresses of controllers to dial; they then call over the lines that this opens.
        slow_step_s: a step that takes longer is a warning in the log.
        limits: of one caller.
        tracing: makes OpenTelemetry spans.

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
        controllers: Sequence[str] = (),
        slow_step_s: float = SLOW_STEP_S,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        own = token
        if token and is_link_token(token):
            if not controllers:
                words = "this token only brings a server into a fleet"
                raise ServeError(f"{words}; give --controller, or a token of its own")
            own = secrets.token_urlsafe()  # who has the fleet's token may not call its servers
        environments = load_targets(targets)
        self.names = [environment.name for environment in environments]
        self._listener = None if host == NOWHERE else Listener(host, port, token=own, insecure=insecure)
        self.url = self._listener.url if self._listener else ""
        self.pool = SessionPool(
            environments,
            max_sessions=max_sessions,
            lease_s=lease_s,
            oracle=oracle,
            threads=threads,
            slow_step_s=slow_step_s,
        )
        service = PoolService(self.pool)
        self._limits = limits or Limits()
        self._app = create_app(service, token=own, limits=self._limits, tracing=tracing)
        self._dialer = Dialer(self.pool, service, controllers, token, tracing) if controllers else None
        if self._listener is None and self._dialer is None:
            raise ServeError("a server that listens nowhere needs a controller to dial")
        self._drain_s = drain_s

    @property
    def announcement(self) -> str:
        """The line that says that the server is ready, and where."""
        where = f" at {self.url}" if self.url else ""
        through = " through its controller" if self._dialer is not None else ""
        return f"serving {', '.join(self.names)}{where}{through}"

    async def start(self) -> None:
        """Return once requests are answered. Raises ServeError where a task's startup fails."""
        try:
            await self.pool.tasks()
        except EnvironmentFailed as error:
            await self.stop()
            raise ServeError(error.message) from error
        if self._listener is not None:
            await self._listener.start(self._app, Connections(self._limits, self.pool.metrics))
        if self._dialer is not None:
            await self._dialer.start()

    async def stop(self) -> None:
        """Drain, then stop; idempotent."""
        hand_over = self._dialer.hand_over if self._dialer is not None else None
        draining = asyncio.ensure_future(self.pool.drain(self._drain_s, hand_over))
        if self._dialer is not None:
            await asyncio.sleep(0)  # the drain has begun
            await self._dialer.say_draining()
        await draining
        if self._dialer is not None:
            await self._dialer.stop()
        if self._listener is not None:
            await self._listener.stop()
        await self.pool.aclose()

    def hurry(self) -> None:
        """End without waiting for open sessions."""
        self._drain_s = 0.0
        self.pool.hurry()


class Running(Protocol):
    """Something that serves until it is told to stop."""

    @property
    def announcement(self) -> str:
        """The one line that says that it is ready."""

    async def start(self) -> None:
        """Return once requests are answered."""

    async def stop(self) -> None:
        """End in order."""

    def hurry(self) -> None:
        """End without waiting any longer."""


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
    run_until_stopped(server, announce or print_now)


def run_until_stopped(server: Running, announce: Callable[[str], None]) -> None:
    """Run a server on an event loop of its own until SIGINT or SIGTERM; a second one hurries."""
    factory = uvicorn.Config("").get_loop_factory()  # uvloop's, where there is one
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(server, announce))


def print_now(line: str) -> None:
    """Print a line for whoever started the server and waits for it."""
    print(line, flush=True)


async def _serve(server: Running, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            logger.info("hurried", extra={"facts": {"pid": os.getpid()}})
            server.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # it may wait for a controller that never comes
        starting.cancel()
        await asyncio.wait((starting,))
    else:
        await starting
        # Steps make many short-lived objects and few cycles: frequent full collections cost a third of
        # the throughput and most of the tail latency. A batch of thousands of steps is gone before the
        # first of them.
        gc.freeze()
        gc.set_threshold(200_000, 20, 100)
        announce(server.announcement)
        logger.info("started", extra={"facts": {"what": server.announcement, "pid": os.getpid()}})
    await stopping
    logger.info("draining", extra={"facts": {"pid": os.getpid()}})
    await server.stop()
    logger.info("stopped", extra={"facts": {"pid": os.getpid()}})
