"""Limits of one caller: sizes, counts, deadlines and rates, each with a safe default."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_env.errors import InvalidRequest, ServeError
from agentrl_env.fast_wire import AnyToolCall, AssistantMessage
from agentrl_env.session.session import MESSAGE_LOOP_S

MAX_BUCKETS = 10_000
"""Number of clients whose rates are kept; the least recent are dropped first."""


OPERATOR_FACTOR = 16
# Possessive, with an optional end: no text takes more than one pass.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class Limits(BaseModel):
    """The limits of a server or controller.

    Args:
        max_body_bytes: size of a request body, and of a WebSocket message.
        max_depth: nesting of JSON in a request. The parser itself stops at 200, also in the arguments of a
            tool call, where the error goes to the model.
        max_values: values in the JSON of a call with an agent token, where each object, list and item counts;
            16 times as many in any other call.
        max_message_chars: size of one assistant message: its text, and the names and arguments of its calls.
        max_tool_calls: calls in one assistant message.
        message_loop_s: seconds for which the calls of one message may hold the event loop, where a task's
            methods run there (``blocking = False``); the model is told that further ones were not executed.
        max_batch_steps: items of one ``POST /v1/step``.
        max_batch_opens: sessions of one ``POST /v1/sessions``.
        max_forks: sessions of one ``POST /v1/sessions/{id}/fork``.
        rate_per_s: requests of a client per second, on average; 0 is unlimited. A client is an agent token,
            the name in ``x-agentrl-client``, or else an address.
        burst: requests of a client at once; by default those of a second, at least one.
        agent_token_s: seconds for which an agent token is valid.
        max_header_bytes: size of the request line and the headers.
        head_s: seconds until the headers of a request must have arrived.
        body_s: seconds until the body of a request must have arrived.
        idle_s: seconds that a connection may wait for its next request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    max_depth: int = Field(default=64, ge=4, le=150)
    max_values: int = Field(default=65_536, ge=64)
    max_message_chars: int = Field(default=1_000_000, ge=1)
    max_tool_calls: int = Field(default=128, ge=1)
    message_loop_s: float = Field(default=MESSAGE_LOOP_S, gt=0, allow_inf_nan=False)
    max_batch_steps: int = Field(default=16_384, ge=1)
    max_batch_opens: int = Field(default=1024, ge=1)
    max_forks: int = Field(default=256, ge=1)
    rate_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    burst: int = Field(default=0, ge=0)
    agent_token_s: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    head_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    body_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    idle_s: float = Field(default=75.0, gt=0, allow_inf_nan=False)

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Self:
        """Return the defaults with ``NAME=VALUE`` settings applied. Raises ServeError."""
        given: dict[str, str] = {}
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals or name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ServeError(f"--caller-limit {setting}: give NAME=VALUE, with NAME one of {known}")
            given[name] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise ServeError(f"--caller-limit {name}={given[name]}: {first['msg']}") from error

    def max_bytes(self, *, agent: bool) -> int:
        """Return the size limit of a request body, and of a WebSocket message."""
        return min(self.max_body_bytes, 8 * self.max_message_chars) if agent else self.max_body_bytes

    def check_values(self, text: bytes | str, *, agent: bool) -> None:
        """Raise InvalidRequest where JSON text holds too many values; called before it is parsed."""
        limit = self.max_values if agent else OPERATOR_FACTOR * self.max_values
        if len(text) <= limit:
            return
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        if _separators(data) <= limit:
            return
        strings = (data.count(b'"') - data.count(b'\\"')) // 2
        if strings > 2 * limit or _separators(_STRING.sub(b"", data)) > limit:
            raise InvalidRequest(f"JSON of more than {limit} values")

    def check_message(self, message: AssistantMessage) -> None:
        """Raise InvalidRequest where an assistant message is over a limit."""
        content = message.content
        calls: Sequence[AnyToolCall] = message.tool_calls or ()
        if content is None:
            size = 0
        elif isinstance(content, str):
            size = len(content)
        else:
            size = self.measure(content, "message.content")
        if calls:
            if len(calls) > self.max_tool_calls:
                raise InvalidRequest(f"{len(calls)} tool calls in a message; at most {self.max_tool_calls}")
            for call in calls:
                size += len(call.id) + len(call.function.name) + len(call.function.arguments)
        if size > self.max_message_chars:
            raise InvalidRequest(f"a message of {size} characters; at most {self.max_message_chars}")

    def measure(self, value: object, where: str) -> int:
        """Return the number of characters in a JSON value. Raises InvalidRequest where it is too deep."""
        size, pending = 0, [(value, 1)]
        while pending:
            item, depth = pending.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict | list):
                if depth > self.max_depth:
                    raise InvalidRequest(f"{where}: JSON nested deeper than {self.max_depth} levels")
                if isinstance(item, dict):
                    size += sum(map(len, item))
                    item = list(item.values())
                pending += [(inner, depth + 1) for inner in item]
        return size


def _separators(data: bytes) -> int:
    """Return an upper bound on the number of values in JSON text."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


class Rates:
    """One token bucket per client.

    Args:
        rate_per_s: refill rate of a bucket.
        burst: size of a bucket.
        clock: seconds, monotonic.
    """

    def __init__(
        self, rate_per_s: float, burst: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate_per_s
        self._burst = float(burst or max(1.0, rate_per_s))
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> float:
        """Take one request from a client's bucket; return the seconds to wait where it is empty."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate
        self._buckets[client] = (left if wait else left - 1.0, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait
