"""A whole fleet on this machine: a controller and its servers, started, kept, replaced, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.table import Table

from agentrl_env.errors import AgentRLError
from agentrl_env.fleet.config import FleetPlan, TaskPlan
from agentrl_env.fleet.controller import Fleet
from agentrl_env.fleet.serve import Controller
from agentrl_env.launch.docker import DockerServer
from agentrl_env.launch.image import build_image
from agentrl_env.launch.placement import Placed
from agentrl_env.launch.process import ServerProcess
from agentrl_env.server.auth import link_token

_LOOK_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_START_S = 120.0


@dataclass(slots=True, kw_only=True)
class _Replica:
    """One place in the fleet, and the server that fills it at the moment."""

    task: TaskPlan
    number: int
    server: Placed | None = None
    state: str = "starting"
    restarts: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class LocalFleet:
    """A plan's controller in this process, and its servers as children or containers.

    Every server dials the controller with a token that lets it do nothing else. One that dies is started
    again, after growing pauses while it dies young; none outlives this process.

    Args:
        plan: what to run.
        report: is given one line for each thing that happens.
    """

    def __init__(self, plan: FleetPlan, report: Callable[[str], None] = lambda line: None) -> None:
        self._plan, self._tell = plan, report
        settings = plan.controller
        state = Fleet(queue_s=settings.queue, resume=settings.resume)
        self._controller = Controller(state, host=settings.host, port=settings.port, token=plan.token)
        self._link_token = link_token(plan.token or secrets.token_urlsafe())
        self.url = self._controller.url
        self._dialled = self.url.replace("//0.0.0.0:", "//127.0.0.1:")
        self._images: dict[str, str] = {}
        self._replicas = [
            _Replica(task=task, number=number) for task in plan.tasks for number in range(task.replicas)
        ]
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once every server is in the fleet. Raises AgentRLError where one cannot start."""
        await self._controller.start()
        for task in self._plan.tasks:
            if task.kind == "docker":
                await self._have_image(task)
        await asyncio.gather(*map(self._fill, self._replicas))
        self._keeping = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]

    async def stop(self) -> None:
        """Let open sessions end within each task's drain, then stop every server and the controller."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        servers = [replica.server for replica in self._replicas if replica.server is not None]
        for replica in self._replicas:
            replica.state = "stopping"
        ended = await asyncio.gather(*(asyncio.to_thread(s.stop) for s in servers), return_exceptions=True)
        await self._controller.stop()
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    async def roll(self) -> None:
        """Replace every server, one after the other: the new one serves before the old one drains."""
        for task in self._plan.tasks:
            if task.kind == "docker":
                await self._have_image(task)
        for replica in self._replicas:
            async with replica.turn:
                old = replica.server
                await self._fill(replica)
                if old is not None:
                    await asyncio.to_thread(old.stop)
            self._report(f"{_name(replica)} was replaced")

    def table(self) -> Table:
        """Return how the fleet stands."""
        members = list(self._controller.fleet.members.values())
        held = sum(len(member.sessions) for member in members)
        room = sum(member.capacity for member in members)
        table = Table(
            title=f"fleet {self._plan.name} at {self.url}",
            caption=f"{held} sessions open, room for {room}",
        )
        for column in ("task", "kind", "serving", "restarts"):
            table.add_column(column)
        for task in self._plan.tasks:
            own = [replica for replica in self._replicas if replica.task is task]
            serving = sum(replica.state == "serving" for replica in own)
            restarts = sum(replica.restarts for replica in own)
            table.add_row(task.name, task.kind, f"{serving}/{task.replicas}", str(restarts))
        return table

    async def _have_image(self, task: TaskPlan) -> None:
        if task.target is None:
            self._images[task.name] = task.image_name
            return
        self._report(f"building the image of {task.name}")
        image = await asyncio.to_thread(build_image, task.target, tag=task.image_name)
        self._images[task.name] = image.name

    async def _fill(self, replica: _Replica) -> None:
        """Put a fresh server into a place; the one that was there is the caller's to stop."""
        server = self._place(replica.task)
        try:
            await asyncio.to_thread(server.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(server.stop)
            raise
        replica.server, replica.state = server, "serving"

    def _place(self, task: TaskPlan) -> Placed:
        shared = {"token": self._link_token, "controller": self._dialled, "start_timeout": _START_S}
        numbers = {"max_sessions": task.max_sessions, "lease": task.lease, "drain": task.drain}
        options = {**shared, **numbers, "oracle": task.oracle, "environment": task.environment}
        if task.kind == "process":
            return ServerProcess(str(task.target), **options)  # type: ignore[arg-type]
        return DockerServer(
            image=self._images[task.name],
            network=task.network,
            limits=task.limits,
            **options,  # type: ignore[arg-type]
        )

    async def _keep(self, replica: _Replica) -> None:
        """Start a place's server again whenever it dies."""
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE_S
        begin = loop.time()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with replica.turn:
                    if await asyncio.to_thread(_lives, replica.server):
                        continue
                    await self._clear(replica)
                    pause = _FIRST_PAUSE_S if loop.time() - begin > _LONGEST_PAUSE_S else 2 * pause
                    await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))
                    begin, replica.restarts, replica.state = loop.time(), replica.restarts + 1, "starting"
                    await self._fill(replica)
                    self._report(f"{_name(replica)} serves again")
            except Exception as error:  # whatever it is: nobody else would start the server again
                self._report(f"{_name(replica)} does not start: {error}")

    async def _clear(self, replica: _Replica) -> None:
        """Stop what is left of a place's dead server."""
        replica.state = "dead"
        self._report(f"{_name(replica)} died{_last_line(replica.server)}; starting another")
        if replica.server is not None:
            await asyncio.to_thread(replica.server.stop)
            replica.server = None

    def _report(self, line: str) -> None:
        """Say what happens; where nobody can be told, the fleet goes on."""
        with contextlib.suppress(OSError, ValueError):
            self._tell(line)


def up(plan: FleetPlan) -> None:
    """Run a fleet until Ctrl-C or SIGTERM; SIGHUP replaces its servers one by one.

    Raises:
        AgentRLError: the fleet cannot start; nothing of it is left.
    """
    asyncio.run(_up(plan))


async def _up(plan: FleetPlan) -> None:
    stop, rolling = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, rolling.set)
    fleet = LocalFleet(plan, report=partial(print, file=sys.stderr, flush=True))
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(fleet.start())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            servers = ", ".join(f"{task.name} x{task.replicas}" for task in plan.tasks)
            print(f"fleet {plan.name} at {fleet.url}: {servers}", flush=True)
            roller = asyncio.create_task(_roll_when_asked(fleet, rolling))
            await _show_until(fleet, stopping)
            roller.cancel()
            await asyncio.gather(roller, return_exceptions=True)
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await fleet.stop()


async def _show_until(fleet: LocalFleet, stopping: asyncio.Task[bool]) -> None:
    console = Console()
    if not console.is_terminal:
        await stopping
        return
    with Live(fleet.table(), console=console, auto_refresh=False) as live:
        while not stopping.done():
            await asyncio.wait((stopping,), timeout=_LOOK_S)
            live.update(fleet.table(), refresh=True)


async def _roll_when_asked(fleet: LocalFleet, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await fleet.roll()
        except Exception as error:  # whatever it is: the next time they are asked for it may do
            with contextlib.suppress(OSError, ValueError):
                print(f"the servers were not all replaced: {error}", file=sys.stderr, flush=True)


def _lives(server: Placed | None) -> bool:
    return server is not None and server.running


def _name(replica: _Replica) -> str:
    return f"{replica.task.name} {replica.number}"


def _last_line(server: Placed | None) -> str:
    if server is None:
        return ""
    with contextlib.suppress(AgentRLError):
        lines = [line for line in server.output().splitlines() if line.strip()]
        return f" ({lines[-1]})" if lines else ""
    return ""
