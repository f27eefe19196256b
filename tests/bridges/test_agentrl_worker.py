"""Real agentrl-worker processes behind a controller, by HTTP and by gRPC."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import gymnasium
import httpx
import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.bridges.agentrl import worker as agentrl_worker
from agentrl_env.errors import EnvironmentFailed, SessionLost
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.server.auth import link_token
from tests.bridges.agentrl_peers import call, needs_peers, run_eval, scripted_model, worker
from tests.env.tasks import until

pytestmark = [pytest.mark.bridges, needs_peers]
TRANSPORTS = pytest.mark.parametrize("transport", ["http", "grpc"])
TOKEN = "a-token-that-is-long-enough"


@asynccontextmanager
async def controlling(**options):
    controller = ControllerServer(FleetService(), port=0, **options)
    await controller.start()
    async with EnvClient.connect(controller.url, token=options.get("token"), timeout=120) as client:
        try:
            yield controller, client
        finally:
            await controller.stop()


@asynccontextmanager
async def sums(folder, transport="http", **parameters):
    """Run a controller and a worker of ``Sums``. Yield the controller, a client and the worker's process."""
    async with controlling() as (controller, client):
        address = (
            f"{controller.url}/api" if transport == "http" else controller.url.replace("http://", "grpc://")
        )
        async with worker(folder, address, "sums", "worker_tasks.Sums", name="sums", **parameters) as process:
            await joined(client, "sums")
            yield controller, client, process


async def joined(client, task):
    """Wait until a worker's task is served and return its description."""
    async with asyncio.timeout(240):
        while True:
            if found := (await client.tasks()).get(task):
                return found
            await asyncio.sleep(0.1)


def add(n, call_id="a"):
    return Message.assistant(None, ToolCall.of("answer", call_id=call_id, n=n))


@TRANSPORTS
async def test_session_of_a_worker_is_played_over_the_wire(tmp_path, transport):
    async with sums(tmp_path, transport) as (_, client, _):
        session = await client.open("sums", index=3)
        assert [message.content for message in session.messages] == ["Add.", "3 + 3?"]
        assert session.tools[0].function.name == "answer"
        wrong = await session.step(add(5))
        assert wrong.messages == (Message(role="tool", tool_call_id="a", content="wrong"),)
        assert (wrong.reward, wrong.metrics["given"], wrong.status) == (0.0, 5.0, SessionStatus.RUNNING)
        right = await session.step(add(6, "b"))
        assert (right.reward, right.terminated, right.metrics["score"]) == (1.0, True, 1.0)
        assert right.messages[0].content == "right"
        assert right.info["agentrl_status"] == "completed"
        custom = await client.open("sums", index=4)
        texts = [await custom.step(Message.assistant("hello")) for _ in range(4)]
        assert [text.status for text in texts[:3]] == [SessionStatus.RUNNING] * 3
        assert (texts[3].status, texts[3].truncated) == (SessionStatus.TRUNCATED_TURNS, True)


@TRANSPORTS
async def test_failures_of_a_worker_have_types_and_never_a_reward(tmp_path, transport, monkeypatch):
    monkeypatch.setattr(agentrl_worker, "CALL_S", 5.0)
    async with sums(tmp_path, transport, indices=["a", "finished", "broken", -1]) as (
        controller,
        client,
        process,
    ):
        for text in ("raise", "hang"):
            session = await client.open("sums", index="a")
            result = await session.step(Message.assistant(text))
            assert (result.status, result.reward) == (SessionStatus.FAILED_ENVIRONMENT, 0.0)
            assert result.info["error"]["type"] == "WorkerFailed"
        with pytest.raises(EnvironmentFailed, match="task error"):
            await client.open("sums", index="broken")
        invalid = await (await client.open("sums", index="a")).step(Message.assistant("invalid"))
        assert (invalid.terminated, invalid.info["agentrl_status"]) == (True, "agent invalid action")
        limit = await (await client.open("sums", index="a")).step(Message.assistant("context"))
        assert (limit.truncated, limit.info["agentrl_status"]) == (True, "agent context limit")
        custom = await client.open("sums", sample={"n": 21})
        assert (await custom.step(add(42))).reward == 1.0
        early = await client.open("sums", index="finished")
        assert early.messages == ()
        assert (await early.step(Message.assistant(""))).reward == 0.5

        async with httpx.AsyncClient(base_url=f"{controller.url}/api/", timeout=120) as http:
            assert (await http.get("get_indices?name=sums")).json() == ["a", "finished", "broken"]
            started = (await http.post("start_sample", json={"name": "sums", "index": "finished"})).json()
            assert (started["finish"], started["status"], started["reward"]) == (True, "completed", 0.5)
            session_id = (await http.post("start_sample", json={"name": "sums", "index": 0})).headers[
                "session_id"
            ]
            said = {"messages": [{"role": "assistant", "content": "context"}]}
            ended = await http.post("interact", headers={"session_id": session_id}, json=said)
            assert ended.json()["status"] == "task limit reached"  # clients accept only one of the two

        held = await client.open("sums", index="a")
        dying = await client.open("sums", index="a")
        result = await dying.step(Message.assistant("die"))
        assert result.status is SessionStatus.FAILED_ENVIRONMENT
        await process.wait()
        with suppress(SessionLost):
            assert (await held.step(add(0))).status is SessionStatus.FAILED_ENVIRONMENT


async def test_sessions_of_a_silent_worker_are_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(agentrl_worker, "LOST_S", 20.0)
    async with sums(tmp_path) as (controller, client, process):
        session = await client.open("sums", index=1)
        process.kill()
        async with asyncio.timeout(120):
            await until(lambda: not controller.fleet.servers)
        with pytest.raises(SessionLost):
            await session.step(add(2))


@TRANSPORTS
async def test_evaluation_and_gymnasium_play_a_worker_of_a_controller(tmp_path, transport):
    def policy(messages):
        question = next(str(one["content"]) for one in messages if one["role"] == "user")
        return call("answer", n=2 * int(question.partition(" ")[0]))

    async with sums(tmp_path, transport, concurrency=3) as (controller, _, _):
        async with scripted_model(policy) as (model, _):
            rows = await run_eval(f"{controller.url}/api", model, tmp_path / "out", "sums")
        assert [row["status"] for row in rows] == ["completed"] * 10
        assert [row["metric_reward"] for row in rows] == [1.0] * 10
        assert [json.loads(row["metrics"])["given"] for row in rows] == [
            2.0 * row["index"]["int_value"] for row in rows
        ]

        def play():
            env = gymnasium.make("agentrl_env:agentrl/Env-v0", url=controller.url, task="sums")
            env.reset(options={"index": 2})
            step = env.unwrapped.step(ToolCall.of("answer", n=4))
            env.close()
            return step

        _, reward, terminated, *_ = await asyncio.to_thread(play)
        assert (reward, terminated) == (1.0, True)


@TRANSPORTS
async def test_virtual_task_of_the_package_is_played_until_it_breaks(tmp_path, transport):
    async with controlling() as (controller, client):
        address = (
            f"{controller.url}/api" if transport == "http" else controller.url.replace("http://", "grpc://")
        )
        async with worker(tmp_path, address, "virtual-task", "agentrl.worker.task.VirtualTask"):
            await joined(client, "virtual-task")
            session = await client.open("virtual-task", index=0)
            said = [session.messages[0].content]
            for _ in range(2):
                said.append((await session.step(Message.assistant("go on"))).messages[0].content)
            assert said == ["Loop: 0", "Loop: 1", "Loop: 2"]
            # It returns a dict, which is not a valid result, so the worker drops the session without an
            # answer.
            last = await session.step(Message.assistant("go on"))
            assert last.status is SessionStatus.FAILED_ENVIRONMENT
            assert "dropped the session" in last.info["error"]["message"]


async def test_worker_joins_a_controller_with_the_link_token_in_its_url(tmp_path):
    async with controlling(token=TOKEN) as (controller, client):
        async with httpx.AsyncClient(base_url=f"{controller.url}/api/") as http:
            beat = {"name": "sums", "address": "http://127.0.0.1:1", "concurrency": 1, "indices": [0]}
            assert (await http.post("receive_heartbeat", json=beat)).status_code == 401
            auth = ("worker", link_token(TOKEN))
            assert (await http.get("list_workers", auth=auth)).status_code == 403
        address = controller.url.replace("http://", f"http://worker:{link_token(TOKEN)}@") + "/api"
        async with worker(tmp_path, address, "sums", "worker_tasks.Sums", name="sums"):
            await joined(client, "sums")
            assert (await (await client.open("sums", index=1)).step(add(2))).reward == 1.0
