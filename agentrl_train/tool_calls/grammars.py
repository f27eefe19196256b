"""The required form of an answer as a grammar of llguidance.

The answer is in the model's own syntax: a thought if the model thinks, then calls as the family writes them,
or JSON. The JSON of a call has the blanks of chat templates, and the JSON of content has a limited number of
blanks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.turn import ParsedCall, ParsedTurn, ToolParser
from agentrl_train.tool_calls.xml_forms import XmlFamily, argument_types

_ARGUMENTS = json.dumps({"THE-ARGUMENTS": 0})
_CONTENT, _THOUGHT = "THE-CONTENT", "THE-THOUGHT"
_CALL_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CONTENT_JSON = {"whitespace_pattern": r"[ \n\t]{0,20}"}
"""Bounded, because a policy that can write blanks forever does so."""
_BLANKS = r"/\s{0,4}/"
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The required form of an answer."""

    calls: Literal["auto", "none", "required"] = "auto"
    tool: str | None = None
    """The only tool that can be called, once; None allows any tool."""
    choice_parameter: str = "tool_choice"
    """Parameter of the request that requires or forbids calls."""
    schema: str | None = None
    """JSON Schema of the content, as JSON; None allows any text."""
    schema_parameter: str = "response_format"
    """Parameter of the request that has the schema."""
    parallel: bool = True
    """Whether an answer can have several calls."""

    def __bool__(self) -> bool:
        """Return True if some answers are excluded."""
        return self.calls != "auto" or self.schema is not None


class Unwritable(ValueError):
    """The calls of a family have no grammar."""


class Writer(Protocol):
    """Writes texts as parts of a grammar for one tokenizer."""

    def written(self, text: str) -> str:
        """Return a text as a part of a grammar."""
        ...

    def control(self, text: str) -> str:
        """Return the control token at the start of a text, or "" if there is none."""
        ...


def grammar(
    constraint: Constraint,
    *,
    parser: ToolParser,
    tools: Sequence[ToolSpec],
    writer: Writer,
    thinks: bool,
    in_thought: bool = False,
) -> str:
    """Return the grammar of the answers to a request.

    Args:
        constraint: the required form.
        parser: the syntax of calls and thoughts.
        tools: the tools that can be called.
        writer: writes texts for the tokenizer.
        thinks: True if the policy can first write a thought.
        in_thought: True if the prompt has opened a thought.

    Raises:
        Unwritable: the calls of the family have no grammar.
    """
    rules = [f"any_text: {_ANY_TEXT}"]
    answers: list[str] = []
    if constraint.schema is not None:
        before, behind = parser.render(ParsedTurn(_CONTENT)).split(_CONTENT)
        rules.append(f"content: {writer.written(before)} json {writer.written(behind)}")
        rules.append(f"json: %json {_schema(json.loads(constraint.schema), _CONTENT_JSON)}")
        answers.append("content")
    elif constraint.calls == "none":
        rules.append(f"FREE: {_without_calls(parser, tools, writer)}")
        answers.append("FREE")
    if tools and constraint.calls != "none":
        if isinstance(parser, XmlFamily):
            rules += _tagged_calls(constraint, parser=parser, tools=tools, writer=writer)
        else:
            rules += _calls(constraint, parser=parser, tools=tools, written=writer.written)
        answers.append("calls")
    thought = ""
    if thinks or in_thought:
        rules += _thought(parser, writer, opened=in_thought)
        thought = "thought " if in_thought else "thought? "
    return "\n".join([f"start: {thought}({' | '.join(answers)})", *rules])


def _thought(parser: ToolParser, writer: Writer, *, opened: bool) -> Iterator[str]:
    opening, closing = tags(parser)
    spoken = parser.render(ParsedTurn(_CONTENT))
    after = parser.render(ParsedTurn(_CONTENT, _THOUGHT)).partition(closing)[2].removesuffix(spoken).strip()
    begin = "" if opened else writer.written(opening)
    yield f"thought: {_BLANKS} {begin} thought_text {_BLANKS} {writer.written(after)}"
    yield _until(closing, writer, name="thought_text")


def _without_calls(parser: ToolParser, tools: Sequence[ToolSpec], writer: Writer) -> str:
    """Return any text without the control token that opens calls, both as a token and as text."""
    opening = writer.control(_parts(parser, tools[0].function.name)[0])
    if not opening:
        raise Unwritable(f"calls in the syntax {parser.name!r} cannot be forbidden; leave the tools out")
    # Only terminals can be excluded. Text never contains control tokens.
    return f"/(?s:.*)/ & ~/(?s:.*){_escape(opening)}(?s:.*)/"


def tags(parser: ToolParser) -> tuple[str, str]:
    """Return the texts that open and close a thought of a family."""
    forms: Sequence[str] = getattr(parser, "thoughts", ())
    opening, _, closing = (forms[0] if forms else "<think>{}</think>").partition("{}")
    return opening.strip(), closing.strip()


def _until(closing: str, writer: Writer, *, name: str) -> str:
    """Return the rule for any text up to a closing tag, and the tag. Blanks before the tag are text."""
    if writer.control(closing.strip()):
        return f"{name}: any_text {writer.written(closing.lstrip())}"
    return f"{name}[lazy]: /(?s:.*){_escape(closing)}/"


def _calls(
    constraint: Constraint, *, parser: ToolParser, tools: Sequence[ToolSpec], written: Callable[[str], str]
) -> Iterator[str]:
    """Yield the rules of one call, or of one or more."""
    parts = [_parts(parser, tool.function.name) for tool in tools]
    numbered = _parts(parser, tools[0].function.name, behind=1)[1] != parts[0][1]
    several = constraint.parallel and constraint.tool is None and not numbered
    firsts = [f"{written(first)} arguments_{n} more" for n, (first, _, _) in enumerate(parts)]
    nexts = [f"{written(following)} arguments_{n} more" for n, (_, following, _) in enumerate(parts)]
    last = written(parts[0][2]) or '""'
    yield f"calls: {' | '.join(firsts)}"
    yield f"more: {' | '.join([last, *(nexts if several else [])])}"
    for number, tool in enumerate(tools):
        schema = {"type": "object", **tool.function.parameters}
        yield f"arguments_{number}: %json {_schema(schema, _CALL_JSON)}"


def _tagged_calls(
    constraint: Constraint, *, parser: XmlFamily, tools: Sequence[ToolSpec], writer: Writer
) -> Iterator[str]:
    """Yield the rules of calls with a tag for each argument, in the order of the schema."""
    written, (opening, closing) = writer.written, parser.block
    several = constraint.parallel and constraint.tool is None
    call = "call" if parser.shared_block else f"{written(opening)} call {written(closing)}"
    again = call if parser.shared_block else f'"\\n" {call}'
    whole = f"{call} ({again})*" if several else call
    if parser.shared_block:
        whole = f"{written(opening)} {whole} {written(closing)}"
    yield f"calls: {whole}"
    yield f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"
    yield _until(parser.parameter[1], writer, name="any_value")
    for number, tool in enumerate(tools):
        schema = tool.function.parameters
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        arguments = []
        for place, key in enumerate(properties):
            rule = f"argument_{number}_{place}"
            arguments.append(rule if key in required else f"{rule}?")
            begin = written(parser.parameter[0].replace("{}", key))
            if "string" in (types := argument_types(schema, key)) or not types:
                yield f"{rule}: {begin} any_value"
            else:
                held = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                value = _schema({**held, **properties[key]}, _CALL_JSON)
                yield f"{rule}: {begin} value_{number}_{place} {written(parser.parameter[1])}"
                yield f"value_{number}_{place}: %json {value}"
        first, last = written(parser.call[0].replace("{}", tool.function.name)), written(parser.call[1])
        yield f"call_{number}: {' '.join([first, *arguments, last])}"


def _parts(parser: ToolParser, name: str, *, behind: int = 0) -> tuple[str, str, str]:
    """Return the texts before the arguments of a call, between those of two calls, and after the last.

    Args:
        parser: writes the calls.
        name: name of the tool of all calls.
        behind: number of the first of the two calls.
    """
    calls = (ParsedCall(name, _ARGUMENTS),) * (behind + 2)
    pieces = parser.render(ParsedTurn(None, None, calls)).split(_ARGUMENTS)
    if len(pieces) != len(calls) + 1:
        raise Unwritable(f"calls in the syntax {parser.name!r} cannot be forced")
    return pieces[0], pieces[behind + 1], pieces[-1]


def _schema(schema: Any, options: dict[str, Any]) -> str:
    held = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return json.dumps(held | {"x-guidance": options})


def _escape(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return "".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)
