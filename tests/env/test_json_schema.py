"""JSON Schemas from elsewhere: dialects, references, patterns, and errors for the model."""

import json
import re

import pytest

from agentrl_env.ecma_pattern import python_pattern
from agentrl_env.json_schema import MAX_CHARACTERS, JsonSchema, SchemaArguments, SchemaProblem
from agentrl_env.schema import ArgumentError

TEXT = {"type": "string"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def parsed(schema, text):
    return SchemaArguments(schema, "").parse(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"start": TEXT, "end": {"$ref": "#/properties/start"}}}, {"end": "x"}, {"end": 1}),
        (
            {
                "properties": {"size": {"$ref": "#/$defs/a/properties/size"}},
                "$defs": {"a": {"properties": {"size": {"type": "integer"}}}, "size": TEXT},
            },
            {"size": 1},
            {"size": "x"},
        ),
        (
            {"properties": {"a": {"$ref": "size"}}, "$defs": {"s": {"$id": "size", "type": "integer"}}},
            {"a": 1},
            {"a": "x"},
        ),
        (
            {"properties": {"a": {"$ref": "#s"}}, "$defs": {"s": {"$anchor": "s", **TEXT}}},
            {"a": ""},
            {"a": 1},
        ),
        ({"properties": {"a": {"$ref": "#/x-types/a%20b"}}, "x-types": {"a b": TEXT}}, {"a": ""}, {"a": 1}),
        ({"$ref": "#/$defs/all", "$defs": {"all": {"required": ["a"]}}}, {"a": 1}, {}),
        ({"additionalProperties": True, "properties": {"a": TEXT}}, {"a": "x", "b": 1}, {"a": 1}),
        ({"additionalProperties": {"type": "number"}}, {"any key": 1.5}, {"any key": "x"}),
        ({"additionalProperties": False, "properties": {"a": {}}}, {"a": None}, {"b": 1}),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, {"a": 1, "b": 2}),
        ({"allOf": [{"required": ["a"]}, {"properties": {"a": TEXT}}]}, {"a": "x"}, {"a": 1}),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, {}),
        ({"dependentRequired": {"card": ["address"]}}, {"card": 1, "address": 2}, {"card": 1}),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}),
        ({"properties": {"definitions": TEXT}, "required": ["definitions"]}, {"definitions": "x"}, {}),
        ({"properties": {"$ref": TEXT, "$defs": {"type": "integer"}}}, {"$ref": "x"}, {"$ref": 1}),
        ({"properties": {"self": TEXT, "from": TEXT, "a-b": TEXT}}, {"self": "x", "a-b": ""}, {"from": 1}),
        ({"properties": {"a": True, "b": False}}, {"a": [1]}, {"b": 1}),
        ({"properties": {"n": {"type": "integer"}}}, {"n": 1.0}, {"n": 1.5}),
        ({"properties": {"a": {"const": {"pattern": "("}}}}, {"a": {"pattern": "("}}, {"a": {}}),
    ],
)
def test_schema_validates_as_json_schema_defines(schema, right, wrong):
    assert parsed(schema, right) == right
    with pytest.raises(ArgumentError):
        parsed(schema, wrong)
    assert SchemaArguments(schema, "").schema.items() >= schema.items()


PAIR = {"properties": {"at": {"type": "array", "items": [{"type": "number"}, TEXT]}}}


@pytest.mark.parametrize("dialect", [{}, {"$schema": DRAFT_7}, {"$schema": DRAFT_7.rstrip("#")}])
def test_tuples_of_draft_7_are_checked_by_position(dialect):
    assert parsed({**dialect, **PAIR}, {"at": [1.5, "m"]}) == {"at": [1.5, "m"]}
    with pytest.raises(ArgumentError, match=r'"at\.1": 2 is not of type \'string\''):
        parsed({**dialect, **PAIR}, {"at": [1.5, 2]})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"n": {"minimum": 0, "exclusiveMinimum": True}}}, {"n": 1}, {"n": 0}),
        ({"$schema": DRAFT_7, "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
        ({"properties": {"a": {"prefixItems": [TEXT], "items": False}}}, {"a": ["x"]}, {"a": ["x", "y"]}),
        ({"$schema": "https://example.com/own", "required": ["a"]}, {"a": 1}, {}),
    ],
)
def test_dialect_is_the_declared_one_or_one_that_permits_the_schema(schema, right, wrong):
    assert JsonSchema(schema).is_valid(right)
    assert not JsonSchema(schema).is_valid(wrong)


TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/t"}, "right": {"$ref": "#/$defs/t"}}}


def test_recursive_schema_is_shown_unchanged_and_checked_at_every_depth():
    schema = {"properties": {"tree": {"$ref": "#/$defs/t"}}, "$defs": {"t": TREE}}
    shown = SchemaArguments(schema, "").schema
    assert {key: shown[key] for key in schema} == schema
    assert len(json.dumps(shown)) < len(json.dumps(schema)) + 50
    deep = wrong = {}
    for _ in range(30):
        deep, wrong = {"left": deep}, {"left": wrong or {"right": 5}}
    assert parsed(schema, {"tree": deep}) == {"tree": deep}
    with pytest.raises(ArgumentError, match="5 is not of type 'object'"):
        parsed(schema, {"tree": wrong})
    text = '{"tree": ' + '{"left": ' * 150 + "{}" + "}" * 150 + "}"
    assert parsed(schema, text)


def test_arguments_that_are_nested_too_deeply_are_the_fault_of_the_model():
    schema = {
        "$ref": "#/$defs/t",
        "$defs": {"t": {"anyOf": [{"additionalProperties": {"$ref": "#/$defs/t"}}]}},
    }
    with pytest.raises(ArgumentError, match=r"nested too deeply|recursion limit"):
        parsed(schema, '{"a": ' * 190 + "1" + "}" * 190)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (None, "is null, not a JSON object"),
        (True, "is true, not a JSON object"),
        ({"properties": {"a": None}}, "invalid at /properties/a: None is not"),
        ({"properties": {"a": {"type": "date"}}}, "invalid at /properties/a/type: 'date' is not valid"),
        ({"properties": {"a": {"type": "string", "required": True}}}, "invalid at /properties/a/required"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, "has no #/\\$defs/gone"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "has no https://example.com/a.json"),
        ({"properties": {"a": {"$ref": "#/title"}}, "title": "T"}, "#/title of its schema is not a schema"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}}, "leads back to itself"),
        ({"description": "x" * MAX_CHARACTERS}, "characters, more than 262,144"),
    ],
)
def test_schema_that_cannot_validate_is_refused_when_it_is_compiled(schema, reason):
    with pytest.raises(SchemaProblem, match=reason):
        SchemaArguments(schema, "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "arguments must be a JSON object"),
        ("{", "arguments are not valid JSON"),
        ('{"n": NaN}', 'argument "n" should be a finite number'),
        ('{"n": 1e999}', 'argument "n" should be a finite number'),
        ('{"n": "x"}', "argument \"n\": 'x' is not of type 'number'"),
        ("{}", "'n' is a required property"),
        ('{"n": 1, "code": "ab"}', 'argument "code": "ab" does not match the pattern ^\\d+$'),
    ],
)
def test_invalid_arguments_are_explained_in_a_line(text, reason):
    schema = {"properties": {"n": {"type": "number"}, "code": {"pattern": r"^\d+$"}}, "required": ["n"]}
    with pytest.raises(ArgumentError, match=re.escape(reason)):
        parsed(schema, text)


def test_long_errors_are_cut():
    with pytest.raises(ArgumentError) as error:
        parsed({"properties": {"a": {"enum": ["x" * 5000]}}}, {"a": 1})
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("pattern", "fits", "others"),
    [
        (r"^\p{L}+$", ["Häß", "Ω", "字"], ["a1", "", "a\n"]),
        (r"^[\p{Lu}\p{Nd} -]+$", ["AÄ 1-2"], ["a"]),
        (r"^[^\p{Uppercase_Letter}]*$", ["abc"], ["aBc"]),
        (r"^[\P{L}]$", ["1"], ["a"]),
        (r"^(?<year>\d{4})-\k<year>$", ["2020-2020"], ["2020-2021", "٢٠٢٠-٢٠٢٠"]),
        (r"^\w+$", ["a_1"], ["ä"]),
        (r"^\S\s[\S]$", ["a\ufeffb"], ["a b ", "   "]),
        (r"^\u{1F600}|\uD83D\uDE01$", ["\U0001f600", "\U0001f601"], ["x"]),
        (r"^[^]$", ["\n"], [""]),
        ("[]", [], ["", "a"]),
        (r"^[[a&&b||c~~$.]$", ["[", "a", "&", "|", "~", "$", "."], ["d"]),
        (r"^\/a\.[^\]]$", ["/a.b"], ["/a.]"]),
        ("^.$", ["a"], ["\u2028", "\n"]),
        (r"\A(?P<x>a)\Z", ["a"], ["b"]),
    ],
)
def test_patterns_follow_ecmascript(pattern, fits, others):
    python = python_pattern(pattern)
    assert [text for text in fits + others if re.search(python, text)] == fits
    compiled = JsonSchema({"properties": {"a": {"pattern": pattern}}})
    assert [text for text in fits + others if compiled.is_valid({"a": text})] == fits


@pytest.mark.parametrize("pattern", ["(?<=a+)b", r"\p{Script=Greek}", "(", r"\u{FFFFFF}"])
def test_pattern_that_python_cannot_express_is_not_checked_and_named(pattern):
    schema = {
        "properties": {"a": {"pattern": pattern, "type": "string"}},
        "patternProperties": {pattern: TEXT},
        "additionalProperties": False,
    }
    compiled = JsonSchema(schema)
    assert set(compiled.unchecked) == {pattern}
    assert compiled.is_valid({"a": "anything"})
    assert not compiled.is_valid({"a": 1})


def test_keys_are_matched_by_the_patterns_of_ecmascript():
    schema = {"patternProperties": {r"^\p{Lu}$": TEXT}, "additionalProperties": False}
    assert parsed(schema, {"Ä": "x"}) == {"Ä": "x"}
    for wrong in ({"Ä": 1}, {"ä": "x"}):
        with pytest.raises(ArgumentError):
            parsed(schema, wrong)
