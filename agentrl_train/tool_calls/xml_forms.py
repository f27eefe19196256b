"""Families with calls in tags and arguments as text. The types come from the schemas of the tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.python_forms import python_value
from agentrl_train.tool_calls.turn import (
    Family,
    ParsedCall,
    arguments_of,
    called,
    model_json,
    read_json,
    unreadable,
    until,
)


@dataclass(frozen=True, kw_only=True)
class XmlFamily(Family):
    """Calls in tags. ``{}`` stands for names in the tags."""

    call: tuple[str, str]
    """Tags of a call. The opening tag has the name of the tool."""
    parameter: tuple[str, str]
    """Tags of an argument. The opening tag has its name."""
    block: tuple[str, str] = ("", "")
    """Tags around calls."""
    shared_block: bool = False
    """Whether all calls of a turn are in one block, or each call has its own block."""
    cdata: bool = False
    """Whether values with XML markup or newlines are written as CDATA."""
    opening: str = ""

    def __post_init__(self) -> None:
        tags = [tag.partition("{}")[0].strip() for tag in (self.block[0], self.call[0]) if tag]
        object.__setattr__(self, "opening", "|".join(map(re.escape, tags)))

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read the calls of a block, or one call if there is no block."""
        blocked = bool(self.block[0]) and opening[0] == self.block[0].strip()
        position = opening.end() if blocked else opening.start()
        closing = self.block[1].strip()
        calls: list[ParsedCall] = []
        while found := self._call(text, position, tools):
            call, position = found
            calls.append(call)
            if not self.shared_block:
                break
        if not calls or (blocked and self.shared_block):
            rest, position = until(text, position, closing or self.call[1].strip())
            return ([*calls, unreadable(rest)] if rest.strip() or not calls else calls), position
        end = re.compile(rf"\s*{re.escape(closing)}").match(text, position) if closing else None
        return calls, end.end() if end else position

    def _call(self, text: str, position: int, tools: Sequence[ToolSpec]) -> tuple[ParsedCall, int] | None:
        head = self._head.match(text, position)
        if head is None:
            return None
        position = head.end()
        arguments: dict[str, Any] = {}
        name = head[1].strip()
        schema = next((tool.function.parameters for tool in tools if tool.function.name == name), {})
        while part := self._parameter.match(text, position):
            key, position = part[1].strip(), part.end()
            arguments[key] = typed(self._text(part[2]), argument_types(schema, key))
        end = self._end.match(text, position)
        if end is None:
            body, position = until(text, head.start(1), self.call[1].strip())
            return unreadable(body), position
        return called(name, arguments, text[head.start(1) : end.start()]), end.end()

    def _text(self, value: str) -> str:
        if self.cdata and (data := _CDATA.fullmatch(value)):
            return data[1].replace(_CDATA_BREAK, "]]>")
        return value

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls in their blocks."""
        bodies = list(map(self._write, calls))
        if self.shared_block:
            return f"{self.block[0]}{''.join(bodies)}{self.block[1]}"
        return "\n".join(f"{self.block[0]}{body}{self.block[1]}" for body in bodies)

    def _write(self, call: ParsedCall) -> str:
        parts = []
        for key, value in arguments_of(call).items():
            text = value if isinstance(value, str) else model_json(value)
            if self.cdata and re.search(r"[<&\n]", text):
                text = f"<![CDATA[{text.replace(']]>', _CDATA_BREAK)}]]>"
            parts.append(self.parameter[0].replace("{}", key) + text + self.parameter[1])
        return self.call[0].replace("{}", call.name) + "".join(parts) + self.call[1]

    @cached_property
    def _head(self) -> re.Pattern[str]:
        before, _, after = self.call[0].partition("{}")
        # If no tag follows a name, it ends at the start of the next tag.
        return re.compile(
            rf"{_loose(before)}([^<>\"]*[^<>\"\s])\s*+{_loose(after) if after.strip() else '(?=<)'}"
        )

    @cached_property
    def _parameter(self) -> re.Pattern[str]:
        before, _, after = self.parameter[0].partition("{}")
        newline = "\n?" if after.endswith("\n") else ""
        following = rf"(?={_loose(before)}|{_loose(self.call[1])})"
        closing = f"{newline}{re.escape(self.parameter[1].strip())}{following}"
        return re.compile(
            rf"{_loose(before)}([^<>]*[^<>\s]){_loose(after).removesuffix(_ANY_SPACE)}{newline}(.*?){closing}",
            re.DOTALL,
        )

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile(_loose(self.call[1]))


_ANY_SPACE = r"\s*+"


def _loose(tags: str) -> str:
    """Return a pattern of tags, with any space around them and instead of their newlines."""
    return _ANY_SPACE + _ANY_SPACE.join(map(re.escape, tags.strip().split("\n"))) + _ANY_SPACE


_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_CDATA_BREAK = "]]]]><![CDATA[>"


def typed(text: str, types: Set[str]) -> Any:
    """Return the value of a text that can have some JSON types.

    Strings stay text. Other types are read as JSON, or as lists and objects in Python's syntax, which some
    templates write. Texts without a type are also read in this way. A text that cannot be parsed stays text,
    and the environment returns an error to the model.
    """
    plain = text.strip()
    if "null" in types and plain in ("null", "None"):
        return None
    if "string" in types:
        return text
    if plain in ("True", "False") and "boolean" in types:
        return plain == "True"
    found = read_json(plain, 0)
    if found and found[1] == len(plain):
        return found[0]
    try:
        return python_value(plain) if plain[:1] in ("[", "{") else text
    except ValueError:
        return text


def argument_types(schema: Mapping[str, Any], key: str) -> Set[str]:
    """Return the JSON types that the schema of a tool allows for an argument. Empty if it has none."""
    properties = schema.get("properties")
    pending = [properties.get(key)] if isinstance(properties, Mapping) else []
    types: set[str] = set()
    followed: set[str] = set()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type")
        types.update(name for name in [declared, *_as_list(declared)] if isinstance(name, str))
        values = [part["const"]] if "const" in part else _as_list(part.get("enum"))
        types.update(_TYPES[type(value)] for value in values if type(value) in _TYPES)
        for choices in ("anyOf", "oneOf", "allOf"):
            pending += _as_list(part.get(choices))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            target: Any = schema
            for step in reference.removeprefix("#/").split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            pending.append(target)
    return types


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
