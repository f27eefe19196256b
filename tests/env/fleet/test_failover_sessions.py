"""Failover with ``controller --resume``: sessions of killed servers continue on other servers."""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from agentrl_env import Done, EnvClient, Environment, Message, Reply, ToolCall, tool
from agentrl_env.errors import (
    InvalidRequest,
    ServeError,
    SessionEnded,
    SessionLost,
    StateUnavailable,
    StepPending,
)
from agentrl_env.fleet import registry, session_failover
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.redis_store import RedisStore
from agentrl_env.fleet.remote_server import Outbox
from agentrl_env.fleet.serve import ControllerServer, control
from agentrl_env.fleet.session_failover import Failover
from agentrl_env.hosting.loader import load_target
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server import failover as server_failover
from agentrl_env.server.failover import FailoverApi
from agentrl_env.server.telemetry.logs import TextLines
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.types import SessionStatus
from agentrl_env.wire import Hello, OpenRequest, SessionRow, StepBatch, StepRequest, TranscriptRequest
from tests.env.fleet.test_controller import Site, kill
from tests.env.redis_server import RedisServer
from tests.env.tasks import Clock, Quick, expire_idle, until

ROOT = Path(__file__).parents[3]


@dataclass
class Spot:
    """A position: a class of the task."""

    at: int = 0


class Walk(Environment):
    """A random walk; each step draws from the generator of the episode."""

    max_turns = 12
    tool_timeout = 20.0
    gate: ClassVar[asyncio.Event]
    started: ClassVar[list[int]]

    def reset(self, sample, rng):
        self.rng, self.spot, self.path = rng, Spot(), []
        return f"Walk to 30, from {self.spot.at}."

    @tool
    def walk(self, far: int = 5):
        """Walk.

        Args:
            far: How far at most.
        """
        self.spot.at += int(self.rng.integers(0, far + 1))
        self.path.append(self.spot.at)
        if self.spot.at >= 30:
            return Done("there", reward=1.0)
        return Reply(str(self.path), reward=0.1, metrics={"far": 1.0})

    @tool
    async def wait(self):
        """Walk once the gate is open."""
        self.started.append(len(self.path))
        await self.gate.wait()
        return self.walk()

    def score(self):
        return {"steps": float(len(self.path))}

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


class Locked(Walk):
    """Its state cannot be encoded."""

    def snapshot(self):
        return {"walk": lambda: 1}


class Stuffed(Walk):
    """Its state is large."""

    def snapshot(self):
        return {**vars(self), "stuff": os.urandom(server_failover.MAX_CHECKPOINT_BYTES)}


class Fragile(Walk):
    """Its state cannot be restored."""

    def restore(self, state):
        raise ZeroDivisionError("author bug")


@pytest.fixture(autouse=True)
def gate(monkeypatch):
    monkeypatch.setattr(session_failover, "FORGET_S", 0.0)
    Walk.gate, Walk.started = asyncio.Event(), []


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def site(**options) -> Site:
    return Site(resume=True, **options)


async def die(site, server):
    """Kill a server and wait until its controller declares it lost."""
    await kill(server)
    await site.fleet.registry.lose(server.pool.server_id, "the test says so")


def holder(site, session):
    (server,) = (
        s for s in site.servers if s.pool.row(session.session_id) and s.pool.server_id in alive(site)
    )
    return server


def alive(site):
    return site.fleet.servers


def batch(sessions, seq, message):
    steps = [StepRequest(session_id=s.session_id, seq=seq, message=message) for s in sessions]
    return StepBatch(steps=steps)


def plain(result):
    return result.model_dump(exclude={"session_id"})


WALK = ToolCall.of("walk")


async def undisturbed(seed, steps):
    async with Walk.local() as client, await client.open("walk", seed=seed) as session:
        results = []
        while not session.status.final and len(results) < steps:
            results.append(plain(await session.step(WALK)))
        return results


async def test_session_continues_on_another_server():
    expected = await undisturbed(3, 12)
    async with site() as fleet:
        for _ in range(4):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=3)
        results = []
        while not session.status.final:
            if len(results) in (0, 2, 5):
                await die(fleet, holder(fleet, session))
            results.append(plain(await session.step(WALK)))
        assert results == expected
        assert session.last.metrics["steps"] == len(expected)
        assert sum(r["reward"] for r in results) == sum(r["reward"] for r in expected)


@pytest.mark.parametrize("call", ["step", "close"])
async def test_server_that_only_claims_a_session_receives_none_of_its_calls(call):
    async with site() as fleet:
        first, second = await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=5)
        here, there = (first, second) if holder(fleet, session) is first else (second, first)
        claim = SessionRow(session_id=session.session_id, task="walk")
        claiming = Hello(server_id="claiming", tasks=(), capacity=1, sessions=(claim,))
        outbox = Outbox()
        await fleet.fleet.registry.join(claiming, outbox)
        await die(fleet, here)
        if call == "step":
            assert [plain(await session.step(WALK))] == await undisturbed(5, 1)
            assert there.pool.open_sessions == 1
        await session.close()
        assert len(outbox) == 1  # the welcome


async def test_running_step_is_repeated_on_another_server():
    async with site() as fleet:
        first, second = await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=5)
        await session.step(WALK)
        here, there = (first, second) if holder(fleet, session) is first else (second, first)
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(lambda: Walk.started == [1])
        await die(fleet, here)
        await until(lambda: Walk.started == [1, 1])
        Walk.gate.set()
        assert [plain(await under_way)] == (await undisturbed(5, 2))[1:]
        assert (session.turn, there.pool.open_sessions) == (2, 1)


async def test_batch_follows_sessions_that_moved():
    expected = {seed: await undisturbed(seed, 3) for seed in range(6)}
    async with site() as fleet:
        for _ in range(3):
            await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(6)]
        message = Message.assistant(None, WALK)

        async def play(seq):
            answers = await fleet.fleet.step_many(batch(sessions, seq, message))
            return [json.loads(answer) for answer in answers]

        await play(1)
        await die(fleet, fleet.servers[0])
        second = await play(2)
        await die(fleet, fleet.servers[1])
        third = await play(3)
        assert {s.pool.open_sessions for s in fleet.servers[2:]} == {6}
        for seed, session in enumerate(sessions):
            assert second[seed]["session_id"] == third[seed]["session_id"] == session.session_id
            assert [r[seed]["reward"] for r in (second, third)] == [r["reward"] for r in expected[seed][1:]]
            texts = [r[seed]["messages"][0]["content"] for r in (second, third)]
            assert texts == [r["messages"][0]["content"] for r in expected[seed][1:]]


async def test_batch_is_split_again_if_its_server_dies_before_sending():
    async with site() as fleet:
        await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(4)]
        for _ in range(2):
            await fleet.serve(Walk)
        message = Message.assistant(None, WALK)
        request = batch(sessions, 1, message)
        await kill(fleet.servers[0])
        playing = asyncio.create_task(fleet.fleet.step_many(request))
        assert len({fleet.fleet.registry.routing.group(s.session_id) for s in sessions}) == 1
        losing = asyncio.create_task(die(fleet, fleet.servers[0]))
        answers = [json.loads(answer) for answer in await playing]
        await losing
        assert [answer.get("seq") for answer in answers] == [1] * 4
        whole = await fleet.fleet._step_group(request.steps, None)
        assert [json.loads(answer) for answer in whole] == answers


async def test_running_batch_is_repeated_on_another_server():
    async with site() as fleet:
        await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(3)]
        await fleet.serve(Walk)
        message = Message.assistant(None, ToolCall.of("wait"))
        under_way = asyncio.create_task(fleet.fleet.step_many(batch(sessions, 1, message)))
        await until(lambda: len(Walk.started) == 3)
        await die(fleet, fleet.servers[0])
        await until(lambda: len(Walk.started) == 6)
        Walk.gate.set()
        answers = [json.loads(answer) for answer in await under_way]
        assert [(a["session_id"], a["seq"]) for a in answers] == [(s.session_id, 1) for s in sessions]


async def test_repeated_step_returns_the_first_answer_after_failover():
    async with site() as fleet:
        await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=1)
        given = [await session.step(WALK) for _ in range(2)]
        await die(fleet, holder(fleet, session))
        backend, message = fleet.client.backend, Message.assistant(None, WALK)
        again = [await backend.step(session.session_id, seq, message) for seq in (2, 1, 2)]
        assert again == [given[1], given[0], given[1]]
        resumed = await fleet.client.resume(session.session_id)
        assert (resumed.turn, resumed.last) == (2, given[1])
        assert (await session.step(WALK)).seq == 3


async def test_transcript_of_a_session_that_moved_twice_is_complete():
    async with site() as fleet:
        await fleet.serve(Walk), await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=1)
        given = []
        for _ in range(2):
            given += [await session.step(WALK) for _ in range(3)]
            await die(fleet, holder(fleet, session))
        transcript = json.loads(
            await fleet.fleet.transcript(TranscriptRequest(session_id=session.session_id))
        )
        assert [turn["result"] for turn in transcript["turns"]] == [r.model_dump(mode="json") for r in given]
        assert {turn["message"]["tool_calls"][0]["function"]["name"] for turn in transcript["turns"]} == {
            "walk"
        }
        backend, message = fleet.client.backend, Message.assistant(None, WALK)
        assert await backend.step(session.session_id, 1, message) == given[0]


async def test_checkpoint_carries_only_the_new_turns(monkeypatch):
    told = []
    hear = lambda self, server_id, frame: told.append(server_failover.read_frame(frame).turns)  # noqa: E731
    monkeypatch.setattr(Failover, "hear", hear)
    async with site() as fleet:
        await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        for _ in range(4):
            await session.step(WALK)
        assert [len(turns) for turns in told] == [0, 1, 1, 1, 1]
        fork = (await session.fork())[0]
        await fork.step(WALK)
        assert [len(turns) for turns in told[5:]] == [4, 1]


async def test_last_answer_of_a_moved_session_can_be_repeated():
    async with site() as fleet:
        await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=1)
        await die(fleet, holder(fleet, session))
        while not session.status.final:
            last = await session.step(WALK)
        again = await fleet.client.backend.step(session.session_id, last.seq, Message.assistant(None, WALK))
        assert again == last
        with pytest.raises(SessionEnded):
            await fleet.client.backend.step(session.session_id, last.seq + 1, Message.assistant(None, WALK))


async def test_last_answer_of_a_lost_server_is_returned_by_another(monkeypatch):
    monkeypatch.setattr(session_failover, "FORGET_S", 60.0)
    async with site() as fleet:
        for _ in range(2):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=1)
        here = holder(fleet, session)
        while not session.status.final:
            last = await session.step(WALK)
        await die(fleet, here)
        again = await fleet.client.backend.step(session.session_id, last.seq, Message.assistant(None, WALK))
        assert again == last


async def test_forks_survive_and_moved_sessions_can_be_forked():
    async with site() as fleet:
        await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=2)
        await session.step(WALK)
        (fork,) = await session.fork()
        await die(fleet, holder(fleet, session))
        (second,) = await session.fork()
        steps = [plain(await one.step(WALK)) for one in (session, fork, second)]
        assert steps[0] == steps[1] == steps[2] == (await undisturbed(2, 2))[1]


async def test_adopted_session_is_counted_on_its_new_server():
    async with site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        other = await fleet.serve(Walk, max_sessions=1)
        await die(fleet, dead)
        await session.step(WALK)
        (member,) = fleet.fleet.servers.values()
        assert (len(member.sessions), member.opening, member.load) == (1, 0, 1.0)
        assert other.metrics.opened["walk"] == 1
        async with httpx.AsyncClient(
            headers={"authorization": "Bearer secret"}, base_url=fleet.controller.url, timeout=60
        ) as http:
            (row,) = (await http.get("/v1/sessions")).json()["sessions"]
        assert (row["session_id"], row["server"]) == (session.session_id, other.pool.server_id)
        assert (row["turn"], row["status"]) == (1, "running")
        await session.close()
        assert (other.pool.open_sessions, len(member.sessions)) == (0, 0)
        assert other.metrics.ended["walk", SessionStatus.CANCELLED] == 1
        assert fleet.fleet.metrics.ended["walk", "session_lost"] == 0
        assert (await fleet.client.open("walk")).turn == 0


async def test_adopted_session_has_a_lease():
    async with site() as fleet:
        dead, other = await fleet.serve(Walk), await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        if holder(fleet, session) is other:
            dead, other = other, dead
        await die(fleet, dead)
        await session.step(WALK)
        other.pool._lease_s = -1.0
        assert await expire_idle(other.pool) == 1
        await until(lambda: kept_at(fleet, session) is None)


def kept_at(site, session):
    """Return the checkpoint of a session in the controller's store."""
    record, *_ = site.fleet.store._records.get(session.session_id, (None,))
    return record and json.loads(record)["last"].get("state")


async def test_record_is_removed_with_its_session():
    async with site() as fleet:
        await fleet.serve(Walk), await fleet.serve(Walk)
        one, two, three = [await fleet.client.open("walk", seed=n) for n in range(3)]
        assert all(kept_at(fleet, s) for s in (one, two, three))
        await one.close()
        while not two.status.final:
            await two.step(WALK)
        await until(lambda: list(fleet.fleet.store._records) == [three.session_id])
        await die(fleet, holder(fleet, three))
        await three.step(WALK)
        await three.close()
        await until(lambda: kept_at(fleet, three) is None)
        assert fleet.fleet.registry.routing._writes == {}


async def test_close_does_not_adopt_a_lost_session():
    async with site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        other = await fleet.serve(Walk)
        await die(fleet, dead)
        await session.close()
        assert other.metrics.opened["walk"] == 0
        assert fleet.fleet.store._records == {}


@pytest.mark.parametrize(
    ("task", "why"), [(Locked, "holds a function at state['walk']"), (Stuffed, "at most 1048576 are kept")]
)
async def test_session_without_a_checkpoint_is_lost_and_one_warning_is_logged(task, why, caplog):
    caplog.set_level(logging.WARNING, "agentrl_env")
    async with site() as fleet:
        dead = await fleet.serve(task)
        sessions = [await fleet.client.open(task.name) for _ in range(2)]
        for session in sessions:
            assert (await session.step(WALK)).seq == 1
        await fleet.serve(task)
        await die(fleet, dead)
        for session in sessions:
            with pytest.raises(SessionLost):
                await session.step(WALK)
    (said,) = [TextLines().format(r) for r in caplog.records if "have no failover" in r.getMessage()]
    assert f"sessions of task {task.name} " in said
    assert said.count(why) == 1


async def test_outdated_checkpoint_is_not_restored(monkeypatch):
    async with site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        await session.step(WALK)
        monkeypatch.setattr(server_failover, "MAX_CHECKPOINT_BYTES", 100)
        await session.step(WALK)
        monkeypatch.undo()
        await session.step(WALK)
        await fleet.serve(Walk)
        await die(fleet, dead)
        with pytest.raises(SessionLost):
            await session.step(WALK)


async def test_session_of_a_task_without_snapshot_is_lost():
    async with site() as fleet:
        dead = await fleet.serve(Quick)
        session = await fleet.client.open("quick")
        await fleet.serve(Quick)
        await die(fleet, dead)
        with pytest.raises(SessionLost):
            await session.step(ToolCall.of("note", text="hello?"))


async def test_without_resume_no_checkpoint_is_sent_and_adopt_is_rejected():
    async with Site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        await session.step(WALK)
        other = await fleet.serve(Walk)
        assert fleet.fleet.store._records == {}
        with pytest.raises(InvalidRequest, match="adopt"):
            await fleet.fleet.servers[other.pool.server_id].call("adopt", b'{"session_id":"x"}')
        await die(fleet, dead)
        with pytest.raises(SessionLost):
            await session.step(WALK)


async def test_session_is_lost_if_no_server_has_room():
    async with site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        await fleet.serve(Walk, max_sessions=1)
        other = await fleet.client.open("walk")
        await die(fleet, dead)
        assert fleet.fleet.metrics.ended["walk", "session_lost"] == 0
        with pytest.raises(SessionLost, match="no other has room"):
            await session.step(WALK)
        await other.close()
        with pytest.raises(SessionLost):
            await session.step(WALK)
        assert fleet.fleet.metrics.ended["walk", "session_lost"] == 1


async def test_lost_session_waits_for_a_free_place():
    async with site(queue_s=20.0) as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=4)
        await fleet.serve(Walk, max_sessions=1)
        other = await fleet.client.open("walk")
        await die(fleet, dead)
        under_way = asyncio.create_task(session.step(WALK))
        await until(lambda: fleet.fleet.gauges()["agentrl_sessions_waiting"] == 1)
        await other.close()
        assert [plain(await under_way)] == await undisturbed(4, 1)


async def test_step_that_kills_its_servers_is_not_repeated_forever():
    async with site() as fleet:
        for _ in range(5):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        for deaths in range(1, 4):
            await until(lambda played=deaths: len(Walk.started) == played)
            await die(fleet, holder(fleet, session))
        with pytest.raises(SessionLost, match="3 servers that held the session died"):
            await under_way
        assert len(fleet.fleet.servers) == 2


async def test_steps_that_might_kill_their_server_take_turns():
    """After two deaths only one of them runs at a time, so a death is never attributed to the wrong step."""
    async with site() as fleet:
        for _ in range(9):
            await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(3)]
        steps = [asyncio.create_task(session.step(ToolCall.of("wait"))) for session in sessions]
        for deaths in (1, 2):
            await until(lambda played=deaths: len(Walk.started) == 3 * played)
            for server in {holder(fleet, session) for session in sessions}:
                await die(fleet, server)
        await until(lambda: len(Walk.started) > 6)
        await asyncio.sleep(0.3)
        assert len(Walk.started) == 7
        Walk.gate.set()
        played = [plain(await step) for step in steps]
        assert [[one] for one in played] == [await undisturbed(seed, 1) for seed in range(3)]


async def stick(site, server, *sessions):
    """Kill a server after its watchdog has named the sessions in which it might be stuck."""
    await kill(server)
    await site.fleet.registry.routing.blame(server.pool.server_id, [one.session_id for one in sessions])
    await site.fleet.registry.lose(server.pool.server_id, "the test says so")


async def test_session_in_which_a_server_was_stuck_is_lost_immediately():
    async with site() as fleet:
        for _ in range(2):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(lambda: Walk.started)
        await stick(fleet, holder(fleet, session), session)
        with pytest.raises(SessionLost, match="its step got the session's server stuck"):
            await under_way
        assert len(Walk.started) == 1
        with pytest.raises(SessionLost):
            await session.step(WALK)


async def test_no_death_counts_for_a_session_that_only_shared_the_stuck_server():
    async with site() as fleet:
        for _ in range(session_failover.MAX_DEATHS + 1):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=4)
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        for deaths in range(1, session_failover.MAX_DEATHS + 1):
            await until(lambda played=deaths: len(Walk.started) == played)
            server = holder(fleet, session)
            await kill(server)
            await fleet.fleet.registry.routing.blame(server.pool.server_id, ["another"])
            await fleet.fleet.registry.lose(server.pool.server_id, "the test says so")
        Walk.gate.set()
        assert [plain(await under_way)] == await undisturbed(4, 1)


async def test_memory_of_lost_servers_in_a_controller_is_bounded(monkeypatch):
    monkeypatch.setattr(registry, "MAX_REMEMBERED", 3)
    async with site() as fleet:
        known = fleet.fleet.registry
        for number in range(10):
            await known.routing.blame(f"server{number}", [f"server{number}.session"])
            await known.lose(f"server{number}", "the test says so")
            known.routing.interrupted([f"server{number}.session"])
        sets = [each for part in (known, known.routing) for each in vars(part).values()]
        sizes = [len(each) for each in sets if isinstance(each, set | registry.RecentNames)]
        assert max(sizes) == 3
        assert await known.is_lost("server9")


async def test_steps_of_a_task_that_blocked_a_server_are_spread_over_the_servers():
    async with site(queue_s=30.0) as fleet:
        stuck = await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(3)]
        steps = [asyncio.create_task(session.step(ToolCall.of("wait"))) for session in sessions]
        await until(lambda: len(Walk.started) == 3)
        first = await fleet.serve(Walk)
        await stick(fleet, stuck, sessions[0])
        await until(lambda: len(Walk.started) == 4)
        second = await fleet.serve(Walk)
        await until(lambda: len(Walk.started) == 5)
        assert (first.pool.open_sessions, second.pool.open_sessions) == (1, 1)
        Walk.gate.set()
        outcomes = await asyncio.gather(*steps, return_exceptions=True)
        assert isinstance(outcomes[0], SessionLost)
        assert [[plain(one)] for one in outcomes[1:]] == [await undisturbed(seed, 1) for seed in (1, 2)]


async def test_sessions_suspected_of_a_stuck_server_take_turns_immediately():
    async with site() as fleet:
        await fleet.serve(Walk)
        sessions = [await fleet.client.open("walk", seed=seed) for seed in range(3)]
        for _ in range(2):
            await fleet.serve(Walk)
        steps = [asyncio.create_task(session.step(ToolCall.of("wait"))) for session in sessions]
        await until(lambda: len(Walk.started) == 3)
        await stick(fleet, holder(fleet, sessions[0]), *sessions[:2])
        await until(lambda: len(Walk.started) == 5)  # the third session, and one of the two
        await asyncio.sleep(0.3)
        assert len(Walk.started) == 5
        Walk.gate.set()
        played = [plain(await step) for step in steps]
        assert [[one] for one in played] == [await undisturbed(seed, 1) for seed in range(3)]


async def test_idle_session_survives_any_number_of_dead_servers():
    async with site() as fleet:
        for _ in range(5):
            await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=4)
        first = plain(await session.step(WALK))
        for _ in range(4):
            await die(fleet, holder(fleet, session))
            await fleet.client.resume(session.session_id)  # moves it while no step is running
        assert [first, plain(await session.step(WALK))] == await undisturbed(4, 2)


async def test_session_is_lost_if_restore_fails():
    async with site() as fleet:
        dead = await fleet.serve(Fragile)
        session = await fleet.client.open("fragile")
        other = await fleet.serve(Fragile)
        await die(fleet, dead)
        with pytest.raises(SessionLost, match="ZeroDivisionError: author bug"):
            await session.step(WALK)
        assert other.pool.open_sessions == 0
        assert (await fleet.client.open("fragile")).turn == 0


async def test_clients_cannot_call_adopt():
    async with site() as fleet:
        server = EnvServer([Walk], port=0, controllers=[fleet.controller.url], token="secret", drain_s=0)
        fleet.servers.append(server)
        await server.start()
        session = await fleet.client.open("walk")
        record = await fleet.fleet.registry.routing.records.find(session.session_id)
        call = b'{"id":1,"call":"adopt",' + msgspec.json.encode(record.last)[1:]
        for url in (server.url, fleet.controller.url):
            address = url.replace("http", "ws") + "/v1/ws"
            async with connect(address, additional_headers={"authorization": "Bearer secret"}) as line:
                await line.send(call.decode())
                answer = json.loads(await line.recv())
            assert answer["error"]["type"] == "invalid_request"
        assert server.pool.open_sessions == 1


async def test_resume_requires_a_token():
    with pytest.raises(ServeError, match="--resume needs a token"):
        control(FleetService(resume=True), port=0)


async def test_agent_token_is_valid_after_failover():
    async with site() as fleet:
        dead = await fleet.serve(Walk)
        session = await fleet.client.open("walk")
        await fleet.serve(Walk)
        await die(fleet, dead)
        async with EnvClient.connect(fleet.controller.url, token=session.agent_token) as agent:
            theirs = await agent.resume(session.session_id)
            assert (await theirs.step(WALK)).seq == 1


async def test_returning_server_can_adopt_its_former_session():
    async with site() as fleet:
        server = await fleet.serve(Walk)
        session = await fleet.client.open("walk", seed=7)
        await session.step(WALK)
        old = server.pool.server_id
        await fleet.fleet.registry.lose(old, "it was silent")
        for link in list(server._links._open):
            link.websocket.transport.abort()
        await until(lambda: set(fleet.fleet.servers) - {old})
        assert [plain(await session.step(WALK))] == (await undisturbed(7, 2))[1:]
        assert server.pool.open_sessions == 1


async def test_time_limit_continues_after_failover():
    class Timed(Walk):
        max_seconds = 60.0

    async with site() as fleet:
        servers = [await fleet.serve(Timed) for _ in range(2)]
        clock = Clock()
        for server in servers:
            server.pool._clock = clock
        session = await fleet.client.open("timed")
        clock.now += 50
        await session.step(WALK)
        dead = holder(fleet, session)
        (other,) = (s for s in servers if s is not dead)
        other.pool._clock = later = Clock()
        later.now = 9000.0
        await die(fleet, dead)
        assert not (await session.step(WALK)).truncated
        later.now += 11
        assert (await session.step(WALK)).status is SessionStatus.TRUNCATED_TIME


@pytest.mark.parametrize("task", ["household", "shop", "sql"])
async def test_starter_tasks_continue_after_failover(task):
    target = f"{ROOT}/environments/{task}"
    async with EnvClient.local(load_target(target), oracle=True) as client:
        expected = [plain(result) async for result in by_expert(await client.open(task, index=5, seed=5))]
    async with site() as fleet:
        for _ in expected:
            await fleet.serve(target, oracle=True)
        session = await fleet.client.open(task, index=5, seed=5)
        results = []
        async for result in by_expert(session):
            results.append(plain(result))
            if not result.final:
                await die(fleet, holder(fleet, session))
        assert results == expected
        assert results[-1]["reward"] == 1.0


async def by_expert(session):
    while not session.status.final:
        yield await session.step(await session.expert())


async def test_task_can_have_another_folder_on_the_other_server(tmp_path):
    code = (
        "from dataclasses import dataclass\nfrom agentrl_env import Environment, tool\n"
        + inspect.getsource(Spot)
    )
    code += """
class Trip(Environment):
    def reset(self, sample, rng):
        self.spot = Spot()
        return "Go."

    @tool
    def go(self):
        self.spot.at += 1
        return str(self.spot)

    def snapshot(self):
        return self.spot

    def restore(self, state):
        assert type(state) is Spot
        self.spot = state
"""
    pools = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "environment.py").write_text(code)
        pools.append(SessionPool([load_target(str(tmp_path / name))]))
    here, there = pools
    opened = await here.open(OpenRequest(task="trip"))
    message = Message.assistant(None, ToolCall.of("go"))
    await here.step(StepRequest(session_id=opened.session_id, seq=1, message=message))
    here_api, there_api = (FailoverApi(pool, Metrics(), None, "token", set()) for pool in pools)
    await there_api.adopt(await here_api.take(here.session(opened.session_id), ""))
    result = json.loads(await there.step(StepRequest(session_id=opened.session_id, seq=2, message=message)))
    assert result["messages"][0]["content"] == "Spot(at=2)"
    for pool in pools:
        await pool.aclose()


async def test_open_sessions_of_a_stopped_server_continue_on_others():
    async with site() as fleet:
        servers = [await fleet.serve(Walk) for _ in range(5)]
        session = await fleet.client.open("walk", seed=5)
        await session.step(WALK)
        for _ in range(3):
            stopped = holder(fleet, session)
            await stopped.stop()
            servers.remove(stopped)
            assert (await fleet.client.resume(session.session_id)).turn == 1
        under_way = asyncio.create_task(session.step(ToolCall.of("wait")))
        await until(lambda: Walk.started == [1])
        stopped = holder(fleet, session)
        servers.remove(stopped)
        await stopped.stop()
        await until(lambda: Walk.started == [1, 1])
        Walk.gate.set()
        assert [plain(await under_way)] == (await undisturbed(5, 2))[1:]
        assert servers[0].pool.open_sessions == 1


class Pair:
    """Two controllers of a fleet with one Redis, and servers linked to both."""

    def __init__(self, redis: RedisServer, servers: int, **options) -> None:
        self._number, self.servers = servers, []
        self.controllers = [
            ControllerServer(
                FleetService(store=RedisStore(redis.url), queue_s=10.0, resume=True, **options),
                port=0,
                token="secret",
            )
            for _ in range(2)
        ]

    async def __aenter__(self) -> "Pair":
        for controller in self.controllers:
            await controller.start()
        urls = [controller.url for controller in self.controllers]
        for _ in range(self._number):
            self.servers.append(EnvServer([Walk], host=NOWHERE, controllers=urls, token="secret", drain_s=0))
            await self.servers[-1].start()
        self.fleets = [controller.fleet for controller in self.controllers]
        await until(lambda: all(len(fleet.servers) == self._number for fleet in self.fleets))
        self.clients = [EnvClient.connect(url, token="secret", timeout=60) for url in urls]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in self.clients:
            await client.aclose()
        for server in self.servers:
            await server.stop()
        for controller in self.controllers:
            await controller.stop()

    def server_of(self, session):
        (server,) = (s for s in self.servers if s.pool.server_id == session.session_id.partition(".")[0])
        return server


async def test_concurrent_adoptions_of_two_controllers_open_one_session(redis):
    async with Pair(redis, 4) as pair:
        sessions = [await pair.clients[n % 2].open("walk", seed=n) for n in range(4)]
        for session in sessions:
            await session.step(WALK)
        dead = pair.server_of(sessions[0])
        held = [s for s in sessions if pair.server_of(s) is dead]
        await kill(dead)
        for fleet in pair.fleets:
            await fleet.registry.lose(dead.pool.server_id, "the test says so")
        message = Message.assistant(None, WALK)
        for session in held:
            asking = [c.backend.step(session.session_id, 2, message) for c in pair.clients * 3]
            answers = await asyncio.gather(*asking)
            assert len({answer.model_dump_json() for answer in answers}) == 1
        assert sum(s.pool.open_sessions for s in pair.servers if s is not dead) == 4
        for n, session in enumerate(sessions):
            expected = await undisturbed(n, 3)
            turn = 3 if session in held else 2
            elsewhere = await pair.clients[turn % 2].resume(session.session_id)
            assert plain(await elsewhere.step(WALK)) == expected[turn - 1]


async def test_new_controller_finds_moved_sessions(redis):
    async with Pair(redis, 2) as pair:
        session = await pair.clients[0].open("walk", seed=6)
        dead = pair.server_of(session)
        await kill(dead)
        await pair.fleets[0].registry.lose(dead.pool.server_id, "the test says so")
        await session.step(WALK)
        port = int(pair.controllers[0].url.rpartition(":")[2])
        await pair.controllers[0].stop()
        fresh = FleetService(store=RedisStore(redis.url), resume=True)
        pair.controllers[0] = ControllerServer(fresh, port=port, token="secret")
        await pair.controllers[0].start()
        assert [plain(await session.step(WALK))] == (await undisturbed(6, 2))[1:]
        assert sum(s.pool.open_sessions for s in pair.servers if s is not dead) == 1


async def test_answers_of_a_server_after_its_loss_are_discarded(redis):
    async with Pair(redis, 2) as pair:
        session = await pair.clients[0].open("walk", seed=8)
        await session.step(WALK)
        given_up, other = pair.server_of(session), pair.fleets[1]
        (there,) = (s for s in pair.servers if s is not given_up)
        await other.registry.stop()  # the server does not notice
        under_way = asyncio.create_task(
            pair.clients[1].backend.step(session.session_id, 2, Message.assistant(None, ToolCall.of("wait")))
        )
        await until(lambda: Walk.started == [1])
        await pair.fleets[0].registry.lose(given_up.pool.server_id, "the test says so")
        assert (await pair.clients[0].resume(session.session_id)).turn == 1
        assert there.pool.open_sessions == 1
        Walk.gate.set()
        assert [plain(await under_way)] == (await undisturbed(8, 2))[1:]
        assert there.pool.session(session.session_id).turn == 2
        again = await pair.clients[0].resume(session.session_id)
        assert plain(await again.step(WALK)) == (await undisturbed(8, 3))[2]


async def test_answers_wait_for_their_checkpoint_in_redis(redis):
    async with Pair(redis, 2) as pair:
        session = await pair.clients[0].open("walk", seed=9)
        redis.kill()
        stepping = asyncio.create_task(session.step(WALK))
        server = pair.server_of(session).pool
        await until(lambda: server.session(session.session_id).turn == 1)
        await until(lambda: pair.fleets[0].registry.routing._writes)
        assert not stepping.done()
        redis.start()
        assert [plain(await stepping)] == (await undisturbed(9, 1))[:1]
        dead = pair.server_of(session)
        await kill(dead)
        await pair.fleets[0].registry.lose(dead.pool.server_id, "the test says so")
        assert [plain(await session.step(WALK))] == (await undisturbed(9, 2))[1:]


async def test_state_unavailable_is_raised_while_redis_is_down(redis, monkeypatch):
    monkeypatch.setattr(session_failover, "CONFIRM_S", 0.05)
    async with Pair(redis, 2) as pair:
        session = await pair.clients[0].open("walk", seed=9)
        redis.kill()
        message = Message.assistant(None, WALK)
        with pytest.raises(StateUnavailable, match="try again"):
            await pair.fleets[0].step(batch([session], 1, message).steps[0])
        (pending,) = await pair.fleets[0].step_many(batch([session], 1, message))
        assert isinstance(pending, StepPending)
        redis.start()
        assert [plain(await session.step(WALK))] == (await undisturbed(9, 1))[:1]


@contextlib.contextmanager
def process(*arguments: str):
    """Run ``agentrl-env``. Its first line announces that it is ready."""
    command = [sys.executable, "-m", "agentrl_env", *arguments]
    environ = {**os.environ, "AGENTRL_TOKEN": "t"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


async def test_sessions_survive_a_killed_process():
    with contextlib.ExitStack() as stack:
        options = ["--port", "0", "--resume", "--lost-after", "1"]
        controller = stack.enter_context(process("controller", *options))
        url = controller.stdout.readline().split(" at ")[1].strip()
        options = ["serve", f"{__file__}:Walk", "--host", "none", "--controller", url]
        servers = [stack.enter_context(process(*options)) for _ in range(2)]
        for server in servers:
            assert server.stdout.readline().startswith("serving walk")
        async with EnvClient.connect(url, token="t", timeout=60) as client:
            sessions = [await client.open("walk", seed=n) for n in range(4)]
            firsts = [plain(await session.step(WALK)) for session in sessions]
            assert len({session.session_id.partition(".")[0] for session in sessions}) == 2
            servers[0].send_signal(signal.SIGKILL)
            seconds = [plain(result) for result in await asyncio.gather(*(s.step(WALK) for s in sessions))]
            for n in range(4):
                assert [firsts[n], seconds[n]] == await undisturbed(n, 2)
            assert (await client.open("walk")).turn == 0


async def test_answered_opening_has_a_checkpoint(redis):
    async with Pair(redis, 2) as pair:
        opened = json.loads(await pair.fleets[1].open(OpenRequest(task="walk")))
        assert (await pair.fleets[0].registry.routing.records.find(opened["session_id"])).last.state
