"""A service behind its limits: whoever calls, over HTTP or the WebSocket, passes here first."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from agentrl_env.errors import Forbidden, InvalidRequest
from agentrl_env.fast_wire import StepItem, StepSaid
from agentrl_env.server.auth import agent_token, caller
from agentrl_env.server.limits import Limits
from agentrl_env.server.service import Service
from agentrl_env.wire import (
    ForkRequest,
    OpenRequest,
    SessionQuery,
    TranscriptQuery,
)


class GuardedService:
    """A ``Service`` that refuses what the caller may not do, or asks too much; it counts all calls.

    Args:
        service: what answers.
        limits: of one call.
        token: the operator's; with one, an answer that opens a session carries the session's own.
    """

    def __init__(self, service: Service, limits: Limits, token: str | None) -> None:
        self.metrics = service.metrics
        self._service = service
        self._limits = limits
        self._token = token

    @property
    def draining(self) -> bool:
        """Whether it takes no new sessions."""
        return self._service.draining

    def gauges(self) -> Mapping[str, float]:
        """Return what ``/metrics`` shows of the present moment."""
        return self._service.gauges()

    async def tasks(self) -> bytes:
        """Return a ``TaskList``."""
        self._admit("tasks")
        return await self._service.tasks()

    async def open(self, request: OpenRequest) -> bytes:
        """Return the ``SessionInfo`` of a new session, with its agent's token."""
        self._admit("open")
        if request.sample is not None:
            self._limits.measure(request.sample, "sample")
        if not request.client:
            request = request.model_copy(update={"client": caller.get().name})
        answer = await self._service.open(request)
        return answer if self._token is None else to_json(self._with_token(from_json(answer)))

    def step(self, session_id: str, step: StepSaid) -> Coroutine[Any, Any, bytes]:
        """Return a ``StepResult``."""
        self._admit("step", session_id)
        self._limits.check_message(step.message)
        return self._service.step(session_id, step)

    def never_waits(self, session_id: str) -> bool:
        """Return whether ``step`` would be done without giving the event loop a turn."""
        return self._service.never_waits(session_id)

    async def step_many(self, steps: Sequence[StepItem], wait_s: float | None) -> list[bytes]:
        """Return for each step its ``StepResult``, or the body of its error.

        An agent's batch is refused whole where any of it is for another session.
        """
        own = caller.get().session_id
        self._admit("step_many", own)
        if own is not None and any(step.session_id != own for step in steps):
            raise Forbidden("an agent's token may only step its own session")
        if len(steps) > self._limits.max_batch_steps:
            most = self._limits.max_batch_steps
            raise InvalidRequest(f"{len(steps)} steps in a batch; at most {most}")
        refused = self._refused(steps)
        if not refused:
            return await self._service.step_many(steps, wait_s)
        good = [step for position, step in enumerate(steps) if position not in refused]
        played = iter(await self._service.step_many(good, wait_s))
        return [refused.get(position) or next(played) for position in range(len(steps))]

    async def info(self, session_id: str) -> bytes:
        """Return a ``SessionInfo``."""
        self._admit("info", session_id)
        return await self._service.info(session_id)

    async def sessions(self, query: SessionQuery) -> bytes:
        """Return a ``SessionList``."""
        self._admit("sessions")
        return await self._service.sessions(query)

    async def transcript(self, session_id: str, query: TranscriptQuery) -> bytes:
        """Return a ``Transcript``."""
        self._admit("transcript")
        return await self._service.transcript(session_id, query)

    async def fleet(self) -> bytes:
        """Return a ``FleetInfo``."""
        self._admit("fleet")
        return await self._service.fleet()

    async def expert(self, session_id: str) -> bytes:
        """Return an ``ExpertAnswer``."""
        self._admit("expert")
        return await self._service.expert(session_id)

    async def fork(self, session_id: str, request: ForkRequest) -> bytes:
        """Return a ``ForkAnswer``, each session with its agent's token."""
        self._admit("fork")
        if request.n > self._limits.max_forks:
            raise InvalidRequest(f"n: {request.n} forks in one call; at most {self._limits.max_forks}")
        answer = await self._service.fork(session_id, request)
        if self._token is None:
            return answer
        forks = from_json(answer)
        return to_json({**forks, "sessions": [self._with_token(info) for info in forks["sessions"]]})

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent."""
        self._admit("close")
        await self._service.close_session(session_id)

    async def aclose(self) -> None:
        """Release everything."""
        await self._service.aclose()

    def _admit(self, call: str, session_id: str | None = None) -> None:
        """Count a call; ``session_id`` is that of a call that the session's agent may make."""
        who = caller.get()
        who.refuse_all_but(session_id)
        who.count_call()
        self.metrics.calls[call] += 1

    def _refused(self, steps: Sequence[StepItem]) -> dict[int, bytes]:
        """Return the errors of the steps that are over a limit, by position."""
        refused: dict[int, bytes] = {}
        check = self._limits.check_message
        for position, step in enumerate(steps):
            try:
                check(step.message)
            except InvalidRequest as error:
                self.metrics.errors[error.type] += 1
                refused[position] = to_json(error.wire())
        return refused

    def _with_token(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "agent_token": agent_token(self._token or "", info["session_id"])}
