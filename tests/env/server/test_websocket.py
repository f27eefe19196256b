"""The WebSocket: the same calls as over HTTP, many sessions on one socket."""

import asyncio
import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.server import websocket as socket_module
from agentrl_env.server.api import Api
from agentrl_env.server.limits import Limits
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.server.websocket import CallSocket
from agentrl_env.session.pool import SessionPool
from tests.env.session.test_fork import Walk
from tests.env.tasks import Quick, Slow, until


class Caller:
    """A raw WebSocket that numbers its calls."""

    def __init__(self, websocket):
        self.websocket, self.number = websocket, 0

    async def send(self, call, **fields):
        self.number += 1
        await self.websocket.send(json.dumps({"id": self.number, "call": call, **fields}))
        return self.number

    async def hear(self):
        async with asyncio.timeout(60):
            return json.loads(await self.websocket.recv())

    async def ask(self, call, **fields):
        number = await self.send(call, **fields)
        answer = await self.hear()
        assert answer.pop("id") == number
        return answer

    async def open(self, task="quick", **fields):
        return (await self.ask("open", task=task, **fields))["result"]["session_id"]


@pytest.fixture
async def calling():
    sockets = []

    async def start(server, **options):
        websocket = await connect(address(server), **options)
        sockets.append(websocket)
        return Caller(websocket)

    yield start
    for websocket in sockets:
        await websocket.close()


def address(server):
    return server.url.replace("http", "ws") + "/v1/ws"


def says(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments)).wire()


NOTE = says("note", text="x")


async def test_every_call_is_supported(serving, calling):
    caller = await calling(await serving(Quick, Walk, oracle=True))
    tasks = (await caller.ask("tasks"))["result"]
    assert (tasks["protocol"], [task["name"] for task in tasks["tasks"]]) == (1, ["quick", "walk"])
    one, two = await caller.open(), await caller.open("walk", seed=1)
    step = (await caller.ask("step", session_id=one, seq=1, message=NOTE))["result"]
    assert (step["session_id"], step["seq"], step["status"]) == (one, 1, "running")
    walk = says("walk", far=0)
    steps = [{"session_id": one, "seq": 2, "message": NOTE}, {"session_id": two, "seq": 1, "message": walk}]
    many = (await caller.ask("step_many", steps=steps))["result"]["results"]
    assert [(result["session_id"], result["seq"]) for result in many] == [(one, 2), (two, 1)]
    assert (await caller.ask("info", session_id=one))["result"]["turn"] == 2
    expert = (await caller.ask("expert", session_id=one))["result"]["message"]
    assert expert["tool_calls"][0]["function"]["name"] == "finish"
    forks = (await caller.ask("fork", session_id=two, n=2))["result"]["sessions"]
    assert [fork["turn"] for fork in forks] == [1, 1]
    assert await caller.ask("close", session_id=one) == {"result": None}
    assert (await caller.ask("info", session_id=one))["result"]["status"] == "cancelled"


async def test_results_equal_those_over_http(serving, calling):
    server = await serving()
    caller = await calling(server)
    async with EnvClient.connect(server.url) as client:
        session_id = await caller.open(index=3)
        result = (await caller.ask("step", session_id=session_id, seq=1, message=NOTE))["result"]
        again = await client.backend.step(session_id, 1, Message(**NOTE))
        assert json.loads(again.model_dump_json()) == result


@pytest.mark.parametrize(
    ("call", "fields", "kind"),
    [
        ("step", {"session_id": "nope", "seq": 1, "message": NOTE}, "unknown_session"),
        ("step", {"session_id": "nope", "seq": 0, "message": NOTE}, "invalid_request"),
        ("step", {"session_id": "nope", "seq": 1}, "invalid_request"),
        ("step_many", {"steps": 3}, "invalid_request"),
        ("open", {"task": "nope"}, "unknown_task"),
        ("open", {"task": "quick", "index": 99}, "unknown_sample"),
        ("expert", {"session_id": "nope"}, "not_supported"),
        ("fork", {"session_id": "nope"}, "unknown_session"),
        ("info", {}, "invalid_request"),
        ("dance", {}, "invalid_request"),
    ],
)
async def test_failed_call_is_answered_with_its_error(serving, calling, call, fields, kind):
    caller = await calling(await serving())
    error = (await caller.ask(call, **fields))["error"]
    assert error["type"] == kind
    assert error["message"]


async def test_malformed_frames_are_rejected_and_the_socket_stays_open(serving, calling):
    caller = await calling(await serving())
    nameless = ('{"call":"tasks"}', '{"id":true,"call":"tasks"}', '{"id":1.5,"call":"tasks"}')
    for text in ("", "{", "[]", "7", "null", b"\xff", "[" * 900, *nameless):
        await caller.websocket.send(text)
        answer = await caller.hear()
        assert (answer["id"], answer["error"]["type"]) == (None, "invalid_request")
    for call_id in ("a", "ü\n", 0, -5):
        await caller.websocket.send(json.dumps({"call": "tasks", "id": call_id}))
        answer = await caller.hear()
        assert answer["id"] == call_id
        assert "result" in answer


async def test_valid_items_of_a_batch_are_stepped(serving, calling):
    caller = await calling(await serving())
    session_id = await caller.open()
    good = {"session_id": session_id, "seq": 1, "message": NOTE}
    answer = await caller.ask("step_many", steps=[{"seq": "x"}, good])
    first, second = answer["result"]["results"]
    assert first["error"]["type"] == "invalid_request"
    assert second["seq"] == 1


async def test_slow_step_does_not_delay_other_sessions(serving, calling):
    caller = await calling(await serving(Quick, Slow))
    late, quick = await caller.open("slow"), await caller.open()
    waiting = await caller.send("step", session_id=late, seq=1, message=says("wait"))
    await caller.ask("step", session_id=quick, seq=1, message=NOTE)
    await caller.ask("info", session_id=late)
    Slow.gate.set()
    assert (await caller.hear())["id"] == waiting


async def test_steps_of_a_session_are_answered_in_order(serving, calling):
    caller = await calling(await serving(Slow))
    sessions = [await caller.open("slow") for _ in range(3)]
    sent = {session: [] for session in sessions}
    for seq in (1, 2):
        for session in sessions:
            sent[session].append(await caller.send("step", session_id=session, seq=seq, message=says("wait")))
    Slow.gate.set()
    heard = {session: [] for session in sessions}
    for _ in range(6):
        answer = await caller.hear()
        heard[answer["result"]["session_id"]].append(answer["id"])
    assert heard == sent


async def test_close_does_not_wait_for_the_running_step(serving, calling):
    caller = await calling(await serving(Slow))
    session_id = await caller.open("slow")
    step = await caller.send("step", session_id=session_id, seq=1, message=says("wait"))
    close = await caller.send("close", session_id=session_id)
    answers = [await caller.hear(), await caller.hear()]
    by_id = {answer["id"]: answer for answer in answers}
    assert by_id[close]["result"] is None
    assert by_id[step]["error"]["type"] == "session_ended"


async def test_session_outlives_its_socket(serving, calling):
    server = await serving(Slow)
    first = await calling(server)
    session_id = await first.open("slow")
    await first.send("step", session_id=session_id, seq=1, message=says("wait"))
    await until(Slow.started.is_set)
    first.websocket.transport.abort()
    second = await calling(server)
    again = await second.send("step", session_id=session_id, seq=1, message=says("wait"))
    Slow.gate.set()
    answer = await second.hear()
    assert (answer["id"], answer["result"]["messages"][0]["content"]) == (again, "waited 1")


async def test_disconnected_client_leaves_the_queue(serving, calling):
    server = await serving(max_sessions=1)
    caller = await calling(server)
    await caller.open()
    await caller.send("open", task="quick", wait_s=30)
    await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"] == 1)
    caller.websocket.transport.abort()
    await until(lambda: server.pool.gauges()["agentrl_sessions_waiting"] == 0)
    assert server.pool.open_sessions == 1


async def test_server_stops_with_open_sockets(serving, calling):
    server = await serving(Slow)
    caller = await calling(server)
    session_id = await caller.open("slow")
    await caller.send("step", session_id=session_id, seq=1, message=says("wait"))
    await until(Slow.started.is_set)
    async with asyncio.timeout(60):
        await server.stop()


def subprotocols(token):
    encoded = base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
    return ["agentrl.v1", f"agentrl.token.{encoded}"]


@pytest.mark.parametrize(
    "options",
    [
        {"additional_headers": {"Authorization": "Bearer sesame"}},
        {"subprotocols": subprotocols("sesame")},
    ],
)
async def test_token_is_accepted_as_header_or_subprotocol(serving, calling, options):
    caller = await calling(await serving(token="sesame"), **options)
    assert "result" in await caller.ask("tasks")
    assert caller.websocket.subprotocol in (None, "agentrl.v1")  # the token is not sent back


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"additional_headers": {"Authorization": "Bearer simsim"}},
        {"subprotocols": subprotocols("simsim")},
        {"subprotocols": ["agentrl.token.%%%"]},
        {"subprotocols": ["agentrl.token.ü".encode("ascii", "replace").decode().replace("?", "*")]},
    ],
)
async def test_invalid_token_is_rejected_during_the_handshake(serving, options):
    server = await serving(token="sesame")
    for url in (address(server), f"{address(server)}?token=sesame"):
        with pytest.raises(InvalidStatus) as caught:
            await connect(url, **options)
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body)["error"]["type"] == "unauthorized"


async def test_other_origins_are_rejected_without_a_token(serving, calling):
    server = await serving()
    with pytest.raises(InvalidStatus) as caught:
        await connect(address(server), origin="https://elsewhere.example")
    assert caught.value.response.status_code == 401
    assert "result" in await (await calling(server, origin=server.url)).ask("tasks")
    guarded = await serving(token="sesame")
    shown = {"origin": "https://elsewhere.example", "subprotocols": subprotocols("sesame")}
    assert "result" in await (await calling(guarded, **shown)).ask("tasks")


async def test_handshake_has_the_protocol_version(serving, calling):
    caller = await calling(await serving(), subprotocols=["agentrl.v1"])
    assert caller.websocket.response.headers["x-agentrl-protocol"] == "1"
    assert caller.websocket.subprotocol == "agentrl.v1"


class FakeWebSocket:
    """The server's side of a socket without a network. Its peer can read slowly."""

    def __init__(self, *texts):
        self.incoming = asyncio.Queue()
        for text in texts:
            self.incoming.put_nowait({"type": "websocket.receive", "text": text})
        self.taken, self.sent = 0, []
        self.reading = asyncio.Event()

    async def receive(self):
        message = await self.incoming.get()
        self.taken += 1
        return message

    async def send(self, message):
        await self.reading.wait()
        self.sent.append(json.loads(message["text"]))

    def hang_up(self):
        self.incoming.put_nowait({"type": "websocket.disconnect", "code": 1000})


def call(number, name, **fields):
    return json.dumps({"id": number, "call": name, **fields})


async def settled(value):
    """Wait until a value no longer changes."""
    before = None
    while before != value():
        before = value()
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["MAX_CALLS", "MAX_UNSENT_BYTES"])
async def test_slow_reader_pauses_the_reading_of_its_calls(monkeypatch, name):
    monkeypatch.setattr(socket_module, name, {"MAX_CALLS": 5, "MAX_UNSENT_BYTES": 1000}[name])
    pool = SessionPool([Quick])
    await pool.tasks()
    websocket = FakeWebSocket(*(call(n, "tasks") for n in range(100)))
    serving = asyncio.create_task(CallSocket(Api(pool, Metrics(), Limits()), websocket, 10**6).serve())
    await settled(lambda: websocket.taken)
    assert 1 <= websocket.taken <= 10
    assert websocket.sent == []
    websocket.reading.set()
    await settled(lambda: len(websocket.sent))
    assert sorted(answer["id"] for answer in websocket.sent) == list(range(100))
    websocket.hang_up()
    await serving
    await pool.aclose()


async def test_disconnect_during_an_answer_ends_the_socket():
    class Gone(FakeWebSocket):
        async def send(self, message):
            self.hang_up()
            raise WebSocketDisconnect(1006)

    pool = SessionPool([Quick])
    websocket = Gone(call(1, "tasks"), call(2, "info", session_id="x"))
    await asyncio.wait_for(CallSocket(Api(pool, Metrics(), Limits()), websocket, 10**6).serve(), 60)
    await pool.aclose()


async def test_message_over_the_limit_is_rejected_with_its_id():
    pool = SessionPool([Quick])
    websocket = FakeWebSocket(call(7, "open", task="x" * 200), "x" * 300, call(8, "tasks"))
    websocket.reading.set()
    websocket.hang_up()
    await CallSocket(Api(pool, Metrics(), Limits()), websocket, 100).serve()
    assert [(answer["id"], answer["error"]["type"]) for answer in websocket.sent[:2]] == [
        (7, "body_too_large"),
        (None, "body_too_large"),
    ]
    await pool.aclose()


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["tasks", "open", "step", "step_many", "info", "close", "expert", "fork"]
FIELDS = ["id", "call", "session_id", "seq", "message", "steps", "wait_s", "n", "task", "index", "request_id"]


class Panic(BaseException):
    """An exception that is not an Exception, as Rust extensions raise."""


async def test_exception_that_is_not_an_exception_is_answered(serving, calling, monkeypatch):
    server = await serving(Quick)
    caller = await calling(server)

    async def panic(request):
        raise Panic("boo")

    monkeypatch.setattr(server.pool, "info", panic)
    answer = await caller.ask("info", session_id=await caller.open())
    assert answer["error"] == {"type": "internal_error", "message": "a bug in the server: Panic"}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.text(max_size=20)
        | ANY_JSON.map(json.dumps)
        | st.fixed_dictionaries(
            {"id": st.integers(0, 9) | ANY_JSON, "call": st.sampled_from(NAMES)},
            optional={name: ANY_JSON for name in FIELDS[2:]},
        ).map(json.dumps),
        max_size=5,
    )
)
def test_every_message_has_one_answer_and_no_internal_error(texts):
    async def serve():
        pool = SessionPool([Quick], max_sessions=2)
        websocket = FakeWebSocket(*texts)
        websocket.reading.set()
        socket = CallSocket(Api(pool, Metrics(), Limits()), websocket, 10**6)
        serving = asyncio.create_task(socket.serve())
        await until(lambda: len(websocket.sent) == len(texts))
        websocket.hang_up()
        await serving
        await pool.aclose()
        return websocket.sent

    answers = asyncio.run(serve())
    assert len(answers) == len(texts)
    for answer in answers:
        assert answer.keys() in ({"id", "result"}, {"id", "error"})
        assert answer.get("error", {}).get("type") != "internal_error"
