"""The seam between a client and whatever holds its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl_env.errors import WireError
from agentrl_env.types import Message, SessionInfo, StepResult, TaskInfo
from agentrl_env.wire import OpenRequest, StepRequest


class SessionBackend(Protocol):
    """What ``EnvClient`` needs: HTTP to a server, or a ``SessionPool`` in this process.

    Every method raises a WireError as the wire would carry it; those over a network also
    ServerUnreachable, CallTimeout and ProtocolError.
    """

    async def tasks(self) -> tuple[TaskInfo, ...]:
        """Return what is served."""

    async def open(self, request: OpenRequest) -> SessionInfo:
        """Open a session."""

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message; the same ``seq`` again gives the same answer."""

    async def step_many(self, steps: Sequence[StepRequest]) -> list[StepResult | WireError]:
        """Step many sessions; results in order, a failed item as its error."""

    async def info(self, session_id: str) -> SessionInfo:
        """Return how a session stands."""

    async def expert(self, session_id: str) -> Message:
        """Return the oracle's next move."""

    async def fork(self, session_id: str, n: int = 1, request_id: str | None = None) -> list[SessionInfo]:
        """Open ``n`` sessions that stand where a session stands."""

    async def close_session(self, session_id: str) -> None:
        """End a session; idempotent."""

    async def aclose(self) -> None:
        """Release connections, or the sessions themselves where they live here."""
