import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl_env.client.schema_sampler import CannotSample, sample_call, sample_json, words_in
from agentrl_env.ecma_pattern import python_pattern
from agentrl_env.gym.spaces import Conversation, ToolCallSpace
from agentrl_env.types import FunctionSpec, ToolSpec

NESTED = {
    "type": "object",
    "properties": {
        "item": {"$ref": "#/$defs/Item"},
        "count": {"type": "integer", "exclusiveMinimum": 0, "maximum": 5},
        "price": {"anyOf": [{"type": "number", "minimum": 0}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["item", "count"],
    "additionalProperties": False,
    "$defs": {
        "Item": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 3, "maxLength": 8},
                "color": {"enum": ["red", "blue"]},
                "inside": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]},
            },
            "required": ["name", "color", "inside"],
        }
    },
}


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema["additionalProperties"] = False
    return ToolSpec(function=FunctionSpec(name=name, description=name, parameters=schema))


GUESS = tool("guess", n={"type": "integer", "minimum": 1, "maximum": 20})
SAY = tool("say", text={"type": "string"})

SCALARS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("integer")},
        optional={"minimum": st.integers(-50, 0), "maximum": st.integers(0, 50)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("number")},
        optional={"minimum": st.integers(-50, 0), "exclusiveMaximum": st.integers(1, 50)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 4), "maxLength": st.integers(4, 40)},
    ),
    st.fixed_dictionaries({"enum": st.lists(st.text() | st.integers(), min_size=1)}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}]),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
        | st.builds(
            lambda parts: {"type": "object", "properties": parts, "required": list(parts)},
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        )
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_sampled_value_is_valid_under_its_schema(schema, seed):
    value = sample_json(schema, np.random.default_rng(seed))
    Draft202012Validator(schema).validate(value)


@given(st.integers(0, 2**32))
def test_recursive_schemas_terminate(seed):
    value = sample_json(NESTED, np.random.default_rng(seed))
    Draft202012Validator(NESTED).validate(value)


def test_pattern_is_sampled_from_matching_examples():
    schema = {"type": "string", "pattern": "^[a-z]+ \\d$", "examples": ["cabinet 2"]}
    assert sample_json(schema, np.random.default_rng(0)) == "cabinet 2"


@pytest.mark.parametrize(
    "pattern",
    [
        "^[0-9a-f]{40}$",
        r"^[A-Z]{2}\d{2}(-\w+)?$",
        r"^(GET|POST) /[^\s?#]*\?$",
        r"^(?=.*\d)(?=.*[a-z])[^x]{8,}$",
        r"^(?<quote>['\"])\p{Lu}+\k<quote>$",
        r"\b\S+@[a-z.]+\.(?:com|org)\b",
        r"^[\w.-]*?[^][\u{1F600}-\u{1F64F}]$",
    ],
)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_string_is_sampled_from_its_pattern(pattern, seed):
    schema = {"type": "string", "pattern": pattern, "minLength": 12, "maxLength": 60}
    text = sample_json(schema, np.random.default_rng(seed))
    assert 12 <= len(text) <= 60
    assert re.search(python_pattern(pattern), text)


def test_names_are_sampled_from_their_patterns():
    schema = {"type": "object", "patternProperties": {"^x-[0-9]+$": {"type": "integer"}}, "minProperties": 3}
    value = sample_json({**schema, "additionalProperties": False}, np.random.default_rng(0))
    assert len(value) >= 3
    assert all(re.fullmatch("x-[0-9]+", name) and isinstance(item, int) for name, item in value.items())


@pytest.mark.parametrize("pattern", ["^(?=a)b$", "(a{1000}){1000}", "(?!)"])
def test_pattern_without_a_sampled_match_raises_with_advice(pattern):
    with pytest.raises(CannotSample, match="examples"):
        sample_json({"type": "string", "pattern": pattern}, np.random.default_rng(0))


def test_tools_without_sampled_arguments_are_omitted():
    never = {"type": "object", "properties": {"x": {"pattern": "(?!)"}}, "required": ["x"]}
    odd = ToolSpec(function=FunctionSpec(name="odd", parameters=never))
    rng = np.random.default_rng(0)
    assert {sample_call([odd, SAY], rng).function.name for _ in range(10)} == {"say"}
    with pytest.raises(CannotSample, match="No arguments of 'odd' were found"):
        sample_call([odd], rng)


def test_strings_are_sampled_from_the_given_words():
    call = sample_call([SAY], np.random.default_rng(3), words=["cabinet 2"])
    assert json.loads(call.function.arguments)["text"].startswith("cabinet 2")


def test_words_in_keeps_trailing_numbers():
    assert list(words_in("You see cabinet 2, an apple.")) == [
        "You", "see", "cabinet 2", "an", "apple.",
    ]  # fmt: skip


def test_sample_call_without_tools_raises():
    with pytest.raises(ValueError, match="no tools"):
        sample_call([], np.random.default_rng(0))


def test_sampled_action_is_in_the_space_and_reproducible():
    first, second = ToolCallSpace([GUESS, SAY], seed=5), ToolCallSpace([GUESS, SAY], seed=5)
    draws = [first.sample() for _ in range(50)]
    assert draws == [second.sample() for _ in range(50)]
    assert all(draw in first for draw in draws)
    assert {draw["name"] for draw in draws} == {"guess", "say"}


@pytest.mark.parametrize(
    "action",
    [
        {"name": "guess", "arguments": {}},
        {"name": "guess", "arguments": {"n": "seven"}},
        {"name": "guess", "arguments": {"n": 21}},
        {"name": "guess", "arguments": {"n": 3, "m": 4}},
        {"name": "fly", "arguments": {}},
        {"name": ["guess"], "arguments": {"n": 3}},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "guess"}}]},
        {"role": "assistant", "tool_calls": 3},
        "guess(3)",
        None,
    ],
)
def test_invalid_action_is_not_in_the_space(action):
    assert action not in ToolCallSpace([GUESS])


def test_assistant_message_with_valid_calls_is_in_the_space():
    function = {"name": "guess", "arguments": '{"n": 3}'}
    call = {"id": "a", "type": "function", "function": function}
    assert {"role": "assistant", "content": None, "tool_calls": [call]} in ToolCallSpace([GUESS])
    function["arguments"] = "{"
    assert {"role": "assistant", "content": None, "tool_calls": [call]} not in ToolCallSpace([GUESS])


def test_space_without_tools_samples_assistant_messages():
    space = ToolCallSpace([], seed=0)
    assert space.sample()["role"] == "assistant"
    assert space.sample() in space


def test_conversation_space_contains_only_messages():
    space = Conversation(seed=1)
    assert space.sample() in space
    assert ({"role": "user", "content": "höllo\n世界"},) in space
    assert () in space
    assert "text" not in space
    assert ({"role": "nobody", "content": ""},) not in space


@pytest.mark.parametrize("space", [Conversation(seed=2), ToolCallSpace([GUESS, SAY], seed=2)])
def test_pickled_space_is_equal_and_samples_identically(space):
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space
    assert hash(copy) == hash(space)
    assert copy.sample() == space.sample()
    assert not space.is_np_flattenable


def test_masks_are_rejected():
    with pytest.raises(ValueError, match="mask"):
        Conversation().sample(mask=1)


DRAFT_7 = "http://json-schema.org/draft-07/schema#"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "items": [{"type": "null"}, {"const": 2}]},
        {"items": [{"type": "null"}], "additionalItems": False},
        {"type": "string", "pattern": r"^\p{L}+$"},
        {"type": "array", "prefixItems": [True], "items": False},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    ],
)
def test_drawn_values_fit_foreign_schemas(part):
    dialect = {"$schema": DRAFT_7} if "additionalItems" in part else {}
    schema = {**dialect, "type": "object", "properties": {"at": part}, "required": ["at"]}
    space = ToolCallSpace(
        [ToolSpec(function=FunctionSpec(name="go", description="", parameters=schema))], seed=0
    )
    assert all(space.contains(space.sample()) for _ in range(20))
    assert not space.contains({"name": "go", "arguments": {}})
