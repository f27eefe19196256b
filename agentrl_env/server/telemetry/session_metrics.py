"""Session metrics: counts, logs and traces the sessions of a pool."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.telemetry.tracing import annotate, spanned
from agentrl_env.types import SessionStatus, TaskCounts

if TYPE_CHECKING:
    from agentrl_env.session import Session
    from agentrl_env.tools import StepBuilder

T = TypeVar("T")
_RUNNING = SessionStatus.RUNNING
logger = logging.getLogger("agentrl_env")
messages = logging.getLogger("agentrl_env.messages")
"""Messages of models and environments, at level DEBUG, with ``--log-messages`` only."""
SLOW_STEP_S = 30.0


class SessionMetrics:
    """Counts, logs and traces the sessions of a pool; an ``Observer``.

    Args:
        metrics: counters of the process.
        slow_step_s: steps that take longer are logged as warnings.
        tracing: whether calls may be traced.
    """

    def __init__(self, metrics: Metrics, slow_step_s: float = SLOW_STEP_S, *, tracing: bool = False) -> None:
        self._metrics = metrics
        self._slow_step_s = slow_step_s
        self._tracing = tracing

    def opened(self, session: Session, client: str) -> None:
        """Observe a session that has opened."""
        task = session.sample.task
        self._metrics.opened[task] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            logger.info("session opened", extra=_where(session, client=client))

    def ended(self, session: Session, client: str, seconds: float) -> None:
        """Observe a session that has ended, ``seconds`` after it began."""
        task, status = session.sample.task, session.status
        self._metrics.ended[task, status] += 1
        annotate(session_id=session.session_id, task=task)
        if logger.isEnabledFor(logging.INFO):
            facts = {"status": status.value, "turns": session.turn, "duration_s": round(seconds, 6)}
            logger.info("session ended", extra=_where(session, client=client, **facts))

    def traced(
        self, name: str, work: Coroutine[Any, Any, T], session: Session | None, tool: str = ""
    ) -> Coroutine[Any, Any, T]:
        """Return ``work``, run under a trace span where tracing is on."""
        if not self._tracing:
            return work
        attributes = {"tool": tool} if tool else {}
        if session is not None:
            attributes |= {"session_id": session.session_id, "task": session.sample.task}
        return spanned(name, work, **attributes)

    def tool_ran(self, task: str, name: str, seconds: float) -> None:
        """Observe a call of a tool."""
        self._metrics.tool_ran(task, name, seconds)

    def counts(self) -> Mapping[str, TaskCounts]:
        """Return what was counted so far, by task."""
        return self._metrics.by_task()

    def stepped(self, session: Session, result: StepBuilder, seconds: float) -> None:
        """Observe a step that has been taken."""
        task = session.sample.task
        self._metrics.step_taken(task, seconds)
        if session.status is not _RUNNING and session.status is not SessionStatus.FAILED_ENVIRONMENT:
            self._metrics.scored_session(
                task, session.episode_return, success=result.metrics.get("success", 0.0) > 0
            )
        invalid = result.metrics.get("invalid_calls")
        if invalid:
            self._metrics.invalid_calls[task] += int(invalid)
        if seconds >= self._slow_step_s:
            facts = {"seq": session.turn, "duration_s": round(seconds, 6)}
            logger.warning("slow step", extra=_where(session, **facts))
        if messages.isEnabledFor(logging.DEBUG):
            *_, (message, answer) = session.history
            texts = {"message": message.wire(), "answer": [item.wire() for item in answer.messages]}
            messages.debug("step", extra=_where(session, seq=answer.seq, **texts))


def _where(session: Session, **facts: object) -> dict[str, dict[str, object]]:
    return {"facts": {"session_id": session.session_id, "task": session.sample.task, **facts}}
