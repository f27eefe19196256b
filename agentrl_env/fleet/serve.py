"""The processes of a fleet: a controller, and a server whose worker processes connect to one."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.routing import WebSocketRoute

from agentrl_env.errors import ServeError
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.link_endpoint import link_endpoint
from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.fleet.supervisor import Replica, Supervisor
from agentrl_env.hosting.serve import BRIDGES, print_now, run_until_stopped, sessions_get
from agentrl_env.launch.process import ServerHandle, ServerProcess
from agentrl_env.server.app import create_app
from agentrl_env.server.auth import AgentTokens, is_link_token, link_token
from agentrl_env.server.limits import Limits
from agentrl_env.server.sockets import Listener, Tls
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.server.watchdog import STUCK_S
from agentrl_env.wire import LINK_PATH

logger = logging.getLogger("agentrl_env")
_EVERYWHERE = re.compile(r"//(0\.0\.0\.0|\[::\]):")

STOP_S = 3.0
"""Seconds that a stopping controller waits for answers. After that, callers can use another controller."""
STARVED_FACTOR = 60
"""A linked server may be silent for ``stuck_s`` times this factor. Its watchdog kills a stuck server long
before that, but does not count the time in which the server waits for a processor."""
ADOPTION_S = 90.0
"""Seconds that a session waits for a place on another worker, or for its own worker to restart."""


class ControllerServer:
    """A controller, served from the running event loop.

    Stopping it ends no session: sessions live in the servers, which connect again.

    Args:
        fleet: the servers and their sessions.
        host: address to bind.
        port: port to bind; 0 picks a free one.
        token: operator token, required beyond loopback. Servers present it, or the link token that
            ``link_token`` derives from it.
        insecure: permit an address beyond loopback without a token.
        tls: encrypts the connections. Processes on this machine then use a separate loopback address, which
            ``local_url`` returns.
        limits: limits of one caller.
        tracing: makes OpenTelemetry spans.

    Raises ServeError.
    """

    def __init__(
        self,
        fleet: FleetService,
        *,
        host: str = "127.0.0.1",
        port: int = 8100,
        token: str | None = None,
        insecure: bool = False,
        tls: Tls | None = None,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        if token and is_link_token(token):
            reason = "a link token only permits a server to join a fleet"
            raise ServeError(f"{reason}; start the controller with the operator token")
        self.fleet = fleet
        self.metrics = fleet.metrics
        self._listener = Listener(host, port, token=token, insecure=insecure, tls=tls)
        self._local = Listener("127.0.0.1", 0, token=token, insecure=insecure) if tls is not None else None
        self.url = self._listener.url
        self._limits = limits or Limits()
        if token:
            fleet.use_token(token)
        self._tokens = AgentTokens(token, self._limits.agent_token_s) if token else None
        self._app = create_app(
            fleet,
            self.metrics,
            token=token,
            tokens=self._tokens,
            limits=self._limits,
            tracing=tracing,
            bridges=BRIDGES,
        )
        self._app.router.routes.append(WebSocketRoute(LINK_PATH, link_endpoint(fleet.registry)))

    @property
    def local_url(self) -> str:
        """The address to which processes on this machine connect."""
        return self._local.url if self._local else re.sub(_EVERYWHERE, "//127.0.0.1:", self.url)

    @property
    def announcement(self) -> str:
        """The line that announces that the controller is ready, with its address."""
        return f"controlling a fleet at {self.url}"

    @property
    def drain_notice(self) -> str:
        """Empty, because sessions continue in their servers."""
        return ""

    async def start(self) -> None:
        """Start answering requests. Raises ServeError if Redis does not answer."""
        try:
            await self._listener.start(self._app, self._limits, self.metrics)
            if self._local is not None:
                await self._local.start(self._app, self._limits, self.metrics, lifespan=False)
            await self.fleet.start()
            if self._tokens is not None:
                await self._tokens.share(self.fleet.store)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Refuse new sessions, answer the calls in progress, and stop. Idempotent."""
        self.fleet.draining = True
        timer = asyncio.get_running_loop().call_later(STOP_S, self.fleet.fail_waiting)
        if self._local is not None:
            await self._local.stop()
        await self._listener.stop()
        timer.cancel()
        if self._tokens is not None:
            await self._tokens.stop()
        await self.fleet.aclose()

    def stop_waiting(self) -> None:
        """Do nothing, because a controller does not wait for sessions."""

    async def remove(self, server: ServerHandle) -> None:
        """Remove a server of this machine whose process has ended, without waiting for missing heartbeats.

        Sessions whose calls got the server stuck are not continued elsewhere.
        """
        blocking = server.blocking_sessions() if isinstance(server, ServerProcess) else []
        for remote in self._remotes(server):
            await self.fleet.registry.routing.blame(remote.server_id, blocking)
            await self.fleet.registry.lose(remote.server_id, "its process ended")

    def retire(self, server: ServerHandle) -> int:
        """Stop placing sessions on a server of this machine. Return the number of its open sessions."""
        remotes = self._remotes(server)
        for remote in remotes:
            remote.stale = True
        return sum(len(remote.sessions) + remote.opening for remote in remotes)

    def reload_certificate(self) -> None:
        """Read the certificate files again for new connections. Raises ServeError."""
        self._listener.reload_certificate()

    def _remotes(self, server: ServerHandle) -> list[RemoteServer]:
        return [remote for remote in self.fleet.servers.values() if server.is_at(remote.place)]


class WorkerServer:
    """Tasks served by several processes of this machine, behind one address.

    The processes connect to a controller in this process with a token that allows nothing else.

    Args:
        targets: targets to serve, as on the command line.
        workers: number of processes.
        arguments: further options of ``agentrl-env serve`` for each process.
        drain_s: seconds that open sessions get to end when the server stops.
        resume: as for ``FleetService``.
        stuck_s: seconds after which a process whose event loop does not run is killed and replaced. 0
            disables this.
        options: options of ``ControllerServer``.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        workers: int,
        arguments: Sequence[str],
        drain_s: float,
        resume: bool = False,
        stuck_s: float = STUCK_S,
        **options: Any,
    ) -> None:
        self._fleet = FleetService(
            queue_s=0.0, adoption_s=ADOPTION_S, resume=resume, stuck_after_s=STARVED_FACTOR * stuck_s
        )
        self._controller = ControllerServer(self._fleet, **options)
        self._drain_s = drain_s
        make = partial(
            ServerProcess,
            *targets,
            controllers=[self._controller.local_url],
            token=link_token(options.get("token") or secrets.token_urlsafe()),
            drain=drain_s,
            stuck_after=stuck_s,
            arguments=arguments,
            forward_output=True,
        )
        self._supervisor = Supervisor(
            [Replica(name=f"worker {number}", make=make) for number in range(workers)],
            report=logger.warning,
            on_end=self._controller.remove,
            poll_s=0.1,
        )

    @property
    def announcement(self) -> str:
        """The line that announces that the server is ready, with its address."""
        tasks = ", ".join(sorted({task for server in self._fleet.servers.values() for task in server.tasks}))
        return f"serving {tasks} at {self._controller.url} with {len(self._supervisor.replicas)} workers"

    @property
    def drain_notice(self) -> str:
        """A text about the sessions that a drain waits for. Empty if there are none."""
        return sessions_get(int(self._fleet.gauges()["agentrl_sessions_open"]), self._drain_s)

    async def start(self) -> None:
        """Return once every worker serves. Raises ServeError if a worker ends during the start."""
        await self._controller.start()
        try:
            await self._supervisor.start()
        except ServeError as error:
            await self._stop_workers(0.0)
            raise ServeError("a worker ended during the start; see its error above") from error

    async def stop(self) -> None:
        """Drain, then stop. Idempotent."""
        self._fleet.draining = True
        await self._stop_workers(self._drain_s)
        await self._controller.stop()

    def stop_waiting(self) -> None:
        """End a drain without waiting for open sessions."""
        self._supervisor.stop_waiting()

    async def _stop_workers(self, drain_s: float) -> None:
        stopping = asyncio.create_task(self._supervisor.stop())
        if drain_s <= 0:
            await asyncio.sleep(0)
            self.stop_waiting()
        await stopping


def control(fleet: FleetService, **options: Any) -> None:
    """Run a controller until SIGINT or SIGTERM.

    Args:
        fleet: the servers and their sessions.
        options: of ``ControllerServer``.

    Raises ServeError.
    """
    if fleet.resumes and not options.get("token"):
        reason = "a controller with --resume needs a token, which authenticates the servers' checkpoints"
        raise ServeError(f"{reason}; use --token-file or AGENTRL_TOKEN")
    run_until_stopped(ControllerServer(fleet, **options), print_now)


def serve_with_workers(targets: Sequence[str], **options: Any) -> None:
    """Serve tasks with several processes. The first SIGINT or SIGTERM drains the server, a second stops it.

    Args:
        targets: targets to serve, as on the command line.
        options: options of ``WorkerServer``.
    """
    run_until_stopped(WorkerServer(targets, **options), print_now)
