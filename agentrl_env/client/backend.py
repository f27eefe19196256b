"""The seam between a client and its sessions: HTTP and WebSocket, or a pool in this process."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import BaseModel

from agentrl_env.types import Message, StepResult
from agentrl_env.wire import Call


class SessionBackend(Protocol):
    """Makes the calls of the protocol.

    Methods raise the WireError that is answered; those over a network also ServerUnreachable, CallTimeout
    and ProtocolError.
    """

    async def call(self, call: Call, request: BaseModel) -> Any:
        """Make a call; return its answer, a ``call.answer``."""

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message; repeating a ``seq`` returns the same result."""

    async def aclose(self) -> None:
        """Close connections, or the sessions themselves where they live in this process."""
