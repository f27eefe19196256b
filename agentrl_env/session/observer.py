"""Who is told what happens in sessions: the seam between them and counters, logs and traces."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from agentrl_env.session import Session
    from agentrl_env.tools import Turn

T = TypeVar("T")
logger = logging.getLogger("agentrl_env")


class Observer(Protocol):
    """Is told what happens in sessions, to count, log and trace it."""

    def tool(self, session: Session, name: str) -> AbstractContextManager[object]:
        """Return what is entered while a tool, or ``respond``, runs."""

    def step(self, session: Session, turn: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what is awaited in the place of a turn."""

    def traces(self) -> bool:
        """Return whether ``tool`` has to be entered, for what runs in a tool to be part of its trace."""

    def tool_ran(self, session: Session, name: str, seconds: float) -> None:
        """Take note of a tool for which ``tool`` was not entered."""

    def stepped(self, session: Session, turn: Turn, seconds: float) -> None:
        """Take note of a step that the session has just taken."""


class _Unobserved:
    def tool(self, session: Session, name: str) -> AbstractContextManager[object]:
        return _NOTHING

    def step(self, session: Session, turn: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return turn

    def traces(self) -> bool:
        return False

    def tool_ran(self, session: Session, name: str, seconds: float) -> None:
        return

    def stepped(self, session: Session, turn: Turn, seconds: float) -> None:
        return


_NOTHING: AbstractContextManager[None] = nullcontext()
UNOBSERVED: Observer = _Unobserved()


def log_failure(session: Session, what: str, error: BaseException) -> None:
    """Tell of author code that raised, with its traceback."""
    task = session.sample.task
    words = f"{what} of task {task} failed in session {session.session_id}"
    facts = {"session_id": session.session_id, "task": task}
    logger.warning(words, exc_info=error, extra={"facts": facts})
