"""A tolerant reader of calls that a model writes as JSON, but not in the syntax of its family.

Instruct models often write a call in a code fence or bare, and the token limit can cut the closing tag. An
object is a call only if it names a tool of the session and its arguments are a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.turn import ParsedCall, ParsedTurn, called, scan_json

OBJECT = re.compile(r'{\s*"(?:name|arguments|parameters|id|type|function)"\s*:')
"""Pattern of the beginning of a JSON object that might be a call."""
_KEYS = {"name", "arguments", "parameters", "id", "type"}
"""Keys of a call. An object with others, such as a description, is something else: the tool's schema."""
_FENCE = re.compile(r"```[\w-]*\Z")
_AFTER = re.compile(r"\s*[,;]?\s*(?:\]\s*)?(?:```)?")


def read_tolerantly(
    turn: ParsedTurn, tools: Sequence[ToolSpec], *, thought: re.Pattern[str]
) -> ParsedTurn | None:
    """Read the calls that the family's parser could not read; return None if there are none.

    Calls that could not be read are replaced by the calls in their text. The content is searched only if the
    parser read no call. Text with a mark of a ``thought`` is left alone.
    """
    names = {tool.function.name for tool in tools}
    calls: list[ParsedCall] = []
    content = turn.content
    if content and not any(call.name for call in turn.calls) and not thought.search(content):
        calls, content = _calls_in(content, names)
    for call in turn.calls:
        hidden = bool(call.name) or thought.search(call.arguments)
        found = [] if hidden else _calls_in(call.arguments, names)[0]
        calls += found or [call]
    if calls == list(turn.calls):
        return None
    return replace(turn, content=content or None, calls=tuple(calls))


def _calls_in(text: str, names: Collection[str]) -> tuple[list[ParsedCall], str]:
    """Return the calls in a text, and the text without them, their brackets and their fences."""
    calls: list[ParsedCall] = []
    rest: list[str] = []
    start = position = 0
    while opening := OBJECT.search(text, position):
        found = scan_json(text, opening.start())
        if isinstance(found, json.JSONDecodeError):
            # The text up to the error is part of this object: no call of its own starts there.
            position = max(opening.end(), found.pos)
            continue
        value, end = found
        if call := _call(value, text[opening.start() : end], names):
            calls.append(call)
            before = text[start : opening.start()].rstrip().removesuffix("[").rstrip()
            rest.append(_FENCE.sub("", before).strip())
            after = _AFTER.match(text, end)
            start = position = after.end() if after else end
        else:
            # The call itself is inside {"type": "function", "function": {...}}.
            position = opening.end() if isinstance(value.get("function"), dict) else end
    rest.append(text[start:].strip())
    return calls, "\n".join(part for part in rest if part)


def _call(value: dict[str, Any], text: str, names: Collection[str]) -> ParsedCall | None:
    arguments = value.get("arguments", value.get("parameters"))
    if not (value.keys() <= _KEYS and isinstance(arguments, dict | str)):
        return None
    call = called(value.get("name"), arguments, text, value.get("id"))
    return call if call.name in names else None
