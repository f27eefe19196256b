"""``python -m tests.soak`` holds many sessions open, replaces them steadily, and checks for leaks and lost
sessions.

SOAK_SECONDS, SOAK_SESSIONS and SOAK_WORKERS set the duration, the number of sessions and the number of
processes: 1 for a single server, more for a controller with that many workers. The oldest sessions are
replaced at a steady rate, each within ``LIFETIME_S``, while random sessions are stepped. At the end, client
and server compare the ids of their open sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agentrl_env import EnvClient, ToolCall
from agentrl_env.client.client import ClientSession
from agentrl_env.errors import AgentRLError

TARGET = f"{Path(__file__).parent}/benchmarks/serving_task.py:EchoInline"
LIFETIME_S = 100.0
STEPS = 3
"""Number of steps for each replaced session."""
OPENING = 64
"""Maximum number of concurrent openings."""
TICK_S = 0.1
SAMPLE_S = 10.0
FLAT = 0.05
"""Allowed growth of each resource after the warm-up, as a fraction."""
PAGE = 1000


@dataclass(slots=True, kw_only=True)
class Sample:
    """Total resource usage of the server's processes at one point in time."""

    at: float
    rss_mb: float
    files: int
    threads: int
    tasks: int
    open: int


@dataclass(slots=True)
class Soak:
    """The result of a run."""

    sessions: int
    workers: int
    seconds: float = 0.0
    opened: int = 0
    steps: int = 0
    failed: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    leaked: int = 0
    left: int = 0
    """Sessions that the server still lists after closing all of them."""
    samples: list[Sample] = field(default_factory=list)

    def settled(self) -> list[Sample]:
        """Return the samples after the warm-up, which lasts 1.5 lifetimes but at most half of the run."""
        begin = min(1.5 * LIFETIME_S, self.seconds / 2)
        return [sample for sample in self.samples if sample.at >= begin]

    def slope(self, name: str) -> float:
        """Return the growth per minute after the warm-up, by least squares."""
        settled = self.settled()
        if len(settled) < 2:
            return 0.0
        at = sum(s.at for s in settled) / len(settled)
        mean = sum(getattr(s, name) for s in settled) / len(settled)
        spread = sum((s.at - at) ** 2 for s in settled)
        return 60 * sum((s.at - at) * (getattr(s, name) - mean) for s in settled) / spread

    @property
    def flat(self) -> bool:
        """True if memory, files, threads and tasks do not grow after the warm-up."""
        settled = self.settled()
        if len(settled) < 2:
            return False
        minutes = (settled[-1].at - settled[0].at) / 60
        return all(
            self.slope(name) * minutes <= FLAT * max(getattr(settled[0], name), 20)
            for name in ("rss_mb", "files", "threads", "tasks")
        )

    @property
    def ok(self) -> bool:
        """True if no session was lost, duplicated or leaked, and no resource grew."""
        wrong = (self.failed, self.lost, self.doubled, self.leaked, self.left)
        return self.flat and not any(wrong)

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON values."""
        slopes = {f"{n}_per_min": round(self.slope(n), 3) for n in ("rss_mb", "files", "threads", "tasks")}
        names = ("sessions", "workers", "opened", "steps", "lost", "doubled", "leaked", "left")
        counts = {name: getattr(self, name) for name in names}
        first = self.settled()[0].rss_mb if self.settled() else 0.0
        last = self.samples[-1].rss_mb if self.samples else 0.0
        rss = {"rss_mb_after_warm_up": round(first, 1), "rss_mb_at_end": round(last, 1)}
        failed = {"failed": len(self.failed), "seconds": round(self.seconds), "flat": self.flat}
        return {**counts, **failed, **rss, **slopes}


class SessionHolder:
    """Holds sessions open, replaces the oldest and steps the others."""

    def __init__(self, client: EnvClient, soak: Soak) -> None:
        self.ids: dict[str, ClientSession] = {}
        self._client, self._soak = client, soak
        self._order: deque[ClientSession] = deque()
        self._ever: set[str] = set()
        self._rng = random.Random(0)

    async def open(self, number: int) -> None:
        """Open ``number`` sessions, at most ``OPENING`` at a time."""
        for begin in range(0, number, OPENING):
            await asyncio.gather(*(self._open() for _ in range(min(OPENING, number - begin))))

    async def turn_over(self, number: int) -> None:
        """Replace the ``number`` oldest sessions and step some of the others."""
        oldest = [self._order.popleft() for _ in range(number)]
        staying = self._rng.sample(range(len(self._order)), min(STEPS * number, len(self._order)))
        steps = (self._step(self._order[n]) for n in staying)
        await asyncio.gather(*map(self._close, oldest), *steps)
        await self.open(number)

    async def close(self) -> None:
        """Close all sessions."""
        while self._order:
            some = [self._order.popleft() for _ in range(min(OPENING, len(self._order)))]
            await asyncio.gather(*map(self._close, some))

    async def _open(self) -> None:
        try:
            session = await self._client.open("echo_inline")
        except AgentRLError as error:
            self._soak.failed.append(f"open: {error}")
            return
        self._soak.opened += 1
        self._soak.doubled += session.session_id in self._ever
        self._ever.add(session.session_id)
        self.ids[session.session_id] = session
        self._order.append(session)

    async def _step(self, session: ClientSession) -> None:
        text = f"{session.session_id} {session.turn + 1}"
        try:
            result = await session.step(ToolCall.of("echo", text=text))
        except AgentRLError as error:
            self._soak.failed.append(f"step: {error}")
            return
        self._soak.steps += 1
        if result.messages[0].content != text:
            self._soak.failed.append(f"wrong answer: {result}")

    async def _close(self, session: ClientSession) -> None:
        try:
            await session.close()
        except AgentRLError as error:
            self._soak.failed.append(f"close: {error}")
        self.ids.pop(session.session_id, None)


async def run(sessions: int, seconds: float, workers: int = 1, sample_s: float = SAMPLE_S) -> Soak:
    """Hold sessions of a server process open for the given seconds."""
    soak = Soak(sessions, workers)
    room = ["--max-sessions", str(sessions + sessions // 10 + 2 * OPENING)]
    command = [sys.executable, "-m", "agentrl_env", "serve", "--port", "0", "--workers", str(workers), *room]
    process = await asyncio.create_subprocess_exec(*command, TARGET, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            announced = (await process.stdout.readline()).decode()
        url = announced.split(" at ")[1].split()[0]
        async with EnvClient.connect(url) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
            holder = SessionHolder(client, soak)
            await holder.open(sessions)
            await _hold(soak, holder, http, process.pid, seconds, sample_s)
            listed = await _listed(http)
            soak.doubled += len(listed) - len(set(listed))
            soak.lost = len(holder.ids.keys() - set(listed))
            soak.leaked = len(set(listed) - holder.ids.keys())
            await holder.close()
            soak.left = len(await _listed(http))
    finally:
        process.terminate()
        await process.wait()
    return soak


async def _hold(
    soak: Soak, holder: SessionHolder, http: httpx.AsyncClient, pid: int, seconds: float, sample_s: float
) -> None:
    """Replace sessions at a steady rate and sample the server."""
    begin = time.monotonic()
    due, sampled = 0.0, -sample_s
    while (now := time.monotonic() - begin) < seconds:
        if now - sampled >= sample_s:
            sampled = now
            soak.samples.append(await _sample(http, pid, now))
        due += soak.sessions / min(LIFETIME_S, seconds / 3) * TICK_S
        await holder.turn_over(int(due))
        due -= int(due)
        await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - begin - now)))
    soak.seconds = time.monotonic() - begin
    soak.samples.append(await _sample(http, pid, soak.seconds))


async def _sample(http: httpx.AsyncClient, pid: int, at: float) -> Sample:
    pids = [pid, *_children(pid)]
    text = (await http.get("/metrics")).text
    return Sample(
        at=at,
        rss_mb=sum(_status(p, "VmRSS") for p in pids) / 1024,
        threads=sum(_status(p, "Threads") for p in pids),
        files=sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids),
        tasks=_gauge(text, "agentrl_event_loop_tasks"),
        open=_gauge(text, "agentrl_sessions_open"),
    )


async def _listed(http: httpx.AsyncClient) -> list[str]:
    """Return the ids of all running sessions as listed by the server."""
    found: list[str] = []
    after: str | None = None
    while True:
        query = {"status": "running", "limit": str(PAGE), **({"after": after} if after else {})}
        page = (await http.get("/v1/sessions", params=query)).json()
        found += [session["session_id"] for session in page["sessions"]]
        after = page["next"]
        if after is None:
            return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _status(pid: int, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def _gauge(text: str, name: str) -> int:
    match = re.search(rf"^{name} (\S+)", text, re.MULTILINE)
    return round(float(match[1])) if match else 0


def main() -> int:
    """Run, print the result and return 1 on any failure."""
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    sessions = int(os.environ.get("SOAK_SESSIONS", "10000"))
    soak = asyncio.run(run(sessions, seconds, int(os.environ.get("SOAK_WORKERS", "1"))))
    print(f"{'s':>6} {'RSS MB':>8} {'files':>6} {'threads':>8} {'tasks':>6} {'open':>7}")
    for sample in soak.samples[:: max(1, len(soak.samples) // 30)]:
        row = f"{sample.at:6.0f} {sample.rss_mb:8.1f} {sample.files:6} {sample.threads:8} {sample.tasks:6}"
        print(f"{row} {sample.open:7}")
    for failure in soak.failed[:20]:
        print(f"! {failure}")
    print(json.dumps(soak.summary()), flush=True)
    return 0 if soak.ok else 1


if __name__ == "__main__":
    sys.exit(main())
