"""An assistant turn as text and as its parts: thought, content and calls.

Instruct models often write a call in a code fence or without tags, and the token limit can cut off the
closing tag. ``read_tolerantly`` also reads such calls: an object is a call only if it names a tool of the
session and its arguments are a JSON object.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from agentrl_env.types import ToolSpec

OBJECT = re.compile(r'{\s*"(?:name|arguments|parameters|id|type|function)"\s*:')
"""Pattern of the start of a JSON object that might be a call."""
_KEYS = {"name", "arguments", "parameters", "id", "type"}
"""Keys of a call. An object with other keys, such as a description, is not a call but the tool's schema."""
_FENCE = re.compile(r"```[\w-]*\Z")
_AFTER = re.compile(r"\s*[,;]?\s*(?:\]\s*)?(?:```)?")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a tool.

    A readable call has a name, and the text of a JSON object as arguments. An unreadable call has an empty
    name, and its own text as arguments.
    """

    name: str
    arguments: str
    id: str = field(default="", compare=False)
    """The id that the model wrote if the family's calls have ids, or else ""."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn. Calls within ``thought`` are part of its text."""

    content: str | None = None
    thought: str | None = None
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    """Reads and writes the assistant turns of one family of models."""

    @property
    def name(self) -> str:
        """Key in ``PARSERS``."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_thought: bool = False) -> ParsedTurn:
        """Parse a sampled turn. Any text can be parsed, so this never raises.

        Args:
            text: the completion, decoded with its special tokens, without the final stop token.
            tools: the tools of the session. Their schemas determine the types of arguments written without
                types.
            in_thought: True if the generation prompt has opened a thought (it ends with ``<think>``), so that
                the turn starts inside it. Without its closing tag the whole turn is then a thought.
        """
        ...

    def render(self, turn: ParsedTurn, *, in_thought: bool = False) -> str:
        """Return the text a model would sample for a turn, without the stop token.

        Args:
            turn: content, thought and calls.
            in_thought: as in ``parse``. The opening tag of the thought is then omitted, but never the closing
                tag.

        Raises:
            ValueError: the arguments of a call are not a JSON object.
        """
        ...

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return the id of a call in the form that the family's templates accept."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """Base of the families: a turn is text, with thoughts and calls between their marks."""

    name: str
    template: str
    """Pattern in chat templates of the family that is not in those of earlier families in ``PARSERS``."""

    opening: str
    """Pattern of the start of a call, or of a block of calls."""
    thoughts: tuple[str, ...] = ("<think>\n{}\n</think>\n\n",)
    """Forms of a thought, starting with the family's own."""
    spoken: str = "{}"
    """Form of the content."""
    gap: str = "\n"
    """Text between content and calls."""

    @abstractmethod
    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Return the calls that start at a match of ``opening``, and the position after them.

        Without calls, the text up to that position is content.
        """

    @abstractmethod
    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the text of calls."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_thought: bool = False) -> ParsedTurn:
        """Parse a turn like ``ToolParser``."""
        text = without_surrogates(text)
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        if in_thought:
            closing = self._closing.search(text)
            if closing is None:
                return ParsedTurn(thought=self._opened.sub("", text, count=1).strip() or None)
            thoughts.append(self._opened.sub("", text[: closing.start()], count=1))
            position = closing.end()
        while mark := self._mark.search(text, position):
            content.append(text[position : mark.start()])
            if mark["open"]:
                closing_tag = self._tags[mark["open"]]
                thought, _, _ = text[mark.end() :].partition(closing_tag)
                thoughts.append(thought)
                position = min(len(text), mark.end() + len(thought) + len(closing_tag))
            elif mark["close"]:
                # The thought was opened before the text, so all text so far belongs to it.
                thoughts, content, calls = [text[: mark.start()]], [], []
                position = mark.end()
            else:
                found, position = self.read(text, mark, tools)
                calls += found
                if not found:
                    content.append(text[mark.start() : position])
        content.append(text[position:])
        said = "".join(self._unwrapped.sub("", part) for part in content).strip()
        thought = "\n".join(part.strip() for part in thoughts if part.strip())
        return ParsedTurn(said or None, thought or None, tuple(calls))

    def render(self, turn: ParsedTurn, *, in_thought: bool = False) -> str:
        """Render a turn like ``ToolParser``."""
        text = ""
        if turn.thought or in_thought:
            opening, _, closing = self.thoughts[0].partition("{}")
            text = ("" if in_thought else opening) + (turn.thought or "") + closing
        if turn.content:
            text += self.spoken.replace("{}", turn.content, 1)
        if turn.calls:
            text += (self.gap if turn.content else "") + self.write(turn.calls)
        return without_surrogates(text)

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return ``call_{turn}_{number}``."""
        return f"call_{turn}_{number}"

    @cached_property
    def _tags(self) -> dict[str, str]:
        """Closing tags of thoughts by their opening tags."""
        parts = (form.partition("{}") for form in self.thoughts)
        return {opening.strip(): closing.strip() for opening, _, closing in parts}

    @cached_property
    def _opened(self) -> re.Pattern[str]:
        return re.compile(rf"\A\s*(?:{one_of(self._tags)})")

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(one_of(self._tags.values()))

    @cached_property
    def _mark(self) -> re.Pattern[str]:
        tags = rf"(?P<open>{one_of(self._tags)})|(?P<close>{one_of(self._tags.values())})"
        return re.compile(rf"{tags}|{self.opening}")

    @cached_property
    def _unwrapped(self) -> re.Pattern[str]:
        """Texts before and after the content in ``spoken``."""
        return re.compile(one_of(part for part in self.spoken.split("{}") if part))


def one_of(texts: Iterable[str]) -> str:
    """Return a pattern of any of some texts, longest first because one can start with another."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


def until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Return the text from a position to a closing tag, or to the end, and the position after the tag."""
    body, tag, _ = text[start:].partition(closing) if closing else (text[start:], "", "")
    return body, start + len(body) + len(tag)


def unreadable(text: str) -> ParsedCall:
    """Return an unreadable call for a text."""
    return ParsedCall("", text.strip())


def called(name: Any, arguments: Any, text: str, call_id: Any = "") -> ParsedCall:
    """Return a call of parsed parts. It is unreadable unless it has a name and an object as arguments.

    Args:
        name: name of the tool.
        arguments: JSON object or its text; None if there are no arguments.
        text: text of the call.
        call_id: the id that the model wrote.
    """
    try:
        value = _JSON.decode(arguments) if isinstance(arguments, str) else arguments
        if value is None:
            value = {}
        if not (isinstance(name, str) and name.strip() and isinstance(value, Mapping)):
            return unreadable(text)
        plain = isinstance(arguments, str) and "\\ud" not in arguments.lower()
        return ParsedCall(
            without_surrogates(name.strip()),
            arguments if plain else json_text(value),
            without_surrogates(call_id) if isinstance(call_id, str) else "",
        )
    except (ValueError, RecursionError):  # ValueError: not JSON, or a number that JSON cannot represent
        return unreadable(text)


def read_json(text: str, position: int) -> tuple[Any, int] | None:
    """Return the JSON value at a position and the position after it, or None if there is none."""
    found = scan_json(text, position)
    return None if isinstance(found, json.JSONDecodeError) else found


def scan_json(text: str, position: int) -> tuple[Any, int] | json.JSONDecodeError:
    """Like ``read_json``, but return the error if there is no JSON value."""
    start = _SPACE.match(text, position)
    assert start is not None
    try:
        return _JSON.raw_decode(text, start.end())
    except json.JSONDecodeError as error:
        return error
    except (ValueError, RecursionError) as error:
        return json.JSONDecodeError(str(error), text, start.end())


def json_text(value: Any) -> str:
    """Return JSON as ``ToolCall.of`` writes it, without lone surrogates, which UTF-8 cannot encode."""
    text = json.dumps(value, allow_nan=False)
    if "\\ud" not in text:
        return text
    return json.dumps(encodable(value))


def model_json(value: Any) -> str:
    """Return JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def arguments_of(call: ParsedCall) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        ValueError: they are not a JSON object.
    """
    try:
        arguments = _JSON.decode(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {call.name!r} are not a JSON object: {call.arguments}")
    return arguments


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def encodable(value: Any) -> Any:
    """Return a JSON value without lone surrogates."""
    return json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def read_turn(
    parser: ToolParser,
    text: str,
    tools: Sequence[ToolSpec] = (),
    *,
    thought: re.Pattern[str],
    in_thought: bool = False,
) -> tuple[ParsedTurn, bool]:
    """Parse a turn like ``ToolParser.parse``. Also return True if the tolerant reader found calls.

    The tolerant reader skips text with a mark of a ``thought``.
    """
    turn = parser.parse(text, tools, in_thought=in_thought)
    tolerant = read_tolerantly(turn, tools, thought=thought)
    return tolerant or turn, tolerant is not None


def read_tolerantly(
    turn: ParsedTurn, tools: Sequence[ToolSpec], *, thought: re.Pattern[str]
) -> ParsedTurn | None:
    """Read the calls that the family's parser could not read. Return None if there are none.

    Unreadable calls are replaced by the calls in their text. The content is searched only if the parser read
    no call. Text with a mark of a ``thought`` is skipped.
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
            # The text up to the error is part of this object, so no other call starts there.
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
