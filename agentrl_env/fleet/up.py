"""``agentrl-env up``: a controller and its servers on this machine, from one file."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl_env.fleet.config import FleetConfig, TaskConfig, read_fleet_config
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import STARVED_FACTOR, ControllerServer
from agentrl_env.fleet.supervisor import Replica, Supervisor
from agentrl_env.hosting.serve import print_now, run_until_stopped, sessions_get
from agentrl_env.launch.docker import DockerServer
from agentrl_env.launch.image import build_image
from agentrl_env.launch.process import ServerHandle, ServerProcess
from agentrl_env.server.auth import link_token
from agentrl_env.server.sockets import Tls

_REFRESH_S = 0.5


class LocalFleet:
    """A controller in this process, and its servers as child processes or containers.

    The servers connect to the controller with a token that allows nothing else. A supervisor restarts
    servers that end. No server outlives this process.

    Args:
        config: configuration of the fleet.
        report: called with one line per event.
        token: operator token. By default it is read from the configured variable.
        tls: encrypts the connections of callers.
    """

    def __init__(
        self,
        config: FleetConfig,
        report: Callable[[str], None] = lambda line: None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._config = config
        token = token or config.token
        settings = config.controller
        sessions = FleetService(
            queue_s=settings.queue,
            resume=settings.resume,
            stuck_after_s=STARVED_FACTOR * max(task.stuck_after for task in config.tasks),
        )
        address: dict[str, Any] = {"host": settings.host, "port": settings.port, "token": token}
        self._controller = ControllerServer(sessions, **address, tls=tls)
        self._link_token = link_token(token or secrets.token_urlsafe())
        self.url = self._controller.url
        self._replicas = {
            task.name: [self._replica(task, number) for number in range(task.replicas)]
            for task in config.tasks
        }
        self.supervisor = Supervisor(
            [replica for group in self._replicas.values() for replica in group],
            report=report,
            on_end=self._controller.remove,
            retire=self._controller.retire,
        )

    @property
    def announcement(self) -> str:
        """The line that announces that the fleet is ready, with its address."""
        servers = ", ".join(f"{task.name} x{task.replicas}" for task in self._config.tasks)
        return f"fleet {self._config.name} at {self.url}: {servers}"

    @property
    def drain_notice(self) -> str:
        """A text about the sessions that a drain waits for. Empty if there are none."""
        open_sessions = sum(len(server.sessions) for server in self._controller.fleet.servers.values())
        return sessions_get(open_sessions, max(task.drain for task in self._config.tasks))

    async def start(self) -> None:
        """Return once every server has joined the fleet. Raises AgentRLError if one cannot start."""
        await self._controller.start()
        await self._build_images(self._config.tasks)
        await self.supervisor.start()

    async def stop(self) -> None:
        """Let open sessions end within each task's drain, then stop every server and the controller."""
        try:
            await self.supervisor.stop()
        finally:
            await self._controller.stop()

    def stop_waiting(self) -> None:
        """End the drain of a concurrent ``stop`` early."""
        self.supervisor.stop_waiting()

    async def reload(self, config: FleetConfig) -> None:
        """Apply a configuration that was read again, and reload the certificate.

        Servers are added, removed and replaced to match the new configuration. If nothing has changed, all
        are replaced, so that they load their tasks again. A replaced server gets no new session and is
        stopped once its sessions have ended. The fleet's name and its controller do not change.

        Raises AgentRLError if a new server does not start. The previous server then continues.
        """
        self._controller.reload_certificate()
        before = self._config
        if (config.name, config.controller) != (before.name, before.controller):
            self.supervisor.report("changes of the fleet's name and of [controller] need a restart")
        config = config.model_copy(update={"name": before.name, "controller": before.controller})
        known = {task.name: task for task in before.tasks}
        replaced = [
            task for task in config.tasks if config == before or _is_other(task, known.get(task.name))
        ]
        await self._build_images(replaced)
        self._config = config
        for name in known.keys() - {task.name for task in config.tasks}:
            await self._scale(name, 0)
        for task in config.tasks:
            replicas = self._replicas.setdefault(task.name, [])
            for replica in replicas:
                replica.make = partial(self._make_server, task)
            kept = replicas[: task.replicas]
            while len(replicas) < task.replicas:
                replicas.append(self._replica(task, len(replicas)))
                await self.supervisor.add(replicas[-1])
            if task in replaced:
                await self.supervisor.roll(kept)
            await self._scale(task.name, task.replicas)

    async def _scale(self, name: str, number: int) -> None:
        """Remove the last servers of a task."""
        while len(self._replicas[name]) > number:
            await self.supervisor.remove(self._replicas[name].pop())
        if not number:
            del self._replicas[name]

    def _replica(self, task: TaskConfig, number: int) -> Replica:
        return Replica(name=f"{task.name} {number}", make=partial(self._make_server, task))

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
        for task in self._config.tasks:
            own = self._replicas.get(task.name, [])
            serving = sum(replica.state == "serving" for replica in own)
            restarts = sum(replica.restarts for replica in own)
            table.add_row(task.name, task.kind, f"{serving}/{task.replicas}", str(restarts))
        return table

    async def _build_images(self, tasks: Sequence[TaskConfig]) -> None:
        for task in tasks:
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


def _is_other(task: TaskConfig, before: TaskConfig | None) -> bool:
    """Return True if the options of a task's servers have changed. Their number is ignored."""
    return before is not None and task != before.model_copy(update={"replicas": task.replicas})


class _ForegroundFleet(LocalFleet):
    """The fleet of the command line. SIGHUP reloads its file, and a terminal shows a table of its state.

    Args:
        read: reads the file.
        options: options of ``LocalFleet``.
    """

    def __init__(self, read: Callable[[], FleetConfig], **options: Any) -> None:
        super().__init__(read(), _report, **options)
        self._read = read
        self._tasks: Sequence[asyncio.Task[None]] = ()

    async def start(self) -> None:
        requested = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
        try:
            await super().start()
        except BaseException:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(self._reload_on_request(requested)),
            asyncio.create_task(self._show_table()),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().stop()

    async def _reload_on_request(self, requested: asyncio.Event) -> None:
        while True:
            await requested.wait()
            requested.clear()
            self.supervisor.report("SIGHUP: reading the fleet's file again")
            try:
                await self.reload(self._read())
            except Exception as error:  # the next request may succeed
                self.supervisor.report(f"the file is not applied, or not completely: {error}")
            else:
                self.supervisor.report("the file is applied")

    async def _show_table(self) -> None:
        console = Console()
        if console.is_terminal:
            with Live(self.table(), console=console, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(_REFRESH_S)
                    live.update(self.table(), refresh=True)


def up(file: Path, token: str | None = None, tls: Tls | None = None) -> None:
    """Run a fleet until Ctrl-C or SIGTERM. SIGHUP reloads its file.

    Args:
        file: the configuration file.
        token: operator token. By default it is read from the configured variable.
        tls: encrypts the connections of callers.

    Raises AgentRLError if the fleet cannot start. All servers that did start are then stopped.
    """
    run_until_stopped(_ForegroundFleet(partial(read_fleet_config, file), token=token, tls=tls), print_now)


def _report(line: str) -> None:
    print(f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {line}", file=sys.stderr, flush=True)
