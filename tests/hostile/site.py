"""The servers under attack, and the helpers to reach them."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from agentrl_env import EnvClient
from agentrl_env.client.client import ClientSession
from tests.chaos.site import BUG, MARK, Part, agentrl, free_ports, left_processes, redis_command
from tests.hostile.account import Account
from tests.hostile.tasks import ANSWER, SAID

TASKS_FILE = Path(__file__).with_name("tasks.py")
ANSWER_S = 25.0
"""Maximum seconds until an answer or a refusal. A longer wait counts as hung."""
LIMITS = ("head_s=2", "body_s=2", "idle_s=3")
"""Short timeouts, so that they expire during the run."""
LOOK_S = 0.5
END_S = 10.0
"""Maximum seconds for the processes of a stopped site to exit."""


class Skipped(Exception):
    """Raised if an attack cannot run on this machine. The message gives the reason."""


class Site:
    """The servers of one layout with their processes.

    Args:
        name: name of the layout.
        folder: folder for logs and temporary files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.token = secrets.token_urlsafe(32)
        self.urls: list[str] = []
        self.parts: list[Part] = []
        self.redis_url = ""
        self.mark = secrets.token_hex(8)
        self.environment = {
            MARK: self.mark,
            "AGENTRL_TOKEN": self.token,
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
            "PYTHONPATH": str(TASKS_FILE.parents[2]),
        }
        self.running = ("start", "")
        """Kind and name of the attack that is being made, to which findings are attributed."""
        self.closing: list[Callable[[], object]] = []
        """Called after all processes have ended."""
        self._read: dict[str, int] = {}
        self._limits: set[asyncio.Timeout] = set()
        self._waits: dict[Path, float] = {}
        """Seconds that each thread of the site has waited for a processor, at the last look."""
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after this many seconds during which the site's processes had a processor.

        On an overloaded machine no wall-clock limit can be guaranteed.
        """
        async with asyncio.timeout(seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def _look(self) -> None:
        """Extend the limits by the longest time that a thread has waited for a processor."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            before, self._waits = self._waits, await asyncio.to_thread(_waits, self.mark)
            passed, last = loop.time() - last, loop.time()
            starved_s = max((now - before.get(one, now) for one, now in self._waits.items()), default=0.0)
            for limit in self._limits:
                with suppress(RuntimeError):  # expires immediately
                    limit.reschedule((limit.when() or last) + min(starved_s, passed))

    def add(self, name: str, command: list[str], ready: str, **environment: str) -> Part:
        """Add a process that starts with the site."""
        log = self.folder / f"{name}.log"
        log.touch()
        part = Part(name, command, {**self.environment, **environment}, log, ready)
        self.parts.append(part)
        return part

    async def restart(self) -> None:
        """Kill and restart all processes after an attack that broke the site permanently."""
        ready = [(part, part.times_ready()) for part in self.parts]
        for pid in left_processes(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(part.until_ready(times + 1) for part, times in ready))

    def part(self, name: str) -> Part:
        """Return a process by its name."""
        return next(part for part in self.parts if part.name == name)

    async def start(self) -> None:
        """Start all processes, Redis first, and wait until they are ready."""
        for part in self.parts:
            await part.start()
            if part.name == "redis":
                await part.until_ready()
        await asyncio.gather(*(part.until_ready() for part in self.parts))
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> list[int]:
        """Stop all processes. Kill and return processes that outlived their parents."""
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.gather(*(part.stop() for part in reversed(self.parts)))
        end = time.monotonic() + END_S
        while (left := left_processes(self.mark)) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for close in self.closing:
            await asyncio.to_thread(close)
        return left

    def read_logs(self, account: Account) -> None:
        """Count unexpected tracebacks and agents' text in the logs since the last call."""
        for part in self.parts:
            data = part.log.read_bytes()
            text = data[self._read.get(part.name, 0) :].decode(errors="replace")
            self._read[part.name] = len(data)
            for match in BUG.finditer(text):
                before = text[: match.start()].rstrip("\n").rpartition("\n")[2]
                if " WARNING " not in before:  # failures of tasks log tracebacks too
                    account.find("uncaught", f"{part.name}: {match[1] or match[2]}", *self.running)
            if SAID in text:
                at = text.index(SAID)
                what = f"the log of {part.name} contains an agent's text: {text[max(0, at - 120) : at + 40]}"
                account.find("breaches", what, *self.running)

    def ended_badly(self) -> list[str]:
        """Return the processes that exited on their own since the last call."""
        names = [part.name for part in self.parts if part.ended_badly]
        for part in self.parts:
            part.ended_badly = 0
        return names


def _waits(mark: str) -> dict[Path, float]:
    """Return the seconds that each thread of the site's processes has waited for a processor."""
    found = {}
    for pid in left_processes(mark):
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                found[file] = int(file.read_text().split()[1]) / 1e9
    return found


def _serve(*options: str, tasks: tuple[str, ...] = ("Tally", "ThreadTally", "Vault", "Trap")) -> list[str]:
    targets = [f"{TASKS_FILE}:{name}" for name in tasks]
    limits = [word for limit in LIMITS for word in ("--caller-limit", limit)]
    common = ["--lease", "120", "--drain", "0", "--max-sessions", "600"]
    return agentrl("serve", *common, *limits, *options, *targets)


def single(folder: Path, *, tasks: tuple[str, ...] = ("Tally", "ThreadTally", "Vault", "Trap")) -> Site:
    """Return one server."""
    site = Site("single", folder)
    (port,) = free_ports(1)
    site.urls = [f"http://127.0.0.1:{port}"]
    site.add("server", _serve("--port", str(port), "--oracle", tasks=tasks), "serving ")
    return site


def threads(folder: Path) -> Site:
    """Return one server with tasks that hang on threads."""
    site = single(folder, tasks=("Tally", "ThreadTally", "ThreadTrap"))
    site.name = "threads"
    return site


def workers(folder: Path) -> Site:
    """Return a server with two processes. Sessions continue if one of them dies."""
    site = Site("workers", folder)
    (port,) = free_ports(1)
    site.urls = [f"http://127.0.0.1:{port}"]
    options = ("--workers", "2", "--resume", "--port", str(port), "--oracle")
    tasks = ("Tally", "ThreadTally", "Vault", "Trap", "ThreadTrap")
    site.add("workers", _serve(*options, tasks=tasks), "serving ")
    return site


def fleet(folder: Path) -> Site:
    """Return three servers behind two controllers with a shared Redis."""
    if shutil.which("redis-server") is None:
        raise Skipped("redis-server is not installed (.ci/system-packages redis-server)")
    site = Site("fleet", folder)
    redis, *ports = free_ports(3)
    site.redis_url = f"redis://127.0.0.1:{redis}"
    site.urls = [f"http://127.0.0.1:{port}" for port in ports]
    site.add("redis", redis_command(redis, folder), "Ready to accept connections")
    for number, port in enumerate(ports):
        site.add(f"controller{number}", controller(site, port), "controlling ")
    for number in range(3):
        site.add(f"server{number}", member(site), "serving ")
    return site


def member(site: Site) -> list[str]:
    """Return the command line of a server of a fleet."""
    return _serve("--host", "none", "--oracle", *(f"--controller={url}" for url in site.urls))


def controller(site: Site, port: int) -> list[str]:
    """Return the command line of a controller of a fleet."""
    limits = [word for limit in LIMITS for word in ("--caller-limit", limit)]
    options = ["--redis", site.redis_url, "--resume", "--queue", "4", "--lost-after", "5", *limits]
    return agentrl("controller", "--port", str(port), *options)


def shells(
    folder: Path,
    name: str,
    *,
    kind: str,
    image: str = "",
    user: int = 0,
    docker_host: str = "",
    limits: str = "",
) -> Site:
    """Return one server with a sandbox for each session.

    Args:
        folder: folder for logs and temporary files.
        name: name of the site.
        kind: argument of ``open_sandbox``.
        image: container image, for Docker.
        user: user id of the server, or 0 for the current user.
        docker_host: address of the Docker daemon.
        limits: value of AGENTRL_SANDBOX_LIMITS.
    """
    site = Site(name, folder)
    (port,) = free_ports(1)
    site.urls = [f"http://127.0.0.1:{port}"]
    command = _serve("--port", str(port), tasks=("Shell", "Tally"))
    if user:
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            raise Skipped("only root can start a server as another user (setpriv)")
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
        if subprocess.run(
            [*become, "sh", "-c", f"exec {sys.executable} -c ''"], capture_output=True
        ).returncode:
            raise Skipped(f"user {user} cannot run {sys.executable}")
        command = [*become, *command]
    environment = {"HOSTILE_SANDBOX": kind, "HOME": str(folder)}
    environment |= {"HOSTILE_IMAGE": image} if image else {}
    environment |= {"DOCKER_HOST": docker_host} if docker_host else {}
    environment |= {"AGENTRL_SANDBOX_LIMITS": limits} if limits else {}
    site.add("server", command, "serving ", **environment)
    return site


@dataclass(slots=True)
class Victim:
    """A session of the task ``vault``, opened by the operator."""

    session: ClientSession
    answer: str
    seed: int

    @property
    def id(self) -> str:
        """Id of the session."""
        return self.session.session_id

    @property
    def token(self) -> str:
        """Agent token of the session."""
        return self.session.agent_token or ""


class Ground:
    """The context of an attack: a site, random choices, and the account.

    Args:
        site: the servers.
        rng: source of the random choices.
        account: counts the attack's findings.
    """

    def __init__(self, site: Site, rng: Random, account: Account) -> None:
        self.site, self.rng, self.account = site, rng, account

    def find(self, count: str, what: str) -> None:
        """Count a finding."""
        self.account.find(count, what, *self.site.running)

    @property
    def url(self) -> str:
        """Address of one of the site's servers or controllers."""
        return self.rng.choice(self.site.urls)

    def connect(self, token: str | None = None, url: str | None = None) -> EnvClient:
        """Return a client with the operator's token or another one."""
        return EnvClient.connect(url or self.url, token=token or self.site.token, timeout=ANSWER_S)

    @asynccontextmanager
    async def vaults(self, number: int = 1) -> AsyncIterator[list[Victim]]:
        """Open sessions of the task ``vault`` with different solutions, and close them at the end."""
        async with self.connect() as client:
            victims = []
            for _ in range(number):
                answer, seed = f"{ANSWER}{self.rng.randbytes(8).hex()}", self.rng.randrange(10**14, 10**15)
                session = await client.open("vault", sample={"answer": answer}, seed=seed, wait=ANSWER_S)
                victims.append(Victim(session, answer, seed))
            yield victims
            for victim in victims:
                with suppress(Exception):
                    await victim.session.close()

    async def ask(
        self, method: str, path: str, *, token: str | None = None, url: str | None = None, **options: Any
    ) -> httpx.Response | None:
        """Send an HTTP request. Return None if the server refused it by closing the connection.

        Counts internal errors and unanswered requests.
        """
        headers = dict(options.pop("headers", {}))
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        try:
            async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, verify=False) as http:
                answer = await http.request(method, (url or self.url) + path, headers=headers, **options)
        except httpx.TimeoutException:
            self.find("hung", f"{method} {path[:80]} was not answered in {ANSWER_S:g} s")
            return None
        except (httpx.TransportError, httpx.InvalidURL, UnicodeEncodeError, ValueError):
            return None
        self.check(answer.content, f"{method} {path[:80]}")
        return answer

    def check(self, content: bytes, what: str) -> None:
        """Count an internal error."""
        if b'"type":"internal_error"' in content:
            self.find("uncaught", f"{what}: {content[:300]!r}")

    def address(self, url: str | None = None) -> tuple[str, int]:
        """Return the host and port of a server."""
        host, _, port = (url or self.url).removeprefix("http://").rpartition(":")
        return host, int(port)

    async def send_raw(self, data: bytes, *, wait_s: float = ANSWER_S, end: bool = False) -> bytes | None:
        """Send bytes on a new connection. Return everything received until the server closes it.

        Args:
            data: bytes to send.
            wait_s: maximum seconds to wait.
            end: close this side after sending.

        Returns None if the connection is still open and nothing was received.
        """
        reader, writer = await asyncio.open_connection(*self.address())
        received = bytearray()
        try:
            async with asyncio.timeout(wait_s):
                writer.write(data)
                await writer.drain()
                if end:
                    writer.write_eof()
                while more := await reader.read(1 << 16):
                    received += more
        except TimeoutError:
            if not received:
                return None
        except OSError:
            pass
        finally:
            writer.transport.abort()
        return bytes(received)

    def memory(self) -> int:
        """Return the memory of the site's processes in bytes."""
        total = 0
        for pid in left_processes(self.site.mark):
            with suppress(OSError, AttributeError):
                status = Path(f"/proc/{pid}/status").read_text()
                total += int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]
        return total


Attack = Callable[[Ground], Awaitable[None]]


def named(*attacks: Attack) -> dict[str, Attack]:
    """Return attacks by function name."""
    return {attack.__name__: attack for attack in attacks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of attacker: its attacks and their layouts.

    Args:
        name: value for ``--only``.
        lane: kinds in the same lane run one after another. Lanes run concurrently.
        sites: names of layouts. Each attack runs on all of them.
        share: share of the time, relative to other kinds.
        attacks: attacks by name.
        only_on: layouts of attacks that do not run on all layouts.
    """

    name: str
    lane: str
    sites: tuple[str, ...]
    share: float
    attacks: dict[str, Attack]
    only_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def make_folder(readable: bool = False) -> Path:
    """Return a new temporary folder, optionally readable by other users."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder.chmod(0o777 if readable else 0o700)
    return folder
