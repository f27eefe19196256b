"""The episodes of one Gymnasium environment, one after another: a session and its conversation."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_env.client.client import ClientSession
from agentrl_env.client.formatting import format_messages
from agentrl_env.dataset import SEED_BITS
from agentrl_env.errors import (
    AgentRLError,
    EnvironmentFailed,
    SessionEnded,
    SessionExpired,
    WireError,
)
from agentrl_env.gym.actions import as_message
from agentrl_env.gym.connection import Connection
from agentrl_env.gym.spaces import ChatMessage
from agentrl_env.types import Message, SessionStatus, StepResult

OPTIONS = {"index", "sample", "split"}
"""What ``reset(options=...)`` may choose of an episode."""
GOODBYE_S = 10.0
"""How long the closing of a session is waited for; later its lease ends it."""
LOST: dict[SessionStatus, type[WireError]] = {
    SessionStatus.FAILED_ENVIRONMENT: EnvironmentFailed,
    SessionStatus.EXPIRED: SessionExpired,
    SessionStatus.CANCELLED: SessionEnded,
}
"""The ends of a session that are no end of the episode: it has no outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one step brought."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def over(self) -> bool:
        """Whether it was the episode's last."""
        return self.terminated or self.truncated


class Episode:
    """The present episode. Its coroutines run on the connection's loop.

    A step that raises ends it: the environment may have moved unseen, so it must not go on. It runs
    in the process that began it alone; neither pickle nor fork carries it over.
    """

    def __init__(self) -> None:
        self._running = False
        self._pid = os.getpid()
        self._session: ClientSession | None = None
        self._conversation: list[Message] = []

    def __reduce__(self) -> tuple[type[Episode], tuple[()]]:
        return Episode, ()

    @property
    def running(self) -> bool:
        """Whether a step is possible."""
        return self._running and self._pid == os.getpid()

    def lose(self) -> None:
        """Let no further step be taken: somebody did not hear the last answer."""
        self._running = False

    def observation(self) -> tuple[ChatMessage, ...]:
        """Return the conversation so far, the caller's to keep."""
        return tuple(message.wire() for message in self._conversation)

    def text(self) -> str:
        """Return the conversation as text."""
        return format_messages(self._conversation)

    async def begin(self, connection: Connection, choice: dict[str, Any], *, wait: float) -> dict[str, Any]:
        """Open a new session as ``choose`` says and return the ``info`` that names the sample.

        Raises what ``EnvClient.open`` does, and UnknownTask; then no episode is running.
        """
        await self.end()
        self._conversation, self._pid = [], os.getpid()
        client = await connection.client()
        session = await client.open(await connection.task(), wait=wait, **choice)
        self._session, self._running = session, True
        self._conversation = list(session.messages)
        sample = session.info.sample
        return {
            "task": sample.task,
            "split": sample.split,
            "index": sample.index,
            "seed": sample.seed,
            "status": str(session.status),
            "tools": [tool.model_dump() for tool in session.tools],
        }

    async def step(self, action: Any) -> Turn:
        """Play one action. Raises WireError, ServerUnreachable, CallTimeout: the episode is lost."""
        assert self._session is not None
        message = as_message(action, call_id=f"call_{len(self._conversation)}")
        self._running = False
        result = await self._session.step(message)
        if result.status in LOST:
            raise _lost(result)
        self._running = not result.final
        self._conversation += [message, *result.messages]
        return Turn(
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated,
            info={**result.info, "status": str(result.status), "metrics": dict(result.metrics)},
        )

    async def end(self) -> None:
        """Close the session; idempotent. Where nobody answers any more, its lease ends it."""
        session, self._session, self._running = self._session, None, False
        if session is not None and self._pid == os.getpid():
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await session.close()


def choose(
    options: Mapping[str, Any], *, seed: int | None, split: str, rng: np.random.Generator
) -> dict[str, Any]:
    """Return what ``EnvClient.open`` is to open, from the options and the seed of a reset.

    Without a seed, and without an index or a sample that have their own, ``rng`` draws one.

    Raises:
        ValueError: there is an unknown option.
    """
    if unknown := sorted(options.keys() - OPTIONS, key=str):
        raise ValueError(f"Unknown reset option {unknown[0]!r}; known: {sorted(OPTIONS)}.")
    choice = {key: _python(value) for key, value in options.items() if value is not None}
    if seed is None and not choice.keys() & {"index", "sample"}:
        seed = int(rng.integers(2**SEED_BITS))
    return {"split": split, **choice, "seed": seed}


def _python(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _lost(result: StepResult) -> WireError:
    error = result.info.get("error")
    reason = error.get("message") if isinstance(error, dict) else error
    return LOST[result.status](f"The episode is lost ({result.status}): {reason or 'no reason was given'}")
