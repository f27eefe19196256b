"""Limits and budgets of one caller: sizes, counts, deadlines and rates, all with safe defaults."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import coroutine
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl_env.errors import InvalidRequest, RateLimited, ServeError
from agentrl_env.fast_wire import AnyToolCall, AssistantMessage
from agentrl_env.session.session import MESSAGE_LOOP_S

if TYPE_CHECKING:
    from agentrl_env.server.telemetry.metrics import Metrics

T = TypeVar("T")
MAX_BUCKETS = 10_000
"""Maximum number of clients with a stored rate, and of callers with a stored budget."""
SMALL_BYTES = 64 * 1024
"""Requests and answers up to this size do not count towards the budgets of bytes."""
HOLD_S = 0.02
"""Shorter periods on the event loop are not charged."""
HOLD_BURST_S = 0.5
"""Seconds of event loop time that an agent may use in a burst."""
DELAY_S = 0.005
"""The waiting time of the event loop's thread is read at most this often."""
RECEIVE_S = 4e-9
"""Seconds of event loop time that are charged for each byte of a large request."""
PAUSE_S = 0.5
"""Seconds for which a large request is held back, unread, before it is refused."""
RETRY_S = 1.0
AGENT_TOKEN_S = 86_400.0
OPERATOR_FACTOR = 16


class Limits(BaseModel):
    """The limits of a server or controller.

    Args:
        max_body_bytes: size of a request body, and of a WebSocket message.
        max_depth: nesting of JSON in a request. The parser itself stops at 200 levels, also in the arguments
            of a tool call, whose errors are returned to the model.
        max_values: values in the JSON of a call with an agent token. Each object, list and item counts.
            Other calls may have 16 times as many.
        max_message_chars: characters of one assistant message, with the names and arguments of its calls.
        max_tool_calls: calls in one assistant message.
        message_loop_s: seconds for which the calls of one message may occupy the event loop, if the task's
            methods run there (``blocking = False``). The model gets an error for each further call, which is
            not executed.
        max_batch_steps: items of one ``POST /v1/step``.
        max_batch_opens: sessions of one ``POST /v1/sessions``.
        max_forks: sessions of one ``POST /v1/sessions/{id}/fork``.
        rate_per_s: average number of a client's requests per second. 0 is unlimited. A client is identified
            by its agent token, the name in ``x-agentrl-client``, or else its address.
        burst: requests that a client may send in a burst. By default the number for one second, at least one.
        agent_token_s: seconds for which an agent token is valid.
        max_header_bytes: size of the request line and the headers.
        head_s: seconds within which the headers of a request must arrive.
        body_s: seconds within which the body of a request must arrive.
        idle_s: seconds that a connection may wait for its next request.
        max_held_bytes: total size of an agent's requests in progress and of its answers that wait to be sent.
            An address may have 16 times as much. Requests and answers up to 64 KiB do not count.
        max_unfinished: bodies and WebSocket messages over 64 KiB that are being received from an agent. An
            address may have 16 times as many.
        max_connections: an agent's requests in progress and WebSockets. An address may have 16 times as many
            connections, and its idle connections are closed before a new one is refused.
        loop_share: fraction of the event loop's time that an agent may use, in bursts of up to 0.5 s. Only
            periods over 20 ms count, without the time that the process waits for a processor (on Linux). An
            address may use 16 times as much. From 1, it is unlimited. Receiving 1 MB in requests over 64 KiB
            counts as 4 ms.
        max_history_bytes: size of the turns that a session keeps for repeated requests and transcripts. The
            last two turns are always kept.
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
    agent_token_s: float = Field(default=AGENT_TOKEN_S, gt=0, allow_inf_nan=False)
    max_header_bytes: int = Field(default=64 * 1024, ge=1024)
    head_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    body_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    idle_s: float = Field(default=75.0, gt=0, allow_inf_nan=False)
    max_held_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_unfinished: int = Field(default=8, ge=1)
    max_connections: int = Field(default=512, ge=1)
    loop_share: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    max_history_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)

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
        """Raise InvalidRequest if a JSON text has too many values. It is called before the text is parsed."""
        limit = self.max_values if agent else OPERATOR_FACTOR * self.max_values
        if len(text) <= limit:
            return
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        end = 0
        while end < len(data):  # stop early if the first part already has too many
            end = max(4 * end, 4 * limit)
            if _separators(data[:end]) > limit and _values(data[:end], limit) > limit:
                raise InvalidRequest(f"the JSON has more than {limit} values")

    def check_message(self, message: AssistantMessage) -> None:
        """Raise InvalidRequest if an assistant message is over a limit."""
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
        """Return the number of characters in a JSON value. Raises InvalidRequest if it is nested too deep."""
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


def _values(data: bytes, limit: int) -> int:
    """Return an upper bound on the number of values in JSON text, ignoring the contents of its strings."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = plain.count(b'"')
    # Strings are values too, and splitting a text with this many strings would take too long.
    return quotes // 4 if quotes > 4 * limit + 4 else _separators(b"".join(plain.split(b'"')[::2]))


class Rates:
    """One token bucket per client.

    Args:
        rate_per_s: refill rate of a bucket.
        burst: size of a bucket.
        clock: returns the monotonic time in seconds.
    """

    def __init__(
        self, rate_per_s: float, burst: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate_per_s
        self._burst = float(burst or max(1.0, rate_per_s))
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> float:
        """Take a request from a client's bucket. Return the seconds to wait: 0 unless it is empty."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        wait = 0.0 if left >= 1.0 else (1.0 - left) / self._rate
        self._buckets[client] = (left if wait else left - 1.0, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait


def processor_delay() -> float:
    """Return the seconds for which this thread has waited for a processor. 0 if the system does not count."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


class Budget:
    """The budget of one caller: counts the resources that it uses now, and refuses more than its limits.

    Args:
        budgets: the budgets of all callers.
        agent: True if the caller has an agent token.
    """

    __slots__ = ("_agent", "_budgets", "_free_at", "connections", "held", "unfinished")

    def __init__(self, budgets: Budgets, agent: bool) -> None:
        self._budgets = budgets
        self._agent = agent
        self.held = 0
        """Bytes of the caller's large requests and answers in progress."""
        self.unfinished = 0
        """Number of the caller's large requests that are being received."""
        self.connections = 0
        """Number of the caller's requests in progress and WebSockets."""
        self._free_at = 0.0
        """Time at which the event loop time that the caller used is paid off. 0 if it used none."""

    @property
    def idle(self) -> bool:
        """True if this budget can be dropped."""
        return not (self.connections or self.held or self._free_at > self._budgets.clock())

    def check_connections(self) -> None:
        """Raise RateLimited if an agent has too many requests in progress."""
        if self._agent and self.connections >= self._budgets.limits.max_connections:
            raise self._refusal("max_connections", f"has {self.connections} connections; close some")

    def admit(self) -> None:
        """Raise RateLimited if the caller must wait before its next call."""
        if self.held > self._budgets.max_held[self._agent]:
            raise self._refusal("max_held_bytes", f"holds {self.held} bytes; read the answers")
        if self._free_at and (wait_s := self._free_at - self._budgets.clock()) > 0:
            raise self._refusal("loop_share", "took too much of the server's time; slow down", wait_s)

    def hold(self, size: int, *, begin: bool = False, times: int = 1) -> None:
        """Count ``size`` more bytes of a request until ``release``. Raises RateLimited.

        Args:
            size: number of bytes.
            begin: count the request as unfinished until ``received``.
            times: factor on the limit.
        """
        if begin and self.unfinished >= self._budgets.max_unfinished[self._agent]:
            raise self._refusal("max_unfinished", f"has {self.unfinished} unfinished requests; finish them")
        if self.held + size > times * self._budgets.max_held[self._agent]:
            raise self._refusal("max_held_bytes", f"holds {self.held} bytes; wait until they are answered")
        if begin:
            self.unfinished += 1
            self._budgets.metrics.unfinished += 1
        self.keep(size)

    def received(self) -> None:
        """Count a request as finished."""
        self.unfinished -= 1
        self._budgets.metrics.unfinished -= 1

    def keep(self, size: int) -> None:
        """Count ``size`` more bytes of answers until ``release``. Answers are never refused."""
        self.held += size
        self._budgets.metrics.held_bytes += size

    def release(self, size: int) -> None:
        """Stop counting ``size`` bytes of ``hold`` or ``keep``."""
        self.keep(-size)

    @asynccontextmanager
    async def large(self, size: int) -> AsyncIterator[None]:
        """Count a large message until it is answered. Raises RateLimited."""
        self.admit()
        try:
            self.hold(size)
        finally:
            self.charge(RECEIVE_S * size)
        try:
            await self.turn()
            yield
        finally:
            self.release(size)

    async def turn(self) -> None:
        """Wait until no other large request is parsed in this round of the event loop."""
        async with self._budgets.turns:
            await asyncio.sleep(0)

    @coroutine
    def timed(self, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Run a coroutine and charge the caller for the long periods in which it occupies the event loop."""
        steps = cast(Coroutine[Any, Any, T], work)
        value: Any = None
        error: BaseException | None = None
        while True:
            begin = self._budgets.begin()
            try:
                awaited = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                if (seconds := self._budgets.occupied(begin)) > HOLD_S:
                    self.charge(seconds)
            try:
                value, error = (yield awaited), None
            except BaseException as thrown:
                value, error = None, thrown

    def charge(self, seconds: float) -> None:
        """Charge a period of event loop time."""
        self._budgets.metrics.held_seconds += seconds
        share = self._budgets.loop_share[self._agent]
        if share < 1:
            earliest = self._budgets.clock() - HOLD_BURST_S / share
            self._free_at = max(self._free_at, earliest) + seconds / share

    def _refusal(self, budget: str, why: str, retry_after: float = RETRY_S) -> RateLimited:
        self._budgets.metrics.refusals[budget] += 1
        return RateLimited(f"{budget}: this client {why}", retry_after=round(retry_after, 3), budget=budget)


class Budgets:
    """One budget per caller: a session's agent, or else an address.

    Args:
        limits: limits of one caller.
        metrics: counts the used resources and the refusals.
        clock: returns the monotonic time in seconds.
        delay: returns the seconds for which the thread has waited for a processor.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
        delay: Callable[[], float] = processor_delay,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self.clock = clock
        self._delay = delay
        self._read_at = -DELAY_S
        self._delayed = 0.0
        self.turns = asyncio.Lock()
        factors = (OPERATOR_FACTOR, 1)
        # Indexed by ``agent``. At least one request is always allowed.
        self.max_held = [
            max(factor * limits.max_held_bytes, limits.max_bytes(agent=bool(agent)))
            for agent, factor in enumerate(factors)
        ]
        self.max_unfinished = [factor * limits.max_unfinished for factor in factors]
        self.loop_share = [factor * limits.loop_share for factor in factors]
        self._of: dict[str, Budget] = {}

    def of(self, session_id: str | None, address: object) -> Budget:
        """Return the budget of a caller.

        Args:
            session_id: session of an agent token. None for the operator token and without a token.
            address: address of the connection, as in the ASGI scope.
        """
        name = session_id or (str(address[0]) if isinstance(address, tuple | list) and address else "")
        budget = self._of.get(name)
        if budget is None:
            if len(self._of) >= MAX_BUCKETS:
                self._of = {name: budget for name, budget in self._of.items() if not budget.idle}
            budget = self._of[name] = Budget(self, session_id is not None)
        return budget

    def begin(self) -> float:
        """Return the time at which a period on the event loop begins."""
        now = self.clock()
        if now - self._read_at >= DELAY_S:
            self._read_at, self._delayed = now, self._delay()
        return now

    def occupied(self, begin: float) -> float:
        """Return the seconds since ``begin``, without those in which the thread waited for a processor."""
        seconds = self.clock() - begin
        return seconds if seconds <= HOLD_S else seconds - (self._delay() - self._delayed)
