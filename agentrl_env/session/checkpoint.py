"""Checkpoints: what another process needs to continue a session between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from agentrl_env.errors import AUTHOR_ERRORS, EnvironmentFailed, StateError
from agentrl_env.session.executor import Executor
from agentrl_env.session.history import History
from agentrl_env.session.state_codec import decode, encode
from agentrl_env.tools import describe
from agentrl_env.types import Message, TaskSample

if TYPE_CHECKING:
    from agentrl_env.environment import Environment
    from agentrl_env.session.session import Session


class Checkpoint(BaseModel):
    """A session between two steps, without its history."""

    model_config = ConfigDict(frozen=True)

    sample: TaskSample
    client: str = ""
    """Name of the caller that opened it."""
    opening: tuple[Message, ...]
    turn: int = Field(ge=0)
    """Number of steps taken."""
    episode_return: float
    """Sum of the rewards so far."""
    elapsed_s: float
    """Seconds of its time limit that have passed."""
    state: str
    """Snapshot of the environment, encoded by ``state_codec``."""

    def restore(self, session: Session, history: History, now: float) -> None:
        """Let a new session continue from here; ``start`` raises EnvironmentFailed where it cannot.

        Args:
            session: one that has not started.
            history: last turns.
            now: time of the session's clock.
        """
        session.continue_from(
            lambda environment: environment.restore(decode(self.state.encode(), type(environment))),
            opening=self.opening,
            turn=self.turn,
            episode_return=self.episode_return,
            began=now - self.elapsed_s,
            history=history,
        )


async def take_checkpoint(
    session: Session, now: float, client: str = "", since: int = -1
) -> tuple[Checkpoint, tuple[tuple[str, str], ...]]:
    """Return a checkpoint of a session, and the turns after turn ``since``.

    Args:
        session: one whose task has ``snapshot``.
        now: time of the session's clock.
        client: name of the caller that opened it.
        since: a turn.

    Raises:
        EnvironmentFailed: ``snapshot`` fails, or returns what cannot be encoded.
        SessionEnded: the session has ended.
        SessionExpired: the session was idle past its lease.
    """

    async def ask(
        environment: Environment, executor: Executor
    ) -> tuple[Checkpoint, tuple[tuple[str, str], ...]]:
        timeout = environment.tool_timeout
        try:
            state = await executor.run(environment.snapshot, timeout)
            encoded: bytes = await executor.run(lambda: encode(state, type(environment)), timeout)
        except StateError as error:
            raise EnvironmentFailed(str(error)) from error
        except AUTHOR_ERRORS as error:
            raise EnvironmentFailed(describe(error)) from error
        checkpoint = Checkpoint(
            sample=session.sample,
            client=client,
            opening=session.opening,
            turn=session.turn,
            episode_return=session.episode_return,
            elapsed_s=now - session.began,
            state=encoded.decode("ascii"),
        )
        return checkpoint, session.history.tail(session.turn - since)

    return await session.between_steps(ask)
