"""Families with calls as JSON: in a tag, bare, or after the name of the tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.python_forms import python_calls
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
class JsonFamily(Family):
    """JSON in a tag: one call, or a list of calls."""

    opening_tag: str
    closing_tag: str
    opening: str = ""
    listed: bool = True
    """Whether all calls of a turn are one list, or each call has its own tag."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "opening", self.opening or re.escape(self.opening_tag))

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read the JSON after the tag up to its end. A string in it can contain the closing tag."""
        if (found := read_json(text, opening.end())) and (end := self._end.match(text, found[1])):
            body = text[opening.end() : found[1]]
            return entries(found[0], body, self.entry), end.end()
        body, position = until(text, opening.end(), self.closing_tag)
        return [unreadable(body)], position

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls in tags."""
        bodies = [model_json(self.body(call)) for call in calls]
        if self.listed:
            return f"{self.opening_tag}[{', '.join(bodies)}]{self.closing_tag}"
        return "\n".join(f"{self.opening_tag}\n{body}\n{self.closing_tag}" for body in bodies)

    def entry(self, value: dict[str, Any], text: str) -> ParsedCall:
        """Read one call."""
        return json_call(value, text)

    def body(self, call: ParsedCall) -> dict[str, Any]:
        """Return one call as the family's JSON."""
        return {"name": call.name, "arguments": arguments_of(call)}

    @cached_property
    def _end(self) -> re.Pattern[str]:
        if not self.closing_tag:
            return re.compile(r"\s*")
        return re.compile(rf"\s*(?:{re.escape(self.closing_tag)}|\Z|(?={self.opening}))")


class Apertus(JsonFamily):
    """``<|tools_prefix|>[{"name": {arguments}}]<|tools_suffix|>``."""

    def entry(self, value: dict[str, Any], text: str) -> ParsedCall:
        """Read one call, which is an object with one key."""
        name, arguments = next(iter(value.items()), ("", None))
        return called(name if len(value) == 1 else "", arguments, text)

    def body(self, call: ParsedCall) -> dict[str, Any]:
        """Return an object with one key."""
        return {call.name: arguments_of(call)}


class Cohere(JsonFamily):
    """``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>``."""

    def entry(self, value: dict[str, Any], text: str) -> ParsedCall:
        """Read one call."""
        return called(value.get("tool_name"), value.get("parameters"), text, value.get("tool_call_id", ""))

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls, numbered if they have no id."""
        return super().write([ParsedCall(c.name, c.arguments, c.id or str(n)) for n, c in enumerate(calls)])

    def body(self, call: ParsedCall) -> dict[str, Any]:
        """Return one call as the family's JSON."""
        return {"tool_call_id": call.id, "tool_name": call.name, "parameters": arguments_of(call)}


@dataclass(frozen=True, kw_only=True)
class Llama(Family):
    """A turn that is ``{"name": ..., "parameters": {...}}``, or ``<|python_tag|>`` before it."""

    opening: str = (
        r"<\|python_(?:tag|start)\|>(?:<\|python_end\|>)?"
        r'|(?<![^\s;,}]){\s*"name"\s*:|(?:\A\s*+|(?<=\n)[ \t]*+){\s*"'
    )

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read one call, JSON or ``name.call(argument=value)``. Other JSON without a tag is content."""
        tagged = opening[0].startswith("<|python_")
        start = opening.end() if tagged else opening.start()
        if found := read_json(text, start):
            value, end = found
            if not tagged and isinstance(value, dict) and not _is_call(value, tools):
                return [], end
            separator = re.compile(r"\s*(?:[;,]|<\|python_end\|>)?\s*").match(text, end)
            assert separator is not None
            return entries(value, text[start:end], json_call), separator.end()
        python = python_calls(text[start:]) if tagged else None
        calls = [ParsedCall(c.name.removesuffix(".call"), c.arguments) for c in python or ()]
        return calls or [unreadable(text[start:])], len(text)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls, with semicolons between them."""
        bodies = ({"name": call.name, "parameters": arguments_of(call)} for call in calls)
        return "; ".join(model_json(body) for body in bodies)


def _is_call(value: dict[str, Any], tools: Sequence[ToolSpec]) -> bool:
    """Return True if JSON is a call, even a malformed one, and not an answer that contains a name."""
    parts = (value.get(key) for key in ("parameters", "arguments", "function"))
    return any(isinstance(part, dict) for part in parts) or value.get("name") in {
        tool.function.name for tool in tools
    }


@dataclass(frozen=True, kw_only=True)
class Mistral(Family):
    """``[TOOL_CALLS]`` with a list of JSON calls, or ``name[ARGS]{...}``, or ``name[CALL_ID]id[ARGS]{...}``.

    All three forms can be read. ``form`` is the form to write.
    """

    form: str
    opening: str = r"\[TOOL_CALLS\]"
    thoughts: tuple[str, ...] = ("[THINK]{}[/THINK]", "<think>\n{}\n</think>")
    gap: str = ""

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read a list of calls, or one call and its arguments."""
        start = opening.end()
        if found := read_json(text, start):
            return entries(found[0], text[start : found[1]], _mistral_call), found[1]
        head = _MISTRAL_HEAD.match(text, start)
        if head and (found := read_json(text, head.end())):
            call = called(head[1], found[0], text[start : found[1]], _nine(head[2]))
            return [call], found[1]
        body, _ = until(text, start, "[TOOL_CALLS]")
        return [unreadable(body)], start + len(body)

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls in the family's form."""
        if self.form == "list":
            bodies = [{"name": call.name, "arguments": arguments_of(call)} for call in calls]
            return f"[TOOL_CALLS]{model_json(bodies)}"
        return "".join(
            self.form.format(
                name=call.name,
                id=_nine(call.id) or self.call_id(0, number, call.name),
                arguments=model_json(arguments_of(call)),
            )
            for number, call in enumerate(calls)
        )

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return nine letters and digits, the only ids that the family's templates accept."""
        return sha256(f"{turn} {number} {name}".encode()).hexdigest()[:9]


_MISTRAL_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\s\[]*)\s*)?(?:\[ARGS\])?")


def _nine(text: Any) -> str:
    return text if isinstance(text, str) and re.fullmatch("[A-Za-z0-9]{9}", text) else ""


def _mistral_call(value: dict[str, Any], text: str) -> ParsedCall:
    call = json_call(value, text)
    return ParsedCall(call.name, call.arguments, _nine(call.id))


@dataclass(frozen=True, kw_only=True)
class NamedFamily(Family):
    """A block of calls between tokens, each a name and then the JSON of its arguments: DeepSeek, Kimi."""

    block: tuple[str, str]
    call: tuple[str, str, str]
    """Tokens that open a call, divide its name from its arguments, and close it."""
    opening: str = ""
    gap: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "opening", f"{re.escape(self.block[0])}|{re.escape(self.call[0])}")

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read the calls of a block. A string in the arguments can contain the closing tokens."""
        open_call, divider, close_call = (re.escape(token) for token in self.call)
        begin = re.compile(rf"\s*{open_call}(.*?){divider}", re.DOTALL)
        finish = re.compile(rf"\s*(?:{close_call}|\Z|(?={open_call}|{re.escape(self.block[1])}))")
        position = opening.start() if opening[0] == self.call[0] else opening.end()
        calls = []
        while head := begin.match(text, position):
            found = self.read_call(head[1], text, head.end())
            end = finish.match(text, found[1]) if found else None
            if found and end:
                calls.append(found[0])
                position = end.end()
            else:
                body, position = until(text, head.start(1), self.call[2])
                calls.append(unreadable(body))
        rest, position = until(text, position, self.block[1])
        if rest.strip() or not calls:
            calls.append(unreadable(rest))
        return calls, position

    def read_call(self, head: str, text: str, position: int) -> tuple[ParsedCall, int] | None:
        """Read one call: its head, the text before the divider, and the arguments at a position."""
        found = read_json(text, position)
        return (called(head, found[0], text[position : found[1]]), found[1]) if found else None

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls in a block."""
        opening, divider, closing = self.call
        bodies = (
            f"{opening}{self.head(call, number)}{divider}{self.arguments(call)}{closing}"
            for number, call in enumerate(calls)
        )
        return f"{self.block[0]}{''.join(bodies)}{self.block[1]}"

    def head(self, call: ParsedCall, number: int) -> str:
        """Return the text before the divider."""
        return call.name

    def arguments(self, call: ParsedCall) -> str:
        """Return the text after the divider."""
        return model_json(arguments_of(call))


@dataclass(frozen=True, kw_only=True)
class DeepSeek(NamedFamily):
    """``name<|sep|>{...}``, and before V3.1 ``function<|sep|>name`` with the arguments in a fence.

    Both forms can be read. ``fenced`` selects the form to write.
    """

    fenced: bool
    block: tuple[str, str] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call: tuple[str, str, str] = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")

    def read_call(self, head: str, text: str, position: int) -> tuple[ParsedCall, int] | None:
        """Read one call of either form."""
        fence = _FENCE.match(text, position) if head.strip() == "function" else None
        if fence is None:
            return super().read_call(head, text, position)
        if (found := read_json(text, fence.end())) and (end := _FENCE_END.match(text, found[1])):
            return called(fence[1], found[0], text[position : end.end()]), end.end()
        return None

    def head(self, call: ParsedCall, number: int) -> str:
        """Return the name, or the type of the call."""
        return "function" if self.fenced else call.name

    def arguments(self, call: ParsedCall) -> str:
        """Return the arguments. In the fenced form they follow the name in a code fence."""
        arguments = super().arguments(call)
        return f"{call.name}\n```json\n{arguments}\n```" if self.fenced else arguments


_FENCE = re.compile(r"\s*([^\n`]+?)\s*```(?:json)?")
_FENCE_END = re.compile(r"\s*(?:```)?")


@dataclass(frozen=True, kw_only=True)
class Kimi(NamedFamily):
    """``functions.name:0`` before the arguments: the id of the call, which holds its name."""

    block: tuple[str, str] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call: tuple[str, str, str] = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    thoughts: tuple[str, ...] = ("<think>{}</think>",)

    def read_call(self, head: str, text: str, position: int) -> tuple[ParsedCall, int] | None:
        """Read one call, with the id that the model wrote."""
        found = read_json(text, position)
        name = re.fullmatch(r"(?:functions\.)?(.+?)(?::\d+)?", head.strip())
        if found is None or name is None:
            return None
        return called(name[1], found[0], text[position : found[1]], head.strip()), found[1]

    def head(self, call: ParsedCall, number: int) -> str:
        """Return the id."""
        return call.id or self.call_id(0, number, call.name)

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return ``functions.{name}:{number}``."""
        return f"functions.{name}:{number}"


@dataclass(frozen=True, kw_only=True)
class Gemma(Family):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,key:1}<tool_call|>``."""

    opening: str = r"<\|tool_call>"
    thoughts: tuple[str, ...] = ("<|channel>thought\n{}\n<channel|>",)
    gap: str = ""

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read one call."""
        head = re.compile(r"\s*call:([^\s{]+)\s*(?={)").match(text, opening.end())
        try:
            if head and (found := _gemma_value(text, head.end())):
                end = re.compile(r"\s*(?:<tool_call\|>|\Z|(?=<\|tool_call>))").match(text, found[1])
                if end:
                    return [called(head[1], found[0], text[opening.end() : found[1]])], end.end()
        except (ValueError, IndexError, RecursionError):
            pass
        body, position = until(text, opening.end(), "<tool_call|>")
        return [unreadable(body)], position

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls."""
        return "".join(
            f"<|tool_call>call:{call.name}{_gemma_text(arguments_of(call))}<tool_call|>" for call in calls
        )


_GEMMA_QUOTE = '<|"|>'
_GEMMA_KEY = re.compile(r"[^\s:{}\[\],<]+(?: +[^\s:{}\[\],<]+)*")
_GEMMA_NULL = re.compile(r"None\b")
"""The template writes null as Python does."""


def _gemma_value(text: str, position: int) -> tuple[Any, int]:
    """Return the value at a position and the position after it.

    Raises:
        ValueError: there is no value.
    """
    position = _after_space(text, position)
    if text.startswith(_GEMMA_QUOTE, position):
        start = position + len(_GEMMA_QUOTE)
        end = text.index(_GEMMA_QUOTE, start)
        return text[start:end], end + len(_GEMMA_QUOTE)
    if text[position] not in "{[":
        if null := _GEMMA_NULL.match(text, position):
            return None, null.end()
        found = read_json(text, position)
        if found is None:
            raise ValueError("no value")
        return found
    closing = "}" if text[position] == "{" else "]"
    items: list[Any] = []
    position = _after_space(text, position + 1)
    while text[position] != closing:
        if items:
            if text[position] != ",":
                raise ValueError("no comma")
            position = _after_space(text, position + 1)
        if closing == "}":
            key, position = _gemma_key(text, position)
            position = _after_space(text, position)
            if text[position] != ":":
                raise ValueError("no colon")
            value, position = _gemma_value(text, position + 1)
            items.append((key, value))
        else:
            value, position = _gemma_value(text, position)
            items.append(value)
        position = _after_space(text, position)
    return (dict(items) if closing == "}" else items), position + 1


def _gemma_key(text: str, position: int) -> tuple[str, int]:
    if bare := _GEMMA_KEY.match(text, position):
        return bare[0], bare.end()
    key, position = _gemma_value(text, position)
    return str(key), position


def _gemma_text(value: Any) -> str:
    """Return a value as the template writes it, with keys in alphabetical order."""
    if isinstance(value, str):
        return f"{_GEMMA_QUOTE}{value}{_GEMMA_QUOTE}"
    if isinstance(value, dict):
        keys = sorted(value, key=str.lower)
        names = (key if _GEMMA_KEY.fullmatch(key) else _gemma_text(key) for key in keys)
        return (
            "{"
            + ",".join(f"{name}:{_gemma_text(value[k])}" for name, k in zip(names, keys, strict=True))
            + "}"
        )
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_text, value))}]"
    return model_json(value)


def _after_space(text: str, position: int) -> int:
    while text[position].isspace():
        position += 1
    return position


def entries(value: Any, text: str, read: Any) -> list[ParsedCall]:
    """Read a JSON value as one call or a list of calls. A list without calls is one unreadable call."""
    if isinstance(value, dict):
        return [read(value, text)]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [read(item, model_json(item)) for item in value]
    return [unreadable(text)]


def json_call(value: dict[str, Any], text: str) -> ParsedCall:
    """Read ``{"name": ..., "arguments": {...}}``, also with ``parameters`` or nested as OpenAI does."""
    function = value.get("function")
    if isinstance(function, dict):
        return json_call({"id": value.get("id"), **function, "function": None}, text)
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return called(value.get("name"), arguments, text, value.get("id"))
