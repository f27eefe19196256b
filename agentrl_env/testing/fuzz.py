"""Fuzzing: odd assistant messages generated from a task's tool schemas.

Some are invalid, so the server must reject them as the model's error. The others fit the schema but have
unusual values. Neither kind may break the environment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_env.client.schema_sampler import CannotSample, sample_json
from agentrl_env.json_schema import compiled_schema
from agentrl_env.types import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec

ODD_STRINGS = (
    "", " ", "\n\t", "\x00", "x" * 100_000, "naïve 世界 🎲", "\u202eabc", "0", "-1", "null", "NaN", "[]",
    "'; DROP TABLE users; --", "' OR 1=1 --", "../../etc/passwd", "%s%n{}", "<script>",
    "${HOME}", "\\", "\ud800",
)  # fmt: skip
ODD_INTEGERS = (*range(-2, 33), 2**31, -(2**63), 2**63, 10**30, 10**400)
ODD_NUMBERS = (0.0, -0.0, -1.5, 1e308, 5e-324, 0.1)
WRONG_TYPES: tuple[Any, ...] = ("text", 3.5, True, None, [], {}, [[1]], {"a": 1})
NOT_FINITE: tuple[Any, ...] = (math.nan, [math.inf], {"a": math.nan}, [{"a": [-math.inf]}])
"""Values that are not valid JSON but that Python's ``json`` writes and reads."""
BROKEN_JSON = ("{", "not json", '"text"', "[1, 2]", "null", "7", "{'n': 1}", '{"n": NaN}', "[" * 5000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzCase:
    """One odd message. ``invalid`` is True if the server must reject it."""

    label: str
    message: Message
    invalid: bool = False


def fuzz_cases(tools: Sequence[ToolSpec], rng: np.random.Generator) -> Iterator[FuzzCase]:
    """Yield odd messages for every tool, then odd messages that do not concern a single tool."""
    for tool in tools:
        yield from _odd_values(tool.function, rng)
        yield from _invalid_arguments(tool.function, rng)
        for text in BROKEN_JSON:
            yield _case(f"{tool.function.name}: broken JSON", tool.function.name, text, True)
    yield from _odd_shapes(tools, rng)


def _odd_values(function: FunctionSpec, rng: np.random.Generator) -> Iterator[FuzzCase]:
    """Yield valid calls in which one argument has an unusual value."""
    for name in function.parameters.get("properties", {}):
        for odd in (*ODD_STRINGS, *ODD_INTEGERS, *ODD_NUMBERS, *WRONG_TYPES):
            arguments = _arguments(function, rng)
            if arguments is None:
                return
            arguments[name] = odd
            if _fits(function, arguments):
                yield _call(f"{function.name}: odd {name}", function, arguments, invalid=False)


def _invalid_arguments(function: FunctionSpec, rng: np.random.Generator) -> Iterator[FuzzCase]:
    """Yield calls with an argument that is of the wrong type, not finite, missing or unknown."""
    base = _arguments(function, rng)
    if base is None:
        return
    for name in function.parameters.get("properties", {}):
        for wrong in WRONG_TYPES:
            arguments = {**base, name: wrong}
            if not _fits(function, arguments):
                yield _call(f"{function.name}: wrong type of {name}", function, arguments)
        for value in NOT_FINITE:
            yield _call(f"{function.name}: {name} not finite", function, {**base, name: value})
    for name in function.parameters.get("required", ()):
        arguments = {key: value for key, value in base.items() if key != name}
        yield _call(f"{function.name}: {name} missing", function, arguments)
    for extra in ("no_such_argument", "self", "__class__", ""):
        arguments = {**base, extra: 1}
        if not _fits(function, arguments):
            yield _call(f"{function.name}: unknown argument {extra!r}", function, arguments)


def _odd_shapes(tools: Sequence[ToolSpec], rng: np.random.Generator) -> Iterator[FuzzCase]:
    """Yield messages that call an unknown tool, no tool, or many tools."""
    known = {tool.function.name for tool in tools}
    for name in ("no_such_tool", "", "reset", "close", "__init__", "score", "工具", "a" * 5000):
        if name not in known:
            yield _case("unknown tool", name, "{}", True)
    for content in (None, "", "Let me think.", "x" * 100_000, "🎲\x00\u202e"):
        yield FuzzCase(label="no tool call", message=Message.assistant(content))
    parts = [{"type": "text", "text": "Let me think."}, {"type": "image_url"}]
    yield FuzzCase(label="content parts", message=Message(role="assistant", content=parts))
    calls = [
        ToolCall.of(tool.function.name, call_id=f"call_{i}", **arguments)
        for i, tool in enumerate(list(tools) * 3)
        if (arguments := _arguments(tool.function, rng)) is not None
    ]
    yield FuzzCase(label="many calls", message=Message.assistant("Now all at once.", *calls))
    same = [call.model_copy(update={"id": "same"}) for call in calls[:2]]
    yield FuzzCase(label="two calls with one id", message=Message.assistant(None, *same))


def _arguments(function: FunctionSpec, rng: np.random.Generator) -> dict[str, Any] | None:
    try:
        value = sample_json(function.parameters, rng)
    except CannotSample:
        return None
    return value if isinstance(value, dict) else None


def _fits(function: FunctionSpec, arguments: Any) -> bool:
    return compiled_schema(function.parameters).is_valid(arguments)


def _call(label: str, function: FunctionSpec, arguments: Any, invalid: bool = True) -> FuzzCase:
    return _case(label, function.name, json.dumps(arguments), invalid)


def _case(label: str, name: str, arguments: str, invalid: bool) -> FuzzCase:
    call = ToolCall(id="call_0", function=FunctionCall(name=name, arguments=arguments))
    return FuzzCase(label=label, message=Message.assistant(None, call), invalid=invalid)
