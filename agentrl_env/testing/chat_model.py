"""A model behind an OpenAI-compatible endpoint, as a policy."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from pydantic import ValidationError

from agentrl_env.client.client import ClientSession
from agentrl_env.errors import AgentRLError
from agentrl_env.testing.context import Rollout
from agentrl_env.types import Message

ATTEMPTS = 4
"""Requests for one completion, where the endpoint is busy or does not answer."""
PAUSE_S = 0.5
"""Seconds before the second request; each further pause is twice as long."""


class ModelFailed(AgentRLError):
    """The endpoint gave no completion; the message says why."""


class ChatModel:
    """A model of an OpenAI-compatible endpoint. Use it as an async context manager.

    Args:
        url: The base URL, such as ``http://127.0.0.1:8000/v1``.
        model: The model's name.
        key: The API key; None sends none.
        temperature: The temperature; None leaves it to the endpoint.
        timeout: Seconds for one completion.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        temperature: float | None = None,
        timeout: float = 120.0,
    ) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._options = {"model": model} | ({} if temperature is None else {"temperature": temperature})
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout)

    async def __aenter__(self) -> ChatModel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    def policy(self) -> ChatPolicy:
        """Return the policy of one episode."""
        return ChatPolicy(self)

    async def complete(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[Message, int | None]:
        """Return the model's message, and its tokens where the endpoint counts them. Raises ModelFailed."""
        body: dict[str, Any] = {**self._options, "messages": [message.wire() for message in messages]}
        if tools:
            body["tools"] = tools
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
            try:
                response = await self._http.post(self._url, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{self._url} did not answer: {type(error).__name__} {error}".rstrip()
                continue
            if response.is_success:
                return _completion(self._url, response)
            problem = f"{self._url} answered {response.status_code}: {response.text[:200]}"
            if response.status_code != 429 and response.status_code < 500:
                break
        raise ModelFailed(problem)


class ChatPolicy:
    """Plays one episode with a model, and counts the tokens that the model writes."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self.tokens: int | None = None

    async def __call__(self, session: ClientSession, rollout: Rollout) -> Message:
        """Return the model's next message."""
        messages = list(rollout.opening)
        for turn in rollout.turns:
            messages += [turn.action, *turn.result.messages]
        tools = [tool.model_dump(mode="json") for tool in session.tools]
        message, tokens = await self._model.complete(messages, tools)
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens
        return message


def _completion(url: str, response: httpx.Response) -> tuple[Message, int | None]:
    try:
        body = response.json()
        found = body["choices"][0]["message"]
        calls = found.get("tool_calls") or None
        text = {"role": "assistant", "content": found.get("content")}
        message = Message.model_validate(text | ({"tool_calls": calls} if calls else {}))
        tokens = (body.get("usage") or {}).get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError, ValidationError) as error:
        raise ModelFailed(f"{url} answered something that is no chat completion: {error}"[:300]) from error
    return message, tokens if isinstance(tokens, int) else None
