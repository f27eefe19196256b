"""The client for OpenAI-compatible endpoints against a real HTTP server."""

import json
import sys

import httpx
import pytest

from agentrl_env import Message, ToolCall
from agentrl_env.evaluation import ChatModel, ModelFailed, chat_model
from agentrl_env.evaluation.chat_model import ContextFull, ModelRefused, Pace
from tests.env.evaluation.chat_server import ChatServer, completion

QUESTION = [Message(role="user", content="Well?")]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(chat_model, "PAUSE_S", 0.0)


async def ask(*answers, **options):
    """Query a server with these answers. Return the completion or the error, and the server."""
    left = list(answers)
    with ChatServer(lambda body: left.pop(0) if len(left) > 1 else left[0]) as server:
        async with ChatModel(server.url, "small", **options) as model:
            try:
                return await model.complete(QUESTION, seed=3), server
            except ModelFailed as error:
                return error, server


async def test_completion_has_text_thought_usage_and_time():
    found, server = await ask(
        completion(text="Yes.", reasoning_content="Hm."), key="k", temperature=0.5, body={"max_tokens": 9}
    )
    assert (found.message.content, found.thought, found.finish_reason) == ("Yes.", "Hm.", "stop")
    assert (found.usage.input, found.usage.output, found.usage.cached) == (20, 5, 8)
    assert found.usage.thinking is None
    assert found.seconds > 0
    expected = {"model": "small", "temperature": 0.5, "max_tokens": 9, "seed": 3}
    (request,) = server.requests
    assert request == {**expected, "messages": [{"role": "user", "content": "Well?"}]}
    assert server.keys == ["Bearer k"]


async def test_request_to_a_busy_endpoint_is_retried():
    found, server = await ask((429, {"retry-after": "0"}), (503, {}), (500, {}), completion(text="Yes."))
    assert (found.message.content, found.repeats, len(server.requests)) == ("Yes.", 3, 4)


async def test_endpoint_that_stays_busy_fails():
    found, server = await ask((429, {}))
    assert type(found) is ModelFailed
    assert "answered 429" in str(found)
    assert len(server.requests) == chat_model.BUSY_ATTEMPTS


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (401, "wrong key", ModelRefused),
        (404, "no such model", ModelRefused),
        (400, "This model's maximum context length is 8192 tokens.", ContextFull),
        (400, "the request exceeds the available context size (4096 tokens)", ContextFull),
        (400, "prompt is too long: 205000 tokens > 200000 maximum", ContextFull),
        (400, "The input token count exceeds the maximum number of tokens allowed (1048576).", ContextFull),
        (422, "`inputs` tokens + `max_new_tokens` must be <= 4096", ContextFull),
        (400, "the field tools is unknown", ModelFailed),
    ],
)
async def test_refusals_have_types_and_are_not_retried(status, text, error):
    found, server = await ask((status, {"text": text}))
    assert type(found) is error
    assert text in str(found)
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": {"tool_calls": [{}]}}]}])
async def test_answer_that_is_not_a_completion_fails(answer):
    found, _ = await ask(answer)
    assert type(found) is ModelFailed
    assert "not a chat completion" in str(found)


async def test_error_in_an_answer_of_status_200_is_shown():
    found, _ = await ask({"error": {"message": "the provider is down", "code": 502}})
    assert type(found) is ModelFailed
    assert "the provider is down" in str(found)


async def test_failure_in_an_answer_of_status_200_is_retried_and_costs_no_episode():
    down = {"error": {"message": "the provider is down", "code": 502}}
    broken = {"choices": [{"message": {"content": ""}, "finish_reason": "error"}]}
    found, server = await ask(down, {"choices": []}, broken, completion(text="Yes."))
    assert (found.message.content, found.repeats, len(server.requests)) == ("Yes.", 3, 4)


@pytest.mark.parametrize(("code", "error"), [(401, ModelRefused), (400, ContextFull)])
async def test_refusal_in_an_answer_of_status_200_is_not_retried(code, error):
    found, server = await ask({"error": {"message": "maximum context length", "code": code}})
    assert (type(found), len(server.requests)) == (error, 1)


async def test_query_of_the_url_and_further_headers_are_in_every_request():
    with ChatServer(lambda body: completion(text="Yes.")) as server:
        url = f"{server.url}?api-version=2024-10-21"
        async with ChatModel(url, "small", headers={"api-key": "secret"}) as model:
            await model.complete(QUESTION)
    ((query, headers),) = server.sent
    assert (query, headers["api-key"]) == ("api-version=2024-10-21", "secret")


@pytest.mark.parametrize("with_original", [True, False])
@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("multi_tool_use.parallel", "multi_tool_use_parallel"),
        ("", "_"),
        ("l" * 70, "l" * 64),
        ("look", "look"),
    ],
)
async def test_invalid_name_of_a_tool_is_sent_back_in_a_valid_form(name, sent, with_original):
    call = {"id": "a", "type": "function", "function": {"name": name, "arguments": '{"to": "th'}}
    answers = [{"choices": [{"message": {"tool_calls": [call]}}]}, completion(text="Yes.")]
    with ChatServer(lambda body: answers.pop(0)) as server:
        async with ChatModel(server.url, "small") as model:
            first = await model.complete(QUESTION)
            originals = {1: first.original} if with_original else {}
            await model.complete([*QUESTION, first.message], originals=originals)
    assert first.message.tool_calls[0].function.name == name
    (call,) = server.requests[1]["messages"][1]["tool_calls"]
    assert call["function"] == {"name": sent, "arguments": "{}"}


def test_proxy_that_cannot_be_used_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ModelRefused, match="SOCKS"):
        ChatModel("http://127.0.0.1:9/v1", "small")


async def test_number_for_an_id_and_null_for_a_name_are_turns_of_the_model():
    calls = [{"id": 7, "function": {"name": "look", "arguments": "{}"}}, {"function": {"name": None}}]
    found, _ = await ask({"choices": [{"message": {"content": None, "tool_calls": calls}}]})
    assert [(call.id, call.function.name) for call in found.message.tool_calls] == [
        ("7", "look"),
        ("call_1", ""),
    ]


SIGNED = {
    "id": "call_a",
    "type": "function",
    "index": 0,
    "function": {"name": "look", "arguments": "{}"},
    "extra_content": {"google": {"thought_signature": "c2ln"}},
}


@pytest.mark.parametrize(
    ("said", "sent_back"),
    [
        (
            {"reasoning_content": "I must look.", "tool_calls": [SIGNED], "refusal": None, "annotations": []},
            {"content": None, "reasoning_content": "I must look.", "tool_calls": [SIGNED]},
        ),
        (
            {"content": "Hm.", "reasoning_details": [{"data": "x"}], "tool_calls": [SIGNED]},
            {"content": "Hm.", "reasoning_details": [{"data": "x"}], "tool_calls": [SIGNED]},
        ),
        ({"content": "Hi.", "reasoning_content": "A text.", "tool_calls": []}, {"content": "Hi."}),
        (
            {"tool_calls": [SIGNED | {"function": {"name": "look", "arguments": '{"to": "th'}}]},
            {"content": None, "tool_calls": [SIGNED]},
        ),
        (
            {"tool_calls": [SIGNED | {"function": {"name": "look", "arguments": "[1]"}}]},
            {"content": None, "tool_calls": [SIGNED]},
        ),
    ],
    ids=["thought and signature", "details", "thought beside a text", "call that was cut", "list"],
)
async def test_message_is_sent_back_in_the_form_that_the_endpoint_expects(said, sent_back):
    answers = [{"choices": [{"message": {"role": "assistant"} | said}]}, completion(text="Yes.")]
    with ChatServer(lambda body: answers.pop(0)) as server:
        async with ChatModel(server.url, "small") as model:
            first = await model.complete(QUESTION)
            await model.complete([*QUESTION, first.message], originals={1: first.original})
    assert server.requests[1]["messages"][1] == {"role": "assistant"} | sent_back


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"finish_reason": "content_filter"}, "content_filter"),
        ({"finish_reason": "error", "error": {"message": "the provider is down"}}, "the provider is down"),
    ],
)
async def test_answer_that_the_endpoint_withholds_or_breaks_off_fails(choice, reason):
    found, _ = await ask({"choices": [{"message": {"role": "assistant", "content": ""}, **choice}]})
    assert type(found) is ModelFailed
    assert reason in str(found)


@pytest.mark.parametrize(
    "odd",
    [
        {"finish_reason": 5},
        {"finish_reason": "\ud83d"},
        {"usage": [1]},
        {"usage": {"prompt_tokens": 5, "prompt_tokens_details": [1]}},
        {"message": {"content": [{"type": "text", "text": "\ud83d"}]}},
        {"message": {"tool_calls": [{"id": "\ud83d", "function": {"name": "\ud83d"}}]}},
    ],
)
async def test_odd_extra_values_do_not_end_an_evaluation(odd):
    usage = odd.pop("usage", None)
    found, _ = await ask({"choices": [{"message": {"content": "Yes."}, **odd}], "usage": usage})
    assert isinstance(found.finish_reason, str | None)
    assert found.message.model_dump_json().encode()
    (found.finish_reason or "").encode()


def test_nesting_too_deep_for_the_parser_is_a_failure():
    with pytest.raises(ModelFailed, match="not a chat completion"):
        chat_model._completion("url", httpx.Response(200, text="[" * 100_000), seconds=0.0, repeats=0)


async def test_refusal_is_the_models_answer():
    found, _ = await ask({"choices": [{"message": {"content": None, "refusal": "I must not."}}]})
    assert found.message.content == "I must not."


async def test_call_in_the_old_form_is_read():
    found, _ = await ask({"choices": [{"message": {"function_call": {"name": "look", "arguments": "{}"}}}]})
    (read,) = found.message.tool_calls
    assert read.function.name == "look"


async def test_calls_that_only_approach_the_format_are_read():
    call = {"function": {"name": "look", "arguments": {"far": True}}}
    found, _ = await ask({"choices": [{"message": {"tool_calls": [call]}}]})
    (read,) = found.message.tool_calls
    assert (read.id, json.loads(read.function.arguments)) == ("call_0", {"far": True})
    found, _ = await ask({"choices": [{"message": {"content": None}}]})
    assert found.message == Message.assistant("")


async def test_half_of_a_surrogate_pair_can_be_sent_on():
    found, _ = await ask(completion(ToolCall.of("say"), text="so \ud83d what"))
    assert found.message.model_dump_json()
    assert found.message.content == "so \ufffd what"


class Clock:
    """A clock that advances only during sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


async def test_pace_spaces_requests_and_delays_all_of_them(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(chat_model.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(chat_model.asyncio, "sleep", clock.sleep)
    pace, begins = Pace(2.0), []
    for number in range(4):
        await pace.wait()
        begins.append(clock.now - 100.0)
        if number == 1:
            pace.hold(30.0)  # Retry-After
    assert begins == [0.0, 2.0, 32.0, 34.0]
