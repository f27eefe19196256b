import json
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env.types import FunctionSpec, ToolSpec
from agentrl_train.tool_calls import PARSERS, ParsedCall, ParsedTurn, parser_for

FAMILIES = sorted(PARSERS)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool(name: str, **properties: Any) -> ToolSpec:
    schema = {"type": "object", "properties": properties}
    return ToolSpec(function=FunctionSpec(name=name, parameters=schema))


MOVE = tool(
    "move", x={"type": "integer"}, to={"type": "string"}, fast={"type": "boolean"}, path={"type": "array"}
)
LOOK = tool("look")


def call(name: str, **arguments: Any) -> ParsedCall:
    return ParsedCall(name, json.dumps(arguments))


def values(turn: ParsedTurn) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """Return a turn with decoded arguments, because families order keys differently."""
    return (
        turn.content,
        turn.thought,
        [(c.name, json.loads(c.arguments) if c.name else c.arguments) for c in turn.calls],
    )


# "Well." and two calls, move and look, as each family documents them.
JSON_MOVE = '{"x": 1, "to": "São Paulo", "fast": true, "path": [{"k": null}]}'
JSON_CALLS = f'[{{"name": "move", "arguments": {JSON_MOVE}}}, {{"name": "look", "arguments": {{}}}}]'
DOCUMENTED = {
    "hermes": f"""Well.
<tool_call>
{{"name": "move", "arguments": {JSON_MOVE}}}
</tool_call>
<tool_call>
{{"name": "look", "arguments": {{}}}}
</tool_call>""",
    "llama": f'Well. {{"name": "move", "parameters": {JSON_MOVE}}}; {{"name": "look", "parameters": {{}}}}',
    "mistral": f"""Well.[TOOL_CALLS] [{{"name": "move", "arguments": {JSON_MOVE}, "id": "abcdefgh1"}},
        {{"name": "look", "arguments": {{}}, "id": "abcdefgh2"}}]""",
    "mistral_args": f"Well.[TOOL_CALLS]move[ARGS]{JSON_MOVE}[TOOL_CALLS]look[ARGS]{{}}",
    "mistral_call_id": f"Well.[TOOL_CALLS]move[CALL_ID]abcdefgh1[ARGS]{JSON_MOVE}"
    "[TOOL_CALLS]look[CALL_ID]abcdefgh2[ARGS]{}",
    "qwen_xml": """Well.

<tool_call>
<function=move>
<parameter=x>
1
</parameter>
<parameter=to>
São Paulo
</parameter>
<parameter=fast>
true
</parameter>
<parameter=path>
[{"k": null}]
</parameter>
</function>
</tool_call>
<tool_call>
<function=look>
</function>
</tool_call>
""",
    "seed": """Well.<seed:tool_call>
<function=move>
<parameter=x>1</parameter>
<parameter=to>São Paulo</parameter>
<parameter=fast>true</parameter>
<parameter=path>[{"k": null}]</parameter>
</function>
</seed:tool_call><seed:tool_call>
<function=look>
</function>
</seed:tool_call>""",
    "glm": """
Well.
<tool_call>move
<arg_key>x</arg_key>
<arg_value>1</arg_value>
<arg_key>to</arg_key>
<arg_value>São Paulo</arg_value>
<arg_key>fast</arg_key>
<arg_value>true</arg_value>
<arg_key>path</arg_key>
<arg_value>[{"k": null}]</arg_value>
</tool_call>
<tool_call>look</tool_call>""",
    "minimax": """Well.
<minimax:tool_call>
<invoke name="move">
<parameter name="x">1</parameter>
<parameter name="to">São Paulo</parameter>
<parameter name="fast">true</parameter>
<parameter name="path">[{"k": null}]</parameter>
</invoke>
<invoke name="look">
</invoke>
</minimax:tool_call>""",
    "minicpm": 'Well.<function name="move"><param name="x">1</param>'
    '<param name="to"><![CDATA[São Paulo]]></param><param name="fast">true</param>'
    '<param name="path">[{"k": null}]</param></function>'
    '\n<function name="look"></function>',
    "lfm2": "<|tool_call_start|>[move(x=1, to='São Paulo', fast=True, path=[{'k': None}]), look()]"
    "<|tool_call_end|>Well.",
    "olmo3": """Well.<function_calls>
move(x=1, to="São Paulo", fast=true, path=[{"k": null}])
look()
</function_calls>""",
    "llama_python": "Well.\n[move(x=1, to='São Paulo', fast=True, path=[{'k': None}]), look()]",
    "harmony": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.move <|constrain|>json<|message|>{JSON_MOVE}<|call|>"
    "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}",
    "deepseek": "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>move\n```json\n"
    f"{JSON_MOVE}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>move<｜tool▁sep｜>{JSON_MOVE}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.move:0<|tool_call_argument_begin|>"
    f"{JSON_MOVE}<|tool_call_end|><|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "gemma4": 'Well.<|tool_call>call:move{fast:true,path:[{k:null}],to:<|"|>São Paulo<|"|>,x:1}<tool_call|>'
    "<|tool_call>call:look{}<tool_call|>",
    "granite": f"Well.<|tool_call|>{JSON_CALLS}",
    "phi4": f"Well.<|tool_call|>{JSON_CALLS}<|/tool_call|>",
    "nemotron": f"Well.<TOOLCALL>{JSON_CALLS}</TOOLCALL>",
    "apertus": f'Well.<|tools_prefix|>[{{"move": {JSON_MOVE}}}, {{"look": {{}}}}]<|tools_suffix|>',
    "cohere": "<|START_RESPONSE|>Well.<|END_RESPONSE|><|START_ACTION|>[\n"
    f'    {{"tool_call_id": "0", "tool_name": "move", "parameters": {JSON_MOVE}}},\n'
    '    {"tool_call_id": "1", "tool_name": "look", "parameters": {}}\n]<|END_ACTION|>',
}
THOUGHTS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "mistral_args": ("[THINK]", "[/THINK]"),
    "mistral_call_id": ("[THINK]", "[/THINK]"),
}
EXPECTED = ("Well.", [("move", json.loads(JSON_MOVE)), ("look", {})])


def tags(family: str) -> tuple[str, str]:
    return THOUGHTS.get(family, ("<think>\n", "\n</think>\n\n"))


@pytest.mark.parametrize("family", FAMILIES)
def test_documented_syntax_parses(family: str) -> None:
    content, thought, calls = values(PARSERS[family].parse(DOCUMENTED[family], [MOVE, LOOK]))
    assert (content, calls) == EXPECTED
    assert thought is None


@pytest.mark.parametrize("family", FAMILIES)
def test_thought_is_separate_from_content_and_calls(family: str) -> None:
    opening, closing = tags(family)
    parsed = PARSERS[family].parse(f"{opening}Hm, so.{closing}{DOCUMENTED[family]}", [MOVE, LOOK])
    assert values(parsed) == (EXPECTED[0], "Hm, so.", EXPECTED[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_thought_that_the_prompt_opened_is_a_thought(family: str) -> None:
    text = f"Hm, so.{tags(family)[1]}{DOCUMENTED[family]}"
    parsed = PARSERS[family].parse(text, [MOVE, LOOK], in_thought=True)
    assert values(parsed) == (EXPECTED[0], "Hm, so.", EXPECTED[1])


# In harmony the recipient is in the header of a message, so the body of a thought cannot contain a call.
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"harmony"}))
@pytest.mark.parametrize("in_thought", [False, True])
def test_call_in_a_thought_is_not_a_call(family: str, in_thought: bool) -> None:
    opening, closing = tags(family)
    start = "" if in_thought else opening
    closed = PARSERS[family].parse(f"{start}{DOCUMENTED[family]}{closing}No.", in_thought=in_thought)
    unclosed = PARSERS[family].parse(f"{start}{DOCUMENTED[family]}", in_thought=in_thought)
    assert (closed.content, closed.calls) == ("No.", ())
    assert (unclosed.content, unclosed.calls) == (None, ())
    assert closed.thought == unclosed.thought == DOCUMENTED[family].strip()


def test_call_before_a_closing_tag_without_an_opening_one_is_a_thought() -> None:
    text = '<tool_call>{"name": "a", "arguments": {}}</tool_call></think>No.'
    parsed = PARSERS["hermes"].parse(text)
    assert (parsed.content, parsed.calls) == ("No.", ())


@pytest.mark.parametrize("family", FAMILIES)
def test_closing_tag_of_a_thought_in_an_argument_is_text(family: str) -> None:
    turn = ParsedTurn("Well.", None, (call("move", to="a </think> b <think> c"), call("look")))
    assert values(PARSERS[family].parse(PARSERS[family].render(turn), [MOVE, LOOK])) == values(turn)


MALFORMED = [
    (
        "hermes",
        '<tool_call>\n{"name": "move", "arguments": {\n</tool_call>',
        '{"name": "move", "arguments": {',
    ),
    ("hermes", '<tool_call>{"name": "move", "arg', '{"name": "move", "arg'),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '{"name": "a", "arguments": [1]}'),
    ("hermes", "<tool_call>{} </think> x</tool_call>", "{} </think> x"),
    ("llama", '{"name": "move", "parameters": {"x": 1', '{"name": "move", "parameters": {"x": 1'),
    ("llama", "<|python_tag|>print(1 +", "print(1 +"),
    ("llama", '{"function": "move", "parameters": {}}', '{"function": "move", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] [{broken", "[{broken"),
    ("mistral_args", '[TOOL_CALLS]move[ARGS]{"x": ', 'move[ARGS]{"x":'),
    ("mistral_call_id", "[TOOL_CALLS]move[CALL_ID]", "move[CALL_ID]"),
    ("qwen_xml", '<tool_call>\n{"name": "move"}\n</tool_call>', '{"name": "move"}'),
    ("qwen_xml", "<function=move>\n<parameter=x>\n1\n</tool_call>", "move>\n<parameter=x>\n1\n</tool_call>"),
    ("seed", "<seed:tool_call>move</seed:tool_call>", "move"),
    ("glm", "<tool_call>move\n<arg_key>x</arg_key>\n<arg", "move\n<arg_key>x</arg_key>\n<arg"),
    ("minimax", "<minimax:tool_call>\nmove(1)\n</minimax:tool_call>", "move(1)"),
    ("minicpm", '<function name="move"><param name="x">1', 'move"><param name="x">1'),
    ("lfm2", "<|tool_call_start|>[move(x=)]<|tool_call_end|>", "[move(x=)]"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "[]"),
    ("lfm2", "<|tool_call_start|>[move(1)]<|tool_call_end|>", "move(1)"),
    ("lfm2", "<|tool_call_start|>[move(x=open('/'))]<|tool_call_end|>", "move(x=open('/'))"),
    ("olmo3", "<function_calls>\nmove(x=", "move(x="),
    ("llama_python", "[move(x=1, ", "[move(x=1,"),
    ("harmony", "<|channel|>commentary to=functions.a<|message|>{x", None),
    ("harmony", "<|channel|>commentary to=functions.move", None),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>move\n{x", "function<｜tool▁sep｜>move\n{x"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>move<｜tool▁calls▁end｜>", "move"),
    ("kimi", "<|tool_calls_section_begin|>functions.move:0<|tool_calls_section_end|>", "functions.move:0"),
    ("gemma4", "<|tool_call>call:move{x:}<tool_call|>", "call:move{x:}"),
    ("gemma4", "<|tool_call>call:move{x:1", "call:move{x:1"),
    ("granite", '<|tool_call|>[{"name": "mo', '[{"name": "mo'),
    ("phi4", "<|tool_call|>move<|/tool_call|>", "move"),
    ("nemotron", "<TOOLCALL>[1]</TOOLCALL>", "[1]"),
    ("apertus", '<|tools_prefix|>[{"a": {}, "b": {}}]<|tools_suffix|>', '{"a": {}, "b": {}}'),
    ("cohere", '<|START_ACTION|>[{"name": "move"}]<|END_ACTION|>', '{"name": "move"}'),
]


@pytest.mark.parametrize(("family", "text", "kept"), MALFORMED)
def test_unreadable_call_keeps_its_text_and_has_no_name(family: str, text: str, kept: str | None) -> None:
    before = "Well.\n" if kept else ""
    parsed = PARSERS[family].parse(before + text)
    assert parsed == ParsedTurn(before.strip() or None, None, (ParsedCall("", kept or text),))


def test_every_family_has_a_documented_and_a_malformed_example() -> None:
    assert set(DOCUMENTED) == set(FAMILIES) == {family for family, _, _ in MALFORMED}


@pytest.mark.parametrize(
    ("family", "good", "bad"),
    [
        ("hermes", '<tool_call>{"name": "look"}</tool_call>', "<tool_call>{</tool_call>"),
        ("lfm2", "<|tool_call_start|>[look(), ", "move(1)]<|tool_call_end|>"),
        (
            "minimax",
            '<minimax:tool_call><invoke name="look"></invoke>',
            "<invoke>x</invoke></minimax:tool_call>",
        ),
        ("mistral_args", "[TOOL_CALLS]look[ARGS]{}", "[TOOL_CALLS]move[ARGS]{x"),
    ],
)
def test_unreadable_call_leaves_its_neighbour_readable(family: str, good: str, bad: str) -> None:
    parsed = PARSERS[family].parse(good + bad)
    assert [c.name for c in parsed.calls] == ["look", ""]
    assert parsed.content is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "look"}', call("look")),
        ('{"name": "look", "arguments": null}', call("look")),
        ('{"name": "look", "arguments": "{\\"x\\": 1}"}', call("look", x=1)),
        ('{"type": "function", "function": {"name": "look", "parameters": {"x": 1}}}', call("look", x=1)),
        ('{"name": "look", "arguments": {"to": "</tool_call>"}}', call("look", to="</tool_call>")),
        (
            '{"name": "look", "arguments": {"x": NaN}}',
            ParsedCall("", '{"name": "look", "arguments": {"x": NaN}}'),
        ),
        (
            '{"name": "look", "arguments": {"x": 1e999}}',
            ParsedCall("", '{"name": "look", "arguments": {"x": 1e999}}'),
        ),
        ('{"name": "look", "arguments": {"to": "\\ud83d"}}', call("look", to="?")),
        ('{"name": "", "arguments": {}}', ParsedCall("", '{"name": "", "arguments": {}}')),
    ],
)
def test_variants_of_json_calls_parse(text: str, expected: ParsedCall) -> None:
    assert PARSERS["hermes"].parse(f"<tool_call>\n{text}\n</tool_call>").calls == (expected,)


@pytest.mark.parametrize(
    "text", ['{"answer": {"x": 1}}', '{"name": "Ada", "born": 1815}', '{"name": "f", "parameters": 7}']
)
def test_llama_json_that_names_no_tool_is_content(text: str) -> None:
    parsed = PARSERS["llama"].parse(text, [MOVE, LOOK])
    assert (parsed.content, parsed.calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "look"}', call("look")),
        ('{"name": "look", "parameters": "{}"}', call("look")),
        ('{"name": "fly", "parameters": {"x": 1}}', call("fly", x=1)),
        ('{"name": "move", "parameters": 7}', ParsedCall("", '{"name": "move", "parameters": 7}')),
    ],
)
def test_llama_json_with_a_tool_or_with_arguments_is_a_call(text: str, expected: ParsedCall) -> None:
    assert PARSERS["llama"].parse(text, [MOVE, LOOK]).calls == (expected,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|python_tag|>{"name": "look", "parameters": {"to": "a"}}', call("look", to="a")),
        ('<|python_tag|>brave_search.call(query="a b")', call("brave_search", query="a b")),
        ('<|python_start|>{"name": "look", "parameters": {}}<|python_end|>', call("look")),
    ],
)
def test_llama_python_tag_starts_a_call(text: str, expected: ParsedCall) -> None:
    assert PARSERS["llama"].parse(text) == ParsedTurn(calls=(expected,))


@pytest.mark.parametrize("between", ["", "\n", "; ", ", "])
def test_llama_reads_calls_that_follow_one_another(between: str) -> None:
    calls = call("look"), call("move", to="a")
    text = between.join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls)
    assert PARSERS["llama"].parse(text) == ParsedTurn(calls=calls)


def test_gemma_parses_nulls_and_keys_of_its_template() -> None:
    text = '<|tool_call>call:move{a b:true,deep:[{x:None}],none:None,to:<|"|>None<|"|>}<tool_call|>'
    expected = call("move", **{"a b": True, "deep": [{"x": None}], "none": None, "to": "None"})
    assert PARSERS["gemma4"].parse(text) == ParsedTurn(calls=(expected,))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "True", True),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nil", "nil"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        (
            {"type": "object"},
            "{'a': [1, {'b': None}], 'c': True}",
            {"a": [1, {"b": None}], "c": True},
        ),
        ({"type": "array"}, "['a, b', \"c'd\"]", ["a, b", "c'd"]),
        ({"type": "array"}, "[print(1)]", "[print(1)]"),
        ({"type": "string"}, "['a']", "['a']"),
        ({}, "[1, {'x': None}]", [1, {"x": None}]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/Side"}, "7", "7"),
        ({}, "7", 7),
        ({}, "north", "north"),
        (None, '{"a": 1}', {"a": 1}),
        (None, "1e999", "1e999"),
    ],
)
@pytest.mark.parametrize("family", ["qwen_xml", "glm", "minimax", "minicpm", "seed"])
def test_xml_arguments_have_the_type_of_the_schema(family: str, schema: Any, text: str, value: Any) -> None:
    parameters = {
        "properties": {"v": schema} if schema is not None else {},
        "$defs": {"Side": {"type": "string"}},
    }
    spec = ToolSpec(function=FunctionSpec(name="f", parameters=parameters))
    written = PARSERS[family].render(ParsedTurn(calls=(call("f", v=text),)))
    parsed = PARSERS[family].parse(written, [spec])
    assert values(parsed)[2] == [("f", {"v": value})]
    assert type(json.loads(parsed.calls[0].arguments)["v"]) is type(value)


NODE = {"anyOf": [{"$ref": "#/$defs/Node"}] * 20 + [{"type": "integer"}]}


@pytest.mark.parametrize(
    "schema",
    [{"type": [["x"], {}]}, {"type": 5, "enum": 5}, {"anyOf": 5, "$ref": 5}, {"enum": [b"x"]}, [], "x", NODE],
)
def test_malformed_schema_leaves_arguments_untyped(schema: Any) -> None:
    spec = ToolSpec(
        function=FunctionSpec(name="f", parameters={"properties": {"v": schema}, "$defs": {"Node": NODE}})
    )
    text = PARSERS["glm"].render(ParsedTurn(calls=(call("f", v=7),)))
    assert values(PARSERS["glm"].parse(text, [spec]))[2] == [("f", {"v": 7})]


def test_xml_text_keeps_its_space_and_inner_tags() -> None:
    text = "\n  def f():\n    return '</parameter>' </function>\n\n"
    turn = ParsedTurn(calls=(call("move", to=text),))
    assert PARSERS["qwen_xml"].parse(PARSERS["qwen_xml"].render(turn), [MOVE]) == turn


def test_qwen_call_without_its_outer_tag_is_a_call() -> None:
    text = "Well.\n<function=move>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    assert values(PARSERS["qwen_xml"].parse(text, [MOVE])) == ("Well.", None, [("move", {"x": 1})])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("[f(from='a', class=1)]", [("f", {"from": "a", "class": 1})]),
        ("[f(to='a, in=b', in='c')]", [("f", {"to": "a, in=b", "in": "c"})]),
        ("[f(to='two\nlines')]", [("f", {"to": "two\nlines"})]),
        ("[a.b(x=-1, y=(1, 2.5))]", [("a.b", {"x": -1, "y": [1, 2.5]})]),
        ("f(x=true)", [("f", {"x": True})]),
        (r"[f(to='\d')]", [("f", {"to": r"\d"})]),
        ("[f(to='<|tool_call_end|>]')]", [("f", {"to": "<|tool_call_end|>]"})]),
    ],
)
def test_python_calls_parse(source: str, expected: list[tuple[str, Any]]) -> None:
    assert values(PARSERS["lfm2"].parse(f"<|tool_call_start|>{source}<|tool_call_end|>"))[2] == expected


def test_python_is_never_run(tmp_path: Any) -> None:
    target = tmp_path / "made"
    for family in ("lfm2", "olmo3", "llama_python", "llama"):
        source = f"[f(x=open({str(target)!r}, 'w'))]"
        for text in (f"<|tool_call_start|>{source}<|tool_call_end|>", source, f"<|python_tag|>{source}"):
            assert not any(c.name for c in PARSERS[family].parse(text).calls)
    assert not target.exists()


def test_harmony_channels_separate_thought_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    assert PARSERS["harmony"].parse(text) == ParsedTurn("Done.", "Hm.\nSo.")


def test_harmony_call_in_the_text_of_a_thought_is_not_a_call() -> None:
    text = "<|channel|>analysis<|message|>I could send to=functions.move {}"
    assert PARSERS["harmony"].parse(text).calls == ()


def test_deepseek_reads_both_of_its_forms() -> None:
    for family in ("deepseek", "deepseek_v31"):
        for text in (DOCUMENTED["deepseek"], DOCUMENTED["deepseek_v31"]):
            assert values(PARSERS[family].parse(text))[2] == EXPECTED[1]


def test_mistral_reads_its_three_forms() -> None:
    names = ("mistral", "mistral_args", "mistral_call_id")
    for family in names:
        for text in names:
            assert values(PARSERS[family].parse(DOCUMENTED[text]))[2] == EXPECTED[1]


def test_ids_that_the_model_wrote_are_kept() -> None:
    expected = {
        "mistral": ["abcdefgh1", "abcdefgh2"],
        "mistral_call_id": ["abcdefgh1", "abcdefgh2"],
        "kimi": ["functions.move:0", "functions.look:1"],
        "cohere": ["0", "1"],
    }
    for family in FAMILIES:
        parsed = PARSERS[family].parse(DOCUMENTED[family], [MOVE, LOOK])
        assert [c.id for c in parsed.calls] == expected.get(family, ["", ""])
        again = PARSERS[family].parse(PARSERS[family].render(parsed), [MOVE, LOOK])
        assert [c.id for c in again.calls] in ([c.id for c in parsed.calls], ["", ""])


@pytest.mark.parametrize("family", FAMILIES)
def test_call_ids_are_distinct_and_in_the_form_of_the_family(family: str) -> None:
    ids = [PARSERS[family].call_id(turn, number, "look") for turn in range(1, 4) for number in range(3)]
    assert len(set(ids)) == (3 if family == "kimi" else 9)
    if family.startswith("mistral"):
        assert all(len(i) == 9 and i.isascii() and i.isalnum() for i in ids)
    elif family == "kimi":
        assert ids[1] == "functions.look:1"
    else:
        assert ids[1] == "call_1_1"


def test_arguments_that_are_not_an_object_are_not_rendered() -> None:
    for family in FAMILIES:
        with pytest.raises(ValueError, match="not a JSON object"):
            PARSERS[family].render(ParsedTurn(calls=(ParsedCall("look", "[1]"),)))


def test_tools_can_be_named_like_python_keywords() -> None:
    for name in set(keyword.kwlist) - {"True", "False", "None"}:
        for text in (
            f"[{name}()]",
            f"[{name}(x=1), {name}(y='a')]",
            f"[look(), {name}(if=2)]",
            f"[a.{name}()]",
        ):
            calls = PARSERS["llama_python"].parse(text).calls
            assert {call.name for call in calls} <= {name, "look", f"a.{name}"}, text
            assert calls[-1].name.removeprefix("a.") == name


NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>[]{}|｜"), max_size=20).map(
    str.strip
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "]<|tool_call_end|>",
        "\n",
        "'\"",
        "\\",
        "</think>",
        "[/THINK]",
        "=}",
    ]
)
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)


def arguments(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    nested = st.recursive(
        SCALARS | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    )
    return st.dictionaries(NAMES, nested, max_size=4)


# A string with the syntax's own marks is ambiguous if the syntax has no escapes.
TEXTS = {
    family: PLAIN_TEXT if family in ("harmony", "gemma4", "qwen_xml", "glm", "minimax", "seed") else ANY_TEXT
    for family in FAMILIES
}


few_examples = settings(max_examples=settings.default.max_examples // 3)  # separate draws for each family


def schema_of(value: Any) -> Mapping[str, Any]:
    return {"type": "null" if value is None else TYPES[type(value)]}


@pytest.mark.parametrize("family", FAMILIES)
@few_examples
@given(data=st.data())
def test_rendered_turn_parses_to_itself(family: str, data: st.DataObject) -> None:
    parser = PARSERS[family]
    names = data.draw(st.lists(NAMES, max_size=3, unique=True))
    calls = {name: data.draw(arguments(TEXTS[family])) for name in names}
    tools = [tool(name, **{key: schema_of(v) for key, v in values.items()}) for name, values in calls.items()]
    turn = ParsedTurn(
        data.draw(WORDS) or None,
        data.draw(WORDS) or None,
        tuple(ParsedCall(name, json.dumps(values)) for name, values in calls.items()),
    )
    for in_thought in (False, True):
        text = parser.render(turn, in_thought=in_thought)
        assert values(parser.parse(text, tools, in_thought=in_thought)) == values(turn)


PIECES = {piece for text in DOCUMENTED.values() for piece in text.split()}
TAGS = {tag for family in FAMILIES for tag in tags(family)}
FRAGMENTS = st.sampled_from(
    [*sorted(PIECES | TAGS), "<|start|>", "<|python_tag|>", "{", "[", "[" * 3000, "(" * 300, "\ud83d", "\0"]
)


@pytest.mark.parametrize("family", FAMILIES)
@few_examples
@given(
    text=st.text() | st.lists(FRAGMENTS | st.text(max_size=5), max_size=12).map("".join),
    in_thought=st.booleans(),
)
def test_any_text_parses(family: str, text: str, in_thought: bool) -> None:
    parsed = PARSERS[family].parse(text, [MOVE, LOOK], in_thought=in_thought)
    for made in parsed.calls:
        made.arguments.encode()
        if made.name:
            assert isinstance(json.loads(made.arguments), dict)


@pytest.mark.parametrize("family", FAMILIES)
def test_long_degenerate_text_parses(family: str) -> None:
    opening = DOCUMENTED[family].removeprefix("Well.").strip()[:40]
    for piece in ("\n", " ", "{", "[", "<", opening, tags(family)[0]):
        for start in ("", opening, opening[:12]):
            assert PARSERS[family].parse(start + piece * (15_000 // len(piece)), [MOVE, LOOK]).thought != ""


MARKS = [
    ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
    ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen_xml"),
    ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", "glm"),
    ("{%- set begin = '<minimax:tool_call>' %}<invoke name=", "minimax"),
    ("'<seed:tool_call>\\n<function=' + name", "seed"),
    ('<function name="f"><param name="p">v</param></function> <tool_call>', "minicpm"),
    ("'<function name=\"' ~ tool_call.name ~ '\">'", "minicpm"),
    ("'<|start_header_id|>assistant<|end_header_id|>' '<|python_tag|>' + name", "llama"),
    ('{"name": function name, "parameters": dictionary of argument name and its value}.', "llama"),
    ("[func_name1(params_name1=params_value1)] <|python_start|>", "llama_python"),
    ("'[TOOL_CALLS] [' + '\"id\": '", "mistral"),
    ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral_args"),
    ("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'", "mistral_call_id"),
    ("'List of tools: <|tool_list_start|>['", "lfm2"),
    ("'\\n' + 'List of tools: ['", "lfm2"),
    ("'<|tool_call_start|>[' + calls + ']<|tool_call_end|>'", "lfm2"),
    ("'<function_calls>' + calls + '</function_calls>'", "olmo3"),
    ("'<|start|>assistant<|channel|>analysis<|message|>'", "harmony"),
    ("'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json'", "deepseek"),
    ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi"),
    ("'<|im_system|>tool_declare<|im_middle|>'", "kimi"),
    ("'<|tool_call>call:' + name", "gemma4"),
    ("respond only with <|tool_call|> followed by a JSON list of tools used", "granite"),
    ("'<|tool|>' + tools + '<|/tool|>'", "phi4"),
    ("'<|tool_call|>' + call + '<|/tool_call|>'", "phi4"),
    ("<TOOLCALL>[...]</TOOLCALL>", "nemotron"),
    ("'<|tools_prefix|>['", "apertus"),
    ("<|START_ACTION|>", "cohere"),
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", None),
]


@pytest.mark.parametrize(("template", "family"), MARKS)
def test_family_is_chosen_from_the_template(template: str, family: str | None) -> None:
    found = parser_for(template)
    assert (found.name if found else None) == family


def test_every_family_can_be_chosen_and_has_its_name() -> None:
    assert {family for _, family in MARKS if family} == set(FAMILIES)
    assert all(parser.name == name for name, parser in PARSERS.items())


def test_documentation_lists_the_families() -> None:
    page = Path(__file__).parents[2] / "docs/reference/tool-calls.md"
    assert sorted(re.findall(r"^\| `(\w+)`", page.read_text(), re.MULTILINE)) == FAMILIES
