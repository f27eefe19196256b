"""Functions made from JSON Schemas: a named, annotated parameter for each property."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": None,
}


def function_of(
    name: str,
    doc: str,
    schema: Mapping[str, Any],
    annotate: Callable[[dict[str, Any]], Any],
    call: Callable[..., Any],
    unset: Any = None,
) -> Callable[..., Any]:
    """Return ``call`` as a method whose signature is that of a JSON Schema.

    Args:
        name: name of the method.
        doc: its docstring.
        schema: schema of an object, whose properties are names of Python; see ``has_python_names``.
        annotate: returns the annotation of a property's schema.
        call: takes the instance, and the arguments by name.
        unset: default of a parameter that is not required, where the schema has none.
    """
    required = schema.get("required", ())
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    annotations = {}
    ordered = sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    for key, value in ordered:
        annotations[key] = annotate(value)
        default = inspect.Parameter.empty if key in required else value.get("default", unset)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(key, kind, annotation=annotations[key], default=default))

    if inspect.iscoroutinefunction(call):

        async def method(self: Any, **arguments: Any) -> Any:
            return await call(self, **arguments)
    else:

        def method(self: Any, **arguments: Any) -> Any:  # type: ignore[misc]
            return call(self, **arguments)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = doc
    method.__annotations__ = annotations
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def has_python_names(schema: Mapping[str, Any]) -> bool:
    """Return whether every property can be a parameter."""
    names = schema.get("properties", {})
    return all(name.isidentifier() and not keyword.iskeyword(name) and name != "self" for name in names)


def inlined(schema: Any, definitions: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a schema with its ``#/$defs/...`` references replaced; deeply nested ones permit anything."""
    if isinstance(schema, list):
        return [inlined(item, definitions, depth) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = definitions or {**schema.get("definitions", {}), **schema.get("$defs", {})}
    if "$ref" in schema:
        found = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {} if depth > 8 else {**inlined(found, definitions, depth + 1), **rest}
    return {
        key: inlined(value, definitions, depth)
        for key, value in schema.items()
        if key not in ("$defs", "definitions")
    }


def python_type(schema: Mapping[str, Any]) -> Any:
    """Return the Python type of a schema without references, as close as ``typing`` can express it."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices:
        return Literal[tuple(choices)]
    options = schema.get("anyOf", schema.get("oneOf"))
    if options:
        return Union[tuple(map(python_type, options))]  # noqa: UP007  -- of a computed length
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_TYPES.get(one, Any) for one in kind)]  # noqa: UP007
    if kind == "array" and schema.get("items"):
        return list[python_type(schema["items"])]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)
