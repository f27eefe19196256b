"""The endpoint of a model that plays users, with a cache of completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from agentrl_env.errors import DefinitionError
from agentrl_env.evaluation.chat_model import ChatModel, Completion, Usage
from agentrl_env.session.single_flight import SingleFlight
from agentrl_env.types import Message, ToolSpec

CACHED = 20_000
"""Maximum number of completions that a process keeps in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible endpoint whose model plays users.

    Each request is sent only once: the same messages, tools, settings and seed get the same answer again,
    from the memory of the process or from the ``cache`` folder. Failed requests are repeated as in
    ``ChatModel``. The object contains no connection and no key, so that it can be copied and stored.

    Attributes:
        url: The base URL, such as ``http://127.0.0.1:8000/v1``.
        model: The model's name.
        key_variable: Name of the environment variable that holds the API key. "" sends none.
        temperature: The temperature. At 0, dialogues are reproducible after a restart if the endpoint is
            deterministic. With a ``cache``, all dialogues are reproducible.
        timeout: Seconds for one completion.
        body: Additional fields of each request, such as ``{"max_tokens": 300}``.
        cache: Folder that keeps completions across processes. "" keeps them in memory only.
    """

    url: str
    model: str = "default"
    key_variable: str = ""
    temperature: float = 0.0
    timeout: float = 120.0
    body: Mapping[str, Any] = field(default_factory=dict)
    cache: str = ""

    @classmethod
    def from_variables(cls, prefix: str) -> Endpoint | None:
        """Return the endpoint that is set in environment variables, or None if ``{prefix}_URL`` is not set.

        ``{prefix}_MODEL``, ``{prefix}_KEY``, ``{prefix}_TEMPERATURE`` and ``{prefix}_CACHE`` are optional.

        Raises DefinitionError if the temperature is not a number.
        """
        found = {name: os.environ.get(f"{prefix}_{name}", "") for name in ("URL", "MODEL", "CACHE")}
        if not found["URL"]:
            return None
        heat = os.environ.get(f"{prefix}_TEMPERATURE", "") or "0"
        try:
            temperature = float(heat)
        except ValueError:
            raise DefinitionError(f"{prefix}_TEMPERATURE={heat!r} is not a number") from None
        return cls(
            url=found["URL"],
            model=found["MODEL"] or "default",
            key_variable=f"{prefix}_KEY",
            temperature=temperature,
            cache=found["CACHE"],
        )

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, seed: int = 0
    ) -> Completion:
        """Return the model's next message, from the cache if it has the answer. Raises ModelFailed."""
        settings = [self.url, self.model, self.temperature, dict(self.body), seed]
        content = [settings, [m.wire() for m in messages], [tool.model_dump(mode="json") for tool in tools]]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        if (kept := _recall(key, self.cache)) is not None:
            return kept
        connection = await _connection(self)

        async def ask() -> Completion:
            # Omit fields that only later requests of the same conversation would use.
            completion = await connection.model.complete(messages, tools, seed=seed)
            completion = replace(completion, original=None)
            _keep(key, self.cache, completion)
            return completion

        return await connection.flights.run(key, ask)


_kept: OrderedDict[str, Completion] = OrderedDict()


def _recall(key: str, folder: str) -> Completion | None:
    if (kept := _kept.get(key)) is not None:
        _kept.move_to_end(key)
        return kept
    if not folder:
        return None
    try:
        data = json.loads((Path(folder) / f"{key}.json").read_text())
        message, usage = Message.model_validate(data.pop("message")), Usage(**data.pop("usage"))
        completion = Completion(message=message, usage=usage, **data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DefinitionError(f"{folder}/{key}.json is damaged ({error}); delete it") from error
    _remember(key, completion)
    return completion


def _keep(key: str, folder: str, completion: Completion) -> None:
    _remember(key, completion)
    if not folder:
        return
    data = {
        "message": completion.message.wire(),
        "thought": completion.thought,
        "finish_reason": completion.finish_reason,
        "usage": completion.usage.model_dump(),
        "seconds": completion.seconds,
        "repeats": completion.repeats,
    }
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, Path(folder) / f"{key}.json")
    except OSError as error:
        raise DefinitionError(f"the cache {folder} cannot be written: {error.strerror or error}") from error


def _remember(key: str, completion: Completion) -> None:
    _kept[key] = completion
    if len(_kept) > CACHED:
        _kept.popitem(last=False)


class _Connection(NamedTuple):
    model: ChatModel
    flights: SingleFlight[Completion]
    holder: AsyncGenerator[ChatModel, None]


_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Connection]] = WeakKeyDictionary()


async def _connection(endpoint: Endpoint) -> _Connection:
    """Return the connections of this event loop to an endpoint. All sessions share them."""
    own = _connections.setdefault(asyncio.get_running_loop(), {})
    name = repr(endpoint)
    if name not in own:
        holder = _held(endpoint)
        own[name] = _Connection(await anext(holder), SingleFlight(), holder)
    return own[name]


async def _held(endpoint: Endpoint) -> AsyncGenerator[ChatModel, None]:
    """Keep a model open until the event loop ends and closes its asynchronous generators."""
    async with ChatModel(
        endpoint.url,
        endpoint.model,
        key=os.environ.get(endpoint.key_variable) if endpoint.key_variable else None,
        temperature=endpoint.temperature,
        timeout=endpoint.timeout,
        body=endpoint.body,
    ) as model:
        yield model
