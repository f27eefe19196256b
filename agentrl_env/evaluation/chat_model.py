"""A model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict

from agentrl_env.client.credentials import (
    NOT_PRINTABLE,
    hide,
    is_header_name,
    public_url,
    secrets_of,
)
from agentrl_env.errors import AgentRLError
from agentrl_env.types import Message, ToolSpec
from agentrl_env.wire import is_header_value

ATTEMPTS = 5
"""Maximum requests for one completion if the endpoint fails or does not answer."""
BUSY_ATTEMPTS = 10
"""Maximum requests for one completion if the endpoint is busy: four minutes without ``Retry-After``."""
PAUSE_S = 0.5
"""Seconds before the second request. Each further pause is twice as long, up to ``MAX_OWN_PAUSE_S``."""
MAX_OWN_PAUSE_S = 60.0
MAX_PAUSE_S = 120.0
"""Longest pause in seconds that ``Retry-After`` can request."""
_CONTEXT = (
    "context_length",
    "context length",
    "context window",
    "context size",
    "maximum context",
    "maximum number of tokens",
    "prompt is too long",
    "too many tokens",
    "`inputs` tokens",
)
"""Phrases for a conversation that is too long, including those of llama.cpp, Anthropic, Gemini and TGI."""
_NO_ANSWER = ("content_filter", "error")
"""Finish reasons that come from the endpoint and not from the model."""
PATH = "/chat/completions"
_MAX_NAME = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
"""Characters that endpoints reject in the name of a called tool."""


class ModelFailed(AgentRLError):
    """The endpoint returned no completion. The message contains the reason."""


class ModelRefused(ModelFailed):
    """No request can succeed: a setting is invalid, or the endpoint does not serve this caller or this model.

    The endpoint answers with 401, 403 or 404, or redirects to another URL.
    """


class ContextFull(ModelFailed):
    """The conversation does not fit into the model's context."""


class EndpointFailed(ModelFailed):
    """The endpoint failed, but another request might succeed. ``busy`` means too many requests."""

    pause_s = 0.0
    """Seconds that the endpoint requested with ``Retry-After``."""

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


class Usage(BaseModel):
    """Tokens of one completion as the endpoint counts them, or None if it does not count them."""

    model_config = ConfigDict(frozen=True)

    input: int | None = None
    """Tokens of the prompt, including cached tokens."""
    output: int | None = None
    """Tokens that the model wrote, including its thoughts."""
    cached: int | None = None
    thinking: int | None = None


NO_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer of a model."""

    message: Message
    original: Mapping[str, Any] | None = None
    """The message with the endpoint's additions, which later requests send back. None if unknown."""
    thought: str | None = None
    """Thoughts that the endpoint returned separately from the message."""
    finish_reason: str | None = None
    usage: Usage = NO_USAGE
    seconds: float = 0.0
    """Seconds that the answered request took, without pauses and failed requests."""
    repeats: int = 0
    """Number of failed requests before this answer."""


class ChatModel:
    """A model of an OpenAI-compatible endpoint. Use it as an async context manager.

    Requests that fail with 408, 409, 429 or 5xx, or without a completion, are repeated. ``Retry-After``
    delays all requests of this object. Errors contain no key, header, password or value of the URL's query.

    Args:
        url: The base URL, such as ``http://127.0.0.1:8000/v1``. Its query is added to every request.
        model: The model's name.
        key: The API key. None sends no key.
        temperature: The temperature. None uses the endpoint's default.
        timeout: Seconds for one request, from its start to the end of its answer.
        requests_per_minute: Maximum number of requests per minute, evenly spaced. None sets no limit.
        body: Additional fields of each request, such as ``{"max_tokens": 512}``.
        headers: Additional headers of each request, such as ``{"api-key": "..."}``.

    Raises:
        ModelRefused: The URL, the key, a header, the timeout, a field of the body or the proxy of the
            environment cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        temperature: float | None = None,
        timeout: float = 120.0,
        requests_per_minute: float | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ModelRefused(f"the timeout of a model must be above 0 seconds and finite, not {timeout}")
        address = _address(url)
        sent = _headers(key, headers or {})
        self._url, self._timeout = str(address), timeout
        self._shown = public_url(self._url)
        self._secrets = [word for value in sent.values() for word in value.split()] + secrets_of(address)
        self._fields = {"model": model, **(body or {})}
        if temperature is not None:
            self._fields["temperature"] = temperature
        for name, value in self._fields.items():
            as_json(value, f"the field {name!r}", ModelRefused)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx.AsyncClient(headers=sent, timeout=None, limits=limits)
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # a SOCKS proxy needs an extra package
            raise ModelRefused(f"the proxy of the environment cannot be used: {error}") from error
        self._pace = Pace(60.0 / requests_per_minute if requests_per_minute else 0.0)

    async def __aenter__(self) -> ChatModel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        seed: int | None = None,
        originals: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Completion:
        """Return the model's next message.

        Args:
            messages: The conversation.
            tools: The tools that the model may call.
            seed: Sampling seed, for endpoints that support the field.
            originals: ``Completion.original`` of the model's messages, by their position in the conversation.
                Reasoning models need their thoughts and signatures back.

        Raises:
            ModelRefused: No request can succeed: the key or the model is wrong.
            ContextFull: The conversation is longer than the model's context.
            ModelFailed: The endpoint did not answer with a completion.
        """
        said = originals or {}
        sent = [_sendable(said.get(place) or message.wire()) for place, message in enumerate(messages)]
        body: dict[str, Any] = {**self._fields, "messages": sent}
        if tools:
            body["tools"] = [tool.model_dump(mode="json") for tool in tools]
        if seed is not None:
            body["seed"] = seed
        content = as_json(body, "the conversation")
        attempt, most = 0, ATTEMPTS
        failure: ModelFailed | None = None
        while attempt < most:
            if attempt:
                await asyncio.sleep(min(PAUSE_S * 2 ** (attempt - 1), MAX_OWN_PAUSE_S))
            await self._pace.wait()
            try:
                return await self._request(content, repeats=attempt)
            except EndpointFailed as error:
                failure = error
                self._pace.hold(error.pause_s)
                if error.busy:
                    most = BUSY_ATTEMPTS
            attempt += 1
        raise ModelFailed(str(failure)) from failure

    async def _request(self, content: bytes, *, repeats: int) -> Completion:
        """Send one request and return its completion. Raises ModelFailed without the endpoint's secrets."""
        begin = time.perf_counter()
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._timeout):  # a timeout of httpx applies to each read
                response = await self._http.post(self._url, content=content, headers=headers)
        except TimeoutError as error:
            raise EndpointFailed(f"{self._shown} did not answer within {self._timeout:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{self._shown} did not answer: {type(error).__name__} {error}".rstrip()
            raise EndpointFailed(hide(problem, self._secrets)) from error
        try:
            return _completion(self._shown, response, seconds=time.perf_counter() - begin, repeats=repeats)
        except ModelFailed as error:
            error.args = (hide(str(error), self._secrets),)
            if isinstance(error, EndpointFailed):
                error.pause_s = _retry_after(response)
            raise


class Pace:
    """Spaces the starts of requests by at least ``interval`` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0

    async def wait(self) -> None:
        """Wait until the next request may start."""
        now = time.monotonic()
        begin = max(now, self._next)
        self._next = begin + self._interval
        if begin > now:
            await asyncio.sleep(begin - now)

    def hold(self, seconds: float) -> None:
        """Delay further requests by some seconds."""
        self._next = max(self._next, time.monotonic() + seconds)


def _address(url: str) -> httpx.URL:
    """Return the address of the requests. Raises ModelRefused."""
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        # The text of the error can contain a part of the password.
        reason = "percent-encode the user and the password in it" if "@" in url else error
        raise ModelRefused(f"the URL {public_url(url)!r} cannot be used: {reason}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ModelRefused(
            f"the URL {public_url(url)!r} cannot be used: it must start with http:// or https:// and a host"
        )
    return address.copy_with(path=f"{address.path.rstrip('/')}{PATH}")


def _headers(key: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of each request. Raises ModelRefused without the invalid value."""
    key = (key or "").strip()
    if not is_header_value(key):
        raise ModelRefused(f"the API key has {NOT_PRINTABLE}")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for name, value in given.items():
        if not is_header_name(name):
            raise ModelRefused(f"{name!r} cannot be the name of a header")
        if not is_header_value(value.strip()):
            raise ModelRefused(f"the header {name} has {NOT_PRINTABLE}")
        headers[name.lower()] = value.strip()
    return headers


def as_json(value: object, name: str, error_type: type[AgentRLError] = ModelFailed) -> bytes:
    """Return a value as JSON. Raises an error if JSON cannot express it, such as NaN."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise error_type(f"{name} cannot be sent as JSON: {error}") from error


def _retry_after(response: httpx.Response) -> float:
    try:
        return min(max(0.0, float(response.headers["retry-after"])), MAX_PAUSE_S)
    except (KeyError, ValueError):  # a date, which would depend on the local clock
        return 0.0


def _failure(url: str, status: int, text: str) -> ModelFailed:
    """Return the error for a status. Some endpoints send it in the body of an answer with status 200."""
    problem = f"{url} answered {status}: {text[:200]}"
    if status in (408, 409, 429) or status >= 500:
        return EndpointFailed(problem, busy=status == 429)
    if status in (401, 403, 404):
        return ModelRefused(problem)
    return (ContextFull if any(words in text.lower() for words in _CONTEXT) else ModelFailed)(problem)


def _redirect_error(url: str, response: httpx.Response) -> ModelRefused:
    location = response.headers["location"]
    try:
        target = response.url.join(location)
    except httpx.InvalidURL:
        return ModelRefused(f"{url} answered {response.status_code} with an invalid Location")
    base = target.copy_with(path=target.path.removesuffix(PATH))
    return ModelRefused(
        f"{url} answered {response.status_code} with the Location {public_url(str(target))}; "
        f"use {public_url(str(base))} as the URL"
    )


def _completion(url: str, response: httpx.Response, *, seconds: float, repeats: int) -> Completion:
    if response.has_redirect_location:
        raise _redirect_error(url, response)
    if not response.is_success:
        raise _failure(url, response.status_code, response.text)
    try:
        body = json.loads(_clean(json.dumps(response.json(), ensure_ascii=False)))
        choice = _choice(url, body)
        found, finish = choice["message"], choice.get("finish_reason")
        asked = found.get("tool_calls") or [{"function": old} for old in [found.get("function_call")] if old]
        calls = [_call(call, number) for number, call in enumerate(asked)]
        content = found.get("content")
        if not calls:  # endpoints reject a message without text and calls
            content = content or found.get("refusal") or ""
        thought = found.get("reasoning_content") or found.get("reasoning")
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        return Completion(
            message=Message.model_validate(message),
            original=_original(found, message),
            thought=thought if isinstance(thought, str) else None,
            finish_reason=finish if isinstance(finish, str) else None,
            usage=_usage(_mapping(body, "usage")),
            seconds=seconds,
            repeats=repeats,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EndpointFailed(
            f"{url} answered something that is not a chat completion: {response.text[:200]!r} "
            f"({type(error).__name__}: {error})"[:400]
        ) from error


def _choice(url: str, body: Any) -> dict[str, Any]:
    """Return the answer in a body. Raises ``ModelFailed`` if the body contains an error instead."""
    error, choices = body.get("error"), body.get("choices")
    if error and not choices:
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and code >= 400 else 500
        raise _failure(url, status, json.dumps(error, ensure_ascii=False))
    choice: dict[str, Any] = choices[0]
    finish = choice.get("finish_reason")
    if finish in _NO_ANSWER:
        reason = choice.get("error") or choice["message"].get("refusal") or "it gives no reason"
        problem = f"{url} ended the answer by {finish}: {reason}"[:300]
        raise EndpointFailed(problem) if finish == "error" else ModelFailed(problem)
    return choice


def _original(found: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the model in the form that later requests send, with additions such as thoughts.

    Thoughts in a message with text are omitted, because they are not needed and some endpoints refuse them.
    """
    added = {name: value for name, value in found.items() if value not in (None, [], {})}
    added.pop("function_call", None)
    if not message.get("tool_calls"):
        kept = {k: v for k, v in added.items() if k not in ("reasoning_content", "tool_calls")}
        return {**kept, **message}
    given = found.get("tool_calls") or [{}]
    calls = [
        {**old, **new, "function": {**(old.get("function") or {}), **new["function"]}}
        for old, new in zip(given, message["tool_calls"], strict=True)
    ]
    return {**added, **message, "tool_calls": calls}


def _sendable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with calls in a form that endpoints accept.

    Models invent names such as ``multi_tool_use.parallel``. Arguments that are not a JSON object occur after
    a cut at the token limit. Endpoints reject the whole conversation for either.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _valid(call["function"])} for call in calls]}


def _valid(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        read = isinstance(json.loads(function["arguments"]), dict)
    except (ValueError, RecursionError):
        read = False
    name = _NO_NAME.sub("_", function["name"])[:_MAX_NAME] or "_"
    return {**function, "name": name, "arguments": function["arguments"] if read else "{}"}


def _call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Convert a tool call of an endpoint to OpenAI's exact format."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    identity = call.get("id")
    return {
        "id": f"call_{number}" if identity in (None, "") else str(identity),
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": arguments},
    }


def _clean(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object under a name in a body, or an empty one."""
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _usage(usage: Mapping[str, Any]) -> Usage:
    read, written = _mapping(usage, "prompt_tokens_details"), _mapping(usage, "completion_tokens_details")
    values = {
        "input": usage.get("prompt_tokens"),
        "output": usage.get("completion_tokens"),
        "cached": read.get("cached_tokens"),
        "thinking": written.get("reasoning_tokens"),
    }
    return Usage(**{name: value for name, value in values.items() if isinstance(value, int)})
