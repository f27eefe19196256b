"""The tasks of one process: what is said of them, what their sessions share, which sample is meant."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from agentrl_env.dataset import Dataset
from agentrl_env.errors import DefinitionError, EnvironmentFailed, UnknownTask, WireError
from agentrl_env.session.capacity import draining
from agentrl_env.session.hooks import SETTLE_S, can_fork
from agentrl_env.session.runner import Runner
from agentrl_env.session.threads import AUTHOR_ERRORS, Threads
from agentrl_env.tools import describe, toolset
from agentrl_env.types import TaskInfo, TaskSample
from agentrl_env.wire import OpenRequest

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

logger = logging.getLogger("agentrl_env")


class Catalog:
    """Environment classes by task name, started once and stopped once.

    Args:
        environments: the tasks; two of one name raise DefinitionError.
        threads: where blocking author code runs.
        oracle: whether the tasks' experts are offered.
    """

    def __init__(self, environments: Iterable[type[Environment]], *, threads: Threads, oracle: bool) -> None:
        self._threads = threads
        self._oracle = oracle
        self._classes: dict[str, type[Environment]] = {}
        self._datasets: dict[str, Dataset] = {}
        self._starting: asyncio.Task[tuple[TaskInfo, ...]] | None = None
        self._starters: dict[str, Runner] = {}
        """What runs, or ran, the ``startup`` of a task, by the task's name."""
        self._ending = False
        for environment in environments:
            if environment.name in self._classes:
                raise DefinitionError(f"two tasks are named {environment.name!r}; rename one")
            toolset(environment)
            self._classes[environment.name] = environment
            self._datasets[environment.name] = Dataset(environment)

    def environment(self, task: str) -> type[Environment]:
        """Return a task's class. Raises UnknownTask."""
        if task not in self._classes:
            known = ", ".join(self._classes) or "none"
            raise UnknownTask(f"no task {task!r} here; tasks: {known}")
        return self._classes[task]

    async def tasks(self) -> tuple[TaskInfo, ...]:
        """Return what is served; the first call opens what sessions share (``startup``)."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._startup())
        return await asyncio.shield(self._starting)

    async def sample(self, request: OpenRequest) -> TaskSample:
        """Return the problem a request means. Raises UnknownSample, EnvironmentFailed."""
        environment, dataset = self._classes[request.task], self._datasets[request.task]
        wanted = (request.split, request.index, request.seed, request.sample)
        try:
            sample: TaskSample = await self._run(environment, dataset.sample, *wanted)
        except WireError:
            raise
        except AUTHOR_ERRORS as error:
            logger.warning("samples of task %s failed", request.task, exc_info=error)
            raise EnvironmentFailed(f"samples of task {request.task!r} failed: {describe(error)}") from error
        return sample

    async def aclose(self) -> None:
        """Release what the sessions shared (``shutdown``), where it was opened.

        A ``startup`` under way is waited for within its own deadline: what it has not opened yet
        ``shutdown`` could not release. No further one begins.
        """
        starting, self._starting = self._starting, None
        if starting is None:
            return
        self._ending = True
        if not starting.done():
            await asyncio.wait((starting,))
        for name, starter in self._starters.items():
            await starter.settle(SETTLE_S)
            environment = self._classes[name]
            try:
                await self._run(environment, environment.shutdown)
            except AUTHOR_ERRORS as error:
                logger.warning("shutdown of task %s failed", name, exc_info=error)

    async def _startup(self) -> tuple[TaskInfo, ...]:
        infos: list[TaskInfo] = []
        for environment in self._classes.values():
            if self._ending:
                raise draining()
            starter = self._starters[environment.name] = self._runner(environment)
            try:
                await starter.call(environment.startup, environment.reset_timeout)
                infos.append(await self._describe(environment))
            except AUTHOR_ERRORS as error:
                logger.warning("startup of task %s failed", environment.name, exc_info=error)
                raise EnvironmentFailed(
                    f"startup of task {environment.name!r} failed: {describe(error)}"
                ) from error
        return tuple(infos)

    async def _describe(self, environment: type[Environment]) -> TaskInfo:
        offered = {
            "expert": self._oracle and environment.overrides("expert"),
            "fork": can_fork(environment),
        }
        return TaskInfo(
            name=environment.name,
            description=environment.description(),
            splits=await self._run(environment, self._datasets[environment.name].info),
            tools=environment.tool_specs(),
            max_turns=environment.max_turns,
            capabilities=tuple(name for name, there in offered.items() if there),
        )

    async def _run(self, environment: type[Environment], function: Callable[..., Any], *args: Any) -> Any:
        """Run author code that belongs to no session."""
        return await self._runner(environment).call(function, environment.reset_timeout, *args)

    def _runner(self, environment: type[Environment]) -> Runner:
        return Runner(blocking=environment.blocking, threads=self._threads)
