"""Step 3 of 9: ToolCall -> StepResult. Methods as tools: what a model sees, and how it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar, overload

from agentrl_env.errors import DefinitionError
from agentrl_env.schema import Arguments, echo
from agentrl_env.types import FunctionSpec, Message, ToolSpec

F = TypeVar("F", bound=Callable[..., Any])
Content = str | Message | list[Message]
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
            if hasattr(function, _MARK):
                self._add(environment, attribute, function)
        self.specs = tuple(tool.spec for tool in self.tools.values())
        self.names = ", ".join(self.tools) or "none"
        self.all_sync = not any(tool.is_async for tool in self.tools.values())

    def _add(self, environment: type, attribute: str, function: Callable[..., Any]) -> None:
        options: _Options = getattr(function, _MARK)
        if options.name in self.tools:
            raise DefinitionError(f"{environment.__name__} has two tools named {options.name!r}; rename one")
        if not inspect.isfunction(function):
            raise DefinitionError(
                f"{environment.__name__}.{attribute}: put @tool on a plain method, closest to it"
            )
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
            is_async=inspect.iscoroutinefunction(function),
        )

    def unknown(self, name: str) -> str:
        """Return what the model is told when it calls a tool that does not exist."""
        return f"Error: there is no tool {echo(name)}. Tools: {self.names}."


@functools.cache
def toolset(environment: type) -> Toolset:
    """Return the tools of an environment class. Raises DefinitionError."""
    return Toolset(environment)


def tool_messages(content: object, call_id: str, name: str) -> list[Message]:
    """Turn a tool's content into messages, exactly one of which answers the call.

    Raises DefinitionError where the content is none of ``str | Message | list[Message]``.
    """
    if isinstance(content, str):
        return [Message(role="tool", tool_call_id=call_id, content=content)]
    messages = as_messages(content, f"{name}()")
    answers = [message for message in messages if message.role == "tool"]
    if not answers:
        return [Message(role="tool", tool_call_id=call_id, content=""), *messages]
    if len(answers) > 1:
        raise DefinitionError(f"{name}() returned {len(answers)} tool messages for one call")
    return [
        message.model_copy(update={"tool_call_id": call_id}) if message.role == "tool" else message
        for message in messages
    ]


def as_messages(content: object, where: str, role: str = "user") -> list[Message]:
    """Turn ``str | Message | list[Message]`` into messages; text speaks as ``role``."""
    if isinstance(content, str):
        return [Message(role=role, content=content)]  # type: ignore[arg-type]
    if isinstance(content, Message):
        return [content]
    if isinstance(content, list) and all(isinstance(item, Message) for item in content):
        return content
    raise DefinitionError(
        f"{where} returned {type(content).__name__}; return a str, a Message or a list of them"
    )


def _attributes(environment: type) -> list[str]:
    """Return every attribute name, base classes first, each in the order it is written."""
    names: dict[str, None] = {}
    for base in reversed(environment.__mro__):
        names.update(dict.fromkeys(vars(base)))
    return list(names)
