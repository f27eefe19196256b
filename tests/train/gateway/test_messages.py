"""The gateway's Anthropic API over HTTP, with a scripted engine."""

import json
from typing import Any

import httpx
import pytest

from agentrl_env.types import Message, ToolCall
from tests.train.fakes import CHAT, ScriptedEngine, always
from tests.train.gateway.test_server import HI, events, opened

TOOL = {"name": "down", "input_schema": {"type": "object", "properties": {}}}
HELLO = {"role": "user", "content": "hello"}


async def ask(client: httpx.AsyncClient, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"model": "any", "max_tokens": 300, "messages": messages, **more}
    answer = await client.post("/messages", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_answer_has_the_text_and_the_token_counts() -> None:
    async with opened() as (client, session, _):
        body = await ask(client, HELLO, system=[{"type": "text", "text": "Be brief."}])
        (turn,) = session.recorder.rollout()[0]
        opening = session.recorder.opening
    assert (body["type"], body["role"], body["model"], body["stop_reason"]) == (
        "message",
        "assistant",
        "any",
        "end_turn",
    )
    assert body["content"] == [{"type": "text", "text": "hi"}]
    assert body["usage"]["input_tokens"] == len(turn.prompt_ids)
    assert body["usage"]["output_tokens"] == len(turn.completion.token_ids)
    assert [(one.role, one.content) for one in opening] == [("system", "Be brief."), ("user", "hello")]


async def test_calls_and_their_results_are_one_segment() -> None:
    said = Message.assistant("down we go", ToolCall.of("down", n=1), ToolCall.of("down", call_id="b", n=2))
    async with opened(ScriptedEngine(CHAT, always(said))) as (client, session, _):
        first = await ask(client, HELLO, tools=[TOOL])
        text, *uses = first["content"]
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "ok"}]}
            for use in uses
        ]
        more = {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}
        counted = await client.post(
            "/messages/count_tokens",
            json={
                "model": "any",
                "tools": [TOOL],
                "messages": [
                    HELLO,
                    {"role": "assistant", "content": first["content"]},
                    {"role": "user", "content": [*results, more]},
                ],
            },
        )
        second = await ask(
            client,
            HELLO,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [*results, more]},
            tools=[TOOL],
        )
        turns, segments = session.recorder.rollout()
    assert text == {"type": "text", "text": "down we go"}
    assert [(use["type"], use["name"], use["input"]) for use in uses] == [
        ("tool_use", "down", {"n": 1}),
        ("tool_use", "down", {"n": 2}),
    ]
    assert first["stop_reason"] == "tool_use"
    assert (len(turns), len(segments)) == (2, 1)
    assert [one.role for one in turns[0].reply] == ["tool", "tool", "user"]
    assert [one.tool_call_id for one in turns[0].reply[:2]] == [
        call.id for call in turns[0].message.tool_calls or ()
    ]
    assert counted.json() == {"input_tokens": second["usage"]["input_tokens"]}


async def test_streamed_answer_adds_up_to_the_unstreamed_answer() -> None:
    said = Message.assistant("down we go", ToolCall.of("down", n=1))
    async with opened(ScriptedEngine(CHAT, always(said))) as (client, *_):
        whole = await ask(client, HELLO, tools=[TOOL])
        body = {"model": "any", "max_tokens": 300, "messages": [HELLO], "tools": [TOOL], "stream": True}
        answer = await client.post("/messages", json=body)
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    found = events(answer.text)
    assert names == [one["type"] for one in found]
    blocks: list[dict[str, Any]] = []
    for one in found:
        match one["type"]:
            case "content_block_start":
                blocks.append(one["content_block"])
            case "content_block_delta" if one["delta"]["type"] == "text_delta":
                blocks[-1]["text"] += one["delta"]["text"]
            case "content_block_delta":
                blocks[-1]["input"] = json.loads(one["delta"]["partial_json"])
    without_ids = [{**block, "id": None} for block in blocks]
    assert without_ids == [{**block, "id": None} for block in whole["content"]]
    end = next(one for one in found if one["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "tool_use"
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_thoughts_are_shown_on_request_and_recognized_with_or_without_them() -> None:
    engine = ScriptedEngine(CHAT, always(Message.assistant("<think>hm</think>hi")))
    async with opened(engine) as (client, session, _):
        plain = await ask(client, HELLO)
        shown = await ask(client, HELLO, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block["type"] for block in plain["content"]] == ["text"]
        assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
        assert shown["content"][0]["thinking"] == "hm"
        said = {"role": "assistant", "content": shown["content"]}
        await ask(client, HELLO, said, {"role": "user", "content": "on"})
        turns, segments = session.recorder.rollout()
    assert len(turns) == 3
    assert turns[-1].segment in (0, 1)
    assert len(segments) == 2  # the second sample of the same question


async def test_stop_sequence_and_token_limit_are_the_reasons_to_stop() -> None:
    engine = ScriptedEngine(CHAT, always(Message.assistant("one two three")))
    async with opened(engine) as (client, *_):
        stopped = await ask(client, HELLO, stop_sequences=["three", " two"])
        cut = await ask(client, {"role": "user", "content": "again"}, max_tokens=1)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"temperature": 0.2}, "temperature = 0.2 differs"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": "tool", "name": "up"}, "tools": [TOOL]}, "names the tool 'up'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"messages": [HELLO, {"role": "assistant", "content": "I"}]}, "a started answer cannot be"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "needs a 'schema'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses"),
        ({"context_management": {"edits": ["clear_thinking_20251015"]}}, "context_management.edits.0: "),
        ({"mcp_servers": [{"url": "https://example.org"}]}, "mcp_servers"),
        ({"max_token": 8}, "'max_token'"),
    ],
)
async def test_unsupported_parameters_are_rejected_in_the_format_of_the_api(
    more: dict[str, Any], word: str
) -> None:
    async with opened() as (client, session, _):
        answer = await client.post("/messages", json={"model": "any", "messages": [HELLO], **more})
        assert not session.recorder.rollout()[0]
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert word in body["error"]["message"]


async def test_refused_parameters_can_be_ignored() -> None:
    more = {"tool_choice": {"type": "any"}, "tools": [TOOL], "temperature": 0.3}
    async with opened(ignored=("tool_choice", "temperature")) as (client, *_):
        assert (await ask(client, HELLO, **more))["stop_reason"] == "end_turn"


async def test_hints_and_labels_change_nothing() -> None:
    more: dict[str, Any] = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "tools": [TOOL],
        "output_config": {"effort": "low"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    async with opened() as (client, *_):
        assert (await ask(client, HELLO, **more))["content"] == [{"type": "text", "text": "hi"}]


async def test_arguments_that_are_not_an_object_are_passed_on_and_recognized() -> None:
    text = '<tool_call>\n{"name": "down", "arguments": "far"}\n</tool_call>'
    async with opened(ScriptedEngine(CHAT, always(Message.assistant(text)))) as (client, session, _):
        first = await ask(client, HELLO, tools=[TOOL])
        said = {"role": "assistant", "content": first["content"]}
        await ask(client, HELLO, said, {"role": "user", "content": "no"}, tools=[TOOL])
        turns, segments = session.recorder.rollout()
    assert (len(turns), len(segments)) == (2, 1), first


async def test_arguments_with_half_of_a_surrogate_pair_are_answered() -> None:
    text = r"""<tool_call>
{"name": "down", "arguments": "{\"far\": \"\\ud83d\"}"}
</tool_call>"""
    async with opened(ScriptedEngine(CHAT, always(Message.assistant(text)))) as (client, *_):
        (use,) = (await ask(client, HELLO, tools=[TOOL]))["content"]
    assert use["input"] == {"far": "?"}


async def test_base_url_can_end_in_v1_and_the_key_can_be_in_its_own_header() -> None:
    async with opened(ScriptedEngine(CHAT, always(HI))) as (client, session, gateway):
        body = {"model": "any", "max_tokens": 9, "messages": [HELLO]}
        for url, headers in (
            (f"{gateway.url}/s/{session.key}/v1/v1/messages", {}),
            (f"{gateway.url}/v1/messages?beta=true", {"x-api-key": session.key}),
        ):
            answer = await client.post(url, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        lost = await client.post(f"{gateway.url}/v1/messages", json=body, headers={"x-api-key": "no"})
        assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
