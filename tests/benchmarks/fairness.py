"""Step latency of a hundred honest callers, with and without one greedy or hostile caller.

Each honest caller is an agent with its own token that takes a step every 500 ms over its own WebSocket.
Latency counts from the time at which a step was due, so a stalled server is fully visible. The other caller
also has an agent token, except the greedy caller, which has the operator's token and steps many sessions in
each request. It runs in its own process with the lowest priority, because on another machine it would not
compete with the server for processors. It repeats its requests without a pause over several connections,
regardless of the answers. Phases without and with it alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import httpx
import numpy as np
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from agentrl_env import EnvClient
from agentrl_env.launch.process import ServerProcess
from tests.benchmarks.http1 import Http1Client
from tests.benchmarks.serving_players import MESSAGE, some_at_once

TARGET = f"{Path(__file__).with_name('serving_task.py')}:EchoInline"
HONEST = 100
EVERY_S = 0.5
"""Seconds between two steps of an honest caller."""
CONNECTIONS = 4
"""Number of connections of the other caller."""
SLOW_BODIES = 40
SECONDS, QUICK_SECONDS = 15.0, 6.0
"""Duration of one phase."""
BATCH = 4096
DEADLINE_S = 120.0
MEGA = 1_000_000
GOAL_MS = 100.0
_DONE = (ConnectionClosed, OSError, TimeoutError, httpx.HTTPError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server, and the session of the other caller."""

    url: str
    operator: str
    session_id: str
    agent: str
    """Agent token of the session."""
    batch: tuple[str, ...] = ()
    """Sessions of the greedy caller."""


Attack = Callable[[Target], Awaitable[int]]
"""Makes one request. Returns the status of the answer, or 0 if the connection was closed."""


def message_of(content: str) -> bytes:
    """Return a step whose content is JSON text."""
    return b'{"seq":1,"message":{"role":"assistant","content":' + content.encode() + b"}}"


def integers(size: int) -> str:
    """Return a JSON list of integers, of about ``size`` bytes."""
    return "[" + ",".join(["0"] * (size // 2)) + "]"


def posts(path: str, body: bytes) -> Attack:
    """Return an attack that posts the same body repeatedly."""

    async def attack(target: Target) -> int:
        headers = {"authorization": f"Bearer {target.agent}"}
        client = Http1Client(target.url, headers=headers, max_connections=1)
        try:
            where = path.replace("{id}", target.session_id)
            return (await client.request("POST", where, body, timeout=DEADLINE_S)).status
        finally:
            await client.aclose()

    return attack


async def large_batches(target: Target) -> int:
    """Step many sessions per request. Every second request has a wrong ``seq`` and returns immediately."""
    headers = {"authorization": f"Bearer {target.operator}"}
    client = Http1Client(target.url, headers=headers, max_connections=1)
    try:
        for seq in range(1, 1_000_000):
            steps = [
                b'{"session_id":"%b","seq":%d,"message":%b}' % (one.encode(), seq, to_json(MESSAGE))
                for one in target.batch
            ]
            body = b'{"steps":[%b]}' % b",".join(steps)
            answer = await client.request("POST", "/v1/step", body, timeout=DEADLINE_S)
            if answer.status != 200:
                return answer.status
        return 200
    finally:
        await client.aclose()


async def slow_bodies(target: Target) -> int:
    """Start a large body, send a little every 10 ms, and never finish it."""
    host, _, port = target.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    size = 7_000_000
    head = f"POST /v1/sessions/{target.session_id}/step HTTP/1.1\r\nhost: localhost\r\n"
    head += f"authorization: Bearer {target.agent}\r\ncontent-length: {size}\r\n\r\n"
    writer.write(head.encode() + b"{" + b" " * 500_000)
    answer = asyncio.ensure_future(reader.readline())
    try:
        while not answer.done():
            writer.write(b" " * 1000)
            await asyncio.wait((answer,), timeout=0.01)
        return int((answer.result().split() or [b"", b"0"])[1])
    finally:
        answer.cancel()
        writer.transport.abort()


async def huge_messages(target: Target) -> int:
    """Send the largest legal messages over a WebSocket without reading the answers first."""
    headers = {"authorization": f"Bearer {target.agent}"}
    url = target.url.replace("http", "ws", 1) + "/v1/ws"
    text = json.dumps("\u00e9" * MEGA)  # six bytes each
    fields = f'"session_id":"{target.session_id}","seq":1,"message":{{"role":"assistant","content":{text}}}'
    async with connect(
        url, additional_headers=headers, compression=None, proxy=None, max_size=None
    ) as socket:
        for number in range(4):
            await socket.send(f'{{"id":{number},"call":"step",{fields}}}')
        answers = [json.loads(await socket.recv()) for _ in range(4)]
    return 200 if all("result" in answer for answer in answers) else 429


ATTACKS: dict[str, tuple[Attack, int]] = {
    "greedy: batches of 4,096 steps": (large_batches, 1),
    'bodies {"steps":[0,0,...]}, 1 MB': (
        posts("/v1/step", b'{"steps":' + integers(MEGA).encode() + b"}"),
        CONNECTIONS,
    ),
    "the same, 4 MB": (posts("/v1/step", b'{"steps":' + integers(4 * MEGA).encode() + b"}"), CONNECTIONS),
    "integers in content, 10 MB": (
        posts("/v1/sessions/{id}/step", message_of(integers(10 * MEGA))),
        CONNECTIONS,
    ),
    "the same, 7 MB": (posts("/v1/sessions/{id}/step", message_of(integers(7 * MEGA))), CONNECTIONS),
    "slow bodies of 7 MB": (slow_bodies, SLOW_BODIES),
    "messages of 6 MB over WebSockets": (huge_messages, CONNECTIONS),
}
"""One request and the number of connections that repeat it, by name."""


def be_hostile(name: str, target: Target, stop: multiprocessing.synchronize.Event, answers: object) -> None:
    """Repeat an attack until stopped. Put the counts of the answers into a queue."""
    os.nice(19)
    asyncio.run(_be_hostile(name, target, stop, answers))


async def _be_hostile(name: str, target: Target, stop: object, answers: object) -> None:
    attack, connections = ATTACKS[name]
    counts: Counter[int] = Counter()

    async def repeat() -> None:
        while True:
            status = 0
            with contextlib.suppress(*_DONE):
                status = await attack(target)
            counts[status] += 1
            if not status:
                await asyncio.sleep(0.01)

    attacking = [asyncio.create_task(repeat()) for _ in range(connections)]
    await asyncio.to_thread(stop.wait)  # type: ignore[attr-defined]
    for task in attacking:
        task.cancel()
    answers.put(counts)  # type: ignore[attr-defined]


@dataclass(slots=True)
class Honest:
    """A hundred agents, each with its own session and WebSocket."""

    url: str
    tokens: list[tuple[str, str]]
    """Session and token of each agent."""
    seq: list[int] = field(default_factory=list)

    async def play(self, seconds: float) -> list[float]:
        """Step at a steady pace. Return the delay of each answer from the time at which its step was due."""
        delays: list[float] = []
        self.seq = self.seq or [0] * len(self.tokens)
        begin = perf_counter() + 1.0

        async def one(number: int) -> None:
            session_id, token = self.tokens[number]
            headers = {"authorization": f"Bearer {token}"}
            url = self.url.replace("http", "ws", 1) + "/v1/ws"
            async with connect(url, additional_headers=headers, compression=None, proxy=None) as socket:
                due = begin + EVERY_S * number / len(self.tokens)
                while due < begin + seconds:
                    await asyncio.sleep(max(0.0, due - perf_counter()))
                    self.seq[number] += 1
                    fields = b'"session_id":"%b","seq":%d' % (session_id.encode(), self.seq[number])
                    frame = b'{"id":1,"call":"step",%b,"message":%b}' % (fields, to_json(MESSAGE))
                    await socket.send(frame.decode())
                    answer = await socket.recv()
                    assert "result" in answer[:20], answer
                    delays.append(perf_counter() - due)
                    due += EVERY_S

        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for number in range(len(self.tokens)):
                group.create_task(one(number))
        return delays


@contextlib.asynccontextmanager
async def hostile(name: str, target: Target, counts: Counter[int]) -> AsyncIterator[None]:
    """Run the other caller in its own process."""
    spawn = multiprocessing.get_context("spawn")
    stop, answers = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=be_hostile, args=(name, target, stop, answers))
    process.start()
    await asyncio.sleep(2.0)
    try:
        yield
    finally:
        stop.set()
        counts.update(await asyncio.to_thread(answers.get, True, DEADLINE_S))
        await asyncio.to_thread(process.join)


def p99(delays: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return float(np.quantile(delays, 0.99)) * 1000


async def measure(url: str, token: str, seconds: float, table: Table) -> float:
    """Fill the table. Return the largest difference of p99 in milliseconds."""
    worst = 0.0
    async with EnvClient.connect(url, token=token) as client:
        sessions = await some_at_once(lambda: client.open("echo_inline"), HONEST)
        honest = Honest(url, [(one.session_id, one.agent_token or "") for one in sessions])
        await honest.play(1.0)
        for name in ATTACKS:
            other = await client.open("echo_inline")
            many = await some_at_once(lambda: client.open("echo_inline"), BATCH if "greedy" in name else 0)
            target = Target(
                url=url,
                operator=token,
                session_id=other.session_id,
                agent=other.agent_token or "",
                batch=tuple(one.session_id for one in many),
            )
            counts: Counter[int] = Counter()
            without = await honest.play(seconds)
            async with hostile(name, target, counts):
                beside = await honest.play(seconds)
            difference = p99(beside) - p99(without)
            worst = max(worst, difference)
            median = float(np.median(beside)) * 1000
            answers = ", ".join(f"{status or 'closed'}: {count}" for status, count in counts.most_common(3))
            table.add_row(
                name,
                f"{p99(without):.1f}",
                f"{p99(beside):.1f}",
                f"{difference:+.1f}",
                f"{median:.1f}",
                answers,
            )
            await asyncio.gather(*(one.close() for one in (other, *many)))
    return worst


def run(*, quick: bool) -> None:
    """Print the table."""
    table = Table(title=f"{HONEST} honest callers, {HONEST / EVERY_S:,.0f} steps/s: p99 in ms")
    for heading in ("the other caller", "without", "with", "more", "median with", "its answers"):
        table.add_column(heading, justify="left" if heading == "the other caller" else "right")
    token = secrets.token_urlsafe()
    with ServerProcess(TARGET, token=token, max_sessions=2 * BATCH) as server:
        worst = asyncio.run(measure(server.url, token, QUICK_SECONDS if quick else SECONDS, table))
    console = Console(width=130)
    console.print(table)
    console.print(f"at most {worst:.0f} ms more; the goal is below {GOAL_MS:.0f} ms")
