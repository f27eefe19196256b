"""Sessions in this process, with the same calls but without a network."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel

from agentrl_env.errors import ClientClosed, WireError
from agentrl_env.session.pool import SessionPool
from agentrl_env.types import Message, StepResult
from agentrl_env.wire import CLOSE, Call, Error, OpenBatch, OpenBatchAnswer, OpenRequest, StepRequest


class LocalBackend:
    """A ``SessionBackend`` with the sessions of a pool."""

    def __init__(self, pool: SessionPool) -> None:
        self.pool = pool
        self._closed = False

    async def call(self, call: Call, request: BaseModel) -> Any:
        """Make a call and return its answer."""
        if self._closed and call is not CLOSE:
            raise ClientClosed("the client is closed, and its sessions with it; make another")
        if isinstance(request, OpenBatch):
            items = await asyncio.gather(*map(self._open, request.sessions))
            return OpenBatchAnswer.model_construct(sessions=tuple(items))
        return await getattr(self.pool, call.name)(request)

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        """Play one assistant message."""
        request = StepRequest.model_construct(session_id=session_id, seq=seq, message=message)
        return StepResult.model_validate_json(await self.pool.step(request))

    async def aclose(self) -> None:
        """Close every session."""
        self._closed = True
        await self.pool.aclose()

    async def _open(self, request: OpenRequest) -> Any:
        try:
            return await self.pool.open(request)
        except WireError as error:
            return Error.model_validate(error.wire())
