"""Gymnasium actions as assistant messages: whatever a policy returns, the environment hears it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from agentrl_env.types import FunctionCall, Message, ToolCall


def as_message(action: Any, call_id: str = "call_0") -> Message:
    """Read an action as an assistant message; what is none becomes the text of an unusable turn.

    Taken are: an assistant message, a tool call in OpenAI form or as ``{"name", "arguments"}``
    (each as a dict or as a pydantic object, the OpenAI client's own included), and plain text.
    """
    try:
        fields = action.model_dump(exclude_none=True) if isinstance(action, BaseModel) else action
        message = _structured(fields, call_id) if isinstance(fields, dict) else None
    except (TypeError, ValueError, RecursionError):  # no JSON, or no message (ValidationError)
        message = None
    text = action if isinstance(action, str) else repr(action)
    return _encodable(message or Message.assistant(text))


def _structured(fields: dict[str, Any], call_id: str) -> Message | None:
    if fields.get("role") == "assistant":
        return Message.model_validate(fields)
    if "function" in fields:
        return Message.assistant(None, ToolCall.model_validate({"id": call_id, **fields}))
    if not isinstance(fields.get("name"), str):
        return None
    arguments = fields.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=_plain)
    function = FunctionCall(name=fields["name"], arguments=arguments)
    return Message.assistant(None, ToolCall(id=call_id, function=function))


def _encodable(message: Message) -> Message:
    """Replace lone surrogates, which Python strings may hold and UTF-8 may not."""
    try:
        message.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(message.wire(), ensure_ascii=False).encode(errors="replace")
        return Message.model_validate_json(text)
    return message


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into something it does: numpy values, then anything as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
