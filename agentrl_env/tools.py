"""Step 3 of 9: ToolCall -> StepResult. Methods as tools: their schemas and the calls in a message."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from typing import Any, Protocol, TypeVar, overload

import numpy as np

from agentrl_env.author_code import describe
from agentrl_env.errors import DefinitionError, ToolError
from agentrl_env.fast_wire import (
    AnyToolCall,
    AssistantMessage,
    ToolAnswer,
    check_nesting,
    encode,
    encode_result,
    encoded_info,
    message_to_json,
)
from agentrl_env.json_schema import SchemaArguments
from agentrl_env.schema import ArgumentError, Arguments, echo
from agentrl_env.types import FunctionSpec, Message, SessionStatus, ToolCall, ToolSpec
from agentrl_env.wording import NO_TOOL_CALL, Wording

SUCCESS_REWARD = 1.0 - 1e-9
"""An episode with at least this sum of rewards is a success, unless ``score()`` overrides it."""

F = TypeVar("F", bound=Callable[..., Any])
Content = str | Message | list[Message]
Invoke = Callable[..., Awaitable[Any]]
"""Runs author code: ``await invoke(name, call_without_arguments, timeout_or_None)``."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of tools that model APIs accept."""
_MARK = "__agentrl_tool__"


@dataclass(frozen=True, slots=True)
class Reply:
    """A tool's answer with a reward for this step, metrics, and ``info`` that the model does not see."""

    content: Content
    _: KW_ONLY
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done(Reply):
    """A tool's last answer. It ends the task (``terminated``), with or without success.

    Attributes:
        truncated: True if a limit of the task, such as a number of steps, ended the episode. The session's
            status is then ``truncated_turns``.
    """

    _: KW_ONLY
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    name: str
    timeout: float | None
    arguments: SchemaArguments | None = None
    """Arguments with a schema from another source. None if the method's signature describes them."""


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, timeout: float | None = None) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, /, *, name: str | None = None, timeout: float | None = None
) -> F | Callable[[F], F]:
    """Make a method of an Environment a tool. The method can still be called directly.

    Args:
        function: the method, when used without parentheses.
        name: tool name that the model sees. By default the method's name.
        timeout: time limit of a call in seconds, instead of the environment's ``tool_timeout``.
    """

    def mark(method: F) -> F:
        if not inspect.isfunction(method):
            kind = type(method).__name__
            raise DefinitionError(f"@tool is put on a plain method, closest to it, not on a {kind}", method)
        if timeout is not None and not is_seconds(timeout):
            raise DefinitionError(f"@tool(timeout={timeout!r}): timeout takes seconds above 0", method)
        tool_name = name or method.__name__
        if not isinstance(tool_name, str) or not TOOL_NAME.fullmatch(tool_name):
            raise DefinitionError(
                f"a tool cannot be named {tool_name!r}: models accept 1 to 64 letters, digits, '_' or '-'",
                method,
            )
        if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise DefinitionError(f"tool {tool_name!r} yields; return the answer instead", method)
        setattr(method, _MARK, _Options(name=tool_name, timeout=timeout))
        return method

    return mark if function is None else mark(function)


def foreign_tool(
    name: str, arguments: SchemaArguments, play: Callable[..., Awaitable[Any]]
) -> Callable[..., Any]:
    """Return a method that is a tool with a JSON Schema from another source.

    Args:
        name: tool name that the model sees.
        arguments: description and arguments of the tool.
        play: ``await play(environment, arguments)`` answers a call.
    """

    async def method(self: Any, /, **given: Any) -> Any:
        return await play(self, given)

    setattr(method, _MARK, _Options(name=name, timeout=None, arguments=arguments))
    return method


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool of an environment class."""

    name: str
    attribute: str
    arguments: Arguments | SchemaArguments
    spec: ToolSpec
    timeout: float | None


class Toolset:
    """The tools of one environment class, in the order of their definition, or of one of its sessions."""

    def __init__(self, environment: type) -> None:
        self.tools: dict[str, Tool] = {}
        for attribute in _attributes(environment):
            function = inspect.getattr_static(environment, attribute)
            if is_tool(function):
                self._add(environment, attribute, function)
        overrides = getattr(environment, "overrides", None)
        self.answers = overrides is not None and overrides("answer_message")
        """True if the task answers whole messages itself."""
        self.responds = overrides is not None and overrides("respond")
        """True if the task answers turns without a tool call itself."""
        self.wording: Wording = getattr(environment, "wording", Wording())
        self.specs = self.wording.tools(tuple(tool.spec for tool in self.tools.values()))
        self.names = ", ".join(self.tools) or "none"

    def offer(self, specs: object) -> Toolset:
        """Return the tools of a session that offers only these. Raises DefinitionError."""
        if not isinstance(specs, Sequence) or not all(isinstance(spec, ToolSpec) for spec in specs):
            raise DefinitionError("session_tools() must return a list of ToolSpec, as self.tool_specs() does")
        names = [spec.function.name for spec in specs]
        if len(set(names)) < len(names):
            raise DefinitionError(f"session_tools() returned two tools with one name: {', '.join(names)}")
        unknown = [] if self.answers else [name for name in names if name not in self.tools]
        if unknown:
            raise DefinitionError(
                f"session_tools() returned {unknown[0]!r}, which is not a tool of the task: {self.names}"
            )
        try:
            for spec in specs:
                spec.model_dump_json()
        except ValueError as error:
            raise DefinitionError(
                f"session_tools() returned a tool that cannot be sent as JSON: {error}"
            ) from None
        offered = copy.copy(self)
        offered.tools = {name: self.tools[name] for name in names if name in self.tools}
        offered.specs, offered.names = tuple(specs), ", ".join(names) or "none"
        return offered

    def without_call(self) -> Reply:
        """Return the default answer to a turn without a tool call."""
        text = self.wording.text(NO_TOOL_CALL, tools=self.names)
        return Reply(text, metrics={"invalid_calls": 1.0})

    def _add(self, environment: type, attribute: str, function: Callable[..., Any]) -> None:
        if not inspect.isfunction(function):
            raise DefinitionError(
                f"{environment.__name__}.{attribute}: put @tool on a plain method, closest to it", function
            )
        options: _Options = getattr(function, _MARK)
        if options.name in self.tools:
            raise DefinitionError(
                f"{environment.__name__} has two tools named {options.name!r}; rename one", function
            )
        arguments = options.arguments or Arguments(function, environment)
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
        )


def is_tool(value: object) -> bool:
    """Return True if an attribute of a class is marked with ``@tool``."""
    return hasattr(getattr(value, "__func__", value), _MARK)


def is_seconds(value: object) -> bool:
    """Return True if a value is a number of seconds above 0. Infinity means no limit."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


@cache
def toolset(environment: type) -> Toolset:
    """Return the tools of an environment class. Raises DefinitionError."""
    return Toolset(environment)


class TimeLimitReached(Exception):
    """The session's ``max_seconds`` have passed."""


class LoopTimeSpent(Exception):
    """The calls of a message have used up the event loop time of one message."""


class Player(Protocol):
    """The part of an Environment, except its tools, that a step uses."""

    @property
    def max_output_chars(self) -> int:
        """Maximum number of characters of the answers to one message."""

    def respond(self, text: str, /) -> Any:
        """Answer an assistant turn without a tool call."""

    def answer_message(self, message: Message, /) -> Any:
        """Answer a whole assistant message."""


class StepBuilder:
    """Builds the result of one step while the tool calls of its message run.

    Args:
        message: the assistant message.
        begin: time of the message's arrival, by the session's clock.
    """

    __slots__ = (
        "answered", "begin", "calling", "done", "info", "message", "messages", "metrics", "reward", "room",
        "truncated",
    )  # fmt: skip

    def __init__(self, message: AssistantMessage, begin: float) -> None:
        self.message = message
        self.begin = begin
        self.messages: list[Message | ToolAnswer] = []
        self.answered = 0
        """Number of answers to calls, which are the first messages."""
        self.reward = 0.0
        self.metrics: dict[str, float] = {"invalid_calls": 0.0}
        self.done = self.truncated = False
        self.info: dict[str, Any] = {}
        self.room = 0
        """Number of characters that are left for the answers."""
        self.calling: Callable[..., Any] | None = None
        """The author's method that was called last. Errors name its place."""

    async def run(self, environment: Player, invoke: Invoke, tools: Toolset) -> None:
        """Run the message's tool calls in order, or ``respond`` if it has none.

        All answers precede the other messages of tools, such as images in the role of the user.

        Args:
            environment: plays the episode.
            invoke: runs author code.
            tools: tools of the session. Other tools are unknown.

        Raises TimeLimitReached, and any exception of author code except ToolError.
        """
        calls: Sequence[AnyToolCall] = self.message.tool_calls or ()
        self.room = environment.max_output_chars
        if tools.answers:
            self.calling = environment.answer_message
            message = Message.model_validate_json(encode(self.message))
            value = await invoke("answer_message", partial(environment.answer_message, message), None)
            self.messages += as_messages(self._take(value, "answer_message"), "answer_message()")
            return
        if not calls:
            self.calling = environment.respond
            answer = partial(environment.respond, _text(self.message))
            try:
                value = await invoke("respond", answer if tools.responds else tools.without_call, None)
            except ToolError as error:
                value = str(error)
            self.messages += as_messages(self._take(value, "respond"), "respond()")
            return
        for position, request in enumerate(calls):
            call = self._parse(tools, request)
            if call is None:
                continue
            tool, arguments = call
            try:
                method = self.calling = partial(getattr(environment, tool.attribute), **arguments)
                value = await invoke(tool.name, method, tool.timeout)
            except ToolError as error:
                self._add(tool_messages(self._take(str(error), tool.name), request.id, tool.name))
                continue
            except TimeLimitReached:
                self._skip(calls[position:], "the time limit was reached")
                raise
            except LoopTimeSpent as error:
                self._skip(calls[position:], str(error))
                return
            self._add(tool_messages(self._take(value, tool.name), request.id, tool.name))
            if self.done:
                self._skip(calls[position + 1 :], "the task has ended")
                return

    def score(self, scores: object, episode_return: float) -> None:
        """Add the metrics of the episode, and ``success``.

        Args:
            scores: return value of ``Environment.score``.
            episode_return: sum of the rewards before this step.
        """
        if not isinstance(scores, Mapping):
            raise DefinitionError(f"score() returned {type(scores).__name__}; return a dict")
        self.metrics.update(_numbers(scores))
        earned = episode_return + self.reward >= SUCCESS_REWARD
        self.metrics["success"] = float(self.metrics.get("success", float(earned)) >= 0.5)

    def fail(self, error: BaseException) -> None:
        """Record an exception of author code, which makes the reward meaningless."""
        self.reward = 0.0
        self.info = {"error": {"type": type(error).__name__, "message": describe(error, self.calling)}}

    def result_json(self, session_id: str, seq: int, status: SessionStatus) -> bytes:
        """Return the StepResult as JSON."""
        return encode_result(session_id, seq, self.messages, self.reward, status, self.metrics, self.info)

    def _parse(self, tools: Toolset, request: AnyToolCall) -> tuple[Tool, dict[str, Any]] | None:
        """Return the tool and the arguments of a call, or None after answering the call with an error."""
        name = request.function.name
        found = tools.tools.get(name)
        if found is None:
            self._reject(request, f"there is no tool {echo(name)}. Tools: {tools.names}")
            return None
        try:
            return found, found.arguments.parse(request.function.arguments)
        except ArgumentError as error:
            self._reject(request, str(error))
            return None

    def _take(self, value: object, caller: str) -> object:
        """Add the reward, the metrics and the info of a return value, and return its content.

        Args:
            value: the return value.
            caller: name of the tool or method that returned it.
        """
        if isinstance(value, Reply):
            self.reward = _sum(self.reward, _finite(value.reward, "reward"), "reward")
            for name, number in _numbers(value.metrics).items():
                self.metrics[name] = _sum(self.metrics.get(name, 0.0), number, f"metric {name}")
            if value.info:
                self._add_info(value.info, caller)
            if isinstance(value, Done):
                self.done, self.truncated = True, value.truncated
            value = value.content
        if not isinstance(value, str):
            value, self.room = bounded(value, self.room)
            return value
        if len(value) > self.room:
            value = cut(value, self.room)
        self.room -= len(value)
        return value

    def _add_info(self, info: Mapping[str, Any], caller: str) -> None:
        """Add the info of a return value. Raises DefinitionError if it cannot be encoded as JSON."""
        try:
            self.info.update(encoded_info(info))
        except BaseException as error:  # an object's __str__ can raise anything
            raise DefinitionError(
                f"info of {caller}() cannot be sent as JSON: {describe(error)}; use dicts with text as keys, "
                "lists, text, numbers, booleans or None"
            ) from error

    def _reject(self, request: AnyToolCall, reason: str) -> None:
        self.metrics["invalid_calls"] += 1.0
        self._add([ToolAnswer(f"Error: {reason}.", request.id)])

    def _skip(self, requests: Sequence[AnyToolCall], reason: str) -> None:
        self._add([ToolAnswer(f"Not executed: {reason}.", request.id) for request in requests])

    def _add(self, messages: Sequence[Message | ToolAnswer]) -> None:
        """Add messages. Answers precede all other messages, since model APIs accept nothing between them."""
        for message in messages:
            if isinstance(message, Message) and message.role != "tool":
                self.messages.append(message)
            else:
                self.messages.insert(self.answered, message)
                self.answered += 1


def tool_messages(content: object, call_id: str, name: str) -> list[Message | ToolAnswer]:
    """Convert a tool's content to messages. Exactly one of them answers the call.

    Raises DefinitionError if the content is not ``str | Message | list[Message]``.
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


def bounded(content: object, room: int) -> tuple[object, int]:
    """Return content as it can be sent, with at most ``room`` characters, and the remaining room."""
    if isinstance(content, str):
        content = clean(cut(content, room))
        return content, room - len(content)
    if isinstance(content, list):
        bounds = []
        for item in content:
            item, room = bounded(item, room)
            bounds.append(item)
        return bounds, room
    if isinstance(content, Message):
        inner, room = bounded(content.content, room)
        return content if inner is content.content else content.model_copy(update={"content": inner}), room
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        text, room = bounded(content["text"], room)
        return {**content, "text": text}, room
    return content, room


def cut(text: str, room: int) -> str:
    """Return at most the first ``room`` characters, with a note for the model if text was cut."""
    kept = max(room, 0)
    if len(text) <= kept:
        return text
    return f"{text[:kept]}\n[The output was cut: {len(text):,} characters, of which {kept:,} are shown.]"


def as_messages(content: object, where: str) -> list[Message]:
    """Convert ``str | Message | list[Message]`` to messages. Text becomes a user message.

    Raises DefinitionError if the content has another type or cannot be encoded as JSON.
    """
    if isinstance(content, str):
        return [Message(role="user", content=clean(content))]
    messages = [content] if isinstance(content, Message) else content
    if not isinstance(messages, list) or not all(isinstance(item, Message) for item in messages):
        if inspect.iscoroutine(content):
            content.close()
            raise DefinitionError(f"{where} returned a coroutine; await it")
        raise DefinitionError(
            f"{where} returned {type(content).__name__}; return a str, a Message or a list of them"
            f"{_remedy(content, where)}"
        )
    for message in messages:
        _check_json(message, where)
    return messages


def _check_json(message: Message, where: str) -> None:
    """Raise DefinitionError if a message cannot be encoded as JSON, or cannot be parsed again."""
    try:
        text = message_to_json(message)
        if isinstance(message.content, list):
            check_nesting(text)
    except ValueError as error:
        raise DefinitionError(f"{where} returned a message that cannot be sent as JSON: {error}") from None


def _remedy(content: object, where: str) -> str:
    """Return advice about values of unsupported types that contain more than text, or ""."""
    items = content if isinstance(content, list) else [content]
    other = next(item for item in items if not isinstance(item, Message))
    if isinstance(content, list) or (isinstance(content, dict) and "role" in content):
        return f"; write Message(role=..., content=...) instead of a {type(other).__name__}"
    if isinstance(content, dict):
        return ", such as json.dumps(...) of the dict"
    rest = content[1:] if isinstance(content, tuple) else ()
    if where != "reset()" and any(isinstance(part, int | float | np.number) for part in rest):
        return "; with a reward, return Reply(content, reward=...), or Done(content, reward=...) at the end"
    return ""


def as_move(move: object) -> Message:
    """Convert ``ToolCall | str | Message`` to an assistant message. Raises DefinitionError."""
    if isinstance(move, ToolCall):
        move = Message.assistant(None, move)
    elif isinstance(move, str):
        move = Message.assistant(clean(move))
    if not isinstance(move, Message) or move.role != "assistant":
        raise DefinitionError(
            f"expert() returned {type(move).__name__}; return a ToolCall, a str or an assistant Message"
        )
    _check_json(move, "expert()")
    return move


def clean(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _attributes(environment: type) -> list[str]:
    """Return all attribute names, base classes first, in the order of their definition."""
    names: dict[str, None] = {}
    for base in reversed(environment.__mro__):
        names.update(dict.fromkeys(vars(base)))
    return list(names)


def _text(message: AssistantMessage) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


def _numbers(metrics: Mapping[Any, object]) -> dict[str, float]:
    """Return metrics as floats. Raises DefinitionError unless the names are valid and the values finite."""
    return {clean(str(name)): _finite(value, f"metric {name}") for name, value in metrics.items()}


def _sum(total: float, number: float, what: str) -> float:
    """Return the sum of two finite numbers. Raises DefinitionError if it is too large for a float."""
    total += number
    if not math.isfinite(total):
        raise DefinitionError(f"the sum of {what} in one step must be a finite number, got {total!r}")
    return total


def _finite(value: object, what: str) -> float:
    if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
        advice = "; write float(...)" if isinstance(value, Decimal | Fraction | np.ndarray) else ""
        raise DefinitionError(f"{what} must be a finite number, got {value!r}{advice}")
    return float(value)
