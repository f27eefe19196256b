"""The channels of gpt-oss ("harmony"): a turn is several messages, each with a channel and a recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.turn import (
    ParsedCall,
    ParsedTurn,
    arguments_of,
    called,
    model_json,
    unreadable,
    without_surrogates,
)

_NEXT = "<|start|>assistant"
_MESSAGE = re.compile(
    r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)", re.DOTALL
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, kw_only=True)
class Harmony:
    """Thoughts are on the channel ``analysis``, and content on ``final``. Calls go ``to=functions.name``."""

    name: str = "harmony"
    template: str = r"<\|channel\|>"
    thoughts: tuple[str, ...] = ("<|channel|>analysis<|message|>{}<|end|>",)

    def parse(self, text: str, tools: Sequence[ToolSpec] = (), *, in_thought: bool = False) -> ParsedTurn:
        """Parse a turn like ``ToolParser``. A message to a tool is a call on any channel."""
        text = without_surrogates(text)
        if in_thought:
            text = f"<|channel|>analysis<|message|>{text}"
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while message := _MESSAGE.match(text, position):
            position = message.end()
            channel, recipient = _CHANNEL.search(message["head"]), _RECIPIENT.search(message["head"])
            if recipient:
                whole = text[message.start() : message.end()].removeprefix(_NEXT)
                calls.append(
                    called(recipient[1].removeprefix("functions."), message["body"].strip() or None, whole)
                )
            elif channel and channel[1] == "analysis":
                thoughts.append(message["body"])
            else:
                content.append(message["body"])
        rest = text[position:]
        if _RECIPIENT.search(rest) and ("<|channel|>" in rest or _NEXT in rest or not position):
            calls.append(unreadable(rest))
        else:
            content.append(rest.removeprefix(_NEXT))
        said, thought = ("\n".join(p.strip() for p in parts if p.strip()) for parts in (content, thoughts))
        return ParsedTurn(said or None, thought or None, tuple(calls))

    def render(self, turn: ParsedTurn, *, in_thought: bool = False) -> str:
        """Render a turn like ``ToolParser``."""
        messages = []
        if turn.thought or in_thought:
            opening = "" if in_thought else "<|channel|>analysis<|message|>"
            messages.append(f"{opening}{turn.thought or ''}<|end|>")
        if turn.content:
            channel = "commentary" if turn.calls else "final"
            messages.append(f"<|channel|>{channel}<|message|>{turn.content}<|end|>")
        for call in turn.calls:
            head = f" to=functions.{call.name}<|channel|>commentary json<|message|>"
            messages.append(f"{head}{model_json(arguments_of(call))}<|call|>")
        text = _NEXT.join(messages)
        for stop in ("<|end|>", "<|call|>"):
            text = text.removesuffix(stop)
        return without_surrogates(text)

    def call_id(self, turn: int, number: int, name: str) -> str:
        """Return ``call_{turn}_{number}``."""
        return f"call_{turn}_{number}"
