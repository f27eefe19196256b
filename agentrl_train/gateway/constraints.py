"""``tool_choice`` and the formats of the APIs as constraints of an answer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentrl_env.types import ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.engine.constraint import Grammars
from agentrl_train.errors import ConstraintError
from agentrl_train.gateway.errors import InvalidRequest, ignoring
from agentrl_train.tool_calls.grammars import Constraint, Unwritable, grammar, tags

JSON_OBJECT = json.dumps({"type": "object"})


class Constraints:
    """Compiles the constraints of requests for one policy.

    Args:
        chat: chat format of the policy.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._grammars = Grammars(chat.tokenizer, stop_token_ids=chat.stop_token_ids)

    def grammar(self, constraint: Constraint, tools: Sequence[ToolSpec], *, context: Sequence[int]) -> str:
        """Return the grammar of the answers after a context. "" allows any text.

        Raises:
            InvalidRequest: no grammar can express the constraint.
        """
        if not constraint:
            return ""
        named = [tool for tool in tools if constraint.tool in (None, tool.function.name)]
        try:
            found = grammar(
                constraint,
                parser=self._chat.parser,
                tools=named,
                writer=self._grammars,
                thinks=self._thinks(),
                in_thought=self._chat.in_thought(context),
            )
            self._grammars.start(found)
        except (Unwritable, ConstraintError) as error:
            raise unsupported(constraint, str(error)) from error
        return found

    def _thinks(self) -> bool:
        opening, _ = tags(self._chat.parser)
        return (
            opening in str(self._chat.tokenizer.chat_template) or self._grammars.control(opening) == opening
        )


@lru_cache(4)
def constraints_of(chat: ChatFormat) -> Constraints:
    """Return the cached constraints of a chat format. Reading a tokenizer's vocabulary takes a second."""
    return Constraints(chat)


def unsupported(constraint: Constraint, reason: str) -> InvalidRequest:
    """Return the error for an unsupported constraint."""
    name = constraint.choice_parameter if constraint.schema is None else constraint.schema_parameter
    return InvalidRequest(
        f"{name} cannot be decoded with constraints ({reason}): simplify the schema, or {ignoring(name)}",
        param=name,
    )


def tool_choice_fields(
    value: Any, tools: Sequence[ToolSpec], *, param: str = "tool_choice"
) -> dict[str, Any]:
    """Return a ``tool_choice`` of either of OpenAI's APIs as fields of ``Constraint``.

    Raises:
        InvalidRequest: the choice does not exist, or names a tool that the request does not have.
    """
    names = [tool.function.name for tool in tools]
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind in (None, "auto") or (kind == "none" and not names):
        return {}
    if kind == "none":
        return {"calls": "none"}
    if value == "required":
        if not names:
            raise InvalidRequest("tool_choice = 'required' needs tools, and there are none", param=param)
        return {"calls": "required"}
    if isinstance(value, Mapping) and value.get("type") == "function":
        held = value.get("function")
        name = held.get("name") if isinstance(held, Mapping) else value.get("name")
        return {"calls": "required", "tool": known(name, names, param=param)}
    raise InvalidRequest(
        f"{param} = {value!r:.200} is not supported: use 'auto', 'none', 'required' or a tool, or "
        f"{ignoring(param)}",
        param=param,
    )


def known(name: Any, names: Collection[str], *, param: str) -> str:
    """Return the name if the request has this tool. Raises ``InvalidRequest`` otherwise."""
    if name not in names:
        raise InvalidRequest(f"{param} names the tool {name!r:.100}, which the request lacks", param=param)
    return str(name)


def schema_of(format: Any, *, param: str) -> str | None:
    """Return the JSON Schema of a format of either of OpenAI's APIs as JSON, or None for text.

    Raises:
        InvalidRequest: the format does not exist, or lacks its schema.
    """
    kind = format.get("type") if isinstance(format, Mapping) else None
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind == "json_schema":
        held = format.get("json_schema", format)
        schema = held.get("schema") if isinstance(held, Mapping) else None
        if isinstance(schema, Mapping):
            return json.dumps(schema)
        raise InvalidRequest(
            f"{param} of type 'json_schema' needs a 'schema', which is an object", param=param
        )
    raise InvalidRequest(
        f"{param} of type {kind!r:.100} is not supported: use 'text', 'json_object' or 'json_schema', or "
        f"{ignoring(param)}",
        param=param,
    )
