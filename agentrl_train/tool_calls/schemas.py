"""The schemas of tools as shown to a model, and examples of matching arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_env.types import ToolSpec

_FIRST = ("type", "title", "description", "properties", "required")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords with schemas by name."""
_NESTED = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords with a schema, or with a list of schemas."""
_EXAMPLES: Mapping[str, Any] = {"integer": 3, "number": 2.5, "boolean": True, "array": [], "object": {}}


def ordered(schema: Any) -> Any:
    """Return a JSON Schema with its keywords in the usual order: type, description, properties, required.

    Environments send the keywords in alphabetical order. Small models copy what a schema starts with, such as
    ``"additionalProperties": false``, into the arguments of their calls. Arguments keep their order.
    """
    if isinstance(schema, list):
        return [ordered(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    keys = dict.fromkeys([*(key for key in _FIRST if key in schema), *schema])
    return {key: _value(key, schema[key]) for key in keys}


def _value(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: ordered(schema) for name, schema in value.items()}
    return ordered(value) if key in _NESTED else value


def example_arguments(tool: ToolSpec, *, text: str) -> dict[str, Any]:
    """Return arguments that match the schema of a tool, with ``text`` for strings."""
    properties = tool.function.parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {key: _example(schema, text) for key, schema in properties.items()}


def _example(schema: Any, text: str) -> Any:
    schema = schema if isinstance(schema, dict) else {}
    if choices := schema.get("enum"):
        return choices[0]
    kind = schema.get("type")
    return _EXAMPLES.get(kind, text) if isinstance(kind, str) else text
