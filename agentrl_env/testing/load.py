"""Load of a task on this machine: start of its server, memory, sessions at once, steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path

from agentrl_env.client.benchmark import measure
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.launch.process import ServerProcess
from agentrl_env.testing.quality import Load

SESSIONS = 64
"""Sessions to hold at once."""
PLAYERS = 16
"""Sessions that are stepped at once, to count steps."""
START_S = 300.0
"""Seconds that a server may take to start."""
LONGER = 15
"""Times as long that steps are counted where the first time had none."""


def measure_load(
    target: str, *, task: str | None = None, sessions: int = SESSIONS, seconds: float = 2.0
) -> Load:
    """Serve a target in a process of its own, hold sessions in it, and let random calls play.

    Args:
        target: A folder, ``file.py:Class`` or ``module:Class``.
        task: Name of the task; None if there is only one.
        sessions: Sessions to hold at once.
        seconds: Seconds in which steps are counted.

    Raises:
        LaunchError: The server does not start.
        AgentRLError: No step succeeded.
    """
    begin = time.monotonic()
    with ServerProcess(target, max_sessions=max(sessions, PLAYERS), start_timeout=START_S) as server:
        connect = partial(EnvClient.connect, server.url)
        pid = server.pid or 0
        start_s, held, memory = asyncio.run(_hold(connect(), task, sessions, pid, begin))
        count = partial(measure, connect, task=task, sessions=PLAYERS, warmup=0.5)
        try:
            load = count(seconds=seconds)
        except AgentRLError:  # no step of a slow task has ended
            load = count(seconds=LONGER * seconds)
    return Load(
        start_s=start_s,
        sessions=held,
        asked=sessions,
        mb_per_session=None if memory is None or not held else memory / held / 1e6,
        episodes_per_s=load.episodes / load.seconds,
        steps_per_s=load.steps_per_s,
    )


async def _hold(
    client: EnvClient, task: str | None, count: int, pid: int, begin: float
) -> tuple[float, int, int | None]:
    """Return the seconds until the first session was open, the sessions held at once, and their memory."""
    async with client:
        async with await client.open(task or ""):
            start_s = time.monotonic() - begin
        before = tree_memory(pid)
        held = await asyncio.gather(*(_open(client, task or "") for _ in range(count)))
        after = tree_memory(pid)
        sessions = [session for session in held if session is not None]
        for session in sessions:
            await session.close()
    memory = None if before is None or after is None else max(after - before, 0)
    return start_s, len(sessions), memory


async def _open(client: EnvClient, task: str) -> ClientSession | None:
    with contextlib.suppress(AgentRLError):  # a session that cannot be held is counted by its absence
        return await client.open(task, wait=5.0)
    return None


def tree_memory(pid: int) -> int | None:
    """Return the bytes of memory of a process and its descendants; None where /proc does not tell."""
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [
            child
            for thread in Path(f"/proc/{pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
    except (OSError, ValueError):
        return None
    return total + sum(tree_memory(int(child)) or 0 for child in children)
