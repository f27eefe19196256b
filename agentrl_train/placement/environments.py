"""Environment servers of a run: started as child processes or reached by URL."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from agentrl_env.client import EnvClient
from agentrl_env.client.http import HttpBackend
from agentrl_env.errors import AgentRLError, Unauthorized
from agentrl_env.launch.process import ServerProcess
from agentrl_env.types import TaskInfo
from agentrl_train.config import EnvironmentSection
from agentrl_train.config.functions import imported
from agentrl_train.config.sections import Program
from agentrl_train.errors import ConfigError, EnvironmentUnavailable
from agentrl_train.gateway.launchers import find_launcher
from agentrl_train.gateway.programs import AgentProgram
from agentrl_train.gateway.server import Gateway
from agentrl_train.tool_calls.turn import encodable
from agentrl_train.types import Sampling, TaskSource

logger = logging.getLogger(__name__)

Given = EnvClient | type
"""A client of a server that runs already, or an ``Environment`` to serve in this process."""
MAX_SAMPLES = 2**62
LEASE_S = 900.0
"""Seconds that a session of a started server can be idle between two completions."""
POLL_INTERVAL_S = 0.5
"""Interval of liveness checks of a child server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The tasks of a run."""

    clients: Mapping[str, EnvClient]
    """Task -> client of its server."""
    sources: Sequence[TaskSource]
    """Training splits. The easiest split if a task has several."""
    held_out: Mapping[str, TaskSource]
    """Task -> its evaluation split."""
    harder: Mapping[str, Sequence[TaskSource]] = field(default_factory=dict)
    """Task -> its harder training splits, from easy to hard."""
    programs: Mapping[str, AgentProgram] = field(default_factory=dict)
    """Task -> the program that plays it."""


@asynccontextmanager
async def environments(
    sections: Sequence[EnvironmentSection],
    *,
    max_sessions: int,
    oracle: bool = False,
    timeout_s: float = 120.0,
    idle_s: float = 0.0,
    levels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    stated: Sampling | None = None,
    given: Mapping[str, Given] = MappingProxyType({}),
) -> AsyncIterator[Served]:
    """Start or connect to every environment server of a run, and stop the started servers on exit.

    If ``given`` has a target of ``serve``, it is served in this process or reached with the given client.
    Agent programs get a gateway. Their requests can only have the sampling parameters ``stated``, or none.
    ``timeout_s`` is the deadline of one call, and ``idle_s`` of one completion. Sessions of started servers
    live at least that long. ``levels`` are the training splits, from easy to hard, of tasks with several.

    Raises:
        EnvironmentUnavailable: a server cannot be started, does not answer or serves no task.
        ConfigError: a configured task or split does not exist.
    """
    async with AsyncExitStack() as stack:
        clients: dict[str, EnvClient] = {}
        sources: list[TaskSource] = []
        harder: dict[str, list[TaskSource]] = {}
        held_out: dict[str, TaskSource] = {}
        programs: dict[str, AgentProgram] = {}
        gateway: Gateway | None = None
        for section in sections:
            if section.program is not None:
                _check_program(section.program)
                gateway = gateway or await stack.enter_async_context(Gateway())
            if section.program is not None and section.program.samples is not None:
                assert gateway is not None
                name, splits = Path(section.program.samples).stem, _read_splits(section, section.program)
                _require_new(name, sources)
                run = _run_of(section.program)
                programs[name] = _program(section, gateway, run=run, samples=splits, stated=stated)
                for split, samples in splits.items():
                    source = TaskSource(task=name, split=split, num_samples=len(samples))
                    if split == section.split:
                        sources.append(source)
                    else:
                        held_out[name] = source
                continue
            options: dict[str, Any] = {
                "max_sessions": max_sessions,
                "oracle": oracle,
                "lease": LEASE_S + idle_s,
                "start_timeout": section.start_timeout_s,
            }
            if section.serve and section.serve[0] in given:
                url, client = "", await _given_client(given[section.serve[0]], stack, options=options)
            else:
                url, client = await _client(section, stack, timeout_s=timeout_s, options=options)
            tasks = await _tasks(client, section)
            for name in section.tasks or tasks:
                _require_new(name, sources)
                info = tasks.get(name)
                if info is None:
                    raise ConfigError(f"no task {name!r} is served; available: {', '.join(sorted(tasks))}")
                clients[name] = client
                first, *others = levels.get(name, (section.split,))
                sources.append(_source(info, first, weight=section.tasks.get(name, 1.0)))
                harder[name] = [_source(info, split) for split in others]
                held_out[name] = _source(info, section.eval_split)
                if gateway is not None and section.program is not None:
                    run = _launch_command(section.program, info, url=url, timeout_s=timeout_s)
                    run = run or _run_of(section.program)
                    programs[name] = _program(section, gateway, run=run, url=url, stated=stated)
        if unknown := levels.keys() - clients.keys():
            raise ConfigError(
                f"rollout.curriculum.levels names {min(unknown)!r}, which is not a task of this run"
            )
        yield Served(clients=clients, sources=sources, harder=harder, held_out=held_out, programs=programs)


def _require_new(name: str, sources: Sequence[TaskSource]) -> None:
    if name in {source.task for source in sources}:
        raise ConfigError(f"two environment servers have a task {name!r}: list it for only one")


def _check_program(program: Program) -> None:
    """Raise ``ConfigError`` if a launcher has no server to play on, is not installed, or does not exist."""
    launcher = find_launcher(program.run)
    if launcher is not None and program.samples is not None:
        raise ConfigError(
            f"environments.program = {program.run!r} plays the sessions of a server: give serve or url "
            "instead of samples"
        )
    if launcher is not None:
        launcher.check_installed()


def _launch_command(program: Program, task: TaskInfo, *, url: str, timeout_s: float) -> list[str] | None:
    """Return the command line of a launcher for a task, or None for another program."""
    launcher = find_launcher(program.run)
    if launcher is None:
        return None
    if not url:
        raise ConfigError(
            f"environments.program = {program.run!r} needs a server: give its address, or a target to serve"
        )
    return launcher.command(task, timeout_s=timeout_s)


def _run_of(program: Program) -> Any:
    """Return the function or the command line of a program."""
    if program.is_function:
        return imported(program.run)
    try:
        return shlex.split(program.run)
    except ValueError as error:
        raise ConfigError(f"environments.program = {program.run!r} is not a command: {error}") from error


def _program(section: EnvironmentSection, gateway: Gateway, **options: Any) -> AgentProgram:
    """Return the program of a section."""
    assert section.program is not None
    return AgentProgram(
        gateway=gateway,
        token=_token(section),
        folder=Path(section.program.folder),
        ignored=section.program.ignore,
        **options,
    )


def _read_splits(section: EnvironmentSection, program: Program) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of a section by split. Raises ``ConfigError`` for a file that is not JSON lines."""
    files = {section.split: program.samples, section.eval_split: program.eval_samples}
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, path in files.items():
        if path is None:
            continue
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
            splits[split] = [encodable(json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"the samples {path} cannot be read: {error}") from error
        if not splits[split] or not all(isinstance(sample, dict) for sample in splits[split]):
            raise ConfigError(f"the samples {path} must be lines with one JSON object each, at least one")
    return splits


async def _client(
    section: EnvironmentSection, stack: AsyncExitStack, *, timeout_s: float, options: Mapping[str, Any]
) -> tuple[str, EnvClient]:
    url = section.url
    if url is None:
        make = partial(ServerProcess, *section.serve, **options)
        url = await stack.enter_async_context(supervised_server(make))
    client = EnvClient.connect(url, token=_token(section), timeout=timeout_s)
    return url, await stack.enter_async_context(client)


async def _given_client(source: Given, stack: AsyncExitStack, *, options: Mapping[str, Any]) -> EnvClient:
    """Return a client of a given environment. Clients of the caller stay open, without their connections."""
    if isinstance(source, EnvClient):
        if isinstance(source.backend, HttpBackend):
            stack.push_async_callback(source.aclose)  # connections of this event loop
        return source
    limits = {"max_sessions": options["max_sessions"], "lease_s": options["lease"]}
    try:
        client = EnvClient.local(source, oracle=options["oracle"], **limits)
    except AgentRLError as error:
        raise ConfigError(f"{source.__qualname__} cannot be served: {error}") from error
    return await stack.enter_async_context(client)


def _token(section: EnvironmentSection) -> str:
    """Return the token of a server."""
    # Do not use the client's default, AGENTRL_TOKEN, because servers of a run would see each other's token.
    token = os.environ.get(section.token_env, "") if section.token_env else ""
    if section.token_env and not token:
        raise ConfigError(f"environments.token_env is {section.token_env}, which is not set: export it")
    return token


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
    """Replace the server in ``current`` whenever it dies. Its sessions are lost and retried."""
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
    source = section.url or ", ".join(section.serve)
    try:
        tasks = await client.tasks()
    except Unauthorized as error:
        problem = "needs a token: name the variable that holds it in environments.token_env"
        if section.token_env:
            problem = f"rejects the token in {section.token_env}: export the token that the server was given"
        raise ConfigError(f"the environment server {section.url} {problem}") from error
    except AgentRLError as error:
        raise EnvironmentUnavailable(f"the environment server {source} lists no tasks: {error}") from error
    if not tasks:
        raise EnvironmentUnavailable(f"{source} serves no task; is a server linked to the controller?")
    return tasks


def _source(info: TaskInfo, split: str, *, weight: float = 1.0) -> TaskSource:
    if split not in info.splits:
        raise ConfigError(f"task {info.name!r} has no split {split!r}; available: {', '.join(info.splits)}")
    number = info.splits[split].num_samples
    if number is not None and not 1 <= number <= MAX_SAMPLES:
        raise ConfigError(f"split {split!r} of task {info.name!r} has {number} samples, so none can be drawn")
    return TaskSource(task=info.name, split=split, num_samples=number, weight=weight)
