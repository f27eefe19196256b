"""Steps a second of our server beside OpenEnv 0.10.0 on the same trivial task.

Server and client share the machine; each server is one process, of one worker. Everybody plays the same
number of steps, in rounds whose order alternates. Ours is driven in two ways: by ``EnvClient``, a coroutine
a session, and by the batch call, one request stepping all sessions. OpenEnv is driven over its WebSocket,
one a session, raw. Authors' code runs in the same way on both sides: as plain methods, which both run on
threads, and on the event loop (``blocking = False`` here, ``step_async`` there).

The ceiling is a bare FastAPI endpoint that is sent the batch call's bytes and answers with its bytes,
without reading or playing anything. The processor time of the server is told for each step as well: unlike
the steps a second it hardly depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table

from agentrl_env.launch.process import ServerProcess
from tests.benchmarks.serving_peers import APPS, PeerProcess, allow_many_sockets
from tests.benchmarks.serving_players import Batch, Ceiling, Client, OpenEnv, Player

TASK = Path(__file__).with_name("serving_task.py")
SESSIONS, QUICK_SESSIONS = (1, 16, 64, 256, 1024), (1, 64, 256)
STEPS, QUICK_STEPS = 6144, 2560
"""Steps of one round; a lone session plays a fifth. Fewer where the time would not do."""
SECONDS, QUICK_SECONDS = 140.0, 32.0
"""For all rounds together. There is at least one of each size."""
MAX_ROUNDS = 6
MODES = {"echo": "as plain methods, on threads", "echo_inline": "on the event loop"}
PACE = ("client/s", "p50, p99 ms", "batch/s", "p50, p99 ms", "OpenEnv/s", "p50, p99 ms")
RATIOS = ("client ×", "batch ×")
COST = ("rounds", "client µs", "batch µs", "OpenEnv µs", "ceiling µs")
CEILING = ("ceiling/s", "client of it", "batch of it")


@dataclass(slots=True)
class Tally:
    """What one player has done in all its rounds."""

    seconds: float = 0.0
    processor: float = 0.0
    rounds: int = 0
    steps: list[float] = field(default_factory=list)
    """The seconds of every step."""

    async def add(self, player: Player, turns: int) -> None:
        """Play one round."""
        begin, processor = perf_counter(), processor_seconds(player.pid)
        self.steps += await player.play(turns)
        self.rounds += 1
        self.seconds += perf_counter() - begin
        self.processor += processor_seconds(player.pid) - processor

    @property
    def rate(self) -> float:
        """Steps a second."""
        return len(self.steps) / self.seconds

    @property
    def waits(self) -> str:
        """The median and 99th percentile of a step, in milliseconds."""
        return ", ".join(f"{1000 * q:.3g}" for q in np.quantile(self.steps, (0.5, 0.99)))


def processor_seconds(pid: int) -> float:
    """Return what a process has used of the processor; nan where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(players: Sequence[Player], *, sessions: int, steps: int, seconds: float) -> list[Tally]:
    """Let players play in rounds, in alternating order, until the time is nearly over."""
    begin = perf_counter()
    end, turns = begin + seconds, max(1, steps // sessions // (5 if sessions == 1 else 1))
    warm_up = max(1, turns // 8)
    tallies = [Tally() for _ in players]
    async with AsyncExitStack() as stack:
        for player in players:
            await player.open(sessions)
            stack.push_async_callback(player.close)
            await player.play(warm_up)
        fitting = int(seconds / (perf_counter() - begin) * warm_up)  # opening counted, so rather fewer
        turns = max(1, min(turns, fitting))
        gc.collect()
        gc.freeze()  # else a player's own client is collected over and over for the sessions of the others
        stack.callback(gc.unfreeze)
        order = list(zip(players, tallies, strict=True))
        for _ in range(MAX_ROUNDS):
            begin = perf_counter()
            for player, tally in order:
                await tally.add(player, turns)
            order.reverse()
            if 2 * perf_counter() - begin > end:
                break
    return tallies


def divide(sizes: Sequence[int], seconds: float) -> dict[int, float]:
    """Divide the time: OpenEnv is slower with many sessions, and they take long to open."""
    weights = {size: 1.0 if size <= 64 else 1.5 if size <= 256 else 3.0 for size in sizes}
    return {size: seconds * weight / sum(weights.values()) for size, weight in weights.items()}


def pace(tallies: Sequence[Tally]) -> list[str]:
    """Return the first table's cells: how fast everybody is, and by how much."""
    client, batch, peer, _ = tallies
    cells = [cell for tally in (client, batch, peer) for cell in (f"{tally.rate:,.0f}", tally.waits)]
    return cells + [f"{tally.rate / peer.rate:.2f}" for tally in (client, batch)]


def cost(tallies: Sequence[Tally]) -> list[str]:
    """Return the second table's cells: each server's processor time a step, and the ceiling."""
    client, batch, _, top = tallies
    used = [f"{1e6 * tally.processor / len(tally.steps):,.1f}" for tally in tallies]
    shares = [f"{tally.rate / top.rate:.1%}" for tally in (client, batch)]
    return [str(top.rounds), *used, f"{top.rate:,.0f}", *shares]


def table(title: str, *headings: str) -> Table:
    """Return an empty table of numbers."""
    empty = Table(title=title)
    for heading in ("sessions", *headings):
        empty.add_column(heading, justify="right")
    return empty


def run(*, quick: bool) -> None:
    """Print the tables."""
    if importlib.util.find_spec("openenv") is None:
        raise SystemExit("this needs openenv: run `make bench`, or `pip install -e '.[bench]'`")
    allow_many_sockets()
    sizes = QUICK_SESSIONS if quick else SESSIONS
    console = Console(width=110)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(PeerProcess(name)) for name in APPS}
        targets = (f"{TASK}:Echo", f"{TASK}:EchoInline")
        own = stack.enter_context(ServerProcess(*targets, max_sessions=3 * max(sizes)))
        for task, mode in MODES.items():
            peer = peers["openenv" if task == "echo" else "openenv-inline"]
            paces = table(f"steps/s (×: OpenEnv's); authors' code runs {mode}", *PACE, *RATIOS)
            costs = table("the same: the server's processor time a step; the ceiling", *COST, *CEILING)
            for sessions, seconds in divide(sizes, (QUICK_SECONDS if quick else SECONDS) / 2).items():
                players = line_up(own, peer, peers["bare"], task)
                steps = QUICK_STEPS if quick else STEPS
                tallies = asyncio.run(measure(players, sessions=sessions, steps=steps, seconds=seconds))
                paces.add_row(str(sessions), *pace(tallies))
                costs.add_row(str(sessions), *cost(tallies))
            console.print(paces)
            console.print(costs)
    console.print(f"all on uvicorn {uvicorn.__version__}, {loop_and_parser()}")


def line_up(own: ServerProcess, peer: PeerProcess, bare: PeerProcess, task: str) -> list[Player]:
    """Return the players in the table's order."""
    assert own.pid is not None
    batch = Batch(own.url, own.pid, task=task)
    top = Ceiling(bare.url(), bare.pid, like=batch)
    return [Client(own.url, own.pid, task=task), batch, OpenEnv(peer.url(), peer.pid), top]


def loop_and_parser() -> str:
    """Return which of uvicorn's event loops and parsers were there for all servers."""
    found = [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name)]
    return "with " + " and ".join(found) if found else "with asyncio's loop and h11"
