"""Calls that real models write outside their family's syntax, and the errors for unreadable calls."""

import json
import re
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env import EnvClient, Environment, tool
from agentrl_env.types import FunctionSpec, Message, ToolSpec
from agentrl_train.chat import ChatFormat, Reading
from agentrl_train.tool_calls import PARSERS, THOUGHT, ParsedTurn
from agentrl_train.tool_calls.errors import problem, with_syntax
from agentrl_train.tool_calls.schemas import ordered
from agentrl_train.tool_calls.turn import read_turn as read_any_turn
from tests.tiny_models import make_tokenizer

few_examples = settings(max_examples=settings.default.max_examples // 3)  # of each parser or form
CHAT = ChatFormat(make_tokenizer())
HERMES = PARSERS["hermes"]
read_turn = partial(read_any_turn, thought=THOUGHT)


def spec(name: str, **properties: str) -> ToolSpec:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return ToolSpec(function=FunctionSpec(name=name, parameters=schema))


TOOLS = [spec("search", query="string"), spec("buy", seller="string")]
CALL = '{"name": "search", "arguments": {"query": "red lamp"}}'
SEARCH, BUY = ("search", {"query": "red lamp"}), ("buy", {"seller": "acme"})
TEXT = st.text(max_size=20).filter(
    lambda text: not re.search("<tool_call>|</tool_call>|<think>|</think>", text)
)
"""Texts without marks, which are marks wherever they are: special tokens, which a policy cannot quote."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=4)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
FORMS = (
    "{}",
    "```json\n{}\n```",
    "```\n{}\n```",
    "I will look.\n\n```json\n{}\n```\nThis should help.",
    "First: {} and then we see.",
    "<tool_call>\n{}\n</tool",
    "<tool_call>\n{}\n</tool_ca",
    "<tool_call>{}<",
    "<tool_call>\n```json\n{}\n```\n</tool_call>",
    "{}\n</tool_call>",
    "[{}]",
)


def calls_of(parsed: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls if call.name]


def read(text: str, tools: list[ToolSpec] = TOOLS, *, parser: str = "hermes") -> list[tuple[str, Any]]:
    """Return the calls that only the tolerant parser finds in a text."""
    parsed, tolerant = read_turn(PARSERS[parser], text, tools)
    assert tolerant == bool(calls_of(parsed))
    return calls_of(parsed)


@pytest.mark.parametrize("form", FORMS)
@few_examples
@given(name=NAMES, arguments=ARGUMENTS, key=st.sampled_from(["arguments", "parameters"]))
def test_call_in_a_fence_or_bare_is_read_to_exactly_its_arguments(
    form: str, name: str, arguments: dict[str, Any], key: str
) -> None:
    body = json.dumps({"name": name, key: arguments})
    assert read(form.replace("{}", body), [spec(name)]) == [(name, arguments)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"```json\n[{CALL}, {CALL}]\n```", [SEARCH, SEARCH]),
        (f'{CALL}\n{{"name": "buy", "arguments": {{"seller": "acme"}}}}', [SEARCH, BUY]),
        (f'{{"type": "function", "function": {CALL}}}', [SEARCH]),
        ('{"type": "function", "name": "search", "parameters": {"query": "red lamp"}}', [SEARCH]),
        ('{"name": "search", "arguments": "{\\"query\\": \\"red lamp\\"}"}', [SEARCH]),
    ],
)
def test_lists_of_calls_and_calls_of_the_openai_api_are_read(
    text: str, expected: list[tuple[str, Any]]
) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '```json\n{"name": "buy", "arguments": {"seller": "delta", "query": "small red lamp"}}\n```',
            [("buy", {"seller": "delta", "query": "small red lamp"})],
        ),
        (
            '```json\n{\n  "name": "buy",\n  "arguments": {\n    "seller": "delta"\n  }\n}\n```',
            [("buy", {"seller": "delta"})],
        ),
        ('{"name": "buy", "arguments": {"seller": "acme", "query": "small red lamp"}', []),
    ],
)
def test_completions_of_qwen_coder_for_the_shop_are_read_or_answered_with_the_reason(
    text: str, expected: list[tuple[str, Any]]
) -> None:
    assert read(text) == expected
    if not expected:
        assert problem(text, TOOLS) == (
            'its JSON ends early, after \'uery": "small red lamp"}\'; missing at the end: }'
        )


def test_content_keeps_the_prose_around_a_call_without_its_fence() -> None:
    parsed, _ = read_turn(HERMES, f"I will look.\n```json\n[{CALL}]\n```\nThen I buy.", TOOLS)
    assert parsed.content == "I will look.\nThen I buy."


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("search", "unknown"),
        '{"name": "search", "arguments": [1]}',
        '{"name": "search", "arguments": "red lamp"}',
        '{"name": "search", "score": 3}',
        '{"name": "search", "arguments": {"query": "red lamp"}',
        "{'name': 'search', 'arguments': {'query': 'red lamp'}}",
        '{"name": "search", "description": "Search.", "parameters": {"type": "object"}}',
        f'{{"type": "function", "function": {json.dumps(TOOLS[0].function.model_dump())}}}',
        f'{{"name": "unknown", "arguments": {{"inner": {CALL}}}}}',
        f'{{"name": "unknown", "arguments": {{"inner": {CALL}',
        f"<think>\n{CALL}\n</think>",
        f"<think>\n{CALL}",
        f"Hm. {CALL}</think> Well.",
        f"<tool_call><think>{CALL}</think>",
        f"<tool_call>Hm. </think>{CALL}",
    ],
)
def test_text_without_a_call_of_a_known_tool_outside_thoughts_yields_no_call(text: str) -> None:
    assert read(text) == []


def test_calls_inside_an_open_thought_are_never_parsed_tolerantly() -> None:
    parsed, tolerant = read_turn(HERMES, f"Hm. {CALL}", TOOLS, in_thought=True)
    assert (parsed.calls, tolerant) == ((), False)


@few_examples
@given(
    text=st.text() | st.lists(st.sampled_from([*FORMS, CALL, '{"name":', '"', "[", "}", "\\"])).map("".join)
)
@pytest.mark.parametrize("parser", PARSERS)
def test_any_text_parses_and_has_a_problem_without_an_error(parser: str, text: str) -> None:
    parsed, _ = read_turn(PARSERS[parser], text, TOOLS)
    assert {name for name, _ in calls_of(parsed)} <= {"search", "buy"} | {
        call.name for call in PARSERS[parser].parse(text, TOOLS).calls
    }
    assert problem(text, TOOLS)


@given(text=st.text().filter(lambda text: "search" not in text and "buy" not in text))
def test_text_without_the_name_of_a_tool_never_yields_a_call(text: str) -> None:
    assert read_turn(HERMES, text, TOOLS)[1] is False


def test_many_openings_are_parsed_quickly() -> None:
    for piece in ('{"name": ', '{"name": "', "[{", '{"name": [', "```json\n", '{"type": {"function": {'):
        assert read(piece * 5_000) == []


def test_call_in_the_syntax_of_the_family_is_read_by_the_family() -> None:
    parsed, tolerant = read_turn(HERMES, f"{CALL}\n<tool_call>\n{CALL}\n</tool_call>", TOOLS)
    assert not tolerant
    assert calls_of(parsed) == [SEARCH]
    assert parsed.content == CALL


def reading(text: str) -> Reading:
    return CHAT.parse_text(text, turn=1, tools=TOOLS)


def answered(text: str, reply: str, *, invalid_calls: int = 1) -> str:
    """Return the reply for the model to an environment's reply."""
    message = reading(text).message
    calls = message.tool_calls
    given_reply = (
        Message(role="tool", content=reply, tool_call_id=calls[0].id)
        if calls
        else Message(role="user", content=reply)
    )
    (shown,) = with_syntax(
        [given_reply], message, invalid_calls=invalid_calls, parser=CHAT.parser, tools=TOOLS
    )
    assert shown.tool_call_id == given_reply.tool_call_id
    assert isinstance(shown.content, str)
    return shown.content


NO_TOOL = 'Error: there is no tool "". Tools: search, buy.'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '<tool_call>\n{"name": "buy", "arguments": {"seller": "acme"',
            "its JSON ends early, after '",
        ),
        ('<tool_call>\n{"name": "buy", "arguments": {"seller": "ac', 'missing at the end: "}}.'),
        ('<tool_call>\n{"name": "buy", "arguments": {"seller": acme}}', "is wrong at character 41, after"),
        ('<tool_call>\n{"query": "buy"}\n</tool_call>', 'its JSON has no "name" of a tool'),
        ('<tool_call>\n{"name": "buy", "arguments": 3}\n</tool_call>', '"arguments" are not a JSON object'),
        ('<tool_call>\n{"name": "sell", "arguments": {}} x</tool_call>', 'there is no tool "sell"; tools: '),
        ("<tool_call>\nbuy\n</tool_call>", "it has no complete name and arguments"),
    ],
)
def test_error_of_an_unreadable_call_names_the_problem_and_the_syntax(text: str, reason: str) -> None:
    shown = answered(text, NO_TOOL)
    assert reason in shown
    assert 'no tool ""' not in shown
    name = "search" if "sell" in text and "buy" not in text else ("buy" if "buy" in text else "search")
    assert f'<tool_call>\n{{"name": "{name}", "arguments": {{' in shown


def test_text_in_place_of_a_call_is_answered_with_the_syntax() -> None:
    shown = answered("I would buy it.", "Call one of the tools: search, buy.")
    assert shown == (
        "Call one of the tools: search, buy. Write a call like this:\n"
        '<tool_call>\n{"name": "buy", "arguments": {"seller": "..."}}\n</tool_call>'
    )


def test_unreadable_json_without_tags_is_named_in_the_answer_to_a_text() -> None:
    shown = answered('{"name": "buy", "arguments": {"seller": "acme"}', "Call one of the tools.")
    assert "A call in your message was not read: its JSON ends early" in shown


def test_valid_turns_and_errors_of_arguments_keep_the_reply_of_the_environment() -> None:
    assert answered("It is red.", "Right.", invalid_calls=0) == "Right."
    missing = "Error: missing argument 'query'."
    assert answered('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', missing) == missing


class Finder(Environment):
    """Find things."""

    def reset(self, sample, rng):  # type: ignore[no-untyped-def]
        return "Find it."

    @tool
    def find(self, zone: str, aisle: int = 1) -> str:
        """Find a thing.

        Args:
            zone: where to look.
            aisle: number of the aisle.
        """
        return "found"


async def test_schema_for_the_model_starts_with_its_type_and_keeps_the_order_of_arguments() -> None:
    async with Finder.local() as client:
        assert isinstance(client, EnvClient)
        session = await client.open("finder", split="train", index=0)
        await session.close()
    parameters = session.tools[0].function.parameters
    shown = ordered(parameters)
    assert shown == parameters
    assert list(shown) == ["type", "properties", "required", "additionalProperties"]
    assert list(shown["properties"]) == ["zone", "aisle"]
    assert list(shown["properties"]["zone"]) == ["type", "description"]
    for chat in (CHAT, ChatFormat(make_tokenizer(), tool_parser="prompt")):
        assert '{"type": "object", "properties": {"zone": {"type": "string"' in chat.render(
            session.messages, session.tools
        )
