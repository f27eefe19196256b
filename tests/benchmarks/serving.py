"""Steps per second of our server, OpenEnv 0.10.0 and agentrl-worker 0.4.0 with the same trivial task.

Server and client share the machine. Each server is one process with one worker. All clients play the same
number of steps, in rounds of alternating order. Our server has three clients: ``EnvClient`` with a coroutine
per session, which chooses its transport or uses only the WebSocket, and the batch call, where one request
steps all sessions. The client for OpenEnv is a raw WebSocket per session. The client for AgentRL's worker is
a loop of raw HTTP requests per session.

Author code runs in one of two ways. *Plain* methods run on threads: the default here and in OpenEnv,
which keeps a thread for each session. *Inline* code runs on the event loop: ``blocking = False`` here,
``step_async`` in OpenEnv. AgentRL's tasks are coroutines, which always run on the event loop. A fair
comparison is plain with plain and inline with inline.

There are two ceilings, both FastAPI endpoints that receive and answer the bytes of the inline batch call
without playing anything: *JSON* reads the request with ``request.json()`` and answers prepared bytes,
*FastAPI* parses the request to models and builds the answer from models. The tables also have the processor
time of a step in the server and the client, which hardly depends on other load, unlike the steps a second.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table

from agentrl_env.hosting.serve import GC_THRESHOLDS
from agentrl_env.launch.process import ServerProcess
from tests.benchmarks.serving_peers import APPS, PeerProcess, allow_many_sockets
from tests.benchmarks.serving_players import AgentRLWorker, Batch, Ceiling, Client, OpenEnv, Player

TASK = Path(__file__).with_name("serving_task.py")
SESSIONS, QUICK_SESSIONS = (1, 16, 64, 256, 1024, 4096), (1, 64, 1024)
STEPS, QUICK_STEPS = 8192, 4096
"""Steps of one round. A single session takes a fifth, and all take fewer if the time is too short."""
SECONDS, QUICK_SECONDS = 480.0, 120.0
"""Total time of all rounds. There is at least one round of each size."""
MAX_ROUNDS = 6
CEILINGS = {"JSON": "/v1/step", "FastAPI": "/parsed"}
OWN = {"echo": "plain", "echo_inline": "inline"}
OPENENV = {"openenv": "OpenEnv, plain", "openenv-inline": "OpenEnv, inline"}
PEERS = {"× OpenEnv plain": "OpenEnv, plain", "× inline": "OpenEnv, inline", "× agentrl": AgentRLWorker.name}
PACE = ("steps/s", "p50 ms", "p99 ms", *PEERS)
SHARES = ("of JSON", "of FastAPI", "server µs", "client µs")


@dataclass(slots=True)
class Tally:
    """Measurements of one player over all rounds."""

    seconds: float = 0.0
    server: float = 0.0
    """Processor time in seconds."""
    client: float = 0.0
    rounds: int = 0
    steps: list[float] = field(default_factory=list)
    """Duration of every step in seconds."""

    async def add(self, player: Player, turns: int) -> None:
        """Play one round."""
        begin, server, client = perf_counter(), processor_seconds(player.pid), process_time()
        self.steps += await player.play(turns)
        self.rounds += 1
        self.seconds += perf_counter() - begin
        self.server += processor_seconds(player.pid) - server
        self.client += process_time() - client

    @property
    def rate(self) -> float:
        """Steps per second."""
        return len(self.steps) / self.seconds

    def cells(self, tallies: Mapping[str, Tally]) -> list[str]:
        """Return the cells of a table row, with ratios to the other players."""
        p50, p99 = (f"{1000 * q:.3g}" for q in np.quantile(self.steps, (0.5, 0.99)))
        peers = [f"{self.rate / tallies[name].rate:.2f}" for name in PEERS.values()]
        shares = [f"{self.rate / tallies[name].rate:.0%}" for name in CEILINGS]
        used = [f"{1e6 * seconds / len(self.steps):.1f}" for seconds in (self.server, self.client)]
        return [f"{self.rate:,.0f}", p50, p99, *peers, *shares, *used]


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process, or nan if the system does not provide it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(players: Sequence[Player], *, sessions: int, steps: int, seconds: float) -> list[Tally]:
    """Play rounds in alternating order until the time is nearly over."""
    begin = perf_counter()
    end, turns = begin + seconds, max(1, steps // sessions // (5 if sessions == 1 else 1))
    warm_up = max(1, turns // 8)
    tallies = [Tally() for _ in players]
    async with AsyncExitStack() as stack:
        for player in players:
            await player.open(sessions)
            stack.push_async_callback(player.close)
            await player.play(warm_up)
        fitting = int(seconds / (perf_counter() - begin) * warm_up)  # including the opening
        turns = max(1, min(turns, fitting))
        gc.collect()
        gc.freeze()  # otherwise each garbage collection traverses the sessions of all players
        stack.callback(gc.unfreeze)
        stack.callback(gc.set_threshold, *gc.get_threshold())
        # As in our server. With the default thresholds, garbage collection takes a third of the time of a
        # client with thousands of sessions.
        gc.set_threshold(*GC_THRESHOLDS)
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
    """Divide the time. Larger numbers of sessions get more, because they open slowly and peers are slower."""
    weights = {size: 1.0 if size <= 64 else 1.5 if size <= 256 else 3.0 for size in sizes}
    return {size: seconds * weight / sum(weights.values()) for size, weight in weights.items()}


def table(title: str) -> Table:
    """Return an empty table of numbers."""
    empty = Table(title=title)
    empty.add_column("sessions", justify="right")
    empty.add_column("who", no_wrap=True)
    for heading in (*PACE, *SHARES):
        empty.add_column(heading, justify="right")
    return empty


def run(*, quick: bool) -> None:
    """Print the tables."""
    for module in ("openenv", "agentrl.worker"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise SystemExit(f"this needs {module}: run `make bench`, or `pip install -e '.[bench]'`")
    allow_many_sockets()
    sizes = QUICK_SESSIONS if quick else SESSIONS
    console = Console(width=150)
    with ExitStack() as stack:
        peers = {name: stack.enter_context(PeerProcess(name)) for name in APPS}
        targets = (f"{TASK}:Echo", f"{TASK}:EchoInline")
        own = stack.enter_context(ServerProcess(*targets, max_sessions=8 * max(sizes)))
        shown = table("steps a second")
        for sessions, seconds in divide(sizes, QUICK_SECONDS if quick else SECONDS).items():
            players = line_up(own, peers)
            steps = QUICK_STEPS if quick else STEPS
            tallies = asyncio.run(measure(players, sessions=sessions, steps=steps, seconds=seconds))
            named = {player.name: tally for player, tally in zip(players, tallies, strict=True)}
            for name, tally in named.items():
                shown.add_row(str(sessions), name, *tally.cells(named))
            shown.add_section()
        console.print(shown)
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(
        f"all on uvicorn {uvicorn.__version__}, {loop_and_parser()}; load average at the end {load}"
    )


def line_up(own: ServerProcess, peers: Mapping[str, PeerProcess]) -> list[Player]:
    """Return the players in the table's order."""
    assert own.pid is not None
    players: list[Player] = []
    for task, mode in OWN.items():
        batch = Batch(own.url, own.pid, task=task, mode=mode)
        players += [
            Client(own.url, own.pid, task=task, mode=mode),
            Client(own.url.replace("http", "ws", 1), own.pid, task=task, mode=mode),
            batch,
        ]
    agentrl, bare = peers["agentrl"], peers["bare"]
    return [
        *players,
        *(OpenEnv(peers[app].url(), peers[app].pid, name=name) for app, name in OPENENV.items()),
        AgentRLWorker(agentrl.url(), agentrl.pid),
        *(Ceiling(bare.url(), bare.pid, like=batch, name=name, path=path) for name, path in CEILINGS.items()),
    ]


def loop_and_parser() -> str:
    """Return the event loop and the HTTP parser that uvicorn uses in all servers."""
    found = [name for name in ("uvloop", "httptools") if importlib.util.find_spec(name)]
    return "with " + " and ".join(found) if found else "with asyncio's loop and h11"
