"""The controller's process: one address, many servers behind it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import WebSocketRoute

from agentrl_env.errors import ServeError
from agentrl_env.fleet.controller import Fleet
from agentrl_env.fleet.supervisor import Workers
from agentrl_env.fleet.worker_endpoint import link_endpoint
from agentrl_env.server.app import create_app
from agentrl_env.server.auth import is_link_token, link_token
from agentrl_env.server.connections import Connections
from agentrl_env.server.limits import Limits
from agentrl_env.server.serve import print_now, run_until_stopped
from agentrl_env.server.sockets import Listener
from agentrl_env.server.telemetry.tracing import Tracing
from agentrl_env.wire import LINK_PATH

PATIENCE_S = 3.0
"""How long a controller that is told to end waits for answers; then their callers may ask another."""
ADOPTION_S = 30.0
"""How long a session waits for room at another worker, or for its own to be started again."""


class Controller:
    """A fleet's address, served from the running event loop.

    Stopping it ends no session: they live in the servers, which dial again.

    Args:
        fleet: the servers.
        host: the address to bind.
        port: 0 picks a free one.
        token: what clients must show; needed for an address that is not loopback. Servers show it, or
            the fleet's token that ``link_token`` makes of it.
        insecure: allow such an address without a token.
        limits: of one caller.
        tracing: makes OpenTelemetry spans.

    Raises ServeError with one clear sentence.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        host: str = "127.0.0.1",
        port: int = 8100,
        token: str | None = None,
        insecure: bool = False,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        if token and is_link_token(token):
            raise ServeError("this token only brings servers into a fleet; a controller needs the operator's")
        self.fleet = fleet
        self._listener = Listener(host, port, token=token, insecure=insecure)
        self.url = self._listener.url
        self._limits = limits or Limits()
        self._app = create_app(fleet, token=token, limits=self._limits, tracing=tracing)
        self._app.router.routes.append(WebSocketRoute(LINK_PATH, link_endpoint(fleet.roster)))

    @property
    def announcement(self) -> str:
        """The line that says that the controller is ready, and where."""
        return f"controlling a fleet at {self.url}"

    async def start(self) -> None:
        """Return once requests are answered. Raises ServeError where Redis does not answer."""
        try:
            await self._listener.start(self._app, Connections(self._limits, self.fleet.metrics))
            await self.fleet.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Take no new sessions, answer what is under way, and end; idempotent."""
        self.fleet.draining = True
        giving_up = asyncio.get_running_loop().call_later(PATIENCE_S, self.fleet.give_up)
        await self._listener.stop()
        giving_up.cancel()
        await self.fleet.aclose()

    def hurry(self) -> None:
        """Do nothing: a controller ends at once."""


class WorkerServer:
    """Tasks served by several processes of this machine, behind one address.

    Args:
        targets: as on the command line.
        workers: how many processes.
        arguments: further options of ``agentrl-env serve`` for each.
        drain_s: seconds that open sessions get to end when the server stops.
        resume: go on with a dead worker's sessions at another, as ``Fleet`` does.
        options: of ``Controller``.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        workers: int,
        arguments: Sequence[str],
        drain_s: float,
        resume: bool = False,
        **options: Any,
    ) -> None:
        fleet = Fleet(queue_s=0.0, adoption_s=ADOPTION_S, resume=resume)
        self._controller = Controller(fleet, **options)
        self._number, self._drain_s = workers, drain_s
        self._workers = Workers(
            workers,
            self._controller.fleet,
            arguments=[*arguments, "--", *targets],
            controller=_dialled(self._controller.url),
            token=link_token(options.get("token") or secrets.token_urlsafe()),
            drain_s=drain_s,
        )

    @property
    def announcement(self) -> str:
        """The line that says that the server is ready, and where."""
        tasks = {task for member in self._controller.fleet.members.values() for task in member.tasks}
        number = f" with {self._number} workers"
        return f"serving {', '.join(sorted(tasks))} at {self._controller.url}{number}"

    async def start(self) -> None:
        """Return once every worker serves."""
        await self._controller.start()
        await self._workers.start()

    async def stop(self) -> None:
        """Drain, then stop; idempotent."""
        self._controller.fleet.draining = True
        await self._workers.stop(self._drain_s)
        await self._controller.stop()

    def hurry(self) -> None:
        """End without waiting for open sessions."""
        self._workers.hurry()


def control(fleet: Fleet, announce: Callable[[str], None] | None = None, **options: Any) -> None:
    """Run a controller until SIGINT or SIGTERM.

    Args:
        fleet: the servers.
        announce: is given the one line that says the controller is ready; printed by default.
        options: of ``Controller``.

    Raises ServeError.
    """
    if fleet.resume and not options.get("token"):
        words = "a controller with --resume needs a token: servers authenticate with it what they restore"
        raise ServeError(f"{words}; use --token or AGENTRL_TOKEN")
    run_until_stopped(Controller(fleet, **options), announce or print_now)


def serve_with_workers(
    targets: Sequence[str], announce: Callable[[str], None] | None = None, **options: Any
) -> None:
    """Serve tasks with several processes until SIGINT or SIGTERM; the first drains, a second hurries.

    Args:
        targets: as on the command line.
        announce: is given the one line that says the server is ready; printed by default.
        options: of ``WorkerServer``.
    """
    run_until_stopped(WorkerServer(targets, **options), announce or print_now)


def _dialled(url: str) -> str:
    """Return an address as a process of this machine dials it."""
    parts = urlsplit(url)
    if parts.hostname in ("0.0.0.0", "::"):
        return f"{parts.scheme}://127.0.0.1:{parts.port}"
    return url
