"""Other forms of functions: legacy functions in chat completions, and namespaces in responses."""

import json
from typing import Any

import pytest

from agentrl_env.types import Message, ToolCall
from agentrl_train.gateway.chat_completions import ChatRequest
from tests.train.fakes import CHAT, ScriptedEngine, always
from tests.train.gateway.test_server import HELLO, chat, events, opened

PARAMETERS = {"type": "object", "properties": {"steps": {"type": "integer"}}}
DOWN = {"name": "down", "description": "Go down.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": DOWN}
SAYS_DOWN = Message.assistant("down we go", ToolCall.of("down", steps=2))
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__house",
    "description": "Tools of the house.",
    "tools": [{"type": "function", **DOWN}],
}
IN_NAMESPACE = Message.assistant(None, ToolCall.of("mcp__house__down", steps=2))


async def test_legacy_functions_are_the_tools_of_one_conversation() -> None:
    async with opened(ScriptedEngine(CHAT, always(SAYS_DOWN))) as (client, session, _):
        (choice,) = (await chat(client, HELLO, functions=[DOWN]))["choices"]
        said = choice["message"]
        assert choice["finish_reason"] == "function_call"
        assert said["function_call"] == {"name": "down", "arguments": '{"steps": 2}'}
        assert "tool_calls" not in said
        result = {"role": "function", "name": "down", "content": "the cellar"}
        second = (await chat(client, HELLO, said, result, functions=[DOWN]))["choices"][0]["message"]
        await chat(client, HELLO, said, result, second, result, functions=[DOWN])
        turns, segments = session.recorder.rollout()
        tools = session.recorder._conversations[0].tools
    assert (len(turns), len(segments)) == (3, 1)
    assert list(turns[0].prompt_ids) == CHAT.opening([Message(**HELLO)], tools)
    assert [tool.model_dump() for tool in tools] == [TOOL]
    assert "the cellar" in CHAT.text(turns[1].prompt_ids)


async def test_legacy_call_is_rendered_as_a_call_of_a_tool_and_its_result() -> None:
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "down", "arguments": "{}"}}
    result = {"role": "function", "name": "down", "content": "the cellar"}
    call = {"id": "a", "type": "function", "function": legacy["function_call"]}
    modern = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "a", "name": "down", "content": "the cellar"}
    async with opened() as (client, session, _):
        await chat(client, HELLO, legacy, result, functions=[DOWN])
        await chat(client, HELLO, modern, answer, tools=[TOOL])
        one, other = session.recorder.rollout()[0]
    assert list(one.prompt_ids) == list(other.prompt_ids)


async def test_streamed_legacy_call_adds_up_to_the_unstreamed_call() -> None:
    async with opened(ScriptedEngine(CHAT, always(SAYS_DOWN))) as (client, *_):
        body = {"messages": [HELLO], "functions": [DOWN], "stream": True}
        answer = await client.post("/chat/completions", json=body)
    choices = [choice for chunk in events(answer.text) for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "down we go"
    (call,) = [one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]]
    assert call == {"name": "down", "arguments": '{"steps": 2}'}
    assert not any("tool_calls" in choice["delta"] for choice in choices)
    assert choices[-1]["finish_reason"] == "function_call"


async def test_only_the_first_of_several_calls_fits_the_legacy_shape() -> None:
    both = Message.assistant(None, ToolCall.of("down"), ToolCall.of("down", call_id="b", steps=3))
    async with opened(ScriptedEngine(CHAT, always(both))) as (client, session, _):
        said = (await chat(client, HELLO, functions=[DOWN]))["choices"][0]["message"]
        result = {"role": "function", "name": "down", "content": "the cellar"}
        await chat(client, HELLO, said, result, functions=[DOWN])
        turns, segments = session.recorder.rollout()
    assert said["function_call"]["arguments"] == "{}"
    assert [segment.reason for segment in segments] == ["root", "rewritten"]
    assert len(turns) == 2


async def test_answer_without_a_call_has_the_shape_of_any_other() -> None:
    async with opened() as (client, *_):
        (choice,) = (await chat(client, HELLO, functions=[DOWN]))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
    assert "function_call" not in choice["message"]


@pytest.mark.parametrize(
    ("choice", "calls", "tool"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ("none", "none", None),
        ({"name": "down"}, "required", "down"),
    ],
)
def test_function_call_has_the_effect_of_tool_choice(choice: Any, calls: str, tool: str | None) -> None:
    request = ChatRequest.model_validate({"messages": [HELLO], "functions": [DOWN], "function_call": choice})
    constraint = request.constraint
    assert (constraint.calls, constraint.tool, constraint.parallel) == (calls, tool, False)
    assert constraint.choice_parameter == "function_call"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"functions": [DOWN], "tools": [TOOL]}, "tools is not supported with functions"),
        ({"functions": [DOWN], "tool_choice": "required"}, "tool_choice is not supported with functions"),
        ({"function_call": {"name": "down"}}, "function_call is not supported without functions"),
        ({"functions": [DOWN], "function_call": {"name": "up"}}, "function_call names the tool 'up'"),
        ({"functions": [DOWN], "function_call": "always"}, "function_call = 'always' is not supported"),
        ({"functions": [{"description": "x"}]}, "functions.0.name"),
    ],
)
async def test_legacy_request_that_cannot_be_kept_is_refused(more: dict[str, Any], word: str) -> None:
    async with opened() as (client, session, _):
        answer = await client.post("/chat/completions", json={"messages": [HELLO], **more})
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
        assert session.recorder.rollout()[0] == []


async def test_functions_of_a_namespace_are_called_by_their_names_in_it() -> None:
    async with opened(ScriptedEngine(CHAT, always(IN_NAMESPACE))) as (client, session, _):
        ask = {"model": "m", "tools": [NAMESPACE], "client_metadata": {"turn": "1"}}
        first = (await client.post("/responses", json=ask | {"input": "go"})).json()
        (call,) = first["output"]
        assert (call["namespace"], call["name"]) == ("mcp__house", "down")
        assert json.loads(call["arguments"]) == {"steps": 2}
        assert first["tools"] == [NAMESPACE]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "the cellar"}
        whole = [{"role": "user", "content": "go"}, call, result]
        answer = await client.post("/responses", json=ask | {"input": whole, "stream": True})
        done = [one["item"] for one in events(answer.text) if one["type"] == "response.output_item.done"]
        assert [(item["namespace"], item["name"]) for item in done] == [("mcp__house", "down")]
        turns, segments = session.recorder.rollout()
        (tool,) = session.recorder._conversations[0].tools
    assert (len(turns), len(segments)) == (2, 1)
    assert (tool.function.name, tool.function.parameters) == ("mcp__house__down", PARAMETERS)
    assert tool.function.description == "Tools of the house.\nGo down."


async def test_function_outside_a_namespace_keeps_its_name() -> None:
    async with opened(ScriptedEngine(CHAT, always(SAYS_DOWN))) as (client, *_):
        tools = [NAMESPACE, {"type": "function", **DOWN}]
        answer = (await client.post("/responses", json={"input": "go", "tools": tools})).json()
    _, call = answer["output"]
    assert call["name"] == "down"
    assert "namespace" not in call


@pytest.mark.parametrize(
    ("tools", "word"),
    [
        ([NAMESPACE, {"type": "function", **DOWN, "name": "mcp__house__down"}], "another tool has this name"),
        ([NAMESPACE, NAMESPACE], "another tool has this name"),
        ([{**NAMESPACE, "tools": [{"type": "custom", "name": "x"}]}], "a tool of type 'custom'"),
        ([{**NAMESPACE, "tools": [NAMESPACE]}], "a tool of type 'namespace'"),
        ([{**NAMESPACE, "tools": [{"type": "function"}]}], "tools.0.tools.0.name"),
        ([{"type": "namespace", "name": "empty"}], "tools.0.tools"),
        ([{"type": "web_search"}], "a tool of type 'web_search'"),
    ],
)
async def test_namespace_that_the_policy_cannot_call_is_refused(tools: list[Any], word: str) -> None:
    async with opened() as (client, session, _):
        answer = await client.post("/responses", json={"input": "go", "tools": tools})
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
        assert session.recorder.rollout()[0] == []
