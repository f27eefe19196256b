import asyncio
import gzip
import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env import Message, ToolCall
from agentrl_env.server.app import create_app
from agentrl_env.server.limits import Limits
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from tests.env.tasks import Clock, Quick, Slow, expire_idle, until


@pytest.fixture
async def serving():
    stack = []

    def make(*environments, app_options=None, **options):
        pool = SessionPool(environments or (Quick,), **options)
        app = create_app(pool, Metrics(), **(app_options or {}))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        stack.extend([client.aclose, pool.aclose])
        client.pool = pool
        return client

    yield make
    for close in stack:
        await close()


@pytest.fixture
def http(serving):
    return serving()


def body(seq, name="note", session_id=None, **arguments):
    arguments = arguments or ({"text": "x"} if name == "note" else {})
    data = {"seq": seq, "message": Message.assistant(None, ToolCall.of(name, **arguments)).wire()}
    return data | ({"session_id": session_id} if session_id else {})


async def opened(http, **fields):
    answer = await http.post("/v1/sessions", json={"task": "quick"} | fields)
    assert answer.status_code == 201
    return answer.json()


def error_of(answer):
    error = answer.json()["error"]
    assert set(error) >= {"type", "message"}
    assert "\n" not in error["message"]
    return answer.status_code, error["type"]


async def test_health_and_metrics_endpoints_answer(http):
    assert (await http.get("/health")).json() == {"status": "ok"}
    await opened(http)
    answer = await http.get("/metrics")
    assert "agentrl_sessions_open 1" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


async def test_every_response_has_the_protocol_header(http):
    for path in ("/health", "/v1/tasks", "/nowhere"):
        assert (await http.get(path)).headers["x-agentrl-protocol"] == "1"


async def test_tasks_are_listed(http):
    answer = (await http.get("/v1/tasks")).json()
    assert answer["protocol"] == 1
    (task,) = answer["tasks"]
    assert task["name"] == "quick"
    assert task["splits"]["train"] == {"num_samples": 10}
    assert task["tools"][0]["function"]["parameters"]["required"] == ["text"]


async def test_session_is_played_over_http(http):
    info = await opened(http, index=2, seed=5)
    assert info["status"] == "running"
    assert info["messages"][0] == {"role": "system", "content": "Be quick."}
    url = f"/v1/sessions/{info['session_id']}"
    result = (await http.post(f"{url}/step", json=body(1))).json()
    assert set(result) == {
        "session_id",
        "seq",
        "messages",
        "reward",
        "terminated",
        "truncated",
        "status",
        "metrics",
        "info",
    }
    assert result["messages"][0]["role"] == "tool"
    assert set(result["messages"][0]) == {"role", "content", "tool_call_id"}
    assert (await http.post(f"{url}/step", json=body(1))).json() == result
    state = (await http.get(url)).json()
    assert (state["turn"], state["last"]) == (1, result)
    assert (await http.delete(url)).status_code == 204
    assert (await http.delete(url)).status_code == 204
    assert (await http.delete("/v1/sessions/unknown")).status_code == 204
    assert (await http.get(url)).json()["status"] == "cancelled"


async def test_invalid_tool_call_is_a_result_and_not_an_http_error(http):
    url = f"/v1/sessions/{(await opened(http))['session_id']}/step"
    answer = await http.post(url, json=body(1, "nope"))
    assert answer.status_code == 200
    assert answer.json()["metrics"]["invalid_calls"] == 1.0


@pytest.mark.parametrize(
    ("ids", "answered"),
    [
        ([None, None], ["call_0", "call_1"]),
        ([7, "b"], ["7", "b"]),
        (["", "b"], ["", "b"]),
        (["a", 0], ["a", "0"]),
    ],
)
async def test_calls_without_an_id_are_named_by_their_position(http, ids, answered):
    url = f"/v1/sessions/{(await opened(http))['session_id']}/step"
    function = {"name": "note", "arguments": '{"text": "x"}'}
    calls = [{"type": "function", "function": function} | ({} if i is None else {"id": i}) for i in ids]
    answer = await http.post(url, json={"seq": 1, "message": {"role": "assistant", "tool_calls": calls}})
    assert answer.status_code == 200
    assert [message["tool_call_id"] for message in answer.json()["messages"]] == answered


async def test_byte_order_mark_is_ignored_and_compressed_body_is_reported(http):
    mark = b"\xef\xbb\xbf"
    answer = await http.post("/v1/sessions", content=mark + b'{"sessions": [{"task": "quick"}]}')
    assert answer.status_code == 201
    url = f"/v1/sessions/{answer.json()['sessions'][0]['session_id']}/step"
    assert (await http.post(url, content=mark + json.dumps(body(1)).encode())).json()["seq"] == 1
    answer = await http.post(url, content=gzip.compress(json.dumps(body(2)).encode()))
    assert error_of(answer) == (422, "invalid_request")
    assert answer.json()["error"]["message"] == "the body is compressed with gzip; send plain JSON"


async def test_each_error_has_its_type_and_status(serving):
    clock = Clock()
    http = serving(Quick, Slow, max_sessions=2, lease_s=10, clock=clock)
    one = (await opened(http))["session_id"]
    step = f"/v1/sessions/{one}/step"
    post = http.post
    assert error_of(await post("/v1/sessions", json={"task": "nope"})) == (404, "unknown_task")
    assert error_of(await post("/v1/sessions", json={"task": "quick", "split": "dev"})) == (
        404,
        "unknown_sample",
    )
    assert error_of(await post("/v1/sessions", json={"task": "quick", "index": 99})) == (
        404,
        "unknown_sample",
    )
    assert error_of(await post("/v1/sessions", content=b"{")) == (422, "invalid_request")
    assert error_of(await post("/v1/sessions", json=[])) == (422, "invalid_request")
    for value in (b"NaN", b'"\\ud800"'):
        content = b'{"task": "quick", "sample": {"x": %s}}' % value
        assert error_of(await post("/v1/sessions", content=content)) == (422, "invalid_request")
    assert error_of(await post("/v1/sessions", json={"task": "quick", "seed": -1})) == (
        422,
        "invalid_request",
    )
    assert error_of(await post("/v1/sessions", content=b"\xff\xfe")) == (422, "invalid_request")
    assert error_of(await post("/v1/sessions/nope/step", json=body(1))) == (404, "unknown_session")
    assert error_of(await http.get("/v1/sessions/nope")) == (404, "unknown_session")
    assert error_of(await post(step, json=body(2))) == (409, "seq_conflict")
    assert error_of(await post(step, json=body(0))) == (422, "invalid_request")
    assert error_of(await post(step, json={"seq": 1})) == (422, "invalid_request")
    user = {"seq": 1, "message": {"role": "user", "content": "x"}}
    assert error_of(await post(step, json=user)) == (422, "invalid_request")
    assert error_of(await http.get("/v1/nowhere")) == (404, "unknown_route")
    assert error_of(await http.put("/v1/sessions")) == (405, "method_not_allowed")
    assert error_of(await post(f"/v1/sessions/{one}/expert")) == (501, "not_supported")
    await opened(http, task="slow")
    full = await post("/v1/sessions", json={"task": "quick"})
    assert error_of(full) == (503, "server_full")
    assert int(full.headers["retry-after"]) >= 1
    await post(step, json=body(1, "finish"))
    assert error_of(await post(step, json=body(2))) == (409, "session_ended")
    two = (await opened(http))["session_id"]
    clock.now += 60
    await expire_idle(http.pool)
    assert error_of(await http.get(f"/v1/sessions/{two}")) == (410, "session_expired")
    assert error_of(await post(f"/v1/sessions/{two}/step", json=body(1))) == (410, "session_expired")
    await http.pool.drain(0)
    draining = await post("/v1/sessions", json={"task": "quick"})
    assert error_of(draining) == (503, "server_draining")
    assert "retry-after" in draining.headers
    assert (await http.get("/health")).json() == {"status": "draining"}
    metrics = (await http.get("/metrics")).text
    assert 'agentrl_errors_total{type="session_expired"} 2.0' in metrics


class Broken(Quick):
    def reset(self, sample, rng):
        raise OSError("no disk")


async def test_failed_reset_is_a_typed_error(serving):
    answer = await serving(Broken).post("/v1/sessions", json={"task": "broken"})
    assert error_of(answer) == (500, "environment_failed")
    assert "OSError: no disk" in answer.json()["error"]["message"]


async def test_failed_step_is_a_result(http):
    url = f"/v1/sessions/{(await opened(http))['session_id']}/step"
    answer = await http.post(url, json=body(1, "crash"))
    assert answer.status_code == 200
    assert answer.json()["status"] == "failed_environment"
    assert answer.json()["info"]["error"]["type"] == "ZeroDivisionError"


class BrokenPool(SessionPool):
    async def info(self, session_id):
        raise RuntimeError("secret detail")


async def test_internal_error_has_no_details():
    pool = BrokenPool([Quick])
    transport = httpx.ASGITransport(create_app(pool, Metrics()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.get("/v1/sessions/x")
    assert error_of(answer) == (500, "internal_error")
    assert "secret" not in answer.text
    await pool.aclose()


async def test_batch_steps_many_sessions_and_items_fail_independently(http):
    a, b = [(await opened(http))["session_id"] for _ in range(2)]
    steps = [
        body(1, session_id=a),
        {"session_id": b},
        7,
        body(1, session_id="nope"),
        body(2, session_id=a),
        body(1, session_id=b),
    ]
    answer = await http.post("/v1/step", json={"steps": steps})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [r.get("seq") for r in results] == [1, None, None, None, 2, 1]
    assert [r["error"]["type"] for r in results if "error" in r] == [
        "invalid_request",
        "invalid_request",
        "unknown_session",
    ]
    assert results[0]["messages"][0]["content"].startswith("1 ")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"steps": 3}', b"{}", b'{"steps": [], "wait_s": -1}'])
async def test_malformed_batch_is_rejected(http, content):
    assert error_of(await http.post("/v1/step", content=content)) == (422, "invalid_request")


async def test_empty_batch_has_no_results(http):
    assert (await http.post("/v1/step", json={"steps": []})).json() == {"results": []}


async def test_batch_with_wait_s_returns_early(serving):
    http = serving(Slow)
    session_id = (await opened(http, task="slow"))["session_id"]
    steps = [body(1, "wait", session_id=session_id)]
    answer = await http.post("/v1/step", json={"steps": steps, "wait_s": 0.01})
    assert answer.json()["results"][0]["error"]["type"] == "step_pending"
    Slow.gate.set()
    answer = await http.post("/v1/step", json={"steps": steps})
    assert answer.json()["results"][0]["seq"] == 1


async def test_expert_answers_with_the_oracle_option(serving):
    http = serving(oracle=True)
    assert (await http.get("/v1/tasks")).json()["tasks"][0]["capabilities"] == ["expert"]
    session_id = (await opened(http))["session_id"]
    answer = await http.post(f"/v1/sessions/{session_id}/expert")
    call = answer.json()["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {}
    assert call["function"]["name"] == "finish"


async def test_token_is_required_except_for_health(serving):
    http = serving(app_options={"token": "sesam"})
    assert (await http.get("/health")).status_code == 200
    for path in ("/metrics", "/v1/tasks", "/nowhere"):
        assert error_of(await http.get(path)) == (401, "unauthorized")
        wrong = {"authorization": "Bearer sesame"}
        assert error_of(await http.get(path, headers=wrong)) == (401, "unauthorized")
    right = {"authorization": "Bearer sesam"}
    assert (await http.get("/v1/tasks", headers=right)).status_code == 200


async def test_body_over_the_limit_is_rejected(serving):
    http = serving(app_options={"limits": Limits(max_body_bytes=1024)})
    assert error_of(await http.post("/v1/sessions", content=b"x" * 1025)) == (413, "body_too_large")

    async def chunks():
        for _ in range(3):
            yield b"x" * 500

    assert error_of(await http.post("/v1/sessions", content=chunks())) == (413, "body_too_large")
    assert (await http.post("/v1/sessions", json={"task": "quick"})).status_code == 201


async def test_disconnected_client_leaves_the_queue(serving):
    http = serving(max_sessions=1)
    await opened(http)
    pool, app = http.pool, create_app(http.pool, Metrics())
    body_sent = asyncio.Event()

    async def receive():
        if not body_sent.is_set():
            body_sent.set()
            return {"type": "http.request", "body": b'{"task": "quick", "wait_s": 60}'}
        await until(lambda: pool.gauges()["agentrl_sessions_waiting"])
        return {"type": "http.disconnect"}

    async def send(message):
        return None

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sessions",
        "headers": [],
        "query_string": b"",
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    assert pool.gauges()["agentrl_sessions_waiting"] == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
STEP = st.fixed_dictionaries(
    {},
    optional={
        "seq": JSON | st.integers(1, 2),
        "message": JSON | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"])}),
        "session_id": JSON | st.just("known"),
    },
)
OPEN = st.fixed_dictionaries(
    {"task": JSON | st.just("quick")},
    optional={
        "split": JSON | st.sampled_from(["train", "dev", "empty"]),
        "index": JSON | st.integers(0, 9),
        "seed": JSON,
        "sample": JSON,
        "request_id": JSON,
    },
)
REQUESTS = st.one_of(
    st.tuples(st.just("/v1/sessions"), OPEN | JSON),
    st.tuples(st.sampled_from(["/v1/sessions/known/step", "/v1/sessions/other/step"]), STEP | JSON),
    st.tuples(st.just("/v1/step"), st.fixed_dictionaries({"steps": st.lists(STEP | JSON)}) | JSON),
)


def is_object(body: bytes) -> bool:
    """Return True if a body is a JSON object, which can open a session with defaults."""
    try:
        return isinstance(json.loads(body), dict)
    except ValueError:
        return False


@settings(max_examples=30, deadline=None)
@given(st.lists(REQUESTS, max_size=8), st.binary(max_size=30).filter(lambda body: not is_object(body)))
def test_no_request_body_causes_an_internal_error(requests, garbage):
    async def run():
        pool = SessionPool([Quick])
        transport = httpx.ASGITransport(create_app(pool, Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            known = (await opened(http))["session_id"]
            for path, content in requests:
                text = json.dumps(content).replace('"known"', json.dumps(known))
                answer = await http.post(path.replace("known", known), content=text)
                assert answer.status_code in (200, 201, 404, 409, 422)
            for path in ("/v1/sessions", "/v1/step", f"/v1/sessions/{known}/step"):
                assert error_of(await http.post(path, content=garbage)) == (422, "invalid_request")
        await pool.aclose()

    asyncio.run(run())


class RaisingPool(SessionPool):
    batches = 0

    async def step_many(self, request):
        self.batches += 1
        raise ValueError("a bug")


async def test_internal_error_in_a_batch_is_not_retried():
    pool = RaisingPool([Quick])
    transport = httpx.ASGITransport(create_app(pool, Metrics()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/v1/step", json={"steps": []})
    assert (answer.status_code, pool.batches) == (500, 1)
    await pool.aclose()
