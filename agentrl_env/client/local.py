"""Sessions in this process, with the same calls but without a network."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentrl_env.errors import ClientClosed, InvalidRequest, WireError
from agentrl_env.fast_wire import message_to_json
from agentrl_env.session.observer import as_wire_error
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
        if isinstance(message.content, list):
            _check_parts(message)
        request = StepRequest.model_construct(session_id=session_id, seq=seq, message=message)
        try:
            answer = await self.pool.step(request)
        except WireError:
            raise
        except Exception as error:  # as over HTTP, so that other steps of the caller's batch continue
            raise as_wire_error(error) from error
        return StepResult.model_validate_json(answer)

    async def aclose(self) -> None:
        """Close every session."""
        self._closed = True
        await self.pool.aclose()

    async def _open(self, request: OpenRequest) -> Any:
        try:
            return await self.pool.open(request)
        except Exception as error:
            return Error.model_validate(as_wire_error(error).wire())


def _check_parts(message: Message) -> None:
    """Raise InvalidRequest, as over HTTP, if the parts of a message cannot be encoded as JSON."""
    try:
        message_to_json(message)
    except PydanticSerializationError as error:
        raise InvalidRequest(f"the message cannot be sent as JSON: {error}") from error
