"""Size and rate limits on the requests of a client."""

import asyncio
import json

import httpx
import pytest
from websockets.asyncio.client import connect

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.errors import InvalidRequest, RateLimited, ServeError
from agentrl_env.server.limits import MAX_BUCKETS, Limits, Rates
from tests.env.session.test_fork import Walk
from tests.env.tasks import Clock, Quick

NOTE = Message.assistant(None, ToolCall.of("note", text="x"))
SMALL = Limits(max_depth=8, max_message_chars=200, max_tool_calls=3, max_batch_steps=4, max_forks=2)


def raw(server, **headers):
    return httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=60)


def nested(levels):
    return json.loads("[" * levels + "]" * levels)


def error_of(answer):
    return answer.status_code, answer.json()["error"]["type"]


WRONG_MESSAGES = {
    "content": {"content": "x" * 201},
    "arguments": {
        "tool_calls": [
            {"id": "a", "function": {"name": "note", "arguments": json.dumps({"text": "x" * 200})}}
        ]
    },
    "calls": {"tool_calls": [{"id": str(n), "function": {"name": "finish"}} for n in range(4)]},
    "parts": {"content": [{"type": "text", "text": "x" * 201}]},
    "depth": {"content": [{"type": "text", "x": nested(8)}]},
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
async def test_message_over_a_limit_is_rejected_without_a_turn(serving, name):
    server = await serving(limits=SMALL)
    message = {"role": "assistant", **WRONG_MESSAGES[name]}
    async with EnvClient.connect(server.url) as client, raw(server) as http:
        one, two = await client.open("quick"), await client.open("quick")
        wrong = {"session_id": one.session_id, "seq": 1, "message": message}
        right = {"session_id": two.session_id, "seq": 1, "message": NOTE.wire()}
        assert error_of(await http.post(f"/v1/sessions/{one.session_id}/step", json=wrong)) == (
            422,
            "invalid_request",
        )
        results = (await http.post("/v1/step", json={"steps": [wrong, right, wrong]})).json()["results"]
        assert [r["error"]["type"] if "error" in r else r["seq"] for r in results] == [
            "invalid_request",
            1,
            "invalid_request",
        ]
        async with connect(f"{server.url.replace('http', 'ws', 1)}/v1/ws") as socket:
            await socket.send(json.dumps({"id": 1, "call": "step", **wrong}))
            assert json.loads(await socket.recv())["error"]["type"] == "invalid_request"
        assert (await one.step(NOTE)).seq == 1


async def test_requests_at_the_limits_are_accepted(serving):
    server = await serving(limits=SMALL)
    async with EnvClient.connect(server.url) as client, raw(server) as http:
        session = await client.open("quick", sample={"deep": nested(7)})
        step = {"seq": 1, "message": {"role": "assistant", "content": "x" * 200}}
        assert (await http.post(f"/v1/sessions/{session.session_id}/step", json=step)).status_code == 200


async def test_batches_forks_and_samples_over_a_limit_are_rejected(serving):
    server = await serving(Quick, Walk, limits=SMALL)
    async with EnvClient.connect(server.url) as client, raw(server) as http:
        session = await client.open("walk")
        step = {"session_id": session.session_id, "seq": 1, "message": {"role": "assistant", "content": ""}}
        assert error_of(await http.post("/v1/step", json={"steps": [step] * 5})) == (422, "invalid_request")
        assert (await client.resume(session.session_id)).turn == 0
        with pytest.raises(InvalidRequest, match="3 forks in one call; at most 2"):
            await session.fork(3)
        with pytest.raises(InvalidRequest, match="sample: JSON nested deeper than 8 levels"):
            await client.open("quick", sample={"deep": nested(8)})
        assert server.pool.open_sessions == 1


@pytest.mark.parametrize("levels", [150, 250, 100_000])
@pytest.mark.parametrize("where", ["sample", "ignored", "top", "open-ended"])
async def test_deeply_nested_json_is_rejected(serving, levels, where):
    server = await serving()
    deep = "[" * levels + "]" * levels
    body = {
        "sample": f'{{"task":"quick","sample":{{"a":{deep}}}}}',
        "ignored": f'{{"task":1,"x":{deep}}}',
        "top": deep,
        "open-ended": "[" * levels,
    }[where]
    async with raw(server) as http:
        for path in ("/v1/sessions", "/v1/step", "/v1/sessions/x/step", "/v1/sessions/x/fork"):
            answer = await http.post(path, content=body)
            assert error_of(answer) in ((422, "invalid_request"), (404, "unknown_session")), path
        assert error_of(await http.post("/v1/sessions", content=body)) == (422, "invalid_request")


@pytest.mark.parametrize("levels", [70, 250, 100_000])
async def test_deeply_nested_json_in_arguments_is_an_invalid_call(serving, levels):
    server = await serving()
    deep = '{"text":' + "[" * levels + "]" * levels + "}"
    call = {"id": "a", "type": "function", "function": {"name": "note", "arguments": deep}}
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
        result = await session.step(message)
        assert result.metrics["invalid_calls"] == 1.0
        assert result.messages[0].content.startswith("Error: ")
        assert (await session.step(NOTE)).seq == 2


def test_token_bucket_refills_per_client():
    clock = Clock()
    rates = Rates(2.0, 3, clock=clock)
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b") == 0.0
    clock.now += 0.25
    assert rates.take("a") == 0.25
    clock.now += 0.25
    assert rates.take("a") == 0.0
    clock.now += 100
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_number_of_token_buckets_is_bounded():
    rates = Rates(1.0)
    for number in range(MAX_BUCKETS + 10):
        rates.take(str(number))
    assert len(rates._buckets) == MAX_BUCKETS


async def test_rate_limited_response_has_retry_after(serving):
    server = await serving(limits=Limits(rate_per_s=0.01, burst=2))
    async with raw(server, **{"x-agentrl-client": "eager"}) as eager, raw(server) as other:
        assert [(await eager.get("/v1/tasks")).status_code for _ in range(3)] == [200, 200, 429]
        answer = await eager.get("/v1/tasks")
        assert error_of(answer) == (429, "rate_limited")
        assert int(answer.headers["retry-after"]) >= answer.json()["error"]["retry_after"] > 90
        assert (await eager.get("/health")).status_code == 200
        assert (await other.get("/v1/tasks")).status_code == 200


async def test_each_websocket_call_counts_against_the_rate_limit(serving):
    server = await serving(limits=Limits(rate_per_s=0.01, burst=2))
    async with connect(f"{server.url.replace('http', 'ws', 1)}/v1/ws") as socket:
        for number in range(3):
            await socket.send(json.dumps({"id": number, "call": "tasks"}))
        answers = sorted([json.loads(await socket.recv()) for _ in range(3)], key=lambda a: a["id"])
    assert ["error" in answer for answer in answers] == [False, False, True]
    assert answers[2]["error"]["type"] == "rate_limited"
    assert answers[2]["error"]["retry_after"] > 90


async def test_client_waits_for_retry_after(serving):
    server = await serving(limits=Limits(rate_per_s=25, burst=1))
    async with EnvClient.connect(server.url) as client:
        session = await client.open("quick")
        for seq in range(1, 5):
            assert (await session.step(NOTE)).seq == seq
        await session.close()
    assert server.metrics.errors["rate_limited"] > 0


async def test_client_raises_rate_limited_if_the_wait_exceeds_its_timeout(serving):
    server = await serving(limits=Limits(rate_per_s=0.01, burst=1))
    async with EnvClient.connect(server.url, timeout=30.0) as client:
        await client.tasks()
        async with asyncio.timeout(60):
            with pytest.raises(RateLimited):
                await client.tasks()


def test_limits_are_parsed_and_invalid_ones_raise_one_sentence():
    assert Limits.parse(["rate_per_s=2.5", "max_depth=10"]) == Limits(rate_per_s=2.5, max_depth=10)
    with pytest.raises(ServeError, match=r"nope=1: give NAME=VALUE, with NAME one of max_body_bytes, "):
        Limits.parse(["nope=1"])
    with pytest.raises(ServeError, match=r"max_depth=x: Input should be a valid integer"):
        Limits.parse(["max_depth=x"])
    with pytest.raises(ServeError, match=r"body_s=0: Input should be greater than 0"):
        Limits.parse(["body_s=0"])
