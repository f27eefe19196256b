"""The processes of a run: Redis, controllers and servers. Each is restarted when it exits."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.chaos.proxy import Proxy

TASKS_FILE = Path(__file__).parent / "tasks.py"
TARGETS = [f"{TASKS_FILE}:{name}" for name in ("Ledger", "SlowLedger", "ThreadLedger")]
LEASE_S, DRAIN_S, LOST_AFTER_S = 20.0, 3.0, 5.0
CONTROLLERS, SERVERS, WORKERS = 3, 4, 2
START_S, STOP_S = 60.0, 30.0
MARK = "CHAOS_RUN"
BUG = re.compile(r"^Traceback .*\n(?:[ |+].*\n|\n)*(.*)$|^(.*never retrieved.*)$", re.MULTILINE)
"""Matches a traceback in a log."""


class Part:
    """A process that is restarted whenever it exits.

    Args:
        name: Name in reports.
        command: Command line.
        environment: Environment variables in addition to those of this process.
        log: File to which its output is appended.
        ready: Text that it prints when it is ready.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: Path, ready: str
    ) -> None:
        self.name, self.log = name, log
        self.killed: set[int] = set()
        self.ended_badly = 0
        self.command, self.environment = command, environment
        self._ready = ready.encode()
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The process id, or None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the process and keep it running."""
        await self._begin()
        self._keeping = asyncio.create_task(self._keep())

    async def until_ready(self, times: int = 1) -> None:
        """Wait until the process has been ready this many times."""
        async with asyncio.timeout(START_S):
            while self.times_ready() < times:  # noqa: ASYNC110  -- another process's file
                await asyncio.sleep(0.1)

    def times_ready(self) -> int:
        """Return how often the process has become ready."""
        return self.log.read_bytes().count(self._ready)

    def send(self, number: signal.Signals, pid: int | None = None) -> int | None:
        """Send a signal to the process or one of its children. Return the process id."""
        pid = pid or self.pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                if number is signal.SIGKILL:
                    self.killed.add(pid)
        return pid

    def children(self) -> list[int]:
        """Return the ids of its child processes."""
        try:
            return [int(n) for n in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []

    async def stop(self) -> bool:
        """Stop the process gracefully. Return False if it had to be killed."""
        self._stopping = True
        if self._keeping is None:
            return True
        self.send(signal.SIGTERM)
        _, pending = await asyncio.wait((self._keeping,), timeout=STOP_S)
        if pending:
            self.send(signal.SIGKILL)
            await self._keeping
        return not pending

    async def _begin(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if self._stopping:
                return
            if code not in (0, -signal.SIGKILL, -signal.SIGTERM):
                self.ended_badly += 1
            await asyncio.sleep(0.3)
            if self._stopping:
                return
            await self._begin()


class Site:
    """All processes of a run and the proxies between them.

    Args:
        folder: Folder of ledgers and logs.
        resume: True if sessions of lost servers continue on other servers.
    """

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self.mark = secrets.token_hex(8)
        self.token = secrets.token_hex(16)
        self.resume = resume
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir()
        self._folder = folder
        self.environment = {
            MARK: self.mark,
            "AGENTRL_TOKEN": self.token,
            "CHAOS_LEDGER": str(self.ledgers),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
        }
        redis_port, *ports = free_ports(2 + CONTROLLERS)
        self.redis = self._part("redis", redis_command(redis_port, folder), "Ready to accept connections")
        self.redis_proxies = [Proxy(redis_port) for _ in range(CONTROLLERS)]
        self.client_proxies = [Proxy(port) for port in ports[1:]]
        self.link_proxies = [Proxy(port) for port in ports[1:]]
        self._ports = ports[1:]
        self.workers_url = f"http://127.0.0.1:{ports[0]}"
        self.controllers: list[Part] = []
        self.servers: list[Part] = []
        workers = ["--workers", str(WORKERS), "--port", str(ports[0]), *_serve_options()]
        self.workers = self._part("workers", agentrl("serve", *workers, *TARGETS), "serving ")

    @property
    def urls(self) -> list[str]:
        """Addresses of the controllers for clients."""
        return [f"http://127.0.0.1:{proxy.port}" for proxy in self.client_proxies]

    @property
    def parts(self) -> list[Part]:
        """All processes."""
        return [self.redis, *self.controllers, *self.servers, self.workers]

    async def start(self) -> None:
        """Start everything and wait until it is ready."""
        for proxy in (*self.redis_proxies, *self.client_proxies, *self.link_proxies):
            await proxy.start()
        await self.redis.start()
        await self.redis.until_ready()
        for n, port in enumerate(self._ports):
            redis = f"redis://127.0.0.1:{self.redis_proxies[n].port}"
            options = ["--port", str(port), "--redis", redis, "--queue", "3"]
            options += ["--lost-after", str(LOST_AFTER_S)]
            options += ["--resume"] if self.resume else []
            command = agentrl("controller", *options)
            self.controllers.append(self._part(f"controller{n}", command, "controlling "))
        dialled = [f"--controller=http://127.0.0.1:{proxy.port}" for proxy in self.link_proxies]
        for n in range(SERVERS):
            options = ["--host", "none", *dialled, *_serve_options()]
            self.servers.append(self._part(f"server{n}", agentrl("serve", *options, *TARGETS), "serving "))
        for part in (*self.controllers, *self.servers, self.workers):
            await part.start()
        await asyncio.gather(*(part.until_ready() for part in self.parts))

    async def stop(self) -> list[str]:
        """Stop everything gracefully. Return the names of processes that had to be killed."""
        stopped = await asyncio.gather(*(part.stop() for part in (*self.servers, self.workers)))
        stopped += await asyncio.gather(*(part.stop() for part in (*self.controllers, self.redis)))
        for proxy in (*self.redis_proxies, *self.client_proxies, *self.link_proxies):
            await proxy.stop()
        names = [part.name for part in (*self.servers, self.workers, *self.controllers, self.redis)]
        return [name for name, ended in zip(names, stopped, strict=True) if not ended]

    def bugs(self) -> Counter[str]:
        """Return the last lines of all tracebacks in the logs, with their counts."""
        found: Counter[str] = Counter()
        for part in self.parts:
            for match in BUG.finditer(part.log.read_text(errors="replace")):
                found[f"{part.name.rstrip('0123456789')}: {match[1] or match[2]}"] += 1
        return found

    def _part(self, name: str, command: Sequence[str], ready: str) -> Part:
        log = self._folder / f"{name}.log"
        log.touch()
        return Part(name, command, self.environment, log, ready)


def left_processes(mark: str) -> list[int]:
    """Return the ids of processes of a run that are still alive."""
    return [pid for pid in _processes() if _environ(pid).find(f"{MARK}={mark}".encode()) >= 0]


def free_ports(number: int) -> list[int]:
    """Return free ports that no outgoing connection can take before they are bound."""
    ports: set[int] = set()
    while len(ports) < number:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def agentrl(*arguments: str) -> list[str]:
    """Return an ``agentrl-env`` command line."""
    return [sys.executable, "-m", "agentrl_env", *arguments]


def _serve_options() -> list[str]:
    return ["--lease", str(LEASE_S), "--drain", str(DRAIN_S), "--max-sessions", "60"]


def redis_command(port: int, folder: Path) -> list[str]:
    """Return the command line of a Redis server that keeps its data in a folder."""
    # Redis writes to disk before it answers, so that the shared state survives a kill.
    keep = ["--appendonly", "yes", "--save", ""]
    return ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *keep]
