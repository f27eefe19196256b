"""``agentrl-env up``: a controller and its servers on this machine, from one file."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl_env.fleet.config import FleetConfig, TaskConfig
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import STARVED_FACTOR, ControllerServer
from agentrl_env.fleet.supervisor import Replica, Supervisor
from agentrl_env.hosting.serve import print_now, run_until_stopped, sessions_get
from agentrl_env.launch.docker import DockerServer
from agentrl_env.launch.image import build_image
from agentrl_env.launch.process import ServerHandle, ServerProcess
from agentrl_env.server.auth import link_token

_REFRESH_S = 0.5


class LocalFleet:
    """A controller in this process, and its servers as child processes or containers.

    The servers connect to the controller with a token that permits nothing else. A supervisor restarts
    servers that end. No server outlives this process.

    Args:
        config: what to run.
        report: called with one line per event.
        token: operator token; by default that of the configured variable.
    """

    def __init__(
        self,
        config: FleetConfig,
        report: Callable[[str], None] = lambda line: None,
        token: str | None = None,
    ) -> None:
        self._config = config
        token = token or config.token
        settings = config.controller
        sessions = FleetService(
            queue_s=settings.queue,
            resume=settings.resume,
            stuck_after_s=STARVED_FACTOR * max(task.stuck_after for task in config.tasks),
        )
        self._controller = ControllerServer(sessions, host=settings.host, port=settings.port, token=token)
        self._link_token = link_token(token or secrets.token_urlsafe())
        self.url = self._controller.url
        replicas = [
            Replica(name=f"{task.name} {number}", make=partial(self._make_server, task))
            for task in config.tasks
            for number in range(task.replicas)
        ]
        self.supervisor = Supervisor(replicas, report=report, on_end=self._controller.remove)

    @property
    def announcement(self) -> str:
        """The line that announces that the fleet is ready, with its address."""
        servers = ", ".join(f"{task.name} x{task.replicas}" for task in self._config.tasks)
        return f"fleet {self._config.name} at {self.url}: {servers}"

    @property
    def drain_notice(self) -> str:
        """The sessions that a drain waits for, in words; empty where there are none."""
        open_sessions = sum(len(server.sessions) for server in self._controller.fleet.servers.values())
        return sessions_get(open_sessions, max(task.drain for task in self._config.tasks))

    async def start(self) -> None:
        """Return once every server has joined the fleet. Raises AgentRLError if one cannot start."""
        await self._controller.start()
        await self._build_images()
        await self.supervisor.start()

    async def stop(self) -> None:
        """Let open sessions end within each task's drain, then stop every server and the controller."""
        try:
            await self.supervisor.stop()
        finally:
            await self._controller.stop()

    def stop_waiting(self) -> None:
        """Cut the drain of a concurrent ``stop`` short."""
        self.supervisor.stop_waiting()

    async def roll(self) -> None:
        """Replace the servers one by one; each new server serves before the old one drains."""
        await self._build_images()
        await self.supervisor.roll()

    def table(self) -> Table:
        """Return a table of the fleet's state."""
        servers = list(self._controller.fleet.servers.values())
        open_sessions = sum(len(server.sessions) for server in servers)
        capacity = sum(server.capacity for server in servers)
        table = Table(
            title=f"fleet {self._config.name} at {self.url}",
            caption=f"{open_sessions} open sessions, capacity {capacity}",
        )
        for column in ("task", "kind", "serving", "restarts"):
            table.add_column(column)
        replicas = iter(self.supervisor.replicas)
        for task in self._config.tasks:
            own = [next(replicas) for _ in range(task.replicas)]
            serving = sum(replica.state == "serving" for replica in own)
            restarts = sum(replica.restarts for replica in own)
            table.add_row(task.name, task.kind, f"{serving}/{task.replicas}", str(restarts))
        return table

    async def _build_images(self) -> None:
        for task in self._config.tasks:
            if task.kind == "docker" and task.target is not None:
                self.supervisor.report(f"building the image of {task.name}")
                await asyncio.to_thread(build_image, task.target, tag=task.image_name)

    def _make_server(self, task: TaskConfig) -> ServerHandle:
        options = {
            "token": self._link_token,
            "controllers": [self._controller.local_url],
            "environment": task.environment,
            **task.serve_options(),
        }
        if task.kind == "process":
            return ServerProcess(str(task.target), **options)
        return DockerServer(image=task.image_name, network=task.network, limits=task.limits, **options)


class _ForegroundFleet(LocalFleet):
    """The fleet of the command line: SIGHUP replaces its servers, and a terminal shows its table."""

    _tasks: Sequence[asyncio.Task[None]] = ()

    async def start(self) -> None:
        requested = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
        try:
            await super().start()
        except BaseException:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(self._roll_on_request(requested)),
            asyncio.create_task(self._show_table()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().stop()

    async def _roll_on_request(self, requested: asyncio.Event) -> None:
        while True:
            await requested.wait()
            requested.clear()
            self.supervisor.report(
                "SIGHUP: replacing the servers; changes of the fleet's file need a restart"
            )
            try:
                await self.roll()
            except Exception as error:  # the next request may succeed
                self.supervisor.report(f"not all servers were replaced: {error}")

    async def _show_table(self) -> None:
        console = Console()
        if console.is_terminal:
            with Live(self.table(), console=console, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(_REFRESH_S)
                    live.update(self.table(), refresh=True)


def up(config: FleetConfig, token: str | None = None) -> None:
    """Run a fleet until Ctrl-C or SIGTERM; SIGHUP replaces its servers, as configured at the start.

    Args:
        config: what to run.
        token: operator token; by default that of the configured variable.

    Raises AgentRLError if the fleet cannot start; everything that had started is stopped.
    """
    run_until_stopped(_ForegroundFleet(config, _report, token), print_now)


def _report(line: str) -> None:
    print(f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {line}", file=sys.stderr, flush=True)
