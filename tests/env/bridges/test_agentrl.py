"""AgentRL's protocol at /api, over real sockets."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from agentrl_env import EnvClient
from agentrl_env.bridges.agentrl.server import ENDLESS_INDICES, KEEP_ALIVE_BURST
from agentrl_env.bridges.agentrl.worker import WorkerFailed, WorkerTask
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from tests.env.tasks import Guess, Quick, Slow

TOKEN = "a-token-that-is-long-enough"


class Client:
    """A client of AgentRL's protocol."""

    def __init__(self, url, **options):
        self.url = url
        self.http = httpx.AsyncClient(base_url=f"{url}/api/", timeout=120, **options)

    async def start(self, name, index, **fields):
        response = await self.http.post("start_sample", json={"name": name, "index": index, **fields})
        assert response.status_code == 200, response.text
        return response.headers["session_id"], response.json()

    async def say(self, session_id, *messages):
        headers = {"session_id": session_id}
        return await self.http.post("interact", headers=headers, json={"messages": list(messages)})

    async def turns(self):
        """Return the turns of all sessions, newest first."""
        sessions = (await self.http.get(f"{self.url}/v1/sessions")).json()["sessions"]
        return [session["turn"] for session in sessions]


def text(content):
    return {"role": "assistant", "content": content}


def call(name, call_id="call_a7", **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


@pytest.fixture(params=["server", "controller"])
async def client(request):
    """Return a client of a server with ``Quick``, ``Guess`` and ``Slow``, directly or behind a controller."""
    controller = None
    options = {"port": 0, "drain_s": 0, "max_sessions": 2}
    if request.param == "controller":
        controller = ControllerServer(FleetService(), port=0)
        await controller.start()
        options |= {"host": NOWHERE, "controllers": [controller.url]}
    server = EnvServer([Quick, Guess, Slow], **options)
    await server.start()
    client = Client((controller or server).url)
    yield client
    await client.http.aclose()
    await server.stop()
    if controller is not None:
        await controller.stop()


async def test_session_is_played_to_its_end_and_rewards_add_up(client):
    assert (await client.http.get("get_indices?name=quick")).json() == list(range(10))
    assert len((await client.http.get("get_indices?name=guess-test")).json()) == ENDLESS_INDICES
    session_id, started = await client.start("quick", 3)
    assert [message["role"] for message in started["messages"]] == ["system", "user"]
    assert {one["function"]["name"] for one in started["tools"]} >= {"gain", "finish"}
    gained = (await client.say(session_id, text("so"), call("gain", amount=0.5))).json()
    assert (gained["finish"], gained["status"], gained["reward"]) == (False, "running", 0.5)
    assert gained["messages"][0]["tool_call_id"] == "call_a7"
    ended = (await client.say(session_id, call("finish", "call_b", reward=0.25))).json()
    assert (ended["finish"], ended["status"], ended["reward"]) == (True, "completed", 0.75)
    assert ended["metrics"]["score"] == ended["metrics"]["success"] == 0.0
    assert (await client.say(session_id, text("more"))).status_code == 400


async def test_index_selects_the_same_episode_as_the_native_routes(client):
    session_id, started = await client.start("quick-test", 4)
    noted = (await client.say(session_id, call("note", text="x"))).json()
    async with EnvClient.connect(client.url) as native:
        session = await native.open("quick", split="test", index=4)
        assert [message.wire() for message in session.messages] == started["messages"]
        result = await session.step({"role": "assistant", **call("note", text="x")})
        assert [message.wire() for message in result.messages] == noted["messages"]


async def test_failed_environment_has_a_status_and_no_reward(client):
    session_id, _ = await client.start("quick", 0)
    failed = (await client.say(session_id, call("crash"))).json()
    assert (failed["finish"], failed["status"], failed["reward"]) == (True, "task error", None)
    assert failed["result"]["error"]["type"] == "ZeroDivisionError"


async def test_turn_limit_is_a_task_limit(client):
    session_id, _ = await client.start("guess", 0)
    answers = [(await client.say(session_id, text(f"hm {n}"))).json() for n in range(8)]
    assert [answer["finish"] for answer in answers] == [False] * 7 + [True]
    assert (answers[7]["status"], answers[7]["reward"]) == ("task limit reached", 0.0)


async def test_custom_task_replaces_the_sample(client):
    _, started = await client.start("quick", -1, custom_task={"index": 3, "n": 77})
    assert "77" in started["messages"][1]["content"]
    _, plain = await client.start("quick", -1, custom_task={"index": 3})
    assert "'n': 3" in plain["messages"][1]["content"]
    refused = await client.http.post("start_sample", json={"name": "quick", "index": -1})
    assert (refused.status_code, "custom_task" in refused.json()["message"]) == (400, True)


async def test_repeated_call_steps_once_and_a_repeated_move_twice(client):
    session_id, _ = await client.start("quick", 0)
    first = (await client.say(session_id, call("note", text="x"))).json()
    assert (await client.say(session_id, call("note", text="x"))).json() == first
    assert await client.turns() == [1]
    for turn in (2, 3):  # such ids do not identify a call
        again = (await client.say(session_id, call("note", "call_0", text="y"))).json()
        assert again["messages"][0]["content"].startswith(f"{turn} ")
    for turn in (4, 5):
        await client.say(session_id, text("the same words"))
        assert await client.turns() == [turn]


async def test_turn_is_played_once_if_its_caller_times_out_and_repeats_it(client, slow):
    session_id, _ = await client.start("slow", 0)
    message = call("wait", "call_0")
    with pytest.raises(httpx.ReadTimeout):
        await client.http.post(
            "interact", headers={"session_id": session_id}, json={"messages": [message]}, timeout=2.0
        )
    other = await client.say(session_id, call("wait", "call_1"))
    assert (other.status_code, "still processing" in other.json()["message"]) == (400, True)
    repeated = asyncio.create_task(client.say(session_id, message))
    slow.gate.set()
    assert (await repeated).json()["finish"] is False
    assert await client.turns() == [1]


async def test_keep_alive_uses_no_turn_and_a_silent_model_reaches_its_limit(client):
    session_id, started = await client.start("guess", 0)
    kept = (await client.say(session_id, text(""))).json()
    assert (kept["finish"], kept["messages"]) == (False, started["messages"])
    answer = (await client.say(session_id, call("guess", n=1))).json()
    for _ in range(KEEP_ALIVE_BURST):
        assert (await client.say(session_id, text(""))).json()["messages"] == answer["messages"]
    assert await client.turns() == [1]
    await client.say(session_id, text(""))
    assert await client.turns() == [2]


async def test_full_server_lets_a_session_wait_until_one_is_cancelled(client):
    held = [(await client.start("quick", n))[0] for n in range(2)]
    waiting = asyncio.create_task(client.start("quick", 5))
    listed = (await client.http.get("list_sessions")).json()
    assert set(listed) == set(held)
    assert {one["index"] for one in listed.values()} == {0, 1}
    assert (await client.http.post("cancel", headers={"session_id": held[0]})).json() is None
    session_id, _ = await waiting
    assert set((await client.http.get("list_sessions")).json()) == {held[1], session_id}
    assert (await client.http.post("cancel_all")).status_code == 403
    assert (await client.http.post("cancel_all?name=quick")).json() is None
    assert (await client.http.get("list_sessions")).json() == {}


async def test_stale_worker_opens_no_session(client):
    workers = (await client.http.get("list_workers")).json()["quick"]["workers"]
    (worker,) = workers.values()
    assert (worker["capacity"], worker["stale"]) == (2, False)
    body = {"name": "quick", "worker_id": worker["id"], "stale": True}
    assert (await client.http.post("mark_stale", json=body)).json() is None
    opening = asyncio.create_task(client.http.post("start_sample", json={"name": "quick", "index": 0}))
    await asyncio.wait((opening,), timeout=0.5)
    assert (await client.http.get("list_sessions")).json() == {}
    await client.http.post("mark_stale", json={**body, "stale": False})
    assert (await opening).status_code in (200, 503)  # a controller queues it, a server does not
    await client.start("quick", 0)
    for path in ("sync_all", "clean_worker", "clean_session"):
        assert (await client.http.post(path)).json() is None
    assert (await client.http.get("version")).json()["version"] == 1


async def test_unknown_task_index_and_session_are_refused_with_a_reason(client):
    assert "no task" in (await client.http.get("get_indices?name=nowhere")).json()["message"]
    for body in ({"name": "nowhere", "index": 0}, {"name": "quick", "index": 10}, {"index": 0}):
        assert (await client.http.post("start_sample", json=body)).status_code == 400
    for session_id in ("12", "x", "9" * 400):
        assert (await client.say(session_id, text("x"))).status_code == 400
    session_id, _ = await client.start("quick", 0)
    user = {"role": "user", "content": "I am not the model."}
    assert (await client.say(session_id, user)).status_code == 400
    assert (await client.say(session_id)).status_code == 400


@asynccontextmanager
async def secured():
    server = EnvServer([Quick], port=0, drain_s=0, token=TOKEN)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_token_is_accepted_as_the_password_of_basic_authentication_only_at_api():
    async with secured() as server:
        client = Client(server.url, auth=("any", TOKEN))
        async with client.http as http:
            assert (await client.start("quick", 0))[1]["status"] == "running"
            assert (await http.get(f"{server.url}/v1/tasks")).status_code == 401
            assert (await http.get("version", auth=("any", "wrong"))).status_code == 401
            foreign = {"origin": "http://elsewhere.example"}
            assert (await http.get("version", headers=foreign)).status_code == 401


def test_end_of_a_workers_task_without_a_reward_is_a_failure():
    task = WorkerTask()
    task.earned = 0.0
    ended = {"messages": [], "status": "completed", "finish": True}
    for missing in (ended, {**ended, "reward": None}, {**ended, "rewrad": 1.0}):
        with pytest.raises(WorkerFailed, match="ended without a reward"):
            task._reply(missing)
    assert task._reply({**ended, "reward": 0}).reward == 0.0
    assert task._reply({**ended, "status": "task limit reached"}).truncated
