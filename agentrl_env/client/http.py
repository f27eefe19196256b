"""Sessions over HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import httpx

from agentrl_env.errors import CallTimeout, ProtocolError, ServerUnreachable, WireError, from_wire
from agentrl_env.types import Message, SessionInfo, StepResult, TaskInfo
from agentrl_env.wire import ExpertAnswer, OpenRequest, StepBatch, StepRequest, TaskList


class HttpBackend:
    """A server's sessions."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._token = token if token is not None else os.environ.get("AGENTRL_TOKEN")
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None

    async def tasks(self) -> tuple[TaskInfo, ...]:
        return TaskList.model_validate_json(await self._call("GET", "/v1/tasks")).tasks

    async def open(self, request: OpenRequest) -> SessionInfo:
        body = request.model_dump_json().encode()
        return SessionInfo.model_validate_json(await self._call("POST", "/v1/sessions", body))

    async def step(self, session_id: str, seq: int, message: Message) -> StepResult:
        item = StepRequest(session_id=session_id, seq=seq, message=message)
        body = item.model_dump_json(exclude={"session_id"}).encode()
        answer = await self._call("POST", f"/v1/sessions/{session_id}/step", body)
        return StepResult.model_validate_json(answer)

    async def step_many(self, steps: Sequence[StepRequest]) -> list[StepResult | WireError]:
        body = StepBatch(steps=list(steps)).model_dump_json().encode()
        import json

        results = json.loads(await self._call("POST", "/v1/step", body))["results"]
        return [from_wire(item) or StepResult.model_validate(item) for item in results]

    async def info(self, session_id: str) -> SessionInfo:
        return SessionInfo.model_validate_json(await self._call("GET", f"/v1/sessions/{session_id}"))

    async def expert(self, session_id: str) -> Message:
        answer = await self._call("POST", f"/v1/sessions/{session_id}/expert")
        return ExpertAnswer.model_validate_json(answer).message

    async def close_session(self, session_id: str) -> None:
        await self._call("DELETE", f"/v1/sessions/{session_id}")

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout, trust_env=False)
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            response = await self._client.request(method, self.url + path, content=body, headers=headers)
        except httpx.TimeoutException as error:
            raise CallTimeout(f"{self.url} did not answer in time") from error
        except httpx.TransportError as error:
            raise ServerUnreachable(f"no server answers at {self.url}: {error}") from error
        if response.status_code >= 400:
            data: Any = response.json()
            raise from_wire(data) or ProtocolError(f"{self.url} answered {response.status_code}")
        return response.content
