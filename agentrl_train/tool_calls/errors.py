"""Error messages for turns without a call and for unreadable calls. They teach the syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl_env.types import Message, ToolSpec
from agentrl_train.tool_calls.schemas import example_arguments
from agentrl_train.tool_calls.turn import OBJECT, ParsedCall, ParsedTurn, ToolParser, model_json, scan_json

_QUOTED = 24
"""Number of quoted characters before an error."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
"""A string, closed or not, or a bracket."""
_CLOSING = {"{": "}", "[": "]"}


def with_syntax(
    reply: Sequence[Message],
    message: Message,
    *,
    invalid_calls: int,
    parser: ToolParser,
    tools: Sequence[ToolSpec],
) -> Sequence[Message]:
    """Return the environment's reply to a turn, with the reason and the syntax if no call could be parsed.

    The environment does not get the original text. It sees a message without calls, or a call without a name.
    It answers a message without calls with a text, and the syntax is added if the turn counts as invalid. It
    answers a call without a name with an error, which is replaced.
    """
    if not tools:
        return reply
    unread = {call.id: call.function.arguments for call in message.tool_calls or () if not call.function.name}
    if not message.tool_calls and invalid_calls and reply and isinstance(reply[-1].content, str):
        text = message.content if isinstance(message.content, str) else ""
        reason = (
            f" A call in your message was not read: {problem(text, tools)}." if OBJECT.search(text) else ""
        )
        content = f"{reply[-1].content}{reason} {syntax(parser, tools, text)}"
        return [*reply[:-1], reply[-1].model_copy(update={"content": content})]
    replaced = []
    for answer in reply:
        if answer.role == "tool" and answer.tool_call_id in unread:
            text = unread.pop(answer.tool_call_id)
            content = f"Error: the call was not read: {problem(text, tools)}. {syntax(parser, tools, text)}"
            answer = answer.model_copy(update={"content": content})
        replaced.append(answer)
    return replaced


def syntax(parser: ToolParser, tools: Sequence[ToolSpec], text: str = "") -> str:
    """Return the syntax of a call. The example is the tool in a text, or else the first tool."""
    tool = next((tool for tool in tools if tool.function.name in text), tools[0])
    arguments = model_json(example_arguments(tool, text="..."))
    call = parser.render(ParsedTurn(calls=(ParsedCall(tool.function.name, arguments),)))
    return f"Write a call like this:\n{call}"


def problem(text: str, tools: Sequence[ToolSpec]) -> str:
    """Return why a text could not be parsed as a call."""
    start = text.find("{")
    if start < 0:
        return "it has no complete name and arguments"
    opening = OBJECT.search(text)
    start = opening.start() if opening else start
    found = scan_json(text, start)
    if isinstance(found, json.JSONDecodeError):
        return _json_problem(text.rstrip(), start, found)
    value, _ = found
    names = [tool.function.name for tool in tools]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return 'its JSON has no "name" of a tool'
    if name not in names:
        return f"there is no tool {json.dumps(name)}; tools: {', '.join(names)}"
    if not isinstance(value.get("arguments", value.get("parameters")), dict):
        return 'its "arguments" are not a JSON object'
    return "it is not written in the syntax of a call"


def _json_problem(text: str, start: int, error: json.JSONDecodeError) -> str:
    missing = _missing(text, start)
    if error.pos >= len(text) or error.msg.startswith("Unterminated string"):
        return f"its JSON ends early, after {_tail(text, len(text))}; missing at the end: {missing}"
    what = error.msg[:1].lower() + error.msg[1:]
    return f"its JSON is wrong at character {error.pos - start + 1}, after {_tail(text, error.pos)}: {what}"


def _missing(text: str, start: int) -> str:
    """Return the characters that close the strings and brackets of a text."""
    stack: list[str] = []
    quote = ""
    for token in _TOKEN.finditer(text, start):
        part = token[0]
        if part in _CLOSING:
            stack.append(_CLOSING[part])
        elif stack and part == stack[-1]:
            stack.pop()
        elif part.startswith('"') and (len(part) == 1 or not re.search(r'(?<!\\)(?:\\\\)*"\Z', part[1:])):
            quote = '"'
    return quote + "".join(reversed(stack))


def _tail(text: str, end: int) -> str:
    return repr(text[max(0, end - _QUOTED) : end])
