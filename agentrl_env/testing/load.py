"""Load of a task on this machine: start time, memory, concurrent sessions and steps per second."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl_env.client.benchmark import LoadResult, measure
from agentrl_env.client.client import ClientSession, EnvClient
from agentrl_env.errors import AgentRLError
from agentrl_env.launch.process import ServerProcess
from agentrl_env.testing.quality import START_S, Load

SESSIONS = 64
"""Number of sessions to hold open."""
PLAYERS = 16
"""Number of sessions that are stepped concurrently to count steps."""
CLOSE_S = 5.0
"""Seconds to wait for the sessions to close before the server is stopped."""


def measure_load(
    target: str,
    *,
    task: str | None = None,
    sessions: int = SESSIONS,
    seconds: float = 2.0,
    deadline: float = 60.0,
) -> Load:
    """Serve a target in a separate process, hold sessions open in it, and step them with random calls.

    Args:
        target: A folder, ``file.py:Class`` or ``module:Class``.
        task: Name of the task. None if there is only one.
        sessions: Number of sessions to hold open.
        seconds: Seconds in which steps are counted.
        deadline: Seconds in which the sessions must open. Steps are counted for this long if no episode
            started within ``seconds``.

    Raises:
        AgentRLError: The server does not start or opens no session.
    """
    begin = time.monotonic()
    with ServerProcess(target, max_sessions=sessions + PLAYERS, start_timeout=START_S) as server:
        connect = partial(EnvClient.connect, server.url)
        asyncio.run(_open_one(connect(), task))
        start_s = time.monotonic() - begin
        load = _count(partial(measure, connect, task=task, sessions=PLAYERS, warmup=0.5), seconds, deadline)
        # Last, since the server might still be opening sessions that did not open in time.
        held, memory = asyncio.run(hold_sessions(connect(), task, sessions, server.pid or 0, deadline))
    return Load(
        start_s=start_s,
        sessions=held,
        asked=sessions,
        mb_per_session=None if memory is None or not held else memory / held / 1e6,
        episodes_per_s=load.episodes / load.seconds if load else None,
        steps_per_s=load.steps_per_s if load else None,
    )


def _count(count: Callable[..., LoadResult], seconds: float, deadline: float) -> LoadResult | None:
    """Count steps. If no episode started, count again for longer. Return None if no step ended."""
    found = None
    for time_s in (seconds, deadline):
        with contextlib.suppress(AgentRLError):  # no step has ended
            found = count(seconds=time_s)
            if found.episodes:
                break
    return found


async def _open_one(client: EnvClient, task: str | None) -> None:
    async with client, await client.open(task or ""):
        pass


async def hold_sessions(
    client: EnvClient, task: str | None, count: int, pid: int, deadline: float
) -> tuple[int, int | None]:
    """Return the number of open sessions, once all are open or at the deadline, and their memory.

    The memory is None if some sessions were still opening at the deadline, since they use memory too.
    """
    async with client:
        before = tree_memory(pid)
        opening = [asyncio.create_task(_open(client, task or "")) for _ in range(count)]
        _, late = await asyncio.wait(opening, timeout=deadline)
        after = tree_memory(pid)
        opened = [session for one in opening if one.done() and (session := one.result()) is not None]
        for one in opening:
            one.cancel()
        closing = [asyncio.create_task(_close(session)) for session in opened]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
    memory = None if late or before is None or after is None else max(after - before, 0)
    return len(opened), memory


async def _open(client: EnvClient, task: str) -> ClientSession | None:
    with contextlib.suppress(AgentRLError):  # a session that does not open is not counted
        return await client.open(task, wait=5.0)
    return None


async def _close(session: ClientSession) -> None:
    with contextlib.suppress(AgentRLError):  # the server is about to stop
        await session.close()


def tree_memory(pid: int) -> int | None:
    """Return the memory of a process and its descendants in bytes, or None without /proc."""
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
