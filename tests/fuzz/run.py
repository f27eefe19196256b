"""Fuzzes a real server process and compares its resource usage before and after."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import IO, Any

import httpx

from tests.fuzz.account import Account
from tests.fuzz.document import follow_document
from tests.fuzz.raw import RawCaller

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
CALLERS = 16
SETTLE_S = 30.0
ROUND = 2000
GROWTH = {"agentrl_sessions_open": 0, "process_open_fds": 4, "agentrl_tasks_running": 4}
"""Allowed increase of each gauge over the run."""
MEMORY_GROWTH = 0.10
"""Allowed increase of the memory in the second half of the run."""
LEAST_MEMORY = 16 * 2**20
LIMITS = ("head_s=2", "body_s=2", "max_forks=4")
WARM_SESSIONS = 4500
"""More ended sessions than a server remembers."""


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[str], IO[str]]]:
    """Run a server in its own process. Yield its URL, the process and its log."""
    limits = [word for limit in LIMITS for word in ("--caller-limit", limit)]
    options = ["--port", "0", "--oracle", "--lease", str(LEASE_S), "--max-sessions", "20000", "--drain", "0"]
    command = [sys.executable, "-m", "agentrl_env", "serve", *options, *limits, "tests.fuzz.tasks:Fuzzed"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            match = re.search(r"http://\S+", line)
            assert match is not None, "the server did not start"
            yield match[0], process, log
        finally:
            process.terminate()
            process.communicate(timeout=30)


def fuzz(requests: int, seed: int, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Send requests of all kinds. Return the results, with ``ok`` set if nothing failed."""
    account, begin = Account(), time.monotonic()
    with served() as (url, process, log), httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        _warm_up(http, min(WARM_SESSIONS, requests // 10))
        before = _settled_gauges(http, None)
        half: dict[str, float] = {}
        rounds = max(2, requests // ROUND)
        for turn in range(rounds):
            number = requests // rounds + (turn < requests % rounds)
            _fuzz_round(url, http, number, seed * 10_000 + turn, account)
            say(f"{account.requests} requests, {account.server_errors} server errors, {account.hangs} hangs")
            if turn == rounds // 2 - 1:
                half = _settled_gauges(http, before)
        after = _settled_gauges(http, before)
        assert http.get("/health").json() == {"status": "ok"}
        alive = process.poll() is None
        log.seek(0)
        logged = log.readlines()
    grown = {name: after[name] - before[name] for name in GROWTH}
    memory = after["process_resident_memory_bytes"] - half["process_resident_memory_bytes"]
    allowed = max(LEAST_MEMORY, MEMORY_GROWTH * half["process_resident_memory_bytes"])
    ok = alive and not logged and account.server_errors == account.hangs == account.unlike_document == 0
    ok = ok and all(grown[name] <= limit for name, limit in GROWTH.items()) and memory <= allowed
    held = {"before": before, "half": half, "after": after}
    seconds = round(time.monotonic() - begin, 1)
    process_state = {"alive": alive, "log_lines": len(logged), "log": "".join(logged)[:2000]}
    return {"ok": ok, "seed": seed, "seconds": seconds, **account.report(), **process_state, "held": held}


def _fuzz_round(url: str, http: httpx.Client, number: int, seed: int, account: Account) -> None:
    """Send ``number`` requests, one tenth generated from the document and the rest raw."""
    session_ids = _open(http, 30)
    follow_document(url, number // 10, seed, session_ids, account)
    session_ids = _open(http, 30)
    frames, left = number // 4, number - number // 10 - number // 4

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                raw = RawCaller(url, Random(seed * 100 + caller), session_ids, account)
                group.create_task(raw.send_http(_share(left, caller)))
                group.create_task(raw.send_frames(_share(frames, caller)))

    asyncio.run(send())


def _share(number: int, caller: int) -> int:
    return number // CALLERS + (caller < number % CALLERS)


def _open(http: httpx.Client, number: int) -> list[str]:
    answers = [http.post("/v1/sessions", json={"task": "fuzzed"}) for _ in range(number)]
    return [answer.json()["session_id"] for answer in answers]


def _warm_up(http: httpx.Client, number: int) -> None:
    """Fill the server's memory of ended sessions."""
    for session_id in _open(http, number):
        message = {"role": "assistant", "content": "x"}
        http.post(f"/v1/sessions/{session_id}/step", json={"seq": 1, "message": message})
        http.delete(f"/v1/sessions/{session_id}")


def _settled_gauges(http: httpx.Client, before: dict[str, float] | None) -> dict[str, float]:
    """Return the server's gauges after leases have expired and connections are closed."""
    end = time.monotonic() + SETTLE_S
    while True:
        held = _gauges(http)
        wanted = before or {"agentrl_sessions_open": 0.0}
        if all(held[name] <= wanted[name] + GROWTH[name] for name in GROWTH if name in wanted):
            return held
        if time.monotonic() > end:
            return held
        time.sleep(0.2)


def _gauges(http: httpx.Client) -> dict[str, float]:
    wanted = (*GROWTH, "process_resident_memory_bytes")
    lines = [line.split() for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines if name in wanted}
