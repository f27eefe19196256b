"""Gymnasium spaces for conversations and tool calls.

``Conversation`` holds observations: a tuple of chat messages. ``ToolCallSpace`` holds actions: one
call of a tool as ``{"name": ..., "arguments": {...}}``. Sampling an action draws arguments that fit
the tool's JSON Schema, so a random policy is a fair baseline and ``check_env`` exercises the tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from agentrl_env.client.schema_sampler import WORDS, sample_call
from agentrl_env.types import Message, ToolSpec

ChatMessage = dict[str, Any]
"""One message in OpenAI chat format."""


class Conversation(Space[tuple[ChatMessage, ...]]):
    """All tuples of chat messages in OpenAI format, any language, any length."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed-size array form."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[ChatMessage, ...]:
        """Draw a short conversation of user messages."""
        _refuse_masks(mask, probability)
        return tuple(
            {"role": "user", "content": str(self.np_random.choice(WORDS))}
            for _ in range(int(self.np_random.integers(1, 4)))
        )

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a tuple (or list) of well-formed messages."""
        return isinstance(x, tuple | list) and all(_message(item) is not None for item in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    def __hash__(self) -> int:
        return hash(Conversation)

    def __repr__(self) -> str:
        return "Conversation()"


class ToolCallSpace(Space[dict[str, Any]]):
    """All calls ``{"name", "arguments"}`` of the given tools whose arguments fit the tool's schema.

    An assistant message whose calls all fit is a member too, because environments take both.
    Of no tools at all only plain assistant messages are members.
    """

    def __init__(self, tools: Sequence[ToolSpec], seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)
        self.tools = tuple(tools)
        self._schemas = {tool.function.name: tool.function.parameters for tool in tools}

    @property
    def is_np_flattenable(self) -> bool:
        """Calls have no fixed-size array form."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Draw a call with schema-valid arguments; of no tools, an assistant message."""
        _refuse_masks(mask, probability)
        if not self.tools:
            return {"role": "assistant", "content": str(self.np_random.choice(WORDS))}
        function = sample_call(self.tools, self.np_random).function
        return {"name": function.name, "arguments": json.loads(function.arguments)}

    def contains(self, x: Any) -> bool:
        """Whether ``x`` names a tool here and its arguments fit that tool's schema."""
        if not isinstance(x, dict):
            return False
        if x.get("role") == "assistant":
            message = _message(x)
            calls = (message.tool_calls or ()) if message else ()
            return message is not None and all(
                self._fits(call.function.name, _json(call.function.arguments)) for call in calls
            )
        return self._fits(x.get("name"), x.get("arguments"))

    def _fits(self, name: Any, arguments: Any) -> bool:
        if not isinstance(name, str) or name not in self._schemas:
            return False
        return bool(Draft202012Validator(self._schemas[name]).is_valid(arguments))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCallSpace) and self.tools == other.tools

    def __hash__(self) -> int:
        return hash(tuple(self._schemas))

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(self._schemas)})"


def _message(value: Any) -> Message | None:
    try:
        return Message.model_validate(value)
    except ValidationError:
        return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _refuse_masks(mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ValueError("Conversation and tool-call spaces cannot be sampled with a mask.")
