"""Observer: the interface between sessions and a server's counters, logs and traces."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.author_code import author_frames
from agentrl_env.errors import InternalError, WireError

if TYPE_CHECKING:
    from agentrl_env.session.session import Session
    from agentrl_env.tools import StepBuilder
    from agentrl_env.types import TaskCounts

T = TypeVar("T")
logger = logging.getLogger("agentrl_env")


class Observer:
    """Does nothing. A server's subclass counts, logs and traces sessions."""

    def opened(self, session: Session, client: str) -> None:
        """Observe a session that has opened."""

    def ended(self, session: Session, client: str, seconds: float) -> None:
        """Observe a session that has ended, ``seconds`` after it began."""

    def traced(
        self, name: str, work: Coroutine[Any, Any, T], session: Session | None, tool: str = ""
    ) -> Coroutine[Any, Any, T]:
        """Return ``work``, wrapped in a trace span if tracing is on.

        Args:
            name: name of the span.
            work: the coroutine that the span covers.
            session: the session, if any.
            tool: the called tool, if any.
        """
        return work

    def tool_ran(self, task: str, name: str, seconds: float) -> None:
        """Observe a call of a tool, or of ``respond``."""

    def stepped(self, session: Session, result: StepBuilder, seconds: float) -> None:
        """Observe a step that has been taken."""

    def counts(self) -> Mapping[str, TaskCounts]:
        """Return the counts so far, by task."""
        return {}


NO_OBSERVER = Observer()


def log_failure(session: Session, what: str, error: BaseException) -> None:
    """Log an exception of author code with its traceback, starting at the author's first frame."""
    task = session.sample.task
    message = f"{what} of task {task} failed in session {session.session_id}"
    facts = {"session_id": session.session_id, "task": task}
    logger.warning(message, exc_info=author_frames(error), extra={"facts": facts})


def as_wire_error(error: BaseException) -> WireError:
    """Return the error for a caller. An unexpected exception is a bug, and is logged with its traceback."""
    if isinstance(error, WireError):
        return error
    logger.error("a bug in the server", exc_info=error)
    return InternalError(f"a bug in the server: {type(error).__name__}")
