"""The tasks of one process: their descriptions, shared resources and samples."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl_env.author_code import author_frames, describe
from agentrl_env.dataset import Dataset
from agentrl_env.environment import check_class
from agentrl_env.errors import AUTHOR_ERRORS, DefinitionError, EnvironmentFailed, ServerDraining, WireError
from agentrl_env.session.capacity import DRAINING
from agentrl_env.session.executor import Executor
from agentrl_env.session.loop_share import LoopShare
from agentrl_env.session.session import SETTLE_TIMEOUT_S, can_fork
from agentrl_env.session.threads import RunningCalls, ThreadPool
from agentrl_env.types import TaskInfo, TaskSample
from agentrl_env.wire import OpenRequest, choose_task

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

logger = logging.getLogger("agentrl_env")


class Tasks:
    """Environment classes by task name, started once and stopped once.

    Args:
        environments: the tasks. Two tasks with one name raise DefinitionError.
        threads: maximum number of threads for the blocking author code of one task. Each task has its own
            threads, so that calls of another task cannot occupy all of them.
        oracle: offer ``expert`` calls.
        calls: shows the running calls.
    """

    def __init__(
        self,
        environments: Iterable[type[Environment]],
        *,
        threads: int,
        oracle: bool,
        calls: RunningCalls | None = None,
    ) -> None:
        self.threads: dict[str, ThreadPool] = {}
        """Threads by task."""
        self._oracle = oracle
        self._classes: dict[str, type[Environment]] = {}
        self._datasets: dict[str, Dataset] = {}
        self._starting: asyncio.Task[tuple[TaskInfo, ...]] | None = None
        self._starters: dict[str, Executor] = {}
        """Executors of ``startup`` by task."""
        self._ending = False
        loop_share = LoopShare()
        for environment in environments:
            check_class(environment)
            if environment.name in self._classes:
                raise DefinitionError(
                    f"two tasks are named {environment.name!r}; rename one", environment, "name"
                )
            self._classes[environment.name] = environment
            self._datasets[environment.name] = Dataset(environment)
            self.threads[environment.name] = ThreadPool(threads, loop_share, calls)

    def environment(self, task: str) -> type[Environment]:
        """Return the class of a task. An empty name means the only task. Raises UnknownTask."""
        return self._classes[choose_task(task, self._classes)]

    async def describe(self) -> tuple[TaskInfo, ...]:
        """Return the descriptions of all tasks. The first call runs ``startup`` of each task."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._startup())
        return await asyncio.shield(self._starting)

    async def sample(self, request: OpenRequest) -> TaskSample:
        """Return the sample of a request. Raises UnknownSample, InvalidRequest, EnvironmentFailed."""
        environment = self.environment(request.task)
        dataset = self._datasets[environment.name]
        wanted = (request.split, request.index, request.seed, request.sample)
        try:
            sample: TaskSample = await self._run(environment, dataset.sample, *wanted)
        except WireError:
            raise
        except AUTHOR_ERRORS as error:
            logger.warning("samples of task %s failed", environment.name, exc_info=author_frames(error))
            raise EnvironmentFailed(
                f"samples of task {environment.name!r} failed: {describe(error, environment.samples)}"
            ) from error
        return sample

    @property
    def abandoned_threads(self) -> int:
        """Number of threads with a job past its deadline."""
        return sum(threads.abandoned for threads in self.threads.values())

    @property
    def blocking(self) -> list[str]:
        """Names of the tasks with plain methods that run on threads."""
        return [name for name, environment in self._classes.items() if environment.blocking]

    def exhausted(self, task: str) -> bool:
        """Return True if the author code of a task needs a thread and none is free."""
        return self._classes[task].blocking and self.threads[task].exhausted

    async def aclose(self) -> None:
        """Run ``shutdown`` of each task that was started.

        A running ``startup`` is awaited until its deadline, since ``shutdown`` could not release what it
        opens later. No further ``startup`` begins.
        """
        starting, self._starting = self._starting, None
        if starting is None:
            return
        self._ending = True
        if not starting.done():
            await asyncio.wait((starting,))
        for name, starter in self._starters.items():
            await starter.settle(SETTLE_TIMEOUT_S)
            environment = self._classes[name]
            try:
                await self._run(environment, environment.shutdown)
            except AUTHOR_ERRORS as error:
                logger.warning("shutdown of task %s failed", name, exc_info=author_frames(error))

    async def _startup(self) -> tuple[TaskInfo, ...]:
        infos: list[TaskInfo] = []
        for environment in self._classes.values():
            if self._ending:
                raise ServerDraining(DRAINING)
            starter = self._starters[environment.name] = self._executor(environment)
            method: Callable[..., Any] = environment.startup
            call = "startup"
            try:
                await starter.run(method, environment.reset_timeout)
                method = environment.samples
                for split in environment.splits:
                    call = f"samples({split!r})"
                    await self._run(environment, self._datasets[environment.name].split, split)
                infos.append(await self._describe(environment))
            except AUTHOR_ERRORS as error:
                logger.warning(
                    "%s of task %s failed", method.__name__, environment.name, exc_info=author_frames(error)
                )
                text, what = describe(error, method), f"{call} of task {environment.name!r}"
                own = f"{type(error).__name__}: {what}"  # the text already names the call
                failure = text.partition(": ")[2] if text.startswith(own) else f"{what} failed: {text}"
                raise EnvironmentFailed(failure) from error
        return tuple(infos)

    async def _describe(self, environment: type[Environment]) -> TaskInfo:
        offered = {
            "expert": self._oracle and environment.overrides("expert"),
            "fork": can_fork(environment),
            "respond": environment.overrides("respond"),
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
        """Run author code that does not belong to a session."""
        executor = self._executor(environment)
        executor.opening = function == self._datasets[environment.name].sample
        return await executor.run(partial(function, *args), environment.reset_timeout)

    def _executor(self, environment: type[Environment]) -> Executor:
        return Executor(blocking=environment.blocking, threads=self.threads[environment.name])
