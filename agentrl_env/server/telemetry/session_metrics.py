"""What becomes of sessions, told to the counters, the log and the traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.tracing import Span, annotate, span, spanned, traced

if TYPE_CHECKING:
    from agentrl_env.session import Session
    from agentrl_env.tools import Turn

T = TypeVar("T")
logger = logging.getLogger("agentrl_env")
said = logging.getLogger("agentrl_env.messages")
"""What models and environments said, at level DEBUG: nothing of it is written unless asked for."""
SLOW_STEP_S = 30.0


class SessionObserver:
    """Counts, logs and traces the sessions of a pool; an ``Observer``.

    Args:
        metrics: where it counts.
        slow_step_s: a step that takes longer is a warning in the log.
    """

    def __init__(self, metrics: Metrics, slow_step_s: float = SLOW_STEP_S) -> None:
        self._metrics = metrics
        self._slow_step_s = slow_step_s

    def opened(self, session: Session, client: str) -> None:
        """Take note of a session that has opened."""
        task = session.sample.task
        self._metrics.opened[task] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            logger.info("session opened", extra=_where(session, client=client))

    def ended(self, session: Session, client: str, seconds: float) -> None:
        """Take note of a session that has ended, ``seconds`` after it began."""
        task, status = session.sample.task, session.status
        self._metrics.ended[task, status] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            facts = {"status": status.value, "turns": session.turn, "duration_s": round(seconds, 6)}
            logger.info("session ended", extra=_where(session, client=client, **facts))

    def tool(self, session: Session, name: str) -> AbstractContextManager[object]:
        """Return what is entered while a tool runs."""
        return _ToolRun(self._metrics, session, name)

    def step(self, session: Session, turn: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what is awaited in the place of a turn."""
        if not traced():
            return turn
        return spanned("step", turn, session_id=session.session_id, task=session.sample.task)

    def traces(self) -> bool:
        """Return whether the running task is traced."""
        return traced()

    def tool_ran(self, session: Session, name: str, seconds: float) -> None:
        """Take note of a tool that ran outside of ``tool``."""
        self._metrics.tool_ran(session.sample.task, name, seconds)

    def stepped(self, session: Session, turn: Turn, seconds: float) -> None:
        """Take note of a step that the session has just taken."""
        task = session.sample.task
        self._metrics.step_taken(task, seconds)
        wrong = turn.metrics.get("invalid_calls")
        if wrong:
            self._metrics.invalid_calls[task] += int(wrong)
        if seconds >= self._slow_step_s:
            facts = {"seq": session.turn, "duration_s": round(seconds, 6)}
            logger.warning("slow step", extra=_where(session, **facts))
        if said.isEnabledFor(logging.DEBUG):
            *_, (message, result) = session.turns
            words = {"message": message.wire(), "answer": [answer.wire() for answer in result.messages]}
            said.debug("step", extra=_where(session, seq=result.seq, **words))


class _ToolRun:
    """One call of a tool under way."""

    __slots__ = ("_begin", "_metrics", "_name", "_span", "_task")

    def __init__(self, metrics: Metrics, session: Session, name: str) -> None:
        self._metrics, self._task, self._name = metrics, session.sample.task, name
        self._span: Span = span("tool", session_id=session.session_id, task=self._task, tool=name)

    def __enter__(self) -> None:
        self._span.__enter__()
        self._begin = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.tool_ran(self._task, self._name, time.perf_counter() - self._begin)
        self._span.__exit__(kind, error, trace)


def _where(session: Session, **facts: object) -> dict[str, dict[str, object]]:
    return {"facts": {"session_id": session.session_id, "task": session.sample.task, **facts}}
