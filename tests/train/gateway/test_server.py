"""The gateway's API over HTTP, with a scripted engine."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentrl_env.types import Message, ToolCall
from agentrl_train.gateway.server import SHARED, Gateway, Session
from agentrl_train.types import Completion, Sampling, SamplingParams
from tests.train.fakes import CHAT, Script, ScriptedEngine, always

TOOL = {"type": "function", "function": {"name": "down", "parameters": {"type": "object", "properties": {}}}}
HELLO = {"role": "user", "content": "hello"}
HI = Message.assistant("hi")


class SlowEngine(ScriptedEngine):
    """Answers when released."""

    def __init__(self, script: Script) -> None:
        super().__init__(CHAT, script)
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def generate(self, *args: Any, **options: Any) -> Completion:
        self.asked.set()
        await self.may_answer.wait()
        return await super().generate(*args, **options)


class DirectSampler:
    """Samples directly from an engine."""

    def __init__(self, engine: ScriptedEngine, *, max_context: int = 2000) -> None:
        self.sampling = Sampling(max_new_tokens=min(400, max_context - 1), max_context=max_context)
        self._engine = engine

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        segment: int = 0,
        grammar: str = "",
        seed: int | None = None,
    ) -> Completion:
        room = self.sampling.max_context - len(context)
        sampling = SamplingParams(max_new_tokens=min(max_new_tokens or 400, room), grammar=grammar)
        return await self._engine.generate(context, sampling=sampling, session_key=f"one/{segment}")


@asynccontextmanager
async def opened(
    engine: ScriptedEngine | None = None, *, ignored: Sequence[str] = (), **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Session, Gateway]]:
    """Yield a client of a new session, the session and the gateway."""
    sampler = DirectSampler(engine or ScriptedEngine(CHAT, always(HI)), **options)
    async with Gateway() as gateway:
        session = gateway.open(chat=CHAT, sampler=sampler, stated=sampler.sampling, ignored=ignored)
        async with httpx.AsyncClient(base_url=gateway.base_url(session), trust_env=False) as client:
            yield client, session, gateway


async def chat(client: httpx.AsyncClient, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await client.post("/chat/completions", json={"model": "any", "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_answer_has_the_message_its_tokens_and_their_log_probabilities() -> None:
    async with opened() as (client, session, _):
        body = await chat(client, HELLO, logprobs=True, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "hi"
    assert choice["finish_reason"] == "stop"
    (turn,) = session.recorder.rollout()[0]
    assert choice["token_ids"] == turn.completion.token_ids
    assert body["prompt_token_ids"] == turn.prompt_ids
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == turn.completion.logprobs
    assert "".join(one["token"] for one in choice["logprobs"]["content"]) == "hi<|im_end|>"
    assert body["usage"]["total_tokens"] == len(turn.prompt_ids) + len(turn.completion.token_ids)


async def test_calls_are_answered_and_the_conversation_is_one_segment() -> None:
    said = Message.assistant("down we go", ToolCall.of("down"))
    async with opened(ScriptedEngine(CHAT, always(said))) as (client, session, _):
        first = (await chat(client, HELLO, tools=[TOOL]))["choices"][0]
        (call,) = first["message"]["tool_calls"]
        assert (call["function"]["name"], first["finish_reason"]) == ("down", "tool_calls")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        await chat(client, HELLO, first["message"], result, tools=[TOOL])
        turns, segments = session.recorder.rollout()
    assert len(turns) == 2
    assert len(segments) == 1


async def test_each_choice_is_a_segment_and_the_program_continues_from_one_of_them() -> None:
    said = itertools.count()
    engine = ScriptedEngine(CHAT, lambda *_: Message.assistant(f"choice {next(said)}"))
    async with opened(engine) as (client, session, _):
        body = await chat(client, HELLO, n=3)
        choices = [choice["message"] for choice in body["choices"]]
        await chat(client, HELLO, choices[1], HELLO)
        turns, segments = session.recorder.rollout()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["content"] for choice in choices] == ["choice 0", "choice 1", "choice 2"]
    assert body["usage"]["completion_tokens"] == sum(len(one.completion.token_ids) for one in turns[:3])
    assert [turn.segment for turn in turns] == [0, 1, 2, 1]
    assert len(segments) == 3
    assert len({tuple(turn.prompt_ids) for turn in turns[:3]}) == 1


async def test_streamed_answer_adds_up_to_the_unstreamed_answer() -> None:
    said = Message.assistant("down we go", ToolCall.of("down", n=1), ToolCall.of("down", call_id="b", n=2))
    async with opened(ScriptedEngine(CHAT, always(said))) as (client, *_):
        body = {"model": "m", "messages": [HELLO], "tools": [TOOL], "stream": True}
        answer = await client.post(
            "/chat/completions", json=body | {"stream_options": {"include_usage": True}, "logprobs": True}
        )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = events(answer.text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "down we go"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"n": 1}, {"n": 2}]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"temperature": 0.2}, "temperature = 0.2 differs"),
        ({"top_p": 0.9}, "engine.top_p"),
        ({"top_k": 10**400}, "top_k"),
        ({"n": 0}, "n: "),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"response_format": {"type": "xml"}}, "response_format of type 'xml'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "set model.template_kwargs of the run"),
        ({"stop_token_ids": [3]}, "set model.stop of the run"),
        ({"guided_json": {"type": "object"}}, "'guided_json' is not a parameter of this API"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"min_tokens": 8}, "min_tokens = 8"),
        ({"ignore_eos": True}, "ignore_eos = True"),
        ({"max_token": 8}, "'max_token'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ],
)
async def test_unsupported_request_is_rejected_with_a_sentence(more: dict, word: str) -> None:
    async with opened() as (client, session, _):
        answer = await client.post("/chat/completions", json={"model": "m", "messages": [HELLO], **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert session.recorder.rollout()[0] == []


@pytest.mark.parametrize(
    "harmless",
    [
        {"temperature": 1},
        {"top_k": -1},
        {"n": 1, "user": "me", "seed": 3, "store": False, "presence_penalty": 0.0},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"tools": None, "stream": None, "stream_options": {"include_usage": None}, "functions": []},
        {"tools": [{"type": "function", "function": {"name": "down", "description": None}}]},
        {"tools": [{"type": "function", "function": {"name": "down", "parameters": None, "strict": None}}]},
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"chat_template_kwargs": {}, "stop_token_ids": [], "min_tokens": 0, "guided_json": None},
        {"metadata": {"run": "1"}, "service_tier": "auto", "parallel_tool_calls": False, "priority": 1},
    ],
)
async def test_parameters_that_change_nothing_are_accepted(harmless: dict) -> None:
    async with opened() as (client, *_):
        assert (await chat(client, HELLO, **harmless))["choices"][0]["message"]["content"] == "hi"


async def test_refused_parameters_name_the_setting_that_ignores_them() -> None:
    unsupported = {"tool_choice": "sometimes", "response_format": {"type": "xml"}, "top_p": 0.5}
    unsupported["guided_json"] = {"type": "object"}
    async with opened() as (client, *_):
        for name, value in unsupported.items():
            answer = await client.post("/chat/completions", json={"messages": [HELLO], name: value})
            assert answer.status_code == 400
            assert f"environments.program.ignore = ['{name}']" in answer.json()["error"]["message"]
    async with opened(ignored=list(unsupported)) as (client, *_):
        assert (await chat(client, HELLO, **unsupported))["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("more", [{"model": "\ud83d"}, {"messages": [HELLO | {"name": "\ud83d"}]}])
async def test_half_of_a_surrogate_pair_reaches_neither_answer_nor_rollout(more: dict) -> None:
    async with opened() as (client, session, _):
        content = json.dumps({"messages": [HELLO]} | more)
        answer = await client.post("/chat/completions", content=content)
        assert answer.status_code == 200, answer.text
        assert session.recorder.opening[0].name in (None, "?")
        answer.text.encode()


async def test_non_finite_numbers_are_rejected() -> None:
    async with opened() as (client, *_):
        for number in ("NaN", "-Infinity", "1e999"):
            tool = f'{{"type": "function", "name": "down", "parameters": {{"maximum": {number}}}}}'
            answer = await client.post("/responses", content=f'{{"input": "go", "tools": [{tool}]}}')
            assert (answer.status_code, number in answer.json()["error"]["message"]) == (400, True)


async def test_answer_without_text_and_calls_is_an_empty_text() -> None:
    async with opened(ScriptedEngine(CHAT, always(Message.assistant("")))) as (client, *_):
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == ""


def open_for_any_key(gateway: Gateway, key: str) -> Session:
    sampler = DirectSampler(ScriptedEngine(CHAT, always(HI)))
    return gateway.open(chat=CHAT, sampler=sampler, stated=sampler.sampling, key=key)


@pytest.mark.parametrize(("token", "headers"), [("secret", {"Authorization": "bearer secret"}), (None, {})])
async def test_calls_without_a_session_key_share_one_that_opens_again(
    token: str | None, headers: dict[str, str]
) -> None:
    body = {"messages": [HELLO]}
    async with (
        Gateway(unknown=open_for_any_key, token=token) as gateway,
        httpx.AsyncClient(headers=headers) as client,
    ):
        for _ in range(2):
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert (answer.status_code, list(gateway.sessions)) == (200, [SHARED])
            await gateway.close(gateway.sessions[SHARED])
        keyed = await client.post(f"{gateway.url}/s/one/v1/chat/completions", json=body)
        assert (keyed.status_code, list(gateway.sessions)) == (200, ["one"])


async def test_error_of_a_call_to_an_ended_session_advises_another_key() -> None:
    """Clients that always send the same API key cannot start a second session with it."""
    headers, body = {"Authorization": "Bearer none"}, {"messages": [HELLO]}
    async with Gateway(unknown=open_for_any_key) as gateway, httpx.AsyncClient(headers=headers) as client:
        await client.post(f"{gateway.url}/v1/chat/completions", json=body)
        await client.post(f"{gateway.url}/v1/end")
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert answer.status_code == 410
    assert "use another key for the next" in answer.json()["error"]["message"]


async def test_calls_without_a_session_key_are_rejected_if_the_run_opens_sessions() -> None:
    async with opened() as (_, _, gateway), httpx.AsyncClient() as client:
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json={"messages": [HELLO]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
        assert "/s/KEY/v1" in answer.json()["error"]["message"]


async def test_errors_of_sessions_have_types() -> None:
    async with opened() as (client, session, gateway):
        body = {"model": "m", "messages": [HELLO]}
        unknown = await client.post(f"{gateway.url}/s/nobody/v1/chat/completions", json=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
        await gateway.close(session)
        closed = await client.post("/chat/completions", json=body)
        assert (closed.status_code, closed.json()["error"]["code"]) == (410, "session_closed")
        missing = await client.get(f"{gateway.url}/nothing")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
        assert "/s/KEY/v1" in missing.json()["error"]["message"]
        malformed = await client.post("/reward", content=b"{")
        assert malformed.status_code == 410


async def test_conversation_without_room_is_refused_and_the_next_shorter_one_is_answered() -> None:
    async with opened(max_context=100) as (client, session, _):
        answer = await client.post(
            "/chat/completions", json={"messages": [{"role": "user", "content": "x" * 200}]}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert session.context_full
        await chat(client, HELLO)
        assert not session.context_full
        assert len(session.recorder.rollout()[0]) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/messages/count_tokens"])
async def test_messages_that_no_context_can_hold_are_refused_by_their_length(path: str) -> None:
    """Tokenizing the output of a large log blocks the event loop of the run for many seconds."""
    async with opened(max_context=100) as (client, session, _):
        message = {"role": "user", "content": "x" * 30_000}
        answer = await client.post(path, json={"messages": [message]})
        assert answer.status_code == 400
        assert "prompt is too long: 30000 characters > 25600 maximum" in answer.json()["error"]["message"]
        assert session.context_full


async def test_token_limit_and_stop_text_end_an_answer() -> None:
    async with opened(ScriptedEngine(CHAT, always(Message.assistant("one two END three")))) as (client, *_):
        short = await chat(client, HELLO, max_tokens=3)
        assert (short["choices"][0]["message"]["content"], short["choices"][0]["finish_reason"]) == (
            "one",
            "length",
        )
        stopped = await chat(client, HELLO, max_completion_tokens=50, stop="END")
        assert stopped["choices"][0]["message"]["content"] == "one two"
        assert stopped["choices"][0]["finish_reason"] == "stop"


async def test_bearer_key_selects_the_session_as_the_path_does() -> None:
    async with opened() as (client, session, gateway):
        headers = {"Authorization": f"Bearer {session.key}"}
        body = {"messages": [HELLO]}
        answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert len(session.recorder.rollout()[0]) == 1
        models = (await client.get("/models")).json()
        assert models["data"][0]["id"] == "policy"
        assert (await client.get("/models/org/any")).json()["id"] == "org/any"


async def test_client_that_disconnects_and_retries_gets_one_turn() -> None:
    engine = SlowEngine(always(HI))
    async with opened(engine) as (client, session, _):
        first = asyncio.create_task(client.post("/chat/completions", json={"messages": [HELLO]}))
        await engine.asked.wait()
        (call,) = session.recorder._conversations[0].calls
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        while not call.lost:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.may_answer.set()
        assert (await chat(client, HELLO))["choices"][0]["message"]["content"] == "hi"
        assert len(session.recorder.rollout()[0]) == 1
        assert len(engine.calls) == 1


async def test_session_is_not_idle_during_a_call() -> None:
    engine = SlowEngine(always(HI))
    async with opened(engine) as (client, session, _):
        calling = asyncio.create_task(chat(client, HELLO))
        await engine.asked.wait()
        session.last_used -= 100
        assert session.idle_s == 0
        engine.may_answer.set()
        await calling
        assert session.idle_s < 50
        session.last_used -= 100
        assert session.idle_s > 50


async def test_concurrent_calls_of_one_session_are_answered_separately() -> None:
    engine = SlowEngine(lambda context, key: Message.assistant(key))
    async with opened(engine) as (client, session, _):
        asking = [asyncio.create_task(chat(client, HELLO)) for _ in range(3)]
        await engine.asked.wait()
        engine.may_answer.set()
        said = {body["choices"][0]["message"]["content"] for body in await asyncio.gather(*asking)}
        assert said == {"one/0", "one/1", "one/2"}
        turns, segments = session.recorder.rollout()
    assert sorted(turn.segment for turn in turns) == [0, 1, 2]
    assert [one.reason for one in segments] == ["root", "rewritten", "rewritten"]


async def test_failure_of_the_engine_is_an_error_of_the_server_and_can_be_repeated() -> None:
    engine = ScriptedEngine(CHAT, always(HI))
    engine.failures = 1
    async with opened(engine) as (client, session, _):
        failed = await client.post("/chat/completions", json={"messages": [HELLO]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
        assert session.failure is not None
        await chat(client, HELLO)
        assert session.failure is None
        assert len(session.recorder.rollout()[0]) == 1


async def test_completion_without_tokens_is_an_error_of_the_engine() -> None:
    class Empty(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Completion:
            return Completion(token_ids=[], logprobs=[], versions=[], finish_reason="stop")

    async with opened(Empty(CHAT, always(HI))) as (client, session, _):
        failed = await client.post("/chat/completions", json={"messages": [HELLO]})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
        assert session.recorder.rollout()[0] == []


@pytest.mark.parametrize(("limit", "invalid"), [(None, 0), (40, 1)])
async def test_call_truncated_by_the_full_context_is_not_invalid(limit: int | None, invalid: int) -> None:
    """A call truncated by its request's own limit counts against the policy."""
    said = Message.assistant(None, ToolCall.of("up" * 40, note="x" * 900))
    engine = ScriptedEngine(CHAT, always(said))
    async with opened(engine, max_context=450) as (client, session, _):
        await chat(client, HELLO, tools=[TOOL], max_tokens=limit)
        (turn,) = session.recorder.rollout()[0]
    assert (turn.completion.finish_reason, turn.invalid_calls) == ("length", invalid)


async def test_posted_rewards_belong_to_their_turns() -> None:
    async with opened() as (client, session, _):
        early = await client.post("/reward", json={"reward": 1.0})
        assert (early.status_code, early.json()["error"]["param"]) == (400, "reward")
        first = await chat(client, HELLO)
        assert (await client.post("/reward", json={"reward": 0.5, "metrics": {"right": 1.0}})).is_success
        assert (await client.post("/reward", content=b'{"reward": NaN}')).status_code == 400
        await chat(client, HELLO, first["choices"][0]["message"], HELLO)
        assert (await client.post("/reward", json={"reward": 0.25})).is_success
        assert [turn.reward for turn in session.recorder.rollout()[0]] == [0.5, 0.25]
        assert session.metrics == {"right": 1.0}


async def test_responses_api_holds_the_same_conversation() -> None:
    said = Message.assistant("down we go", ToolCall.of("down"))
    async with opened(ScriptedEngine(CHAT, always(said))) as (client, session, _):
        tool = {"type": "function", "name": "down", "description": "", "parameters": {}, "strict": True}
        ask = {"model": "m", "instructions": "Count.", "tools": [tool]}
        first = (await client.post("/responses", json=ask | {"input": "go"})).json()
        text, call = first["output"]
        assert text["content"][0]["text"] == "down we go"
        assert call["type"] == "function_call"
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        whole = [{"role": "user", "content": "go"}, text, call, result]
        await client.post("/responses", json=ask | {"input": whole})
        answer = await client.post(
            "/responses",
            json=ask | {"input": [result], "previous_response_id": first["id"], "stream": True},
        )
        kinds = [event["type"] for event in events(answer.text)]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        unknown = {"input": "go", "previous_response_id": "resp_none"}
        assert (await client.post("/responses", json=unknown)).status_code == 400
        turns, segments = session.recorder.rollout()
    assert [turn.segment for turn in turns] == [0, 0, 1]
    assert segments[1].after_turn == 0
    assert list(turns[0].prompt_ids) == CHAT.opening(
        [Message(role="system", content="Count."), Message(role="user", content="go")],
        session.recorder._conversations[0].tools,
    )


async def test_last_item_of_a_cut_response_is_incomplete() -> None:
    async with opened() as (client, *_):
        whole = (await client.post("/responses", json={"input": "go"})).json()
        cut = (await client.post("/responses", json={"input": "go", "max_output_tokens": 1})).json()
    assert [(one["status"], one["output"][-1]["status"]) for one in (whole, cut)] == [
        ("completed", "completed"),
        ("incomplete", "incomplete"),
    ]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"input": [{"role": "user", "content": 5}]}, "type int"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "type 'str'"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "type int"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input.0.name"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]}, "arguments"),
        ({"input": [{"content": "a"}]}, "role None"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ({"input": "go", "tools": [TOOL]}, "tools.0.name"),
        ({"input": "go", "text": {"format": {"type": "xml"}}}, "text of type"),
        ({"input": "go", "max_tokens": 5}, "'max_tokens'"),
        ({"input": "go", "truncation": "auto"}, "truncation"),
        ({"input": "go", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ],
)
async def test_unsupported_response_is_rejected_with_a_sentence(body: dict, word: str) -> None:
    async with opened() as (client, session, _):
        answer = await client.post("/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert word in answer.json()["error"]["message"]
        assert session.recorder.rollout()[0] == []


async def test_nulls_and_the_verbosity_of_a_response_change_nothing() -> None:
    async with opened() as (client, *_):
        body = {"input": "go", "tools": None, "stream": None, "text": {"verbosity": "low"}, "include": []}
        answer = await client.post("/responses", json=body)
        assert (answer.status_code, answer.json()["tools"]) == (200, [])
