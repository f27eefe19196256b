"""Step 3 of 9: ToolCall -> StepResult. Methods as tools: what a model sees, and how it is called."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
from pydantic_core import PydanticSerializationError

from agentrl_env.errors import DefinitionError, ToolError
from agentrl_env.fast_wire import CallSaid, Said, ToolAnswer, step_answer
from agentrl_env.schema import ArgumentError, Arguments, echo
from agentrl_env.session.threads import AUTHOR_ERRORS
from agentrl_env.types import FunctionSpec, Message, SessionStatus, ToolCall, ToolSpec

if TYPE_CHECKING:
    from agentrl_env.environment import Environment

SUCCESS_REWARD = 1.0 - 1e-9
"""An episode whose rewards sum to this is a success, unless ``score()`` says otherwise."""

F = TypeVar("F", bound=Callable[..., Any])
Content = str | Message | list[Message]
Call = Callable[..., Awaitable[Any]]
"""Runs author code: ``await call(function, timeout_or_None, *args, **kwargs)``."""
_MARK = "__agentrl_tool__"


@dataclass(frozen=True, slots=True)
class Reply:
    """A tool's answer with more than text: a reward for this step, and metrics."""

    content: Content
    _: KW_ONLY
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done(Reply):
    """A tool's last answer: the task has ended, well or badly (``terminated``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    name: str
    timeout: float | None


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, timeout: float | None = None) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, /, *, name: str | None = None, timeout: float | None = None
) -> F | Callable[[F], F]:
    """Make a method of an Environment a tool; it stays a plain method for everybody else.

    Args:
        function: the method, when used without parentheses.
        name: what the model calls it; the method's name by default.
        timeout: seconds a call may take, instead of the environment's ``tool_timeout``.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, _Options(name=name or method.__name__, timeout=timeout))
        return method

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of an environment class."""

    name: str
    attribute: str
    arguments: Arguments
    spec: ToolSpec
    timeout: float | None
    is_async: bool


class Toolset:
    """The tools of one environment class, in the order they are written."""

    def __init__(self, environment: type) -> None:
        self.tools: dict[str, Tool] = {}
        for attribute in _attributes(environment):
            function = inspect.getattr_static(environment, attribute)
            if hasattr(getattr(function, "__func__", function), _MARK):
                self._add(environment, attribute, function)
        self.specs = tuple(tool.spec for tool in self.tools.values())
        self.names = ", ".join(self.tools) or "none"
        methods = [getattr(environment, name, None) for name in ("respond", "score")]
        self.all_sync = not any(tool.is_async for tool in self.tools.values()) and not any(
            inspect.iscoroutinefunction(method) for method in methods
        )
        """Whether nothing that a step calls is a coroutine."""

    def _add(self, environment: type, attribute: str, function: Callable[..., Any]) -> None:
        if not inspect.isfunction(function):
            raise DefinitionError(
                f"{environment.__name__}.{attribute}: put @tool on a plain method, closest to it"
            )
        options: _Options = getattr(function, _MARK)
        if options.name in self.tools:
            raise DefinitionError(f"{environment.__name__} has two tools named {options.name!r}; rename one")
        arguments = Arguments(function, environment.__name__)
        self.tools[options.name] = Tool(
            name=options.name,
            attribute=attribute,
            arguments=arguments,
            spec=ToolSpec(
                function=FunctionSpec(
                    name=options.name,
                    description=arguments.summary,
                    parameters=arguments.schema,
                )
            ),
            timeout=options.timeout,
            is_async=inspect.iscoroutinefunction(inspect.unwrap(function)),
        )


def tool_name(function: Callable[..., Any]) -> str:
    """Return what the model calls a method; the method's own name where it is no tool."""
    options: _Options | None = getattr(function, _MARK, None)
    return function.__name__ if options is None else options.name


@functools.cache
def toolset(environment: type) -> Toolset:
    """Return the tools of an environment class. Raises DefinitionError."""
    return Toolset(environment)


def find_call(tools: Toolset, message: Said) -> tuple[Tool, dict[str, Any]] | None:
    """Return the only call of a message, with its arguments; None where there is not one sound call."""
    if not message.tool_calls or len(message.tool_calls) > 1:
        return None
    function = message.tool_calls[0].function
    found = tools.tools.get(function.name)
    try:
        return None if found is None else (found, found.arguments.parse(function.arguments))
    except AUTHOR_ERRORS:  # which may come from an author's own validator; ``Turn.play`` tells of it
        return None


class TimeOver(Exception):
    """The session's ``max_seconds`` are over."""


class Turn:
    """One assistant message being answered: what it has brought so far.

    Args:
        message: the assistant's.
        begin: when it came, by the session's clock.
    """

    __slots__ = ("begin", "done", "info", "message", "messages", "metrics", "reward")

    def __init__(self, message: Said, begin: float) -> None:
        self.message = message
        self.begin = begin
        self.messages: list[Message | ToolAnswer] = []
        self.reward = 0.0
        self.metrics: dict[str, float] = {"invalid_calls": 0.0}
        self.done = False
        self.info: dict[str, Any] = {}

    async def play(self, environment: Environment, call: Call) -> None:
        """Run the message's tool calls in order, or ``respond`` where it has none.

        Raises TimeOver, and whatever else author code raises but ToolError.
        """
        message = self.message
        if not message.tool_calls:
            try:
                value = await call(environment.respond, None, _text(message))
            except ToolError as error:
                value = str(error)
            self.messages += as_messages(self._take(value), "respond()")
            return
        for position, request in enumerate(message.tool_calls):
            try:
                await self._tool_call(environment, request, call)
            except TimeOver:
                self._skip(message.tool_calls[position:], "the time limit was reached")
                raise
            if self.done:
                self._skip(message.tool_calls[position + 1 :], "the task has ended")
                return

    def take(self, tool: Tool, value: object, error: BaseException | None) -> None:
        """Do what ``play`` does for a message's only call, once the tool has returned or raised."""
        (request,) = self.message.tool_calls or ()
        if error is None and type(value) is str:
            self.messages.append(_answer(request, clean(value)))
        elif error is None:
            self.messages += tool_messages(self._take(value), request.id, tool.name)
        elif isinstance(error, ToolError):
            self.messages.append(_answer(request, clean(str(error))))
        else:
            raise error

    def score(self, scores: object, episode_return: float) -> None:
        """Add the episode's named metrics, and ``success``.

        Args:
            scores: what ``Environment.score`` returned.
            episode_return: the sum of all rewards before this turn.
        """
        if not isinstance(scores, Mapping):
            raise DefinitionError(f"score() returned {type(scores).__name__}; return a dict")
        self.metrics.update(_numbers(scores))
        earned = episode_return + self.reward >= SUCCESS_REWARD
        self.metrics["success"] = float(self.metrics.get("success", float(earned)) >= 0.5)

    def fail(self, error: BaseException) -> None:
        """Take what the author's code has raised; the reward means nothing then."""
        self.reward = 0.0
        self.info = {"error": {"type": type(error).__name__, "message": describe(error)}}

    def answer(self, session_id: str, seq: int, status: SessionStatus) -> bytes:
        """Return what the turn has brought, the answer to step ``seq``: a StepResult as JSON."""
        return step_answer(
            session_id,
            seq,
            self.messages,
            reward=self.reward,
            status=status,
            metrics=self.metrics,
            info=self.info,
        )

    async def _tool_call(self, environment: Environment, request: CallSaid, call: Call) -> None:
        name = request.function.name
        tools = toolset(type(environment))
        found = tools.tools.get(name)
        if found is None:
            self._reject(request, f"there is no tool {echo(name)}. Tools: {tools.names}")
            return
        try:
            arguments = found.arguments.parse(request.function.arguments)
        except ArgumentError as error:
            self._reject(request, str(error))
            return
        try:
            value = await call(getattr(environment, found.attribute), found.timeout, **arguments)
        except ToolError as error:
            self.messages.append(_answer(request, clean(str(error))))
            return
        self.messages += tool_messages(self._take(value), request.id, name)

    def _take(self, value: object) -> object:
        """Take the reward and metrics of a return value, and return its content."""
        if not isinstance(value, Reply):
            return value
        self.reward += _finite(value.reward, "reward")
        for name, number in _numbers(value.metrics).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + number
        self.done = self.done or isinstance(value, Done)
        return value.content

    def _reject(self, request: CallSaid, reason: str) -> None:
        self.metrics["invalid_calls"] += 1.0
        self.messages.append(_answer(request, f"Error: {reason}."))

    def _skip(self, requests: Sequence[CallSaid], reason: str) -> None:
        self.messages += [_answer(request, f"Not executed: {reason}.") for request in requests]


def tool_messages(content: object, call_id: str, name: str) -> list[Message | ToolAnswer]:
    """Turn a tool's content into messages, exactly one of which answers the call.

    Raises DefinitionError where the content is none of ``str | Message | list[Message]``.
    """
    if isinstance(content, str):
        return [ToolAnswer(clean(content), call_id)]
    messages = as_messages(content, f"{name}()")
    answers = [message for message in messages if message.role == "tool"]
    if not answers:
        return [ToolAnswer("", call_id), *messages]
    if len(answers) > 1:
        raise DefinitionError(f"{name}() returned {len(answers)} tool messages for one call")
    return [
        message.model_copy(update={"tool_call_id": call_id}) if message.role == "tool" else message
        for message in messages
    ]


def as_messages(content: object, where: str) -> list[Message]:
    """Turn ``str | Message | list[Message]`` into messages; text speaks as the user.

    Raises DefinitionError where it is something else, or cannot be sent as JSON.
    """
    if isinstance(content, str):
        return [Message(role="user", content=clean(content))]
    messages = [content] if isinstance(content, Message) else content
    if not isinstance(messages, list) or not all(isinstance(item, Message) for item in messages):
        raise DefinitionError(
            f"{where} returned {type(content).__name__}; return a str, a Message or a list of them"
        )
    try:
        for message in messages:
            message.model_dump_json()
    except PydanticSerializationError as error:
        raise DefinitionError(f"{where} returned a message that cannot be sent as JSON: {error}") from None
    return messages


def as_move(move: object) -> Message:
    """Turn ``ToolCall | str | Message`` into an assistant message. Raises DefinitionError."""
    if isinstance(move, ToolCall):
        return Message.assistant(None, move)
    if isinstance(move, str):
        return Message.assistant(move)
    if isinstance(move, Message) and move.role == "assistant":
        return move
    raise DefinitionError(
        f"expert() returned {type(move).__name__}; return a ToolCall, a str or an assistant Message"
    )


def clean(text: str) -> str:
    """Replace what UTF-8 cannot carry: lone surrogates, as undecodable file names have them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _attributes(environment: type) -> list[str]:
    """Return every attribute name, base classes first, each in the order it is written."""
    names: dict[str, None] = {}
    for base in reversed(environment.__mro__):
        names.update(dict.fromkeys(vars(base)))
    return list(names)


def _answer(request: CallSaid, text: str) -> ToolAnswer:
    return ToolAnswer(text, request.id)


def _text(message: Said) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


def _numbers(metrics: Mapping[Any, object]) -> dict[str, float]:
    """Return metrics with names and values that can be sent."""
    return {clean(str(name)): _finite(value, f"metric {name}") for name, value in metrics.items()}


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
        raise DefinitionError(f"{what} must be a finite number, got {value!r}")
    return float(value)


def describe(error: BaseException) -> str:
    """Return an exception's class and text, cut to a readable length."""
    try:
        text = str(error)
    except Exception:  # its author's code too
        text = "its text cannot be read"
    return clean(f"{type(error).__name__}: {text}"[:500])
