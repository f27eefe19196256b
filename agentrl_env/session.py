"""Step 2 of 9: TaskSample -> Session. One sample, one environment instance, used once."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl_env.errors import (
    DefinitionError,
    EnvironmentFailed,
    InvalidRequest,
    NotSupported,
    SeqConflict,
    SessionEnded,
    SessionExpired,
    ToolError,
)
from agentrl_env.runner import AUTHOR_ERRORS, AuthorTimeout, Runner, Threads
from agentrl_env.schema import ArgumentError
from agentrl_env.tools import Done, Reply, Tool, as_messages, tool_messages, toolset
from agentrl_env.types import (
    Message,
    SessionInfo,
    SessionStatus,
    StepResult,
    TaskSample,
    ToolCall,
)

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

logger = logging.getLogger("agentrl_env")

SUCCESS_REWARD = 1.0 - 1e-9
"""An episode whose rewards sum to this is a success, unless ``score()`` says otherwise."""


class _TimeOver(Exception):
    """The session's ``max_seconds`` are over."""


@dataclass(slots=True)
class _Turn:
    """What one turn has gathered so far."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=lambda: {"invalid_calls": 0.0})
    done: bool = False

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + _finite(value, f"metric {name!r}")

    def add(self, value: object) -> object:
        """Take the reward and metrics of a return value, and return its content."""
        if not isinstance(value, Reply):
            return value
        self.reward += _finite(value.reward, "reward")
        self.add_metrics(value.metrics)
        self.done = self.done or isinstance(value, Done)
        return value.content


class Session:
    """An episode under way.

    Steps are numbered from 1 by ``seq``; a repeated one gets the stored answer. At most one step
    runs at a time, and it runs to its end even when its caller goes away. Author code that raises
    ends the session as ``failed_environment``; nothing it raises leaves ``step``.
    """

    def __init__(
        self,
        environment: type[Environment],
        sample: TaskSample,
        *,
        session_id: str,
        threads: Threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session_id = session_id
        self.sample = sample
        self.status = SessionStatus.RUNNING
        self.opening: tuple[Message, ...] = ()
        self._class = environment
        self._tools = toolset(environment)
        self._runner = Runner(blocking=environment.blocking, threads=threads)
        self._clock = clock
        self._begin = clock()
        self._environment: Environment | None = None
        self._results: list[StepResult] = []
        self._return = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.inline = not environment.blocking and _all_sync(environment, self._tools.all_sync)
        """Whether a step never suspends: it then needs no task, and no other can interleave."""

    @property
    def turn(self) -> int:
        """Number of steps taken."""
        return len(self._results)

    def info(self) -> SessionInfo:
        """Return how the session stands."""
        return SessionInfo(
            session_id=self.session_id,
            task=self.sample.task,
            sample=self.sample,
            messages=self.opening,
            tools=self._tools.specs,
            status=self.status,
            turn=self.turn,
            last=self._results[-1] if self._results else None,
        )

    async def start(self) -> SessionInfo:
        """Create the environment and reset it. Raises EnvironmentFailed."""
        rng = np.random.default_rng(self.sample.seed)

        def begin() -> Any:
            self._environment = self._class()
            # A copy, so that author code cannot change the dataset under other sessions.
            return self._environment.reset(self.sample.model_copy(deep=True), rng)

        timeout = self._class.reset_timeout
        try:
            content = await self._runner.call(begin, timeout)
            self.opening = tuple(as_messages(content, "reset()"))
        except AUTHOR_ERRORS as error:
            self.status = SessionStatus.FAILED_ENVIRONMENT
            logger.warning("reset of task %s failed", self.sample.task, exc_info=error)
            await self.close()
            raise EnvironmentFailed(
                f"reset of task {self.sample.task!r} failed: {_describe(error)}"
            ) from error
        return self.info()

    async def step(self, message: Message, seq: int | None = None) -> StepResult:
        """Play one assistant message; ``seq`` None means the next.

        Raises SeqConflict on a gap, SessionEnded or SessionExpired where no step is possible,
        InvalidRequest where the message is not an assistant's.
        """
        if message.role != "assistant":
            raise InvalidRequest(f"a step takes an assistant message, not one of {message.role!r}")
        while True:
            if seq is not None and seq <= self.turn:
                return self._stored(seq)
            if seq is not None and seq > self.turn + (1 if self._task is None else 2):
                raise SeqConflict(
                    f"seq {seq} leaves a gap: the next is {self.turn + 1}", expected=self.turn + 1
                )
            if self._task is None:
                self.refuse_ended()
                seq = self.turn + 1
                if self.inline:
                    return await self._play(message)
                self._begin_task(self._play(message))
            if self._task is not None:
                await asyncio.wait((self._task,))

    async def expert(self) -> Message:
        """Return the oracle's next assistant message, without taking a step.

        Raises NotSupported where the task has none, EnvironmentFailed where it breaks.
        """
        while self._task is not None:
            await asyncio.wait((self._task,))
        self.refuse_ended()
        rng = np.random.default_rng([self.sample.seed, self.turn])
        task = self._begin_task(self._ask_expert(rng))
        await asyncio.wait((task,))
        if task.cancelled():
            self.refuse_ended()
        message: Message = task.result()
        return message

    async def close(self, status: SessionStatus = SessionStatus.CANCELLED) -> None:
        """End the session and release its environment; a step under way is cancelled. Idempotent.

        Args:
            status: how the session ends, where it has not ended yet.
        """
        await asyncio.shield(self.begin_close(status))

    def begin_close(self, status: SessionStatus = SessionStatus.CANCELLED) -> asyncio.Task[None]:
        """Start what ``close`` waits for."""
        if not self.status.final:
            self.status = status
        if self._closing is None:
            self._closing = asyncio.create_task(self._release(self._task))
        return self._closing

    @property
    def released(self) -> asyncio.Task[None] | None:
        """The closing of the environment, once begun; None where nothing needs closing."""
        return self._closing

    def _begin_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._task = asyncio.create_task(coroutine)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        if self._task is task:
            self._task = None

    def _stored(self, seq: int) -> StepResult:
        if seq < 1:
            raise InvalidRequest(f"seq counts from 1, got {seq}")
        return self._results[seq - 1]

    def refuse_ended(self) -> None:
        """Raise SessionExpired or SessionEnded where no further step is possible."""
        if self.status is SessionStatus.EXPIRED:
            raise SessionExpired("the session was idle past its lease; open a new one")
        if self.status.final:
            raise SessionEnded(f"the session has ended ({self.status}); open a new one", status=self.status)

    async def _play(self, message: Message) -> StepResult:
        """Run one turn to its StepResult; author errors become its status."""
        turn = _Turn()
        status, info = SessionStatus.RUNNING, {}
        try:
            try:
                await self._answer(message, turn)
                if turn.done:
                    status = SessionStatus.COMPLETED
                elif self.turn + 1 >= self._class.max_turns:
                    status = SessionStatus.TRUNCATED_TURNS
                else:
                    self._time_left()
            except _TimeOver:
                status = SessionStatus.TRUNCATED_TIME
            if status.final:
                await self._score(turn)
        except AUTHOR_ERRORS as error:
            logger.warning("task %s failed in a step", self.sample.task, exc_info=error)
            status = SessionStatus.FAILED_ENVIRONMENT
            info = {"error": {"type": type(error).__name__, "message": _describe(error)}}
            turn.reward = 0.0
        return self._record(turn, status, info)

    def _record(self, turn: _Turn, status: SessionStatus, info: dict[str, Any]) -> StepResult:
        result = StepResult(
            session_id=self.session_id,
            seq=self.turn + 1,
            messages=tuple(turn.messages),
            reward=turn.reward,
            terminated=status is SessionStatus.COMPLETED,
            truncated=status in (SessionStatus.TRUNCATED_TURNS, SessionStatus.TRUNCATED_TIME),
            status=status,
            metrics=turn.metrics,
            info=info,
        )
        self._results.append(result)
        self._return += turn.reward
        if status.final:
            self.status = status
            if self._closing is None and self._class.overrides("close"):
                self._closing = asyncio.create_task(self._release(None))
        return result

    async def _answer(self, message: Message, turn: _Turn) -> None:
        environment = self._alive()
        if not message.tool_calls:
            self._time_left()
            value = await self._call(environment.respond, None, _text(message))
            turn.messages += as_messages(turn.add(value), "respond()")
            return
        for position, call in enumerate(message.tool_calls):
            try:
                self._time_left()
                await self._tool_call(environment, call, turn)
            except _TimeOver:
                _skip(message.tool_calls[position:], turn, "the time limit was reached")
                raise
            if turn.done:
                _skip(message.tool_calls[position + 1 :], turn, "the task has ended")
                return

    async def _tool_call(self, environment: Environment, call: ToolCall, turn: _Turn) -> None:
        name = call.function.name
        tool = self._tools.tools.get(name)
        if tool is None:
            turn.metrics["invalid_calls"] += 1.0
            turn.messages.append(_tool_message(call, self._tools.unknown(name)))
            return
        try:
            arguments = tool.arguments.parse(call.function.arguments)
        except ArgumentError as error:
            turn.metrics["invalid_calls"] += 1.0
            turn.messages.append(_tool_message(call, f"Error: {error}"))
            return
        try:
            value = await self._run_tool(environment, tool, arguments)
        except ToolError as error:
            turn.messages.append(_tool_message(call, str(error)))
            return
        turn.messages += tool_messages(turn.add(value), call.id, name)

    async def _run_tool(self, environment: Environment, tool: Tool, arguments: dict[str, Any]) -> Any:
        function = getattr(environment, tool.attribute)
        return await self._call(function, tool.timeout, **arguments)

    async def _call(
        self, function: Callable[..., Any], timeout: float | None, /, *args: Any, **kw: Any
    ) -> Any:
        """Call author code within its own deadline and the session's."""
        if self.inline:
            return function(*args, **kw)
        own = self._class.tool_timeout if timeout is None else timeout
        left = self._time_left()
        try:
            return await self._runner.call(function, min(own, left), *args, **kw)
        except AuthorTimeout as error:
            if left < own:
                raise _TimeOver from None
            raise AuthorTimeout(f"{function.__name__}(): {error}") from None

    async def _score(self, turn: _Turn) -> None:
        scores: Mapping[str, float] = {}
        if self._class.overrides("score"):
            environment = self._alive()
            scores = await self._runner.call(environment.score, self._class.tool_timeout)
            if not isinstance(scores, Mapping):
                raise DefinitionError(f"score() returned {type(scores).__name__}; return a dict")
        turn.metrics.update({name: _finite(value, name) for name, value in scores.items()})
        success = turn.metrics.get("success")
        if success is None:
            good = self._return + turn.reward >= SUCCESS_REWARD
        else:
            good = success >= 0.5
        turn.metrics["success"] = float(good)

    async def _ask_expert(self, rng: np.random.Generator) -> Message:
        environment = self._alive()
        try:
            move = await self._runner.call(environment.expert, self._class.tool_timeout, rng)
        except NotSupported:
            raise
        except AUTHOR_ERRORS as error:
            raise EnvironmentFailed(
                f"expert of task {self.sample.task!r} failed: {_describe(error)}"
            ) from error
        if isinstance(move, ToolCall):
            return Message.assistant(None, move)
        if isinstance(move, str):
            return Message.assistant(move)
        if isinstance(move, Message) and move.role == "assistant":
            return move
        raise EnvironmentFailed(
            f"expert of task {self.sample.task!r} returned {type(move).__name__}; "
            "return a ToolCall, a str or an assistant Message"
        )

    async def _release(self, step: asyncio.Task[Any] | None) -> None:
        """Cancel a step under way, then close the environment exactly once."""
        if step is not None and not step.done():
            step.cancel()
            await asyncio.wait((step,))
        # Author code that outlived its deadline may still use what close() releases.
        await self._runner.settle(self._class.reset_timeout)
        if self._environment is None or not self._class.overrides("close"):
            return
        try:
            await self._runner.call(self._environment.close, self._class.reset_timeout)
        except AUTHOR_ERRORS as error:
            logger.warning("close of task %s failed", self.sample.task, exc_info=error)

    def _alive(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("start() the session first")
        return self._environment

    def _time_left(self) -> float:
        """Return the seconds until the session's time limit. Raises _TimeOver."""
        if self._class.max_seconds is None:
            return math.inf
        left = self._begin + self._class.max_seconds - self._clock()
        if left <= 0:
            raise _TimeOver
        return left


def _all_sync(environment: type[Environment], tools_sync: bool) -> bool:
    methods = (environment.respond, environment.score)
    return tools_sync and not any(inspect.iscoroutinefunction(method) for method in methods)


def _skip(calls: tuple[ToolCall, ...], turn: _Turn, reason: str) -> None:
    turn.messages += [_tool_message(call, f"Not executed: {reason}.") for call in calls]


def _tool_message(call: ToolCall, text: str) -> Message:
    return Message(role="tool", tool_call_id=call.id, content=text)


def _text(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
        raise DefinitionError(f"{what} must be a finite number, got {value!r}")
    return float(value)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
