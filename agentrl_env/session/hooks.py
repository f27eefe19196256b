"""What authors' code is asked besides tool calls: to begin, for the oracle's move, for its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl_env.errors import EnvironmentFailed, NotSupported
from agentrl_env.session.answering import Awaited, settled
from agentrl_env.session.runner import Runner
from agentrl_env.session.threads import AUTHOR_ERRORS
from agentrl_env.tools import as_move, describe
from agentrl_env.types import Message, TaskSample

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

SETTLE_S = 10.0
"""How long author code that outlived its deadline is waited for before `close()`."""


def reset(environment: Environment, sample: TaskSample) -> Any:
    """Return what ``reset`` does, of a copy, so that no author changes the dataset under others."""
    return environment.reset(sample.model_copy(deep=True), np.random.default_rng(sample.seed))


async def expert_move(environment: Environment, sample: TaskSample, turn: int, runner: Runner) -> Message:
    """Return the oracle's message after so many turns. Raises NotSupported, EnvironmentFailed."""
    rng = np.random.default_rng([sample.seed, turn, 1])
    try:
        return as_move(await runner.call(environment.expert, environment.tool_timeout, rng))
    except NotSupported:
        raise
    except AUTHOR_ERRORS as error:
        raise EnvironmentFailed(f"expert of task {sample.task!r} failed: {describe(error)}") from error


async def snapshots(environment: Environment, times: int, runner: Runner) -> list[Any]:
    """Return copies of the state, each to be restored once. Raises whatever the author's code does."""
    state = await runner.call(environment.snapshot, environment.tool_timeout)
    # Copied before the next step, which may change what the state holds.
    seconds = environment.tool_timeout
    copies: list[Any] = await runner.call(lambda: [copy.deepcopy(state) for _ in range(times)], seconds)
    return copies


def can_fork(environment: type[Environment]) -> bool:
    """Return whether sessions of a task can be forked: it has both ``snapshot`` and ``restore``."""
    return environment.overrides("snapshot") and environment.overrides("restore")


async def release(made: Callable[[], Environment | None], step: Awaited[Any] | None, runner: Runner) -> None:
    """Cancel a step under way, then close the environment. Raises whatever its ``close`` does.

    ``made`` gives the environment, which a call that outlived its deadline may have made only just now.
    """
    if step is not None and not step.done():
        step.cancel()
        runner.give_up()
        await settled(step)
    # Author code that outlived its deadline may still use what close() releases.
    await runner.settle(SETTLE_S)
    environment = made()
    if environment is not None and environment.overrides("close"):
        await runner.call(environment.close, environment.reset_timeout)
