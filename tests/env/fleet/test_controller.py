"""A controller with real servers over real sockets."""

import asyncio
import json

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect

from agentrl_env import EnvClient, Message, Reply, ToolCall, tool
from agentrl_env.errors import (
    InternalError,
    ServeError,
    ServerDraining,
    ServerFull,
    SessionLost,
    Unauthorized,
    UnknownSample,
    UnknownSession,
    UnknownTask,
)
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.auth import link_token
from agentrl_env.testing import run_checks
from agentrl_env.types import SessionStatus
from agentrl_env.wire import OpenRequest, SessionQuery
from tests.env.tasks import Clock, Guess, Quick, Slow, until


class Site:
    """A controller and the servers that connect to it."""

    def __init__(self, **options) -> None:
        options.setdefault("queue_s", 0.0)
        self.fleet = FleetService(**options)
        self.controller = ControllerServer(self.fleet, port=0, token="secret")
        self.servers: list[EnvServer] = []

    async def __aenter__(self) -> "Site":
        await self.controller.start()
        self.client = EnvClient.connect(self.controller.url, token="secret", timeout=60)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()
        for server in self.servers:
            await server.stop()
        await self.controller.stop()

    async def serve(self, *tasks, controllers=(), **options) -> EnvServer:
        urls = [self.controller.url, *controllers]
        options.setdefault("drain_s", 0)
        server = EnvServer(tasks, host=NOWHERE, controllers=urls, token=link_token("secret"), **options)
        self.servers.append(server)
        await server.start()
        return server


async def kill(server: EnvServer) -> None:
    """Abort a server's links permanently, as if it died."""
    links = server._links
    for task in links._tasks.values():
        task.cancel()
    for link in list(links._open):
        link.websocket.transport.abort()
    await asyncio.gather(*links._tasks.values(), return_exceptions=True)


async def cut(server: EnvServer) -> None:
    """Abort a server's links. The server reconnects."""
    for link in list(server._links._open):
        link.websocket.transport.abort()


async def test_errors_in_the_batch_of_an_agent_are_passed_on():
    async with Site() as site:
        await site.serve(Quick)
        session = await site.client.open("quick")
        message = Message.assistant(None, ToolCall.of("finish")).model_dump(mode="json")
        steps = [{"session_id": session.session_id, "seq": seq, "message": message} for seq in (1, 2)]
        headers = {"authorization": f"Bearer {session.agent_token}"}
        async with httpx.AsyncClient(base_url=site.controller.url, headers=headers, timeout=60) as http:
            answer = await http.post("/v1/step", json={"steps": steps})
            ended, error = answer.json()["results"]
            assert ended["status"] == "completed"
            assert "info" not in ended
            assert error["error"]["type"] == "session_ended"


class Stats(Quick):
    """Its numbers are not finite, or too large to add."""

    @tool
    def measure(self):
        """Return info with NaN and a NumPy number, which the fast encoder does not know."""
        return Reply("measured", info={"mean": float("nan"), "n": np.int64(3)})


@pytest.mark.parametrize("together", [False, True])
async def test_nan_in_info_loses_neither_its_session_nor_the_server(together):
    async with Site() as site:
        server = await site.serve(Stats)
        sessions = [await site.client.open("stats") for _ in range(3)]
        for _ in range(2):
            steps = [session.step(ToolCall.of("measure")) for session in sessions]
            results = await asyncio.gather(*steps) if together else [await step for step in steps]
            assert [result.info for result in results] == [{"mean": None, "n": 3}] * 3
        assert set(site.fleet.servers) == {server.pool.server_id}


async def test_infinite_return_of_a_listed_session_loses_no_server():
    async with Site() as site:
        server = await site.serve(Stats)
        session = await site.client.open("stats")
        for _ in range(2):
            await session.step(ToolCall.of("gain", amount=1.5e308))
        (row,) = (await site.fleet.sessions(SessionQuery())).sessions
        assert row.session_id == session.session_id
        assert set(site.fleet.servers) == {server.pool.server_id}


async def test_bug_in_the_steps_of_one_server_fails_no_other_step(monkeypatch):
    async with Site() as site:
        await site.serve(Quick)
        await site.serve(Quick)
        first, second = [await site.client.open("quick") for _ in range(2)]
        find = site.fleet.registry.routing.find

        async def break_one(session_id):
            if session_id == second.session_id:
                raise ZeroDivisionError
            return await find(session_id)

        monkeypatch.setattr(site.fleet.registry.routing, "find", break_one)
        note = ToolCall.of("note", text="x")
        kept, failed = await asyncio.gather(first.step(note), second.step(note), return_exceptions=True)
        assert (kept.session_id, kept.seq) == (first.session_id, 1)
        assert isinstance(failed, InternalError)


async def test_calls_are_routed_to_the_server_of_the_session():
    async with Site() as site:
        first, second = await site.serve(Quick), await site.serve(Quick, Guess)
        assert set(await site.client.tasks()) == {"quick", "guess"}
        sessions = [await site.client.open("quick", index=n) for n in range(4)]
        assert (first.pool.open_sessions, second.pool.open_sessions) == (2, 2)
        results = await asyncio.gather(*(s.step(ToolCall.of("note", text="hi")) for s in sessions))
        assert [r.session_id for r in results] == [s.session_id for s in sessions]
        again = await site.client.resume(sessions[0].session_id)
        assert again.turn == 1
        for session in sessions:
            await session.close()
        assert first.pool.open_sessions + second.pool.open_sessions == 0


async def test_fleet_passes_the_conformance_checks():
    async with Site() as site:
        for _ in range(2):
            await site.serve(Guess, oracle=True)
        url = site.controller.url
        reports = await asyncio.to_thread(run_checks, lambda: EnvClient.connect(url, token="secret"))
        assert [(r.task, r.ok) for r in reports] == [("guess", True)]


async def test_errors_of_a_server_are_forwarded_unchanged():
    async with Site() as site:
        await site.serve(Quick)
        with pytest.raises(UnknownSample):
            await site.client.open("quick", split="nowhere")
        session = await site.client.open("quick")
        body = {"seq": 5, "message": {"role": "assistant", "content": "x"}}
        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}, timeout=60) as http:
            url = f"{site.controller.url}/v1/sessions/{session.session_id}/step"
            answer = await http.post(url, json=body)
        assert answer.status_code == 409
        assert answer.json()["error"]["type"] == "seq_conflict"


async def test_batch_is_split_by_server_and_joined_in_order():
    async with Site() as site:
        for _ in range(3):
            await site.serve(Quick)
        sessions = [await site.client.open("quick", index=n) for n in range(9)]
        message = {"role": "assistant", "content": None}
        call = {"id": "1", "type": "function", "function": {"name": "note", "arguments": '{"text": "a\\nb"}'}}
        steps = [
            {"session_id": s.session_id, "seq": 1, "message": {**message, "tool_calls": [call]}}
            for s in sessions
        ]
        steps.insert(4, {"session_id": "nobody.there", "seq": 1, "message": message})
        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}, timeout=60) as http:
            site.fleet.registry._started = -1e9  # long after its start, so that it does not wait for servers
            answer = await http.post(f"{site.controller.url}/v1/step", json={"steps": steps})
        results = answer.json()["results"]
        assert results[4]["error"]["type"] == "unknown_session"
        del results[4]
        assert [r["session_id"] for r in results] == [s.session_id for s in sessions]
        assert {r["seq"] for r in results} == {1}


async def test_unknown_task_and_wrong_token_are_rejected():
    async with Site() as site:
        await site.serve(Quick)
        site.fleet.registry._started = -1e9
        with pytest.raises(UnknownTask, match="no task 'chess' here; tasks: quick"):
            await site.client.open("chess")
        async with EnvClient.connect(site.controller.url, token="wrong") as unauthorized:
            with pytest.raises(Unauthorized):
                await unauthorized.open("quick")


async def test_opening_waits_in_the_queue_for_a_free_place():
    async with Site(queue_s=20.0) as site:
        await site.serve(Quick, max_sessions=1)
        first = await site.client.open("quick")
        waiting = asyncio.create_task(site.client.open("quick"))
        await until(lambda: site.fleet.gauges()["agentrl_sessions_waiting"] == 1)
        await first.close()
        second = await waiting
        assert second.session_id != first.session_id


async def test_full_fleet_rejects_opening_without_wait():
    async with Site() as site:
        await site.serve(Quick, max_sessions=1)
        await site.client.open("quick")
        with pytest.raises(ServerFull, match="no server has room"):
            await site.client.open("quick")


async def test_sessions_of_a_dead_server_are_lost():
    clock = Clock()
    async with Site(clock=clock) as site:
        await site.fleet.registry.stop()  # the watch must not look before ``alive`` has connected again
        dead, alive = await site.serve(Slow), await site.serve(Slow)
        sessions = [await site.client.open("slow") for _ in range(2)]
        held = next(s for s in sessions if s.session_id.startswith(dead.pool.server_id))
        other = next(s for s in sessions if s is not held)
        under_way = asyncio.create_task(held.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        await kill(dead)
        clock.now += 100
        await cut(alive)  # reconnecting shows that it is alive
        await until(lambda: site.fleet.servers[alive.pool.server_id].seen == clock.now)
        await site.fleet.registry.check()
        with pytest.raises(SessionLost):
            await under_way
        with pytest.raises(SessionLost):
            await held.step(ToolCall.of("wait"))
        Slow.gate.set()
        assert (await other.step(ToolCall.of("wait"))).seq == 1
        again = await site.client.open("slow")
        assert again.session_id.startswith(alive.pool.server_id)


async def test_lost_server_that_reconnects_ends_its_sessions_and_takes_a_new_id():
    async with Site() as site:
        server = await site.serve(Quick)
        old = server.pool.server_id
        session = await site.client.open("quick")
        await site.fleet.registry.lose(old, "it was silent")
        await cut(server)
        await until(lambda: server.pool.server_id != old and server.pool.server_id in site.fleet.servers)
        assert server.pool.open_sessions == 0
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("note", text="hello?"))
        assert (await site.client.open("quick")).session_id.startswith(server.pool.server_id)


async def test_broken_link_loses_no_session_and_no_step():
    async with Site() as site:
        server = await site.serve(Slow)
        session = await site.client.open("slow")
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(Slow.started.is_set)
        await cut(server)
        Slow.gate.set()
        result = await under_way
        assert (result.seq, result.messages[0].content) == (1, "waited 1")
        assert (await session.step(ToolCall.of("wait"))).messages[0].content == "waited 2"


async def test_replaced_controller_finds_the_open_sessions():
    async with Site() as site:
        server = await site.serve(Quick)
        session = await site.client.open("quick")
        await session.step(ToolCall.of("note", text="one"))
        port = int(site.controller.url.rpartition(":")[2])
        await site.controller.stop()
        site.controller = ControllerServer(FleetService(), port=port, token="secret")
        await site.controller.start()
        result = await session.step(ToolCall.of("note", text="two"))
        assert result.messages[0].content.startswith("2 ")
        assert server.pool.open_sessions == 1


async def test_draining_server_finishes_its_sessions_and_gets_no_new_ones():
    async with Site() as site:
        leaving, staying = await site.serve(Quick, drain_s=60), await site.serve(Quick)
        sessions = [await site.client.open("quick") for _ in range(2)]
        mine = next(s for s in sessions if s.session_id.startswith(leaving.pool.server_id))
        stopping = asyncio.create_task(leaving.stop())
        await until(lambda: site.fleet.servers[leaving.pool.server_id].draining)
        new = [await site.client.open("quick") for _ in range(3)]
        assert all(s.session_id.startswith(staying.pool.server_id) for s in new)
        assert (await mine.step(ToolCall.of("finish"))).terminated
        await stopping
        site.servers.remove(leaving)
        await until(lambda: leaving.pool.server_id not in site.fleet.servers)


async def test_server_that_the_operator_drains_gets_no_session_from_any_controller():
    other = ControllerServer(FleetService(queue_s=0.0), port=0, token="secret")
    await other.start()
    try:
        async with Site() as site, EnvClient.connect(other.url, token="secret", timeout=60) as second:
            drained = await site.serve(Quick, controllers=[other.url])
            staying = await site.serve(Quick, controllers=[other.url])
            await until(lambda: len(site.fleet.servers) == len(other.fleet.servers) == 2)
            name = drained.pool.server_id
            async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}, timeout=60) as http:

                async def drain(draining):
                    body = {"server_id": name, "draining": draining}
                    answer = await http.post(f"{site.controller.url}/v1/fleet/drain", json=body)
                    assert answer.status_code == 200

                await drain(True)
                await until(lambda: other.fleet.servers[name].draining)
                for client in (site.client, second):
                    for _ in range(3):
                        assert (await client.open("quick")).session_id.startswith(staying.pool.server_id)
                await drain(False)
            assert (await site.client.open("quick")).session_id.startswith(name)
            await until(lambda: not other.fleet.servers[name].draining)
    finally:
        await other.stop()


async def test_draining_controller_rejects_openings():
    async with Site() as site:
        await site.serve(Quick)
        site.fleet.draining = True
        with pytest.raises(ServerDraining):
            await site.client.open("quick")


async def test_repeated_opening_returns_the_same_session():
    async with Site() as site:
        servers = [await site.serve(Quick) for _ in range(3)]
        body = {"task": "quick", "request_id": "once"}
        async with httpx.AsyncClient(headers={"authorization": "Bearer secret"}, timeout=60) as http:
            asking = [http.post(f"{site.controller.url}/v1/sessions", json=body) for _ in range(5)]
            answers = await asyncio.gather(*asking)
            later = await http.post(f"{site.controller.url}/v1/sessions", json=body)
        ids = {answer.json()["session_id"] for answer in [*answers, later]}
        assert len(ids) == 1
        assert sum(server.pool.open_sessions for server in servers) == 1


class Sleepy(Slow):
    async def reset(self, sample, rng):
        self.started.set()
        await self.gate.wait()
        return "awake"


async def test_opening_of_a_disconnected_caller_leaves_no_session():
    async with Site() as site:
        server = await site.serve(Sleepy)
        opening = asyncio.create_task(site.fleet.open(OpenRequest(task="sleepy")))
        await until(Slow.started.is_set)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        ended = server.metrics.ended
        Slow.gate.set()
        await until(lambda: ended["sleepy", SessionStatus.CANCELLED] == 1)
        assert server.pool.open_sessions == 0
        await until(lambda: site.fleet.servers[server.pool.server_id].load == 0)


async def test_unknown_session_is_not_reported_lost():
    async with Site() as site:
        server = await site.serve(Quick)
        site.fleet.registry._started = -1e9
        session = await site.client.open("quick")
        for wrong in ("x", "abc.def", f"{server.pool.server_id}.guessed"):
            with pytest.raises(UnknownSession):
                await site.client.resume(wrong)
        await session.close()
        await session.close()


async def test_operator_reads_fleet_sessions_and_transcript():
    async with Site() as site:
        servers = [await site.serve(Quick, max_sessions=7) for _ in range(2)]
        sessions = [await site.client.open("quick", index=n) for n in range(4)]
        await sessions[0].step(ToolCall.of("note", text="seen"))
        async with httpx.AsyncClient(
            headers={"authorization": "Bearer secret"}, base_url=site.controller.url, timeout=60
        ) as http:
            fleet = (await http.get("/v1/fleet")).json()
            listed = (await http.get("/v1/sessions", params={"limit": 3})).json()
            rest = (await http.get("/v1/sessions", params={"limit": 3, "after": listed["next"]})).json()
            transcript = (await http.get(f"/v1/sessions/{sessions[0].session_id}/transcript")).json()
        assert fleet["kind"] == "controller"
        assert {s["server_id"] for s in fleet["servers"]} == {s.pool.server_id for s in servers}
        assert sum(s["open"] for s in fleet["servers"]) == 4
        ids = [row["session_id"] for row in listed["sessions"] + rest["sessions"]]
        assert sorted(ids) == sorted(s.session_id for s in sessions)
        assert "seen" in json.dumps(transcript["turns"])


async def test_server_with_a_wrong_token_does_not_join():
    async with Site() as site:
        server = EnvServer([Quick], host=NOWHERE, controllers=[site.controller.url], token="wrong")
        starting = asyncio.create_task(server.start())
        await asyncio.wait((starting,), timeout=0.5)
        assert not starting.done()
        assert site.fleet.servers == {}
        starting.cancel()
        await server.stop()


@pytest.mark.parametrize(
    "frame", ["{}", "garbage", '{"hello": {"server_id": "a b", "tasks": [], "capacity": 1}}']
)
async def test_link_without_a_hello_is_closed(frame):
    async with Site() as site:
        address = site.controller.url.replace("http", "ws") + "/v1/link"
        async with connect(address, additional_headers={"authorization": "Bearer secret"}) as line:
            await line.send(frame)
            await asyncio.wait_for(line.wait_closed(), 60)
            assert line.close_code == 1008
        assert site.fleet.servers == {}


async def test_link_with_a_malformed_frame_is_closed():
    async with Site() as site:
        await site.serve(Quick)
        address = site.controller.url.replace("http", "ws") + "/v1/link"
        async with connect(address, additional_headers={"authorization": "Bearer secret"}) as line:
            await line.send(json.dumps({"hello": {"server_id": "odd", "tasks": [], "capacity": 1}}))
            assert "welcome" in json.loads(await line.recv())
            await line.send('{"id":1}')
            await asyncio.wait_for(line.wait_closed(), 60)
        assert (await site.client.open("quick")).turn == 0


def test_server_without_an_address_needs_a_controller():
    with pytest.raises(ServeError, match="needs a controller: give --controller URL"):
        EnvServer([Quick], host=NOWHERE)


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "redis://x", "http://", "http://a:81x"])
def test_malformed_controller_address_is_rejected(url):
    with pytest.raises(ServeError, match="is not the http:// or https:// address of a controller"):
        EnvServer([Quick], host=NOWHERE, controllers=[url])
