"""Files that replace the texts of a task, and the files that are rejected."""

import copy
import json

import pytest

from agentrl_env import Done, Environment, Message, ToolCall, Wording, tool
from agentrl_env.errors import DefinitionError
from agentrl_env.tools import toolset

TEXTS = {"opening": "Below {top}.", "wrong": ("{hint}", "guessed"), "rules": "Guess."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "  Name a {number}.\n",
            "parameters": {
                "type": "object",
                "required": ["n"],
                "properties": {"n": {"description": "Which\tnumber.", "type": "integer"}},
                "additionalProperties": False,
            },
        },
    }
]
EXAMPLE = [
    {"role": "system", "content": " You guess {numbers}.\r\n"},
    {"role": "user", "content": "Below 5."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "guess", "arguments": '{"n":3}'}}
        ],
    },
    {"role": "tool", "content": "too low", "tool_call_id": "call_1"},
]


def task(given):
    class Guess(Environment):
        wording = given

        def reset(self, sample, rng):
            return self.wording.opening(top=20)

        @tool
        def guess(self, n: int):
            """Guess a number."""
            if n == 7:
                return Done(self.wording.text("rules"), reward=1.0)
            return self.wording.text("wrong", hint="no", guessed=str(n))

    return Guess


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "wording.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def refusal(path):
    with pytest.raises(DefinitionError) as caught:
        toolset(task(Wording(path, **TEXTS)))
    return str(caught.value)


@pytest.mark.parametrize("path", [None, ""])
def test_task_has_its_own_texts_without_a_file(path):
    with task(Wording(path, **TEXTS)).session(index=0) as session:
        assert session.messages == (Message(role="user", content="Below 20."),)
        assert session.step(ToolCall.of("guess", n=3)).messages[0].content == "no"
        assert session.step("Seven.").messages[0].content == "Call one of the tools: guess."


def test_model_sees_the_messages_tools_and_texts_of_a_file_byte_for_byte(write):
    texts = {"opening": "{{{top}}}", "wrong": "{guessed}: {hint}", "no_tool_call": "Use a tool."}
    path = write({"messages": EXAMPLE, "tools": TOOLS, "texts": texts})
    with task(Wording(path, **TEXTS)).session(index=0) as session:
        shown = [message.model_dump(mode="json") for message in session.messages]
        assert shown == [*EXAMPLE, {"role": "user", "content": "{20}"}]
        tools = [spec.model_dump(mode="json") for spec in session.tools]
        assert json.dumps(tools) == json.dumps(TOOLS)
        assert session.step(ToolCall.of("guess", n=3)).messages[0].content == "3: no"
        assert session.step("Seven.").messages[0].content == "Use a tool."
        assert session.step(ToolCall.of("guess", n=7)).messages[0].content == "Guess."


def test_values_with_braces_are_not_templates(write):
    wording = Wording(write({"texts": {"wrong": "{guessed}{hint}"}}), **TEXTS)
    assert wording.text("wrong", guessed="{hint}", hint="{0}") == "{hint}{0}"


def edited(path, *keys, value=None):
    """Return the tools with one value replaced, or removed if it is None."""
    tools = copy.deepcopy(TOOLS)
    place = tools[0]["function"]
    for key in path:
        place = place[key]
    place.pop(keys[0]) if value is None else place.update({keys[0]: value})
    return tools


PARAMETERS = ("parameters",)
ARGUMENTS = ("parameters", "properties")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is invalid: Invalid JSON"),
        ("[]", "is invalid"),
        ({"system": "Guess."}, "is invalid: system"),
        ({"messages": [{"role": "system", "content": "a", "text": "b"}]}, "messages.0.text"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "messages.0.role"),
        ({"tools": edited((), "strict", value=True)}, "tools.0.function.strict"),
        ({"tools": []}, "lacks the tool 'guess'"),
        ({"tools": TOOLS * 2}, "has the tool 'guess' twice"),
        ({"tools": edited((), "name", value="gues")}, "has a tool 'gues'; the tools of the task are guess"),
        ({"tools": edited(ARGUMENTS, "n")}, "lacks the argument 'n'"),
        (
            {"tools": edited(ARGUMENTS, "m", value={"type": "integer"})},
            "an argument 'm', which the task does",
        ),
        (
            {"tools": edited(ARGUMENTS, "n", value={"type": "string"})},
            """'n' with {"type": "string"}; the task takes {"type": "integer"}""",
        ),
        ({"tools": edited(PARAMETERS, "required", value=[])}, '"required": []'),
        ({"tools": edited(PARAMETERS, "additionalProperties")}, '"additionalProperties": false'),
        ({"texts": {"right": "Yes."}}, "a text 'right'; the texts of the task are no_tool_call, opening"),
        ({"texts": {"wrong": "{hnt}"}}, "field {hnt}; the fields are {guessed}, {hint}"),
        ({"texts": {"rules": "{hint}"}}, "field {hint}; the text has no fields"),
        (
            {"texts": {"opening": "Guess!"}},
            "'opening' has no field, so that all problems look alike; use {top}",
        ),
        ({"texts": {"opening": "{top} {"}}, "not a template"),
        ({"texts": {"opening": "{top.real}"}}, "{top.real} is not a plain field; write {{ and }} for braces"),
        ({"texts": {"opening": "{top!r:>9}"}}, "is not a plain field"),
    ],
)
def test_file_that_does_not_fit_the_task_is_refused_with_the_reason(write, content, reason):
    path = write(content)
    message = refusal(path)
    assert reason in message
    assert path in message


def test_file_that_cannot_be_read_is_refused(tmp_path):
    assert "No such file" in refusal(str(tmp_path / "absent.json"))
    assert "Is a directory" in refusal(str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'{"texts": {"rules": "\xe9"}}')
    assert "is not UTF-8 text" in refusal(str(tmp_path / "latin.json"))


def test_argument_called_description_is_compared(write):
    class Note(Environment):
        def reset(self, sample, rng):
            return ""

        @tool
        def note(self, description: str):
            """Note something."""

    spec = Note.tool_specs()[0].model_dump(mode="json")
    spec["function"]["parameters"]["properties"]["description"] = {"type": "integer"}

    class Reworded(Note):
        wording = Wording(write({"tools": [spec]}))

    with pytest.raises(DefinitionError, match="argument 'description'"):
        toolset(Reworded)


def test_setting_accepts_only_a_wording():
    with pytest.raises(DefinitionError, match="must be a Wording"):

        class Guess(Environment):
            wording = "wording.json"

            def reset(self, sample, rng):
                return ""
