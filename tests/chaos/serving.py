"""The serving half: a fleet under load, with faults in its processes and connections."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from agentrl_env import EnvClient
from tests.chaos.account import Account, left_open, opened_twice, read_ledgers, settle
from tests.chaos.faults import Fault, draw
from tests.chaos.players import SLACK_S, TIMEOUT_S, Book, Player, RawPlayer, SessionPlayer, play_on
from tests.chaos.proxy import Proxy
from tests.chaos.site import LEASE_S, LOST_AFTER_S, Part, Site, left_processes

THINK_S = 0.3
LONE, CROWD, SOCKET, RAW, WORKERS = 6, 16, 8, 6, 6
"""Number of concurrent sessions of each kind of client."""
ENDING_S = 4 * (TIMEOUT_S + SLACK_S)
ROLL_S = 30.0


@dataclass(slots=True)
class ServingReport:
    """The result of a run."""

    seconds: float
    kills: int
    faults: Counter[str]
    account: Account
    book: Book

    @property
    def failed(self) -> bool:
        """True if there was any finding."""
        return bool(self.account.notes)

    def rows(self) -> list[tuple[str, object]]:
        """Return the rows of the report."""
        asked = len(self.book.steps)
        return [
            ("faults", dict(sorted(self.faults.items()))),
            ("sessions opened", self.book.opened),
            ("steps asked for", asked),
            ("steps answered", f"{self.account.steps} ({self.account.steps / max(asked, 1):.2%})"),
            ("steps reported lost", dict(self.account.reported.most_common())),
            ("steps answered correctly after a reported loss", self.account.revived),
            ("sessions continued on another server", self.account.moved),
            ("steps undone with lost servers", self.account.undone),
            ("calls that failed", dict(self.book.errors.most_common())),
            ("longest time without any answer", f"{self.book.longest_silence_s:.1f} s"),
            ("slowest calls, s", dict(self.book.slowest)),
            ("hangs", len(self.book.hangs)),
        ]


async def run(seed: int, seconds: float, folder: Path, *, resume: bool) -> ServingReport:
    """Inject faults into a fleet under load for the given seconds, and account for every step."""
    site, book = Site(folder, resume=resume), Book()
    breaker = Breaker(site)
    begin = time.monotonic()
    try:
        await site.start()
        await _under_load(site, book, breaker, seed, seconds)
        notes = await _look_for_open_sessions(site, book)
    finally:
        unstoppable = await site.stop()
    lines, killed = read_ledgers(site.ledgers), frozenset(pid for p in site.parts for pid in p.killed)
    account = settle(book.steps, lines, resumed=resume)
    notes += [f"a session was never closed: {line}" for line in left_open(lines, killed)]
    notes += [f"an opening made two sessions: {n}" for n in opened_twice(lines, killed, 2 * LOST_AFTER_S + 5)]
    notes += [f"a folder was left: {p.name}" for p in site.ledgers.iterdir() if _left_over(p, killed)]
    notes += [f"process {pid} was left" for pid in left_processes(site.mark)]
    notes += [f"{name} had to be killed at the end" for name in unstoppable]
    notes += book.contradictions
    account.leaked += len(notes)
    account.notes += notes + book.hangs
    account.notes += [f"{number} times in a log: {text}" for text, number in site.bugs().most_common()]
    return ServingReport(time.monotonic() - begin, breaker.kills, breaker.done, account, book)


def run_in_folder(seed: int, seconds: float, *, resume: bool) -> ServingReport:
    """Run in a temporary folder, which is kept if the run fails.

    Args:
        seed: Seed of faults and clients.
        seconds: Duration of the faults.
        resume: True if sessions of lost servers continue on other servers.
    """
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    report = asyncio.run(run(seed, seconds, folder, resume=resume))
    if report.failed:
        print(f"logs and ledgers are in {folder}")
    else:
        shutil.rmtree(folder)
    return report


class Breaker:
    """Injects the faults of a schedule."""

    def __init__(self, site: Site) -> None:
        self.kills = 0
        self.done: Counter[str] = Counter()
        self._site = site
        self._rng = random.Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None

    async def run(self, seed: int, seconds: float) -> None:
        """Inject one fault after another, then let everything recover."""
        self._rng.seed(seed)
        begin = time.monotonic()
        for fault in draw(seed, seconds):
            await asyncio.sleep(max(0.0, begin + fault.at - time.monotonic()))
            self.done[fault.kind] += 1
            task = asyncio.create_task(self._break(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        await asyncio.gather(*self._tasks)

    async def _break(self, fault: Fault) -> None:
        what, _, whom = fault.kind.partition(" ")
        if what in ("kill", "pause", "drain"):
            await self._hurt(what, self._part(whom, fault.which), whom, fault)
        elif what == "roll":
            await self._roll()
        else:
            whom, _, how = whom.partition(" ")
            await self._disturb(what, how, self._proxy(whom, fault.which), fault)

    async def _hurt(self, what: str, part: Part, whom: str, fault: Fault) -> None:
        if what == "kill":
            children = part.children() if whom == "worker" else [None]
            if children:
                self.kills += 1
                part.send(signal.SIGKILL, children[fault.which % len(children)])
        elif what == "drain":
            part.send(signal.SIGTERM)
        else:
            pid = part.send(signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            if pid is not None:
                part.send(signal.SIGCONT, pid)

    async def _disturb(self, what: str, how: str, proxy: Proxy, fault: Fault) -> None:
        match what:
            case "cut" if how:
                proxy.cut_in_a_frame(self._rng, fault.share)
            case "cut":
                proxy.cut(self._rng, fault.share)
            case "half-close":
                proxy.half_close(self._rng, fault.share)
            case "silence":
                proxy.stall_some(self._rng, fault.share)
            case _:
                if what == "stall":
                    proxy.stall()
                elif what == "delay":
                    proxy.delay_s = fault.seconds / 20
                else:
                    proxy.refusing = True
                await asyncio.sleep(fault.seconds)
                proxy.calm()

    async def _roll(self) -> None:
        """Restart all servers gracefully, one after another."""
        for server in self._site.servers:
            times = server.times_ready()
            server.send(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROLL_S):
                    await server.until_ready(times + 1)

    def _part(self, whom: str, which: int) -> Part:
        site = self._site
        parts = {"server": site.servers, "controller": site.controllers, "redis": [site.redis]}
        chosen = parts.get(whom, [site.workers])
        return chosen[which % len(chosen)]

    def _proxy(self, whom: str, which: int) -> Proxy:
        site = self._site
        proxies = {"clients": site.client_proxies, "links": site.link_proxies, "redis": site.redis_proxies}
        return proxies[whom][which % len(proxies[whom])]


async def _under_load(site: Site, book: Book, breaker: Breaker, seed: int, seconds: float) -> None:
    """Play during the faults and until every episode has ended."""
    rng, over = random.Random(seed + 1), asyncio.Event()
    fleet = ",".join(site.urls)
    connect = partial(EnvClient.connect, token=site.token, timeout=TIMEOUT_S)
    crowd, sockets = connect(fleet), connect(fleet.replace("http://", "ws://"))
    workers, alone = connect(site.workers_url), [connect(fleet) for _ in range(LONE)]
    clients = [("lone", client) for client in alone]
    clients += (
        [("batched", crowd)] * CROWD + [("socket", sockets)] * SOCKET + [("workers", workers)] * WORKERS
    )
    players: list[Player] = [
        SessionPlayer(name, client, random.Random(rng.random()), book, THINK_S) for name, client in clients
    ]
    raw = [RawPlayer(site.urls, site.token, random.Random(rng.random()), book, THINK_S) for _ in range(RAW)]
    playing = [asyncio.create_task(play_on(player, over)) for player in [*players, *raw]]
    try:
        await breaker.run(seed, seconds)
        over.set()
        _, late = await asyncio.wait(playing, timeout=ENDING_S)
        book.hangs += [f"a client did not finish: {task}" for task in late]
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for client in {crowd, sockets, workers, *alone}:
            await client.aclose()
        for player in raw:
            await player.aclose()


async def _look_for_open_sessions(site: Site, book: Book) -> list[str]:
    """Wait until all leases have expired. Return a note for every session that is still reported open."""
    await asyncio.sleep(LEASE_S + 5)
    notes: list[str] = []
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx.AsyncClient(timeout=10, headers=headers, trust_env=False) as http:
        for url in (*site.urls, site.workers_url):
            try:
                fleet = (await http.get(f"{url}/v1/fleet")).json()
                listed = (await http.get(f"{url}/v1/sessions?status=running")).json()
            except (httpx.HTTPError, ValueError) as error:
                book.hangs.append(f"{url} does not answer after the faults: {error!r}")
                continue
            for server in fleet["servers"]:
                if server["open"] or server["waiting"]:
                    notes.append(f"{url} counts open sessions although there are none: {server}")
            notes += [f"a session is still open: {session}" for session in listed["sessions"]]
    return notes


def _left_over(path: Path, killed: frozenset[int]) -> bool:
    """Return True if a process that exited gracefully left a session's folder behind."""
    return path.is_dir() and int(path.name.partition("-")[0]) not in killed
