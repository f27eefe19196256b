"""The syntax of tool calls, by family of models: text of a turn -> calls, content and thought, and back.

``parser_for`` chooses a family from a chat template; ``PARSERS`` holds them by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl_env.types import ToolSpec


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a tool; ``arguments`` is JSON text.

    An unreadable call has an empty name, and its own text as arguments.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn. Nothing in ``thought`` is a call."""

    content: str | None = None
    thought: str | None = None
    calls: tuple[ParsedCall, ...] = ()


class ToolParser(Protocol):
    """Reads and writes the assistant turns of one family of models."""

    name: str

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_thought: bool = False) -> ParsedTurn:
        """Parse a sampled turn. Any text parses; nothing raises.

        Args:
            text: the completion, decoded with its special tokens, without the final stop token.
            tools: the tools of the session; their schemas decide the types of arguments written without.
            in_thought: whether the generation prompt has opened a thought (it ends with ``<think>``), so that
                the turn begins inside it. Without its closing tag the whole turn is then a thought.
        """
        ...

    def render(self, turn: ParsedTurn, *, in_thought: bool = False) -> str:
        """Return the text a model would sample for ``turn``, without the stop token.

        Args:
            turn: content, thought and calls.
            in_thought: as in ``parse``: the opening tag of the thought is left out, the closing tag never.
        """
        ...

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return the id of the call ``number`` of a turn, in the form that the family's templates accept."""
        ...


_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    name = "hermes"

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_thought: bool = False) -> ParsedTurn:
        """Parse a turn."""
        thought = None
        if in_thought or text.lstrip().startswith("<think>"):
            thought, _, text = text.replace("<think>", "", 1).partition("</think>")
        calls = tuple(_json_call(match[1]) for match in _CALL.finditer(text))
        return ParsedTurn(_CALL.sub("", text).strip() or None, (thought or "").strip() or None, calls)

    def render(self, turn: ParsedTurn, *, in_thought: bool = False) -> str:
        """Render a turn."""
        thought = turn.thought or ""
        opening = "" if in_thought else "<think>\n"
        parts = [f"{opening}{thought}\n</think>\n"] if thought or in_thought else []
        parts += [turn.content] if turn.content else []
        for call in turn.calls:
            body = {"name": call.name, "arguments": json.loads(call.arguments)}
            parts.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
        return "\n".join(parts)

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return ``call_{turn}_{number}``."""
        return f"call_{turn}_{number}"


def _json_call(text: str) -> ParsedCall:
    try:
        call = json.loads(text)
        name, arguments = str(call["name"]), call["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: not JSON, or a number too long
        name, arguments = "", text
    return ParsedCall(_replace_surrogates(name), _replace_surrogates(arguments))


def _replace_surrogates(text: str) -> Any:
    """Replace lone surrogates, which JSON escapes can produce and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


PARSERS: Mapping[str, ToolParser] = {parser.name: parser for parser in (Hermes(),)}


def parser_for(chat_template: str) -> ToolParser | None:
    """Return the family whose calls a chat template writes, or None if it writes none that is known."""
    return PARSERS["hermes"] if "<tool_call>" in chat_template else None
