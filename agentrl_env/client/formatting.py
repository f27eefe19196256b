"""Messages as readable text with one line per message, for terminals and ``render()``."""

from __future__ import annotations

import json
from collections.abc import Iterable

from agentrl_env.types import Message, ToolCall


def format_message(message: Message) -> str:
    """Return a message as ``role: text``, followed by its calls as ``name(key=value)``."""
    parts = [message_text(message)] if message.content else []
    parts += [format_call(call) for call in message.tool_calls or ()]
    return f"{message.role}: {' '.join(parts)}".rstrip()


def format_messages(messages: Iterable[Message]) -> str:
    """Return one line for each message."""
    return "\n".join(format_message(message) for message in messages)


def format_call(call: ToolCall) -> str:
    """Return a call as ``name(key=value)``. Arguments that are not a JSON object are not changed."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return f"{call.function.name}({call.function.arguments})"
    pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{call.function.name}({', '.join(pairs)})"


def message_text(message: Message) -> str:
    """Return the text of a message, with placeholders for content parts other than text."""
    if isinstance(message.content, list):
        return "".join(str(part.get("text", f"[{part.get('type')}]")) for part in message.content)
    return message.content or ""
