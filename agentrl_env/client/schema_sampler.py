"""Random values that are valid under a JSON Schema, for random policies, spaces and fuzzing.

Example::

    sample_json({"type": "integer", "minimum": 1, "maximum": 6}, rng)  # 4
    sample_call(tools, rng)  # ToolCall.of("guess", n=7)
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_env.client.pattern_sampler import PatternNotDrawn, draw_match
from agentrl_env.ecma_pattern import python_pattern
from agentrl_env.json_schema import SchemaProblem, compiled_schema
from agentrl_env.types import ToolCall, ToolSpec

WORDS = ("a", "apple", "box", "go", "hello", "kitchen", "left", "north", "one", "open", "red", "x")
MAX_DEPTH = 6
"""Below this depth only required properties are drawn, so that recursive schemas terminate."""
_MATCHES = 50
"""Maximum number of draws of a string for a pattern."""

_COMBINERS = ("$ref", "allOf", "anyOf", "oneOf")
_FORMATS = {
    "base64": "aGVsbG8=",
    "base64url": "aGVsbG8=",
    "date": "2024-02-29",
    "date-time": "2024-02-29T12:00:00Z",
    "duration": "P1D",
    "email": "someone@example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "time": "12:00:00Z",
    "uri": "https://example.com/",
    "uuid": "12345678-1234-4678-9234-567812345678",
    "uuid4": "12345678-1234-4678-9234-567812345678",
}


class CannotSample(ValueError):
    """No valid value was found for a schema, for example because of an unusual ``pattern``."""


def sample_call(
    tools: Sequence[ToolSpec],
    rng: np.random.Generator,
    *,
    call_id: str = "call_0",
    words: Sequence[str] = WORDS,
) -> ToolCall:
    """Draw a call of one of ``tools`` with valid arguments. Tools without such arguments are skipped.

    Args:
        tools: The tools to choose from.
        rng: The random generator.
        call_id: The id of the call.
        words: Candidates for strings. Numbers in them suggest a range for numbers.

    Raises:
        ValueError: There are no tools.
        CannotSample: No valid arguments were found for any tool.
    """
    if not tools:
        raise ValueError("There are no tools to call.")
    first, problems = int(rng.integers(len(tools))), []
    for tool in (*tools[first:], *tools[:first]):
        try:
            arguments = sample_arguments(tool, rng, words=words)
        except CannotSample as error:
            problems.append(error)
        else:
            return ToolCall.of(tool.function.name, call_id=call_id, **arguments)
    raise problems[0]


def sample_arguments(
    tool: ToolSpec, rng: np.random.Generator, *, words: Sequence[str] = WORDS
) -> dict[str, Any]:
    """Draw valid arguments of a tool. Raises CannotSample."""
    function = tool.function
    try:
        arguments = sample_json(function.parameters, rng, words=words)
    except CannotSample as error:
        raise CannotSample(f"No arguments of {function.name!r} were found. {error}") from None
    if not isinstance(arguments, dict):
        raise CannotSample(f"The parameters of {function.name!r} are not a JSON object.")
    return arguments


def sample_json(schema: Mapping[str, Any], rng: np.random.Generator, *, words: Sequence[str] = WORDS) -> Any:
    """Draw a JSON value that is valid under ``schema`` (2020-12, local ``$ref``s).

    Raises:
        CannotSample: The schema is invalid, or twenty draws did not give a valid value.
    """
    try:
        validator = compiled_schema(schema)
    except SchemaProblem as error:
        raise CannotSample(f"Invalid JSON Schema: {error}.") from error
    sampler = _Sampler(schema, rng, words)
    for _ in range(20):
        value = sampler.draw(schema, 0)
        if validator.is_valid(value):
            return value
    raise CannotSample(f"No value was found for the schema {schema!r}.")


class _Sampler:
    """One recursive draw. References such as ``#/$defs/Color`` are resolved in ``root``."""

    def __init__(
        self, root: Mapping[str, Any] | bool, rng: np.random.Generator, words: Sequence[str]
    ) -> None:
        self._root = root
        self._rng = rng
        self._words = words or WORDS
        self._numbers = [int(number) for word in words for number in re.findall(r"\d{1,9}", word)]
        self._by_type: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
            "null": lambda schema, depth: None,
            "boolean": lambda schema, depth: self._chance(0.5),
            "integer": self._integer,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }

    def draw(self, schema: Mapping[str, Any] | bool, depth: int) -> Any:
        """Draw one value. The caller must still validate it."""
        if isinstance(schema, bool) or not schema:
            return self._pick([self._pick(self._words), int(self._rng.integers(10)), True, None])
        schema = self._flatten(schema, depth)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._pick(schema["enum"])
        if schema.get("examples") and self._chance(0.5):
            return self._pick(schema["examples"])
        kind = schema.get("type", _guess_type(schema))
        if isinstance(kind, list):
            kind = self._pick(kind)
        return self._by_type[kind](schema, depth)

    def _flatten(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """Resolve references, choose one alternative and merge the parts of ``allOf``."""
        schema = dict(schema)
        while keyword := next((k for k in _COMBINERS if k in schema), None):
            value = schema.pop(keyword)
            if keyword == "$ref":
                parts = [self._resolve(value)]
            elif keyword == "allOf":
                parts = value
            else:
                parts = [self._alternative(value, depth)]
            for part in parts:
                schema = {**(part if isinstance(part, dict) else {}), **schema}
        return schema

    def _alternative(self, options: Sequence[Any], depth: int) -> Any:
        if depth < MAX_DEPTH:
            return self._pick(options)
        return min(options, key=lambda option: ("$ref" in str(option), len(str(option))))

    def _resolve(self, reference: str) -> Any:
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or key not in node:
                raise CannotSample(f"The reference {reference!r} cannot be resolved.")
            node = node[key]
        return node

    def _integer(self, schema: Mapping[str, Any], depth: int) -> int:
        low, high = self._bounds(schema, step=1)
        factor = schema.get("multipleOf", 1)
        return int(self._rng.integers(-(-low // factor), high // factor + 1) * factor)

    def _number(self, schema: Mapping[str, Any], depth: int) -> float:
        if "multipleOf" in schema:
            return self._integer({**schema, "multipleOf": 1}, depth) * float(schema["multipleOf"])
        low, high = self._bounds(schema, step=1e-6)
        return round(float(self._rng.uniform(low, high)), 3)

    def _bounds(self, schema: Mapping[str, Any], step: float) -> tuple[Any, Any]:
        """Return inclusive bounds. Missing bounds are chosen to make small, meaningful values likely."""
        low = schema.get("minimum")
        high = schema.get("maximum")
        if "exclusiveMinimum" in schema:
            low = schema["exclusiveMinimum"] + step
        if "exclusiveMaximum" in schema:
            high = schema["exclusiveMaximum"] - step
        if low is None and high is None and self._numbers and self._chance(0.6):
            return min(self._numbers), max(self._numbers)
        width = 20 if self._chance(0.8) else 1000
        if low is None:
            low = (0 if self._chance(0.8) else -width) if high is None else min(0, high - width)
        return low, max(low, high if high is not None else low + width)

    def _string(self, schema: Mapping[str, Any], depth: int) -> str:
        if schema.get("pattern") and (pattern := python_pattern(schema["pattern"])):
            return self._word_matching(pattern, schema)
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        text = " ".join(self._pick(self._words) for _ in range(1 if self._chance(0.7) else 3))
        return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]

    def _word_matching(self, pattern: str, schema: Mapping[str, Any]) -> str:
        """Return a known word that matches a pattern, or a random string."""
        low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)

        def fits(text: Any) -> bool:
            return isinstance(text, str) and low <= len(text) <= high and re.search(pattern, text) is not None

        known = [*self._words, *schema.get("examples", ()), schema.get("default", "")]
        fitting = [text for text in known if fits(text)]
        if fitting and (schema.get("examples") or self._chance(0.5)):
            return str(self._pick(fitting))
        with contextlib.suppress(PatternNotDrawn):
            for _ in range(_MATCHES):
                if fits(text := draw_match(pattern, self._rng, min_length=low)):
                    return text
        if fitting:
            return str(self._pick(fitting))
        raise CannotSample(
            f"No string was found for the pattern {schema['pattern']!r}; "
            "give the parameter examples with Field(examples=[...])."
        )

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        if isinstance(rest, list):  # a tuple in draft-07
            first, rest = rest, schema.get("additionalItems")
        items = [self.draw(item, depth + 1) for item in first]
        low = schema.get("minItems", 0)
        high = schema.get("maxItems", low + 3) if depth < MAX_DEPTH else low
        if rest is False or (rest is None and not low):
            return items
        for _ in range(int(self._rng.integers(low, high + 1)) - len(items)):
            item = self.draw(True if rest is None else rest, depth + 1)
            if not (schema.get("uniqueItems") and item in items):
                items.append(item)
        return items

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        chance = 0.5 if depth < MAX_DEPTH else 0.0
        value = {
            name: self.draw(part, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if name in required or self._chance(chance)
        }
        kinds = [({"pattern": p}, part) for p, part in schema.get("patternProperties", {}).items()]
        kinds.append((schema.get("propertyNames", {"enum": self._words}), schema.get("additionalProperties")))
        kinds = [(names, part) for names, part in kinds if isinstance(part, dict)]
        if kinds:
            missing = schema.get("minProperties", 0) - len(value)
            for _ in range(max(2 * missing, int(self._chance(chance)))):
                names, part = self._pick(kinds)
                value[str(self.draw(names, depth + 1))] = self.draw(part, depth + 1)
        return value

    def _pick(self, options: Sequence[Any]) -> Any:
        return options[int(self._rng.integers(len(options)))]

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)


def _guess_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    return "string"


def words_in(text: str) -> Iterator[str]:
    """Yield the words of a text that might be useful as arguments of tools."""
    for match in re.finditer(r"[^\W_][\w.\-]*(?: \d+)?", text):
        yield match.group()
