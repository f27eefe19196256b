"""A language model behind an OpenAI-compatible endpoint as the judge of a text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from agentrl_env.evaluation.chat_model import ChatModel
from agentrl_env.types import Message
from agentrl_train.errors import RewardUnavailable
from agentrl_train.storage.atomic_io import write_file

SCORE = r"(?i)score\W{0,8}?(-?\d+(?:\.\d+)?)"
"""Default pattern of a score in an answer, such as "Score: 7" or "**Score**: 7.5"."""
QUOTED = 200
"""Characters of an answer that an error message quotes."""
_open: WeakSet[Judge] = WeakSet()
"""Judges that have had connections."""


class Judge:
    """Asks a model for a score. Callable from many episodes at a time, on one event loop.

    Busy or silent endpoints are asked again, with growing pauses (``ChatModel``). Equal requests are answered
    once: by one request while they are under way, and from ``cache`` afterwards. A call that gets no score
    raises; its episode is then left out of training.

    Args:
        url: base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model.
        prompt: the message to the model, with fields in braces, as for ``str.format``. It must ask for a
            score from ``low`` to ``high`` in the form of ``pattern``.
        low: score that becomes 0.
        high: score that becomes 1.
        pattern: regular expression whose group is the score; its last match in the answer counts.
        cache: folder of the answers, by content; None keeps none.
        key_env: environment variable with the API key; None sends none.
        concurrency: most requests at a time.
        attempts: answers that are asked for, where one has no score.
        timeout: seconds for one answer.
        body: further fields of each request, such as ``{"max_tokens": 256}``; the default temperature is 0.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        prompt: str,
        low: float = 0.0,
        high: float = 1.0,
        pattern: str = SCORE,
        cache: str | Path | None = None,
        key_env: str | None = None,
        concurrency: int = 16,
        attempts: int = 3,
        timeout: float = 120.0,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        if not low < high:
            raise ValueError(f"low ({low:g}) must be below high ({high:g}).")
        self._url, self._model, self._prompt = url, model, prompt
        self._range = (low, high)
        self._pattern = re.compile(pattern)
        self._cache = None if cache is None else Path(cache)
        self._key_env = key_env
        self._attempts = attempts
        fields = {"temperature": 0.0, **(body or {})}
        temperature = fields.pop("temperature")
        self._options: dict[str, Any] = {"temperature": temperature, "timeout": timeout, "body": fields}
        self._concurrency = asyncio.Semaphore(concurrency)
        self._asking: dict[str, asyncio.Task[float]] = {}
        self._chat: ChatModel | None = None

    async def __call__(self, **fields: object) -> float:
        """Return the score of the prompt with these fields, scaled to [0, 1].

        Raises:
            ModelFailed: the endpoint did not answer.
            RewardUnavailable: no answer had a score.
        """
        text = self._prompt.format(**fields)
        request = {"model": self._model, "text": text, **self._options["body"]}
        request["temperature"] = self._options["temperature"]
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if (score := self._cached(digest)) is not None:
            return score
        if (asking := self._asking.get(digest)) is None:
            asking = self._asking[digest] = asyncio.create_task(self._ask(text, digest))
            asking.add_done_callback(lambda done: self._asked(digest, done))
        return await asyncio.shield(asking)  # another episode may wait for it too

    def _asked(self, digest: str, done: asyncio.Task[float]) -> None:
        self._asking.pop(digest)
        if not done.cancelled():
            done.exception()  # all that waited for it may be gone

    async def _ask(self, text: str, digest: str) -> float:
        answer = ""
        async with self._concurrency:
            for _ in range(self._attempts):
                completion = await self._complete(text)
                answer = str(completion.content or "")
                if (score := self._score(answer)) is not None:
                    await asyncio.to_thread(self._keep, digest, answer)
                    return score
        raise RewardUnavailable(
            f"the judge {self._model} gave no score from {self._range[0]:g} to {self._range[1]:g} that "
            f"matches {self._pattern.pattern!r}; its last answer begins: {answer[:QUOTED]!r}"
        )

    async def _complete(self, text: str) -> Message:
        key = os.environ.get(self._key_env) if self._key_env else None
        if self._key_env and not key:
            raise RewardUnavailable(f"the judge's key is missing: set the variable {self._key_env}")
        if self._chat is None:
            self._chat = ChatModel(self._url, self._model, key=key, **self._options)
            _open.add(self)
        return (await self._chat.complete([Message(role="user", content=text)])).message

    async def close(self) -> None:
        """Close the connections; idempotent. A later call opens new ones."""
        chat, self._chat = self._chat, None
        if chat is not None:
            await chat.__aexit__()

    def _score(self, answer: str) -> float | None:
        low, high = self._range
        found = self._pattern.findall(answer)
        value = float(found[-1]) if found else None
        return (value - low) / (high - low) if value is not None and low <= value <= high else None

    def _cached(self, digest: str) -> float | None:
        """Return the score of a kept answer; a damaged file is none."""
        if self._cache is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            return self._score(json.loads(self._path(digest).read_text(encoding="utf-8"))["answer"])
        return None

    def _keep(self, digest: str, answer: str) -> None:
        if self._cache is not None:
            path = self._path(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has kept the same answer meanwhile
                write_file(path, json.dumps({"model": self._model, "answer": answer}).encode())

    def _path(self, digest: str) -> Path:
        assert self._cache is not None
        return self._cache / digest[:2] / f"{digest}.json"


async def close_judges() -> None:
    """Close the connections of all judges of the process; idempotent."""
    for judge in list(_open):
        await judge.close()
    _open.clear()
