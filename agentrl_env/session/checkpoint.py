"""The standing of a session: its encoded state and the rest that another process needs to continue it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl_env.errors import EnvironmentFailed, StateError
from agentrl_env.session.history import History
from agentrl_env.session.runner import Runner
from agentrl_env.session.state_codec import decode, encode
from agentrl_env.session.threads import AUTHOR_ERRORS
from agentrl_env.tools import describe
from agentrl_env.wire import Standing

if TYPE_CHECKING:
    from agentrl_env.environment import Environment
    from agentrl_env.session import Session


async def standing_of(session: Session, clock: Callable[[], float], since: int = -1) -> Standing:
    """Return where a session stands between two steps.

    Args:
        session: one whose task has ``snapshot``.
        clock: the session's.
        since: the turn after which turns are included.

    Raises:
        EnvironmentFailed: ``snapshot`` fails, or returns what cannot be encoded.
        SessionEnded: the session has ended.
        SessionExpired: the session was idle past its lease.
    """

    async def ask(environment: Environment, runner: Runner) -> Standing:
        deadline = environment.tool_timeout
        try:
            state = await runner.call(environment.snapshot, deadline)
            data = await runner.call(encode, deadline, state, type(environment))
        except StateError as error:
            raise EnvironmentFailed(str(error)) from error
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
    """Let a session that is about to start continue from a standing.

    The state may come from anywhere: where it is malformed, ``start`` raises EnvironmentFailed.
    """
    session.restored = lambda environment: environment.restore(decode(standing.state, type(environment)))
    session.opening, session.turn, session.total = standing.opening, standing.turn, standing.total
    session.begin = now - standing.used_s
    session.turns = History.of(standing.turns)
