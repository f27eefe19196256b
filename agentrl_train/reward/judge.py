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

from agentrl_env.evaluation.chat_model import ChatModel, ModelFailed
from agentrl_env.types import Message
from agentrl_train.errors import RewardUnavailable
from agentrl_train.storage.atomic_io import write_file

_NUMBER = r"[-\u2212]?(?:\d+(?:[.,]\d+)?|[.,]\d+)(?:e[-+]?\d+)?"
_WHOLE = r"\s*(?:%|(?:/|out\s+of)\s*\d+(?:[.,]\d+)?)"
_NO_RANGE = r"(?!\d|[.,/]\d|[-\u2013]\d|\s+to\s+\d)"
SCORE = rf"(?i)score(?:\s*\([^()]*\))?\W{{0,8}}?({_NUMBER}(?:{_WHOLE})?){_NO_RANGE}"
"""Default pattern of a score in an answer, such as "Score: 7", "**Score**: 7.5" or "score (0-10): 7/10"."""
_VALUE = re.compile(rf"(?i)\s*({_NUMBER})(?:\s*(?:(%)|(?:/|out\s+of)\s*({_NUMBER})))?\s*")
_FIELD = re.compile(r"\{([A-Za-z_]\w*)([^{}]*)\}")
QUOTED = 200
"""Maximum number of quoted characters of an answer in an error message."""
_open: WeakSet[Judge] = WeakSet()
"""Judges that have opened connections."""


class Judge:
    """Requests a score from a model. Callable from many episodes at a time, on one event loop.

    Requests to busy or silent endpoints are retried with growing pauses (``ChatModel``). Equal requests are
    sent only once. They share the request while it is in progress, and use ``cache`` afterwards. A call that
    gets no score raises an error, and its episode is then omitted from training.

    Args:
        url: base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model.
        prompt: the message to the model, with fields in braces, as for ``str.format``. Other braces, for
            example in a JSON example, are not changed. It must request a score from ``low`` to ``high`` in
            the form of ``pattern``.
        low: score that is scaled to 0.
        high: score that is scaled to 1.
        pattern: regular expression with the score as its group. Its last match in the answer counts. The
            score can have a decimal comma, and be a share, such as "7/10", "7 out of 10" or "70 %".
        cache: folder that caches answers by content; None disables the cache.
        key_env: environment variable with the API key; None sends no key.
        concurrency: maximum number of concurrent requests.
        attempts: number of requests if answers have no score.
        timeout: seconds for one answer.
        body: additional fields of each request, such as ``{"max_tokens": 256}``. The default temperature is
            0, or the endpoint's default if it rejects 0. ``{"temperature": None}`` never sends a temperature.
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
        self._temperature = fields.pop("temperature")
        self._fixed = "temperature" in (body or {})
        self._refused = False
        """True if the endpoint has rejected the default temperature."""
        self._options: dict[str, Any] = {"timeout": timeout, "body": fields}
        self._concurrency = asyncio.Semaphore(concurrency)
        self._asking: dict[str, asyncio.Task[float]] = {}
        self._chats: dict[float | None, ChatModel] = {}

    async def __call__(self, **fields: object) -> float:
        """Return the score of the prompt with these fields, scaled to [0, 1].

        Raises:
            ModelFailed: the endpoint did not answer.
            RewardUnavailable: no answer had a score, or a field of the prompt is missing.
        """
        text = fill_prompt(self._prompt, fields)
        request = {"model": self._model, "text": text, **self._options["body"]}
        request["temperature"] = self._temperature
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if (score := self._cached_score(digest)) is not None:
            return score
        if (asking := self._asking.get(digest)) is None:
            asking = self._asking[digest] = asyncio.create_task(self._ask(text, digest))
            asking.add_done_callback(lambda done: self._forget_request(digest, done))
        return await asyncio.shield(asking)  # another episode can also wait for it

    def _forget_request(self, digest: str, done: asyncio.Task[float]) -> None:
        self._asking.pop(digest)
        if not done.cancelled():
            done.exception()  # it is possible that no episode waits for it any more

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
        temperature = None if self._refused else self._temperature
        if temperature not in self._chats:
            self._chats[temperature] = ChatModel(
                self._url, self._model, key=key, temperature=temperature, **self._options
            )
            _open.add(self)
        try:
            return (await self._chats[temperature].complete([Message(role="user", content=text)])).message
        except ModelFailed as error:
            if self._fixed or temperature is None or "temperature" not in str(error).lower():
                raise
        self._refused = True  # reasoning models accept no temperature
        return await self._complete(text)

    async def close(self) -> None:
        """Close the connections. A later call opens new ones. Idempotent."""
        chats, self._chats = self._chats, {}
        for chat in chats.values():
            await chat.__aexit__()

    def _score(self, answer: str) -> float | None:
        low, high = self._range
        found = [match.group(min(1, self._pattern.groups)) for match in self._pattern.finditer(answer)]
        value = score_value(found[-1] or "", low=low, high=high) if found else None
        return (value - low) / (high - low) if value is not None and low <= value <= high else None

    def _cached_score(self, digest: str) -> float | None:
        """Return the score of a cached answer, or None if the file is damaged."""
        if self._cache is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):
            return self._score(json.loads(self._path(digest).read_text(encoding="utf-8"))["answer"])
        return None

    def _keep(self, digest: str, answer: str) -> None:
        if self._cache is not None:
            path = self._path(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has stored the same answer meanwhile
                write_file(path, json.dumps({"model": self._model, "answer": answer}).encode())

    def _path(self, digest: str) -> Path:
        assert self._cache is not None
        return self._cache / digest[:2] / f"{digest}.json"


def score_value(text: str, *, low: float, high: float) -> float | None:
    """Return the score in a text, or None if it has no score.

    If ``low`` is 0, a share of another whole than ``high``, such as "1/2" or "50 %", is scaled to ``high``.
    """
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    value = _number(match[1])
    whole = 100.0 if match[2] else _number(match[3]) if match[3] else high
    if whole == high:
        return value
    return high * value / whole if low == 0.0 and 0.0 <= value <= whole and whole else None


def _number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace(",", "."))


def fill_prompt(prompt: str, fields: Mapping[str, object]) -> str:
    """Return a prompt with its fields filled in. Braces around other text are not changed.

    Raises:
        RewardUnavailable: a field of the prompt is missing.
    """
    try:
        return prompt.format(**fields)
    except (LookupError, ValueError, AttributeError):
        pass  # it has braces that are not fields

    def value(match: re.Match[str]) -> str:
        name, form = match.groups()
        if name in fields:
            try:
                return match[0].format(**fields)
            except (LookupError, ValueError, AttributeError) as error:
                raise RewardUnavailable(
                    f"the prompt of the judge cannot format {match[0]}: {error}"
                ) from error
        if not form:
            given = ", ".join(sorted(fields)) or "none"
            raise RewardUnavailable(f"the prompt of the judge has the field {match[0]}; given are: {given}")
        return match[0]

    return _FIELD.sub(value, prompt)


async def close_judges() -> None:
    """Close the connections of all judges of the process; idempotent."""
    for judge in list(_open):
        await judge.close()
    _open.clear()
