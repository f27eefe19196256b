"""The grammars of forced answers in the syntax of each model family."""

import pytest

from agentrl_env.types import FunctionSpec, ToolSpec
from agentrl_train.tool_calls import PARSERS
from agentrl_train.tool_calls.grammars import Constraint, Unwritable, grammar
from agentrl_train.tool_calls.turn import ParsedCall, ParsedTurn
from tests.tiny_models import make_tokenizer

pytest.importorskip("llguidance")
from agentrl_train.engine.constraint import Grammars

TOKENIZER = make_tokenizer()
GRAMMARS = Grammars(TOKENIZER, stop_token_ids=[2])
PYTHONIC = {"lfm2", "olmo3", "llama_python", "gemma4"}
NUMBERED = {"kimi", "cohere", "mistral_call_id"}
TAGGED = {"minimax", "seed", "glm", "minicpm", "qwen_xml"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["n"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    ToolSpec(function=FunctionSpec(name="guess", parameters=SCHEMA)),
    ToolSpec(function=FunctionSpec(name="stop", parameters=EMPTY)),
]
GUESS, STOP = ParsedCall("guess", '{"n": 3, "text": "a < b"}'), ParsedCall("stop", "{}")


def accepts(text: str, name: str, constraint: Constraint) -> bool:
    """Return True if the grammar accepts a whole answer."""
    found = grammar(constraint, parser=PARSERS[name], tools=TOOLS, writer=GRAMMARS, thinks=True)
    matcher = GRAMMARS.start(found)
    ids = TOKENIZER(text)["input_ids"]
    kept, sets = matcher.follow(ids)
    return len(kept) == len(ids) and bool(sets[-1][0] & 1 << 2)


@pytest.mark.parametrize("name", sorted(PARSERS.keys() - PYTHONIC))
def test_forced_calls_have_the_syntax_of_the_family(name: str) -> None:
    required = Constraint(calls="required")
    write = PARSERS[name].render
    assert accepts(write(ParsedTurn(None, "Hm.", (GUESS,))), name, required)
    assert accepts(write(ParsedTurn(None, None, (STOP, GUESS))), name, required) == (name not in NUMBERED)
    assert accepts(write(ParsedTurn(None, None, (STOP,))), name, Constraint(calls="required", tool="stop"))
    assert not accepts(write(ParsedTurn("No.", None, ())), name, required)
    assert not accepts(write(ParsedTurn(None, None, (ParsedCall("guess", '{"n": "x"}'),))), name, required)
    assert not accepts(write(ParsedTurn(None, None, (ParsedCall("up", "{}"),))), name, required)
    schema = Constraint(schema='{"type": "object"}', calls="none")
    assert accepts(write(ParsedTurn('{"a": 1}', "Hm.")), name, schema)
    assert not accepts(write(ParsedTurn("a")), name, schema)


@pytest.mark.parametrize("name", sorted(PYTHONIC))
def test_calls_that_are_not_json_cannot_be_forced(name: str) -> None:
    with pytest.raises(Unwritable, match=name):
        accepts("", name, Constraint(calls="required"))


def test_grammar_excludes_forbidden_calls() -> None:
    none = Constraint(calls="none")
    assert accepts("Call <tool, not a tool_call>.", "hermes", none)
    assert not accepts("Now: <tool_call>", "hermes", none)
    with pytest.raises(Unwritable, match="cannot be forbidden"):
        accepts("", "llama", none)
