"""What the application puts on the wire: the sessions of this process, or of a whole fleet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic_core import to_json

from agentrl_env.errors import WireError
from agentrl_env.fast_wire import StepItem, StepSaid
from agentrl_env.server.admin import describe_server, list_sessions, transcript
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.wire import (
    ExpertAnswer,
    ForkAnswer,
    ForkRequest,
    OpenRequest,
    SessionQuery,
    TaskList,
    TranscriptQuery,
)


class Service(Protocol):
    """The calls of protocol 1, read and checked; their answers as JSON, ready to be sent.

    Every method raises a WireError as the wire carries it.
    """

    metrics: Metrics

    @property
    def draining(self) -> bool:
        """Whether it takes no new sessions."""

    def gauges(self) -> Mapping[str, float]:
        """Return what ``/metrics`` shows of the present moment."""

    async def tasks(self) -> bytes:
        """Return a ``TaskList``; the first call makes ready what is served."""

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session."""

    async def step(self, session_id: str, step: StepSaid) -> bytes:
        """Return a ``StepResult``."""

    def never_waits(self, session_id: str) -> bool:
        """Return whether ``step`` would be done without giving the event loop a turn."""

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error."""

    async def info(self, session_id: str) -> bytes:
        """Return a ``SessionInfo``."""

    async def sessions(self, query: SessionQuery) -> bytes:
        """Return a ``SessionList``: sessions that are open or have ended lately, the newest first."""

    async def transcript(self, session_id: str, query: TranscriptQuery) -> bytes:
        """Return a ``Transcript``."""

    async def fleet(self) -> bytes:
        """Return a ``FleetInfo``."""

    async def expert(self, session_id: str) -> bytes:
        """Return an ``ExpertAnswer``."""

    async def fork(self, session_id: str, request: ForkRequest) -> bytes:
        """Return a ``ForkAnswer``."""

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent."""

    async def aclose(self) -> None:
        """Release everything."""


class PoolService:
    """The sessions of this process; a ``Service``."""

    def __init__(self, pool: SessionPool) -> None:
        self.pool = pool
        self.metrics = pool.metrics
        self._epoch = time.time() - pool.now()

    @property
    def draining(self) -> bool:
        """Whether the pool takes no new sessions."""
        return self.pool.draining

    def gauges(self) -> Mapping[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        return self.pool.gauges()

    async def tasks(self) -> bytes:
        """Return a ``TaskList``; the first call opens what sessions share (``startup``)."""
        return TaskList(tasks=await self.pool.tasks()).model_dump_json().encode()

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session."""
        return (await self.pool.open(request)).model_dump_json().encode()

    async def step(self, session_id: str, step: StepSaid) -> bytes:
        """Return a ``StepResult``."""
        return await self.pool.stepper.step(session_id, step.seq, step.message)

    def never_waits(self, session_id: str) -> bool:
        """Return whether ``step`` would be done without giving the event loop a turn."""
        return self.pool.never_waits(session_id)

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error."""
        answers = await self.pool.stepper.step_many(steps, wait_s)
        return [answer if isinstance(answer, bytes) else self._error(answer) for answer in answers]

    async def info(self, session_id: str) -> bytes:
        """Return a ``SessionInfo``."""
        return (await self.pool.info(session_id)).model_dump_json().encode()

    async def sessions(self, query: SessionQuery) -> bytes:
        """Return a ``SessionList``: sessions that are open or have ended lately, the newest first."""
        pool = self.pool
        listed = list_sessions(pool.known(), query, server=pool.server_id, now=pool.now(), epoch=self._epoch)
        return listed.model_dump_json().encode()

    async def transcript(self, session_id: str, query: TranscriptQuery) -> bytes:
        """Return a ``Transcript``."""
        return transcript(self.pool.session(session_id), query.after).model_dump_json().encode()

    async def fleet(self) -> bytes:
        """Return a ``FleetInfo`` of this server alone."""
        return (await describe_server(self.pool)).model_dump_json().encode()

    async def expert(self, session_id: str) -> bytes:
        """Return an ``ExpertAnswer``."""
        return ExpertAnswer(message=await self.pool.expert(session_id)).model_dump_json().encode()

    async def fork(self, session_id: str, request: ForkRequest) -> bytes:
        """Return a ``ForkAnswer``."""
        forks = await self.pool.fork(session_id, request.n, request.request_id)
        return ForkAnswer(sessions=tuple(forks)).model_dump_json().encode()

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent."""
        await self.pool.close_session(session_id)

    async def aclose(self) -> None:
        """End every session and release what they shared."""
        await self.pool.aclose()

    def _error(self, error: WireError) -> bytes:
        self.metrics.errors[error.type] += 1
        return to_json(error.wire())
