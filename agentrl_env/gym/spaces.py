"""Gymnasium spaces and actions: conversations, tool calls, and actions as assistant messages.

``Conversation`` is the observation space: a tuple of chat messages. ``ToolCallSpace`` is the action
space: one tool call, ``{"name": ..., "arguments": {...}}``. A sampled call has arguments that fit the
tool's JSON Schema, so a random policy is a fair baseline and ``check_env`` exercises the tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from agentrl_env.client.schema_sampler import WORDS, sample_call
from agentrl_env.json_schema import compiled_schema
from agentrl_env.types import FunctionCall, Message, ToolCall, ToolSpec

ChatMessage = dict[str, Any]
"""One message in OpenAI chat format."""


class Conversation(Space[tuple[ChatMessage, ...]]):
    """All tuples of chat messages in OpenAI format, with any texts and of any length."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False, because text has no array form of fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[ChatMessage, ...]:
        """Draw a short conversation of user messages."""
        _reject_masks(mask, probability)
        return tuple(
            {"role": "user", "content": str(self.np_random.choice(WORDS))}
            for _ in range(int(self.np_random.integers(1, 4)))
        )

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` is a tuple or list of well-formed messages."""
        return isinstance(x, tuple | list) and all(_as_message(item) is not None for item in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    def __hash__(self) -> int:
        return hash(Conversation)

    def __repr__(self) -> str:
        return "Conversation()"


class ToolCallSpace(Space[dict[str, Any]]):
    """All calls ``{"name", "arguments"}`` of the given tools with arguments that fit the tool's schema.

    Assistant messages whose calls all fit are members too. Without tools, only assistant messages
    without calls are members.
    """

    def __init__(self, tools: Sequence[ToolSpec], seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)
        self.tools = tuple(tools)
        self._schemas = {tool.function.name: tool.function.parameters for tool in tools}

    @property
    def is_np_flattenable(self) -> bool:
        """False, because calls have no array form of fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Draw a call with valid arguments, or an assistant message if there are no tools."""
        _reject_masks(mask, probability)
        if not self.tools:
            return {"role": "assistant", "content": str(self.np_random.choice(WORDS))}
        function = sample_call(self.tools, self.np_random).function
        return {"name": function.name, "arguments": json.loads(function.arguments)}

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` calls a known tool with arguments that fit its schema."""
        if not isinstance(x, dict):
            return False
        if x.get("role") != "assistant":
            return self._fits(x.get("name"), x.get("arguments"))
        message = _as_message(x)
        return message is not None and all(
            self._fits(call.function.name, _from_json(call.function.arguments))
            for call in message.tool_calls or ()
        )

    def _fits(self, name: Any, arguments: Any) -> bool:
        if not isinstance(name, str) or name not in self._schemas:
            return False
        return compiled_schema(self._schemas[name]).is_valid(arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCallSpace) and self.tools == other.tools

    def __hash__(self) -> int:
        return hash(tuple(self._schemas))

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(self._schemas)})"


def action_message(action: Any, call_id: str = "call_0") -> Message:
    """Convert an action to an assistant message.

    Accepts an assistant message, a tool call in OpenAI format or as ``{"name", "arguments"}`` (each as
    a dict or a pydantic object, such as the OpenAI client's), and plain text. Any other dict or object
    becomes a call without a tool name, which every environment counts as invalid.

    Raises TypeError for any other type.
    """
    check_action(action)
    try:
        fields = action.model_dump(exclude_none=True) if isinstance(action, BaseModel) else action
        message = _structured_message(fields, call_id) if isinstance(fields, dict) else None
    except (TypeError, ValueError, RecursionError):  # not JSON, or not a message (ValidationError)
        message = None
    if message is None and not isinstance(action, str):
        message = Message.assistant(None, ToolCall.of("", call_id=call_id, action=repr(action)))
    return _replace_surrogates(message or Message.assistant(action))


def check_action(action: Any) -> None:
    """Raise TypeError unless an action is a dict, a pydantic object or text."""
    if not isinstance(action, str | dict | BaseModel):
        raise TypeError(
            'an action is a tool call such as {"name": "guess", "arguments": {"n": 7}}, an assistant message '
            f"or text, not {type(action).__name__}"
        )


def _structured_message(fields: dict[str, Any], call_id: str) -> Message | None:
    if fields.get("role") == "assistant":
        message = Message.model_validate(fields)
        return None if message.content is None and not message.tool_calls else message
    if "function" in fields:
        return Message.assistant(None, ToolCall.model_validate({"id": call_id, **fields}))
    if not isinstance(fields.get("name"), str):
        return None
    arguments = fields.get("arguments", {})
    if not isinstance(arguments, str):  # NumPy values become Python values, anything else becomes text
        arguments = json.dumps(arguments, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    function = FunctionCall(name=fields["name"], arguments=arguments)
    return Message.assistant(None, ToolCall(id=call_id, function=function))


def _replace_surrogates(message: Message) -> Message:
    """Replace lone surrogates, which a Python string can contain but UTF-8 cannot encode."""
    try:
        message.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(message.wire(), ensure_ascii=False).encode(errors="replace")
        return Message.model_validate_json(text)
    return message


def _as_message(value: Any) -> Message | None:
    try:
        return Message.model_validate(value)
    except ValidationError:
        return None


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _reject_masks(mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ValueError("Conversation and tool-call spaces cannot be sampled with a mask.")
