"""Environment servers of a run: started as child processes or reached by URL."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from agentrl_env.client import EnvClient
from agentrl_env.errors import AgentRLError, Unauthorized
from agentrl_env.launch.process import ServerProcess
from agentrl_env.types import TaskInfo
from agentrl_train.errors import ConfigError, EnvironmentUnavailable
from agentrl_train.runtime.admission import TaskSource
from agentrl_train.runtime.config import EnvironmentSection

logger = logging.getLogger(__name__)

MAX_SAMPLES = 2**62
LEASE_S = 900.0
"""Seconds that a session of a started server may be idle between two completions."""
POLL_INTERVAL_S = 0.5
"""Interval of liveness checks of a child server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The tasks of a run."""

    clients: Mapping[str, EnvClient]
    """Task -> client of its server."""
    sources: Sequence[TaskSource]
    """Training splits."""
    held_out: Mapping[str, TaskSource]
    """Task -> its evaluation split."""


@asynccontextmanager
async def environments(
    sections: Sequence[EnvironmentSection],
    *,
    max_sessions: int,
    oracle: bool = False,
    timeout_s: float = 120.0,
    idle_s: float = 0.0,
) -> AsyncIterator[Served]:
    """Start or connect to every environment server of a run; stop started ones on exit.

    ``timeout_s`` is the deadline of one call, ``idle_s`` of one completion: the
    sessions of started servers live at least that long.

    Raises:
        EnvironmentUnavailable: a server cannot be started or does not answer.
        ConfigError: a configured task or split does not exist.
    """
    async with AsyncExitStack() as stack:
        clients: dict[str, EnvClient] = {}
        sources: list[TaskSource] = []
        held_out: dict[str, TaskSource] = {}
        for section in sections:
            options: dict[str, Any] = {
                "max_sessions": max_sessions,
                "oracle": oracle,
                "lease": LEASE_S + idle_s,
            }
            client = await _client(section, stack, timeout_s=timeout_s, options=options)
            tasks = await _tasks(client, section)
            for name in section.tasks or tasks:
                if name in clients:
                    raise ConfigError(f"two environment servers have a task {name!r}: list it for only one")
                info = tasks.get(name)
                if info is None:
                    raise ConfigError(f"no task {name!r} is served; available: {', '.join(sorted(tasks))}")
                clients[name] = client
                sources.append(_source(info, section.split, weight=section.tasks.get(name, 1.0)))
                held_out[name] = _source(info, section.eval_split)
        yield Served(clients=clients, sources=sources, held_out=held_out)


async def _client(
    section: EnvironmentSection, stack: AsyncExitStack, *, timeout_s: float, options: Mapping[str, Any]
) -> EnvClient:
    # Not the client's default, AGENTRL_TOKEN: every server of a run would learn the token of another.
    token = os.environ.get(section.token_env, "") if section.token_env else ""
    if section.token_env and not token:
        raise ConfigError(f"environments.token_env is {section.token_env}, which is not set: export it")
    url = section.url
    if url is None:
        make = partial(ServerProcess, *section.serve, **options)
        url = await stack.enter_async_context(supervised_server(make))
    return await stack.enter_async_context(EnvClient.connect(url, token=token, timeout=timeout_s))


@asynccontextmanager
async def supervised_server(make: Callable[..., ServerProcess]) -> AsyncIterator[str]:
    """Start a server and yield its URL; restart it at the same URL whenever it dies.

    Raises:
        EnvironmentUnavailable: the server does not start.
    """
    server = make()
    try:
        await asyncio.to_thread(server.start)
    except AgentRLError as error:
        raise EnvironmentUnavailable(str(error)) from error
    current, url = [server], server.url
    supervision = asyncio.create_task(_supervise(current, partial(make, port=urlsplit(url).port)))
    try:
        yield url
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await asyncio.to_thread(current[0].stop)


async def _supervise(current: list[ServerProcess], make: Callable[[], ServerProcess]) -> None:
    """Replace the server in ``current`` whenever it dies; its sessions are lost and retried."""
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        if current[0].running:
            continue
        logger.warning("the environment server at %s died and is restarted", current[0].url)
        await asyncio.to_thread(current[0].stop)
        current[0] = make()
        try:
            await asyncio.to_thread(current[0].start)
        except AgentRLError as error:
            logger.warning("the environment server could not be restarted: %s", error)


async def _tasks(client: EnvClient, section: EnvironmentSection) -> dict[str, TaskInfo]:
    try:
        return await client.tasks()
    except Unauthorized as error:
        words = "name the variable that holds it in environments.token_env"
        raise ConfigError(f"the environment server {section.url} needs a token: {words}") from error
    except AgentRLError as error:
        source = section.url or ", ".join(section.serve)
        raise EnvironmentUnavailable(f"the environment server {source} lists no tasks: {error}") from error


def _source(info: TaskInfo, split: str, *, weight: float = 1.0) -> TaskSource:
    if not info.tools:
        raise ConfigError(f"task {info.name!r} has no tools, so an agent cannot act in it")
    if split not in info.splits:
        raise ConfigError(f"task {info.name!r} has no split {split!r}; available: {', '.join(info.splits)}")
    number = info.splits[split].num_samples
    if number is not None and not 1 <= number <= MAX_SAMPLES:
        raise ConfigError(f"split {split!r} of task {info.name!r} has {number} samples, so none can be drawn")
    return TaskSource(task=info.name, split=split, num_samples=number, weight=weight)
