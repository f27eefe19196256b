import asyncio
import contextlib
import json
import math
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from pydantic import BaseModel, ConfigDict, Field

from agentrl_env import Done, Environment, Message, Reply, ToolCall, ToolError, tool
from agentrl_env.errors import DefinitionError
from agentrl_env.fast_wire import ToolAnswer
from agentrl_env.schema import ArgumentError, parse_docstring
from agentrl_env.tools import StepBuilder, TimeLimitReached, tool_messages, toolset
from tests.env.tasks import Quick


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int = 0


ORIGIN = Point(x=1)


class Everything:
    @tool
    def everything(
        self,
        text: str,
        number: int,
        ratio: float,
        flag: bool,
        colour: Colour,
        mode: Literal["fast", "slow"],
        point: Point,
        points: list[Point],
        maybe: int | None,
        table: dict[str, int],
        limited: Annotated[int, Field(ge=1, le=9, description="a digit")],
        greeting: str = "hi",
        shade: Colour = Colour.BLUE,
        where: Point = ORIGIN,
        *,
        last: int = 3,
    ):
        """Take all kinds of arguments.

        Args:
            text: some text,
                over two lines
            number (int): a number
            limited: this loses against Field

        Returns:
            nothing of use
        """
        return "ok"

    @tool
    def odd_names(self, copy: int, schema: int = 1, _x: int = 2, title: str = "t"):
        """Names that conflict with attributes of a model class."""
        return "ok"

    @tool(name="renamed", timeout=3.0)
    async def original(self):
        return "ok"

    def helper(self):
        return "not a tool"


GOOD = {
    "text": "a",
    "number": 1,
    "ratio": 2,
    "flag": True,
    "colour": "red",
    "mode": "fast",
    "point": {"x": 1},
    "points": [],
    "maybe": None,
    "table": {"a": 1},
    "limited": 5,
}


def arguments(name="everything"):
    return toolset(Everything).tools[name].arguments


def test_schema_is_derived_from_signature_and_docstring():
    spec = toolset(Everything).tools["everything"].spec.function
    properties = spec.parameters["properties"]
    assert spec.description == "Take all kinds of arguments."
    assert properties["text"] == {"type": "string", "description": "some text, over two lines"}
    assert properties["number"]["description"] == "a number"
    assert properties["limited"] == {"type": "integer", "minimum": 1, "maximum": 9, "description": "a digit"}
    assert properties["mode"]["enum"] == ["fast", "slow"]
    assert properties["greeting"] == {"type": "string", "default": "hi"}
    assert properties["shade"]["default"] == "blue"
    assert properties["where"]["default"] == {"x": 1, "y": 0}
    assert spec.parameters["required"] == list(GOOD)
    assert spec.parameters["additionalProperties"] is False
    Draft202012Validator.check_schema(spec.parameters)
    json.dumps(spec.parameters)


def test_generated_titles_are_removed_but_not_a_property_named_title():
    text = json.dumps(arguments().schema)
    assert '"title"' not in text
    assert "title" in arguments("odd_names").schema["properties"]


def test_arguments_have_the_types_of_the_signature():
    values = arguments().parse(json.dumps(GOOD))
    assert values["colour"] is Colour.RED
    assert values["point"] == Point(x=1)
    assert values["maybe"] is None
    assert "greeting" not in values  # the default of the method applies


def test_any_parameter_name_is_allowed():
    assert arguments("odd_names").parse('{"copy": 1, "_x": 3}') == {"copy": 1, "_x": 3}


def test_blank_text_means_no_arguments():
    assert arguments("renamed").parse(" ") == {}
    assert toolset(Everything).tools["renamed"].spec.function.parameters == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": "7"}, 'argument "number" should be a valid integer, got "7"'),
        ({"flag": 1}, 'argument "flag" should be a valid boolean, got 1'),
        ({"colour": "green"}, "argument \"colour\" should be 'red' or 'blue', got \"green\""),
        ({"point": {"y": 1}}, "missing argument 'point.x'"),
        ({"points": [{"x": "a"}]}, 'argument "points.0.x" should be a valid integer, got "a"'),
        ({"limited": 10}, 'argument "limited" should be less than or equal to 9, got 10'),
        ({"surprise": 1}, 'unknown argument "surprise" (known: text, number'),
    ],
)
def test_invalid_argument_raises_one_readable_line(change, message):
    with pytest.raises(ArgumentError) as caught:
        arguments().parse(json.dumps(GOOD | change))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "7", '"x"', "null", "NaN", '{"text": "\ud800"}'])
def test_arguments_that_are_not_a_json_object_are_rejected(text):
    with pytest.raises(ArgumentError, match=r"arguments (are not valid JSON|must be a JSON object)"):
        arguments().parse(text)


class Plan(Environment):
    """A task whose tool takes dates and numbers."""

    def reset(self, sample, rng):
        return ""

    @tool
    def book(
        self,
        day: date,
        at: datetime,
        span: timedelta,
        code: Annotated[str, Field(pattern="^[A-Z]{3}$")],
        seats: list[int],
        choice: Literal[1, 2] | None,
        price: float,
    ):
        """Book a room."""


GOOD_PLAN = {
    "day": "2024-02-29",
    "at": "2024-02-29T12:00:00Z",
    "span": "PT1H",
    "code": "ABC",
    "seats": [1.0, 2e1],
    "choice": 2.0,
    "price": 3.0,
}


def test_whole_number_with_a_decimal_point_is_an_integer():
    schema = toolset(Plan).tools["book"].arguments.schema
    assert Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(GOOD_PLAN)
    values = toolset(Plan).tools["book"].arguments.parse(json.dumps(GOOD_PLAN))
    assert (values["seats"], values["choice"], values["price"]) == ([1, 20], 2, 3.0)
    assert [type(seat) for seat in values["seats"]] == [int, int]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"span": "90 min"}, "argument \"span\" should be an ISO 8601 duration such as 'PT1H30M' (invalid"),
        ({"day": "29 February"}, "argument \"day\" should be an ISO 8601 date such as '2024-02-29' ("),
        (
            {"at": "noon"},
            'argument "at" should be an ISO 8601 date and time such as \'2024',
        ),
        ({"code": "abc"}, 'argument "code" should match pattern \'^[A-Z]{3}$\', got "abc"'),
        ({"seats": [1.5]}, 'argument "seats.0" should be a valid integer, got 1.5'),
        ({"choice": 3.0}, 'argument "choice" should be 1 or 2, got 3'),
    ],
)
def test_error_of_an_argument_names_the_format(change, message):
    with pytest.raises(ArgumentError) as caught:
        toolset(Plan).tools["book"].arguments.parse(json.dumps(GOOD_PLAN | change))
    assert str(caught.value).startswith(message)


class Speed(Enum):
    SLOW = 1
    FAST = 2


class Steered(Quick):
    @tool
    def steer(
        self,
        lever: Literal[0, 1],
        speed: Speed | None = None,
        path: Sequence[Literal[0, 1]] = (),
        go: bool = True,
    ):
        return f"{lever} {speed} {path} {go}"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lever": True}, 'argument "lever" should be one of 0, 1, got true'),
        ({"lever": 1, "speed": True}, 'argument "speed" should be one of 1, 2, got true'),
        ({"lever": 1, "path": [0, False]}, 'argument "path.1" should be one of 0, 1, got false'),
    ],
)
def test_boolean_is_not_an_equal_number(given, problem):
    steer = toolset(Steered).tools["steer"].arguments
    assert steer.parse('{"lever": 1.0, "speed": 2, "path": [0], "go": false}')["go"] is False
    with pytest.raises(ArgumentError) as caught:
        steer.parse(json.dumps(given))
    assert str(caught.value) == problem


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes typing.TypedDict from Python 3.12 on")
def test_cause_of_a_type_without_a_schema_is_named():
    class Pair(typing.TypedDict):
        x: int

    class Paired(Environment):
        def reset(self, sample, rng):
            return ""

        @tool
        def put(self, pairs: list[Pair]):
            """Put pairs."""

    Paired.put.__annotations__["pairs"] = list[Pair]
    with pytest.raises(DefinitionError, match=r"'pairs': Please use `typing_extensions\.TypedDict` instead"):
        toolset(Paired)


def test_long_list_of_problems_is_truncated():
    with pytest.raises(ArgumentError, match=r"and \d+ more$"):
        arguments().parse("{}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({name: st.just(value) | JSON for name, value in GOOD.items()}))
def test_accepted_arguments_match_the_schema(values):
    try:
        arguments().parse(json.dumps(values))
    except ArgumentError:
        return
    Draft202012Validator(arguments().schema).validate(values)


@given(st.text())
def test_any_text_parses_or_raises_argument_error(text):
    with contextlib.suppress(ArgumentError):
        assert isinstance(arguments("odd_names").parse(text), dict)


def test_tools_are_in_definition_order_including_inherited_ones():
    class Base:
        @tool
        def first(self): ...

        @tool
        def second(self): ...

    class Derived(Base):
        @tool
        def third(self): ...

        @tool
        def first(self, n: int):
            """Changed."""

    assert list(toolset(Derived).tools) == ["first", "second", "third"]
    assert toolset(Derived).tools["first"].spec.function.description == "Changed."


def test_tool_can_have_another_name_and_its_own_timeout():
    renamed = toolset(Everything).tools["renamed"]
    assert (renamed.attribute, renamed.timeout) == ("original", 3.0)


def test_tool_is_callable_as_a_plain_method():
    assert Everything().odd_names(1) == "ok"


def no_annotation(self, n): ...
def var_args(self, *n: int): ...
def var_keywords(self, **n: int): ...
def positional(self, n: int, /): ...
def unresolved(self, n: "Nowhere"): ...  # noqa: F821
def strange(self, n: asyncio.Event): ...
def callback(self, n: Callable[[int], int]): ...
def field_as_default(self, n: int = Field(default=3, ge=1)): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_annotation, "needs a type annotation"),
        (var_args, "must be a plain named one"),
        (var_keywords, "must be a plain named one"),
        (positional, "must be a plain named one"),
        (unresolved, "cannot resolve its annotations"),
        (strange, "no schema for its arguments"),
        (callback, "no schema for its arguments"),
        (field_as_default, "belongs into its annotation: n: Annotated"),
    ],
)
def test_invalid_tool_method_raises_one_sentence(function, message):
    class Broken:
        method = tool(function)

    with pytest.raises(DefinitionError, match=message) as caught:
        toolset(Broken)
    assert "\n" not in str(caught.value)


def test_duplicate_tool_names_are_rejected():
    class Twice:
        @tool(name="x")
        def a(self): ...

        @tool(name="x")
        def b(self): ...

    with pytest.raises(DefinitionError, match="two tools named 'x'"):
        toolset(Twice)


def test_tool_on_a_static_method_is_rejected():
    class Static:
        method = staticmethod(tool(no_annotation))

    with pytest.raises(DefinitionError, match="put @tool on a plain method"):
        toolset(Static)


def test_docstring_is_split_into_description_and_arguments():
    text, described = parse_docstring(
        "First.\n\nMore.\n\nArgs:\n    a: one\n    b (int): two\n        lines: here\n\nReturns:\n    c: x"
    )
    assert text == "First.\n\nMore."
    assert described == {"a": "one", "b": "two lines: here"}


def test_text_after_the_arguments_belongs_to_the_description():
    text, described = parse_docstring(
        "First.\n\nArgs:\n  a: one\n    note: two\n  b: three\n\nLast.\n\n"
        "Note:\n    Ten results.\n\nRaises:\n    X: y"
    )
    assert text == "First.\n\nLast.\n\nNote:\n    Ten results."
    assert described == {"a": "one note: two", "b": "three"}


def test_text_of_a_tool_becomes_the_answer_to_its_call():
    (message,) = tool_messages("hi", "id7", "f")
    assert message == ToolAnswer(content="hi", tool_call_id="id7")


def test_messages_of_a_tool_have_exactly_one_answer():
    user = Message(role="user", content="look")
    own = Message(role="tool", content="seen")
    assert [m.role for m in tool_messages(user, "id7", "f")] == ["tool", "user"]
    assert tool_messages([own, user], "id7", "f")[0].tool_call_id == "id7"
    with pytest.raises(DefinitionError, match="2 tool messages for one call"):
        tool_messages([own, own], "id7", "f")


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, ["text"], object()])
def test_invalid_return_values_of_a_tool_are_rejected(value):
    with pytest.raises(DefinitionError, match="return a str, a Message or a list"):
        tool_messages(value, "id7", "f")


async def call(name, call, timeout):
    return call()


async def play(*calls, text=None, call=call):
    environment = Quick()
    environment.notes, environment.draws = [], [5]
    turn = StepBuilder(Message.assistant(text, *calls), 0.0)
    await turn.run(environment, call, toolset(type(environment)))
    return turn


class Chatty(Environment):
    """Answers at length."""

    max_output_chars = 10

    def reset(self, sample, rng):
        return "0123456789abc"

    def respond(self, text):
        return [Message(role="user", content="01234"), Message(role="user", content="56789abc")]

    @tool
    def say(self, text: str):
        return Reply(text, reward=0.5)

    @tool
    def fail(self, text: str):
        raise ToolError(text)

    @tool
    def show(self, text: str):
        image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 100}}
        return Message(role="tool", content=[{"type": "text", "text": text}, image])


async def played(*calls, text=None):
    turn = StepBuilder(Message.assistant(text, *calls), 0.0)
    await turn.run(Chatty(), call, toolset(Chatty))
    return [message.content for message in turn.messages]


CUT = "{}\n[The output was cut: {} characters, of which {} are shown.]"


async def test_long_output_is_truncated_with_a_note_to_the_model():
    assert await played(ToolCall.of("say", text="0123456789")) == ["0123456789"]
    cut = CUT.format("0123456789", 13, 10)
    assert await played(ToolCall.of("say", text="0123456789abc")) == [cut]
    assert await played(ToolCall.of("fail", text="0123456789abc")) == [cut]
    with Chatty.session() as session:
        assert session.messages[0].content == cut


async def test_output_limit_covers_all_answers_to_one_message():
    calls = [ToolCall.of("say", call_id=str(n), text="0123456") for n in range(3)]
    assert await played(*calls) == ["0123456", CUT.format("012", 7, 3), CUT.format("", 7, 0)]
    assert await played(text="hello") == ["01234", CUT.format("56789", 8, 5)]


async def test_output_limit_cuts_the_text_of_content_parts():
    ((text, image),) = await played(ToolCall.of("show", text="0123456789abc"))
    assert text["text"] == CUT.format("0123456789", 13, 10)
    assert len(image["image_url"]["url"]) == 105


async def test_calls_run_in_order_and_rewards_and_metrics_add_up():
    turn = await play(
        ToolCall.of("note", call_id="a", text="x"),
        ToolCall.of("gain", call_id="b", amount=0.25),
        ToolCall.of("gain", call_id="c"),
    )
    assert [(m.tool_call_id, m.content) for m in turn.messages] == [
        ("a", "1 5"),
        ("b", "earned"),
        ("c", "earned"),
    ]
    assert turn.reward == 0.75
    assert turn.metrics == {"invalid_calls": 0.0, "gains": 2.0}


class Shows(Quick):
    @tool
    def show(self, number: int):
        """Show a picture before the answer."""
        return [Message(role="user", content=f"picture {number}"), Message(role="tool", content="shown")]

    @tool
    def last(self):
        """End."""
        return Done([Message(role="user", content="the end")])


async def test_answers_to_all_calls_precede_the_other_messages_of_tools():
    calls = [ToolCall.of("show", call_id="a", number=1), ToolCall.of("nope", call_id="b")]
    calls += [ToolCall.of("show", call_id="c", number=2), ToolCall.of("last", call_id="d")]
    turn = StepBuilder(Message.assistant(None, *calls, ToolCall.of("show", call_id="e", number=3)), 0.0)
    await turn.run(Shows(), call, toolset(Shows))
    assert [m.tool_call_id for m in turn.messages[:5]] == ["a", "b", "c", "d", "e"]
    assert [m.content for m in turn.messages[5:]] == ["picture 1", "picture 2", "the end"]


async def test_calls_after_the_end_are_answered_but_not_executed():
    turn = await play(ToolCall.of("finish", call_id="a"), ToolCall.of("crash", call_id="b"))
    assert turn.done
    assert [m.content for m in turn.messages] == ["bye", "Not executed: the task has ended."]


async def test_invalid_calls_are_answered_and_counted():
    turn = await play(
        ToolCall.of("nope"), ToolCall.of("note"), ToolCall.of("note", text=3), ToolCall.of("refuse")
    )
    assert turn.metrics["invalid_calls"] == 3.0  # a ToolError is not an invalid call
    assert turn.messages[0].content.startswith('Error: there is no tool "nope". Tools: note, gain')
    assert turn.messages[1].content == "Error: missing argument 'text'."
    assert turn.messages[3].content == "not like this"


async def test_turn_without_a_call_is_answered_by_respond():
    turn = await play(text="hello")
    assert turn.messages[0].role == "user"
    assert "Call one of the tools: note, gain" in turn.messages[0].content
    assert turn.metrics["invalid_calls"] == 1.0


async def test_time_limit_propagates_out_of_a_turn():
    async def over(name, call, timeout):
        raise TimeLimitReached

    with pytest.raises(TimeLimitReached):
        await play(ToolCall.of("finish"), call=over)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
async def test_reward_must_be_a_finite_number(value):
    async def give(name, call, timeout):
        return Reply("x", reward=value)

    with pytest.raises(DefinitionError, match="reward must be a finite number"):
        await play(ToolCall.of("gain"), call=give)


@pytest.mark.parametrize("reply", [Reply("x", reward=1e308), Reply("x", metrics={"a": 1e308})])
async def test_sums_of_one_step_must_be_finite_numbers(reply):
    async def give(name, call, timeout):
        return reply

    with pytest.raises(DefinitionError, match=r"the sum of .* must be a finite number, got inf"):
        await play(ToolCall.of("gain"), ToolCall.of("gain"), call=give)


class Unprintable:
    """Raises the given exception when it is converted to text."""

    def __init__(self, error):
        self.error = error

    def __str__(self):
        raise self.error


class Panic(BaseException):
    """An exception that is not an Exception, as Rust extensions raise."""


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


CIRCULAR: dict[str, object] = {}
CIRCULAR["self"] = CIRCULAR


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({(0, 1): 3}, "keys must be str, int, float, bool or None, not tuple"),
        (CIRCULAR, "RecursionError"),
        (nested(150), "recursion limit exceeded"),
        ([10**5000], "Exceeds the limit"),
        (Unprintable(ValueError("no text")), "ValueError: no text"),
        (Unprintable(Panic("boo")), "Panic: boo"),
    ],
)
async def test_info_that_cannot_be_sent_fails_with_the_name_of_its_tool(value, reason):
    replies = iter([Reply("a"), Reply("b", info={"cells": value})])

    async def give(name, call, timeout):
        return next(replies)

    with pytest.raises(DefinitionError) as raised:
        await play(ToolCall.of("note", text="x"), ToolCall.of("gain"), call=give)
    assert str(raised.value).startswith("info of gain() cannot be sent as JSON: ")
    assert reason in str(raised.value)
    assert "use dicts with text as keys" in str(raised.value)


async def test_info_is_that_of_the_return_even_if_its_objects_change_later():
    cells = [1]

    async def give(name, call, timeout):
        if name == "note":
            return Reply("a", info={"cells": cells})
        cells.append({0})
        return Reply("b", info={"n": np.int64(2)})

    turn = await play(ToolCall.of("note", text="x"), ToolCall.of("gain"), call=give)
    assert turn.info == {"cells": [1], "n": 2}


def test_messages_nested_too_deep_for_clients_are_rejected():
    content = [{"type": "json", "value": nested(150)}]
    with pytest.raises(DefinitionError, match=r"f\(\) returned a message that cannot be sent as JSON"):
        tool_messages(Message(role="tool", content=content), "id7", "f")


def test_success_defaults_to_a_return_of_one():
    def success(scores, before, reward):
        turn = StepBuilder(Message.assistant(), 0.0)
        turn.reward = reward
        turn.score(scores, before)
        return turn.metrics["success"]

    assert success({}, 0.9, 0.1) == 1.0
    assert success({}, sum([0.1] * 9), 0.1) == 1.0  # despite rounding
    assert success({}, 0.5, 0.4) == 0.0
    assert success({"success": 1.0}, 0.0, 0.0) == 1.0
    assert success({"success": 0.0}, 5.0, 1.0) == 0.0
    assert success({"success": np.True_, "other": np.float32(2)}, 0.0, 0.0) == 1.0


def test_score_must_be_a_dict_of_numbers():
    with pytest.raises(DefinitionError, match="return a dict"):
        StepBuilder(Message.assistant(), 0.0).score(3, 0.0)
    with pytest.raises(DefinitionError, match="finite number"):
        StepBuilder(Message.assistant(), 0.0).score({"a": "b"}, 0.0)


def test_done_is_a_reply():
    assert isinstance(Done("x"), Reply)
    assert Done("x", reward=0.5).reward == 0.5
    with pytest.raises(TypeError):
        Done("x", 0.5)


def test_tool_error_is_a_public_name():
    assert str(ToolError("a")) == "a"


@dataclass
class Line:
    """A line of an order."""

    article: str
    count: int = 1


class Order(BaseModel):
    """An order."""

    model_config = ConfigDict(extra="forbid")

    first: Line


class Nested(Environment):
    """Take orders."""

    def reset(self, sample, rng):
        return ""

    @tool
    def order(self, line: Line, more: list[Line], whole: Order, gift: Line | None = None):
        """Order."""
        return ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"line": {"article": "a", "n": 1}}, 'unknown argument "line.n" (known: article, count)'),
        ({"more": [{"article": "a", "n": 1}]}, 'unknown argument "more.0.n" (known: article, count)'),
        ({"gift": {"article": "a", "n": 1}}, 'unknown argument "gift.n" (known: article, count)'),
        ({"whole": {"first": {"article": "a"}, "n": 1}}, 'unknown argument "whole.n" (known: first)'),
        ({"whole": {"first": {"n": 1}}}, "missing argument 'whole.first.article'; unknown argument"),
        ({"line": 3}, 'argument "line" should be a JSON object, got 3'),
    ],
)
def test_invalid_field_of_a_nested_argument_is_named(change, message):
    good = {"line": {"article": "a"}, "more": [], "whole": {"first": {"article": "a"}}}
    with pytest.raises(ArgumentError) as caught:
        toolset(Nested).tools["order"].arguments.parse(json.dumps(good | change))
    assert str(caught.value).startswith(message)


class Open(Environment):
    """Take anything."""

    def reset(self, sample, rng):
        return ""

    @tool
    def take(self, data: dict, value: Any = None, sizes: tuple[float, ...] = (), limit: float = math.inf):
        """Take."""
        return ""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"data": {"a": NaN}}', "data.a"),
        ('{"data": {"a": [1, {"b": -Infinity}]}}', "data.a.1.b"),
        ('{"data": {}, "value": NaN}', "value"),
        ('{"data": {}, "value": [1e999]}', "value.0"),
        ('{"data": {"n": 1' + "0" * 400 + ".0}}", "data.n"),
        ('{"data": {}, "sizes": [NaN]}', "sizes.0"),
    ],
)
def test_number_that_is_not_finite_is_refused_in_every_type(text, place):
    with pytest.raises(ArgumentError) as caught:
        toolset(Open).tools["take"].arguments.parse(text)
    assert str(caught.value).startswith(f'argument "{place}" should be a finite number, got ')


def test_text_and_numbers_that_only_look_infinite_are_accepted():
    text = '{"data": {"a": "NaN", "Infinity": 1e+0001}, "value": 1' + "0" * 400 + "}"
    assert toolset(Open).tools["take"].arguments.parse(text)["data"] == {"a": "NaN", "Infinity": 10.0}


def test_infinite_default_is_allowed_and_not_shown_to_models():
    assert "default" not in toolset(Open).tools["take"].arguments.schema["properties"]["limit"]


LAMP = Line(article="lamp")


class Kind(StrEnum):
    A = "a"


class Defaults(Environment):
    """Have defaults of many types."""

    def reset(self, sample, rng):
        return ""

    @tool
    def take(
        self,
        number: float = 1,
        kind: Kind = Kind.A,
        choice: Literal["x", "y"] = "y",
        names: Sequence[str] = (),
        more: list[str] = (),
        line: Line = LAMP,
        maybe: int | None = None,
        anything: Any = object,
    ):
        """Take."""
        return ""


def test_defaults_that_fit_their_annotations_are_accepted():
    assert toolset(Defaults).tools["take"].arguments.parse("{}") == {}


class Sizes(Quick):
    class Size(StrEnum):
        SMALL = "s"


class Shirts(Sizes):
    @tool
    def list(self):
        return "shirts"

    @tool
    def order(self, size: "Size", colors: "list[str]"):  # noqa: F821 (as with postponed annotations)
        return f"{size!r} {colors}"


def test_annotations_name_types_of_the_class_and_no_tools():
    with Shirts.session() as session:
        result = session.step(ToolCall.of("order", size="s", colors=["red"]))
    assert result.messages[0].content == "<Size.SMALL: 's'> ['red']"
