"""A sub-agent as a tool, alongside the tools of the environment (MATPO, arXiv 2510.04678).

The planner is the policy in the context of the episode. It sees one more tool, which takes a task. A worker
answers each call: the same policy with its own system prompt, tools and context, in the same session. The
last text of the worker is the result of the call. This module has pure functions, and ``actor.py`` plays
both::

    segment 0   planner   [system, problem] delegate(task) ............ report -> submit(...)
    segment 1   worker                      [system, task] search(...) -> report
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl_env.types import FunctionSpec, Message, ToolCall, ToolSpec
from agentrl_train.config import SubAgentSection
from agentrl_train.errors import ConfigError

LAST_TURN = "This is your last turn. Report what you have found, without calling a tool."
"""Message of the user in front of the last turn of a worker."""
NO_REPORT = "The agent ended without a report."
"""Result of a call whose worker wrote no text in its last turn."""
_TASK = {"type": "string", "description": "What to do, with all that the agent needs to know for it."}


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The calls of one message, grouped by who answers them."""

    sent: Message | None
    """The message with only the environment's calls, or None if all of its calls are others."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """Id of a call -> the task for a worker."""
    errors: Mapping[str, Message] = field(default_factory=dict)
    """Id of an invalid call -> the answer to it."""


def planner_tools(sub_agent: SubAgentSection, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return the tools that the planner sees: its share of the environment's, and the sub-agent."""
    parameters = {
        "type": "object",
        "properties": {"task": _TASK},
        "required": ["task"],
        "additionalProperties": False,
    }
    function = FunctionSpec(name=sub_agent.name, description=sub_agent.description, parameters=parameters)
    return (*_select_tools(tools, sub_agent.planner_tools), ToolSpec(function=function))


def worker_tools(sub_agent: SubAgentSection, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return the tools of the environment that a worker sees."""
    return _select_tools(tools, sub_agent.worker_tools)


def worker_opening(sub_agent: SubAgentSection, task: str) -> tuple[Message, ...]:
    """Return the messages in front of the first turn of a worker."""
    return (
        Message(role="system", content=sub_agent.system_prompt),
        Message(role="user", content=task),
    )


def views(
    sub_agent: SubAgentSection | None, opening: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[tuple[Sequence[Message], Sequence[ToolSpec]]]:
    """Return the opening and the tools of every kind of segment of a session.

    Raises:
        ConfigError: the settings name a tool that the session does not have, or the sub-agent has the name of
            one of its tools.
    """
    if sub_agent is None:
        return [(opening, tools)]
    names = [tool.function.name for tool in tools]
    if sub_agent.name in names:
        raise ConfigError(
            f"rollout.sub_agent.name = {sub_agent.name!r} is a tool of the environment: use another name"
        )
    for key in ("planner_tools", "worker_tools"):
        if unknown := [name for name in getattr(sub_agent, key) or () if name not in names]:
            raise ConfigError(
                f"rollout.sub_agent.{key} names {unknown[0]!r}, which the environment does not have; its "
                f"tools: {', '.join(names)}"
            )
    return [
        (opening, planner_tools(sub_agent, tools)),
        (worker_opening(sub_agent, "task"), worker_tools(sub_agent, tools)),
    ]


def divide_calls(message: Message, *, sub_agent: SubAgentSection, tools: Sequence[ToolSpec]) -> Division:
    """Divide the calls of a message of an agent that sees ``tools``.

    The environment answers texts, calls that could not be parsed, and calls of its tools that the agent sees.
    """
    names = [tool.function.name for tool in tools]
    sent: list[ToolCall] = []
    tasks: dict[str, str] = {}
    errors: dict[str, Message] = {}
    for call in message.tool_calls or ():
        name = call.function.name
        if name and name not in names:
            errors[call.id] = _answer(call, f"Error: there is no tool {name!r}. Tools: {', '.join(names)}.")
        elif name != sub_agent.name:
            sent.append(call)
        elif (task := _task(call)) is None:
            errors[call.id] = _answer(call, f"Error: {name} takes one argument, task, which is a text.")
        else:
            tasks[call.id] = task
    if not tasks and not errors:
        return Division(sent=message)
    rest = message.model_copy(update={"tool_calls": tuple(sent)}) if sent else None
    return Division(sent=rest, tasks=tasks, errors=errors)


def report(message: Message) -> str:
    """Return the text of a worker's last message."""
    text = message.content.strip() if isinstance(message.content, str) else ""
    return text or NO_REPORT


def merge_answers(
    message: Message, reply: Sequence[Message], answers: Mapping[str, Message]
) -> tuple[Message, ...]:
    """Return all answers in the order of the calls of ``message``, and then the reply's other messages."""
    given: dict[str | None, list[Message]] = {}
    others: list[Message] = []
    for one in reply:
        (given.setdefault(one.tool_call_id, []) if one.role == "tool" else others).append(one)
    ordered: list[Message] = []
    for call in message.tool_calls or ():
        ordered += [answers[call.id]] if call.id in answers else given.pop(call.id, [])
    return (*ordered, *(one for rest in given.values() for one in rest), *others)


def _select_tools(tools: Sequence[ToolSpec], names: Collection[str] | None) -> tuple[ToolSpec, ...]:
    return tuple(tool for tool in tools if names is None or tool.function.name in names)


def _task(call: ToolCall) -> str | None:
    """Return the task of a call of the sub-agent; None if its arguments are not valid."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return None
    task = arguments.get("task") if isinstance(arguments, dict) and len(arguments) == 1 else None
    return task if isinstance(task, str) and task.strip() else None


def _answer(call: ToolCall, content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id=call.id)
