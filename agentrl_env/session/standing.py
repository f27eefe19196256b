"""Where a session stands, in a form that another process can go on from: its state, pickled, and the rest."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agentrl_env.errors import EnvironmentFailed
from agentrl_env.session.history import History
from agentrl_env.session.runner import Runner
from agentrl_env.session.threads import AUTHOR_ERRORS
from agentrl_env.tools import describe
from agentrl_env.wire import Standing

if TYPE_CHECKING:
    from agentrl_env.environment import Environment
    from agentrl_env.session import Session

TARGET_PACKAGE = "agentrl_target_"
"""How the package of a task's folder is named; the rest of the name stands for the folder's place."""


async def standing_of(session: Session, clock: Callable[[], float], since: int = -1) -> Standing:
    """Return where a session stands between two steps.

    Args:
        session: one whose task has ``snapshot``.
        clock: the session's.
        since: the turn after which it takes turns along.

    Raises EnvironmentFailed where the state cannot be had or pickled, SessionEnded, SessionExpired.
    """

    async def ask(environment: Environment, runner: Runner) -> Standing:
        deadline = environment.tool_timeout
        try:
            state = await runner.call(environment.snapshot, deadline)
            data = await runner.call(pickle.dumps, deadline, state)
        except AUTHOR_ERRORS as error:
            raise EnvironmentFailed(describe(error)) from error
        return Standing(
            sample=session.sample,
            opening=session.opening,
            turn=session.turn,
            total=session.total,
            used_s=clock() - session.begin,
            turns=session.turns.tail(session.turn - since),
            state=data,
        )

    return await session.between_steps(ask)


def go_on(session: Session, standing: Standing, now: float) -> None:
    """Let a session, to be started, begin where another stood.

    The state must come from a server that is trusted: to unpickle it may run any code.
    """
    session.restored = lambda environment: environment.restore(_unpickled(standing.state, type(environment)))
    session.opening, session.turn, session.total = standing.opening, standing.turn, standing.total
    session.begin = now - standing.used_s
    session.turns = History.of(standing.turns)


def _unpickled(state: bytes, environment: type[Environment]) -> Any:
    return _Unpickler(state, environment.__module__.partition(".")[0]).load()


class _Unpickler(pickle.Unpickler):
    """Finds the classes of a task's folder also where that lies elsewhere than it did.

    Args:
        state: the pickle.
        package: that of the task, here.
    """

    def __init__(self, state: bytes, package: str) -> None:
        super().__init__(io.BytesIO(state))
        self._package = package

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by the name that it had where it was pickled."""
        package, dot, rest = module.partition(".")
        if package.startswith(TARGET_PACKAGE) and self._package.startswith(TARGET_PACKAGE):
            module = f"{self._package}{dot}{rest}"
        return super().find_class(module, name)
