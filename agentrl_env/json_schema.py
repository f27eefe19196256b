"""JSON Schemas from other sources, which validate values in their own dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator, FormatChecker, SchemaError
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY as SPECIFICATIONS
from pydantic_core import from_json
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from agentrl_env.ecma_pattern import python_pattern
from agentrl_env.schema import MAX_ERRORS, ArgumentError, check_finite, echo

MAX_CHARACTERS = 1 << 18
"""Maximum length of a schema as JSON. The model reads the whole schema with every prompt."""
MAX_MESSAGE = 300
"""Maximum length of one error for the model, since errors can quote values and schemas."""
_MAPS = {
    *("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"),
}
"""Keywords whose value is an object of schemas."""
_SCHEMAS = {
    *("additionalItems", "additionalProperties", "contains", "items", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "prefixItems"),
}
"""Keywords whose value is a schema or a list of schemas."""
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords with schemas that apply to the same value."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaProblem(ValueError):
    """A schema cannot be used. The message is the reason."""


class JsonSchema:
    """A compiled JSON Schema.

    ``$schema`` selects the dialect. Without it, the dialect is 2020-12, or else the newest of draft-07 and
    draft-04 that permits the schema. References are resolved within the schema and the official meta-schemas.

    Args:
        schema: the schema of an object. It is not changed.

    Raises SchemaProblem if the schema is invalid or too long, or has a reference that does not exist or leads
    back to itself.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if not isinstance(schema, Mapping):
            raise SchemaProblem(f"its schema is {echo(schema)}, not a JSON object")
        if (length := len(json.dumps(schema))) > MAX_CHARACTERS:
            raise SchemaProblem(f"its schema has {length:,} characters, more than {MAX_CHARACTERS:,}")
        self._originals: dict[str, str] = {}
        self.unchecked: list[str] = []
        """Patterns that Python's regular expressions cannot express. They are not validated."""
        try:
            dialect = _dialect(schema)
            compiled = self._with_python_patterns(schema)
            _check_references(compiled, dialect.META_SCHEMA["$schema"])
        except RecursionError:
            raise SchemaProblem("its schema is nested too deeply") from None
        self._validator = dialect(compiled, registry=Registry())

    def is_valid(self, value: Any) -> bool:
        """Return True if the schema permits a value."""
        try:
            return bool(self._validator.is_valid(value))
        except RecursionError:
            return False

    def problems(self, value: Any) -> Iterator[str]:
        """Yield the errors in the arguments of a call, one line each."""
        for error in self._validator.iter_errors(value):
            yield self._line(best_match([error]))

    def _line(self, error: ValidationError) -> str:
        where = ".".join(map(str, error.absolute_path))
        message = error.message
        if error.validator == "pattern":
            pattern = self._originals.get(error.validator_value, error.validator_value)
            message = f"{echo(error.instance)} does not match the pattern {pattern}"
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE - 3]}..."
        return f"argument {echo(where)}: {message}" if where else message

    def _with_python_patterns(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._with_python_patterns(item) for item in schema]
        if not isinstance(schema, Mapping):
            return schema
        compiled: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "pattern":
                compiled[key] = self._pattern(value)
            elif key in _MAPS and isinstance(value, Mapping):
                rename = self._pattern if key == "patternProperties" else str
                parts = ((rename(name), self._with_python_patterns(part)) for name, part in value.items())
                compiled[key] = dict(parts)
            else:
                compiled[key] = self._with_python_patterns(value) if key in _SCHEMAS else value
        return compiled

    def _pattern(self, pattern: str) -> str:
        translated = python_pattern(pattern)
        if translated is None:
            self.unchecked.append(pattern)
            return ""  # the empty pattern matches everything
        self._originals[translated] = pattern
        return translated


@lru_cache(maxsize=256)
def _compile(text: str) -> JsonSchema:
    return JsonSchema(json.loads(text))


def compiled_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """Return ``JsonSchema(schema)`` from a cache. Raises SchemaProblem."""
    return _compile(json.dumps(schema))


class SchemaArguments:
    """The arguments of a tool with a schema from another source. Has the interface of ``Arguments``.

    Args:
        schema: schema of the arguments, which the model sees unchanged.
        summary: description of the tool.

    Raises SchemaProblem.
    """

    unknown: tuple[str, ...] = ()

    def __init__(self, schema: Mapping[str, Any], summary: str) -> None:
        self.summary = summary
        self.compiled = JsonSchema(schema)
        self.schema = {"type": "object", **schema}
        if "$ref" not in schema:
            self.schema.setdefault("properties", {})  # model APIs require it

    def parse(self, text: str) -> dict[str, Any]:
        """Return the arguments in the JSON text of a call. Raises ArgumentError."""
        try:
            arguments = from_json(text if text.strip() else "{}")
        except ValueError as error:
            raise ArgumentError(f"arguments are not valid JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ArgumentError("arguments must be a JSON object")
        check_finite(text)
        try:
            problems = list(islice(self.compiled.problems(arguments), MAX_ERRORS))
        except RecursionError:
            raise ArgumentError("arguments are nested too deeply") from None
        if problems:
            raise ArgumentError("; ".join(problems))
        return arguments


def _dialect(schema: Mapping[str, Any]) -> Any:
    """Return the validator class of a schema. Raises SchemaProblem."""
    named = isinstance(schema.get("$schema"), str)
    declared = validator_for(schema, default=None) if named else None
    problem = ""
    for dialect in (declared,) if declared else (Draft202012Validator, Draft7Validator, Draft4Validator):
        try:
            dialect.check_schema(schema, format_checker=FormatChecker(formats=()))
            return dialect
        except SchemaError as error:
            where = "".join(f"/{part}" for part in error.absolute_path)
            problem = problem or f"its schema is invalid at {where or 'its root'}: {error.message:.200}"
    raise SchemaProblem(problem)


def _check_references(schema: Mapping[str, Any], dialect: str) -> None:
    """Raise SchemaProblem unless each reference leads to a schema that does not depend on itself."""
    specification = specification_with(dialect)
    resource = specification.create_resource(schema)
    pending = [(SPECIFICATIONS.resolver_with_root(resource), resource)]
    needs: dict[int, list[int]] = {}
    while pending:
        resolver, resource = pending.pop()
        contents = resource.contents
        if id(contents) in needs or not isinstance(contents, Mapping):
            continue
        needs[id(contents)] = [id(part) for part in _in_place(contents)]
        for reference in (contents[key] for key in _REFERENCES if isinstance(contents.get(key), str)):
            try:
                found = resolver.lookup(reference)
            except Unresolvable:
                raise SchemaProblem(f"its schema has no {reference}") from None
            if not isinstance(found.contents, Mapping | bool):
                raise SchemaProblem(f"{reference} of its schema is not a schema")
            needs[id(contents)].append(id(found.contents))
            pending.append((found.resolver, specification.create_resource(found.contents)))
        pending += [(resolver.in_subresource(part), part) for part in resource.subresources()]
    try:
        TopologicalSorter(needs).prepare()
    except CycleError:
        raise SchemaProblem("a reference of its schema leads back to itself") from None


def _in_place(contents: Mapping[str, Any]) -> Iterator[Any]:
    for key in _IN_PLACE:
        value = contents.get(key)
        yield from value if isinstance(value, list) else [value]
    dependent = contents.get("dependentSchemas")
    yield from dependent.values() if isinstance(dependent, Mapping) else ()
