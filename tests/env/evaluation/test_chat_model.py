"""The client for OpenAI-compatible endpoints against a real HTTP server."""

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from agentrl_env import Message, ToolCall
from agentrl_env.client.credentials import public_url
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key": "sk-SECRET\nsecond"}, "the API key has a line break"),
        (
            {"key": "sk-SECRET\u00e9"},
            "the API key has a line break or another character that is not printable",
        ),
        ({"headers": {"api-key": "SECRET\r\nx: y"}}, "the header api-key has a line break"),
        ({"headers": {"api key": "SECRET"}}, "'api key' cannot be the name of a header"),
    ],
)
def test_key_or_header_that_cannot_be_sent_is_rejected_without_its_value(options, reason):
    with pytest.raises(ModelRefused, match=reason) as found:
        ChatModel("http://127.0.0.1:9/v1", "small", **options)
    assert "SECRET" not in str(found.value)


async def test_white_space_around_a_key_is_not_sent():
    _, server = await ask(completion(text="Yes."), key=" k\n")
    assert server.keys == ["Bearer k"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://bob:PASSW0RD@h:8/v1?key=QSECRET&v=2#x", "http://h:8/v1?key=***&v=***"),
        ("http://token@h/v1?QSECRET", "http://h/v1?***"),
        ("http://bob:PASS/W0RD@h/v1?key=QSECRET", "http://h/v1"),  # not percent-encoded, so no URL
        ("http://h/v1/@model", "http://h/v1/@model"),
        ("localhost:9/v1", "localhost:9/v1"),
    ],
)
def test_url_is_shown_without_credentials(url, shown):
    assert public_url(url) == shown


@pytest.mark.parametrize(
    "url", ["http://bob:PASS/W0RD@h/v1?key=QSECRET", "ftp://bob:PASSW0RD@h/v1?key=QSECRET"]
)
def test_url_that_cannot_be_used_is_rejected_without_its_credentials(url):
    with pytest.raises(ModelRefused, match="cannot be used") as found:
        ChatModel(url, "small")
    assert not [part for part in ("PASS", "W0RD", "QSECRET") if part in str(found.value)]


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_answer_that_repeats_the_credentials_is_shown_without_them(status):
    def reply(body):
        return status, {"text": "sk-SECRET-KEY, HEADERSECRET, PASSW0RD and QUERYSECRET are invalid"}

    with ChatServer(reply) as server:
        url = server.url.replace("//", "//bob:PASSW0RD@") + "?key=QUERYSECRET"
        headers = {"x": "Token HEADERSECRET"}
        async with ChatModel(url, "small", key="sk-SECRET-KEY", headers=headers) as model:
            with pytest.raises(ModelFailed) as found:
                await model.complete(QUESTION)
    assert "?key=*** answered" in str(found.value)
    assert "***, ***, *** and *** are invalid" in str(found.value)


@pytest.mark.parametrize(
    "location", ["https://h2/v1/chat/completions?key=QSECRET", "//h2/v1/chat/completions?key=Q"]
)
async def test_redirect_names_the_url_to_use(location):
    found, server = await ask((308, {"location": location}))
    assert type(found) is ModelRefused
    scheme = "https" if location.startswith("https") else "http"
    assert f"answered 308 with the Location {scheme}://h2/v1/chat/completions?key=***; " in str(found)
    assert f"use {scheme}://h2/v1?key=*** as the URL" in str(found)
    assert len(server.requests) == 1


@contextmanager
def dripping_endpoint():
    """Send a byte of an answer every 50 ms, without an end."""

    def drip(connection):
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)
        except OSError:
            connection.close()

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


async def test_timeout_bounds_the_whole_answer_of_an_endpoint_that_drips(monkeypatch):
    monkeypatch.setattr(chat_model, "ATTEMPTS", 2)
    with dripping_endpoint() as url:
        async with ChatModel(url, "small", timeout=0.3) as model:
            with pytest.raises(ModelFailed, match=r"did not answer within 0\.3 s"):
                await asyncio.wait_for(model.complete(QUESTION), 30)


@pytest.mark.parametrize("timeout", [0, -5, float("nan"), float("inf")])
def test_timeout_must_be_a_number_of_seconds(timeout):
    with pytest.raises(ModelRefused, match="above 0 seconds and finite"):
        ChatModel("http://127.0.0.1:9/v1", "small", timeout=timeout)


def test_field_that_json_cannot_express_is_named():
    with pytest.raises(ModelRefused, match="the field 'x' cannot be sent as JSON"):
        ChatModel("http://127.0.0.1:9/v1", "small", body={"x": [float("nan")]})


@pytest.mark.parametrize("part", [{"number": float("nan")}, {"text": "\ud83d"}])
async def test_conversation_that_json_cannot_express_is_a_failure(part):
    async with ChatModel("http://127.0.0.1:9/v1", "small") as model:
        with pytest.raises(ModelFailed, match="the conversation cannot be sent as JSON"):
            await model.complete([Message(role="user", content=[part])])


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
