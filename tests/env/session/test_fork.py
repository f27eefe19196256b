"""Forks: independent copies of a session."""

import asyncio
import threading

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_env import Done, Environment, Message, Reply, SessionStatus, ToolCall, tool
from agentrl_env.client.client import EnvClient
from agentrl_env.errors import (
    DefinitionError,
    EnvironmentFailed,
    InvalidRequest,
    NotSupported,
    ServerDraining,
    ServerFull,
    SessionEnded,
    SessionExpired,
    UnknownSession,
)
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.app import create_app
from agentrl_env.server.telemetry.metrics import Metrics
from agentrl_env.session.pool import SessionPool
from agentrl_env.testing import Verdict, run_checks
from agentrl_env.testing.checks import fork as fork_check
from agentrl_env.wire import FORK, ForkRequest, OpenRequest
from tests.env.tasks import Clock, Guess, expire_idle, fork_session, until


class Walk(Environment):
    """Walk at random; every step is drawn from the episode's generator."""

    max_turns = 12
    blocking = False

    def reset(self, sample, rng):
        self.rng = rng
        self.places = [0]
        return "Walk to 5."

    @tool
    def walk(self, far: int = 1):
        """Walk.

        Args:
            far: How far at most.
        """
        self.places.append(self.places[-1] + int(self.rng.integers(0, min(abs(far), 9) + 1)))
        if self.places[-1] >= 5:
            return Done("there", reward=1.0)
        return Reply(str(self.places), reward=0.1)

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)


class SlowWalk(Walk):
    """Walk with blocking tools and async hooks, whose duration the test controls."""

    blocking = True
    gate: asyncio.Event
    blocker: threading.Event
    closed: list
    restoring: list

    async def snapshot(self):
        return {"places": self.places, "rng": self.rng}

    async def restore(self, state):
        self.places, self.rng = state["places"], state["rng"]
        self.restoring.append(self)
        await self.gate.wait()

    @tool
    def block(self):
        """Wait on a thread."""
        self.blocker.wait(60)
        return "done"

    def close(self):
        self.closed.append(self)


@pytest.fixture(autouse=True)
def slow():
    SlowWalk.gate, SlowWalk.blocker = asyncio.Event(), threading.Event()
    SlowWalk.closed, SlowWalk.restoring = [], []
    SlowWalk.gate.set()
    yield
    SlowWalk.blocker.set()


@pytest.fixture
async def local():
    made = []

    def make(*environments, **options):
        made.append(EnvClient.local(*environments, **options))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


@pytest.fixture(params=["local", "http"])
async def connect(request, local):
    """Return a function that serves tasks locally or over HTTP and returns a client."""
    servers, clients = [], []

    async def make(*environments, **options):
        if request.param == "local":
            return local(*environments, **options)
        servers.append(EnvServer(environments, port=0, drain_s=0.0, **options))
        await servers[-1].start()
        clients.append(EnvClient.connect(servers[-1].url))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()
    for server in servers:
        await server.stop()


def walk(far=1):
    return ToolCall.of("walk", far=far)


async def play(session, *lengths):
    return [plain(await session.step(walk(far))) for far in lengths]


def plain(result):
    return result.model_dump(exclude={"session_id"})


@pytest.mark.parametrize("task", [Walk, SlowWalk])
async def test_forks_continue_like_the_original(connect, task):
    client = await connect(task)
    session = await client.open(task.name, seed=3)
    await play(session, 1, 1)
    forks = await session.fork(3)
    assert {(fork.turn, fork.status, fork.messages) for fork in forks} == {
        (2, SessionStatus.RUNNING, session.messages)
    }
    assert len({session.session_id, *(fork.session_id for fork in forks)}) == 4
    rests = [await play(one, 1, 2, 1) for one in (session, *forks)]
    assert rests[1:] == rests[:1] * 3


async def test_forks_do_not_affect_each_other_or_the_original(connect):
    client = await connect(Walk)
    alone = await client.open("walk", seed=1)
    expected = await play(alone, 1, 1, 1, 1, 1)
    session = await client.open("walk", seed=1)
    await play(session, 1, 1)
    stray, quiet = await session.fork(2)
    await play(stray, 0, 0, 9)
    await stray.close()
    assert await play(session, 1, 1, 1) == expected[2:]
    assert await play(quiet, 1, 1, 1) == expected[2:]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(0, 3), max_size=5),
)
def test_branches_equal_unforked_episodes_at_any_fork_point(seed, stem, one, two):
    async def straight(client, lengths):
        async with await client.open("walk", seed=seed) as session:
            return await until_end(session, lengths)

    async def until_end(session, lengths):
        results = []
        for far in lengths:
            if session.status.final:
                break
            results.append(plain(await session.step(walk(far))))
        return results

    async def branched():
        async with Walk.local() as client:
            session = await client.open("walk", seed=seed)
            begin = await until_end(session, stem)
            if session.status.final:
                return
            (fork,) = await session.fork()
            assert begin + await until_end(fork, one) == await straight(client, stem + one)
            assert begin + await until_end(session, two) == await straight(client, stem + two)

    asyncio.run(branched())


async def test_fork_replays_earlier_results_under_its_own_session_id(local):
    client = local(Walk)
    session = await client.open("walk", seed=2)
    await session.step(walk(1))
    (fork,) = await session.fork()
    again = await client.backend.step(fork.session_id, 1, Message.assistant(None, walk(1)))
    assert again.session_id == fork.session_id
    assert plain(again) == plain(session.last)
    assert plain(fork.last) == plain(session.last)


async def test_turn_and_time_limits_of_a_fork_count_from_the_start_of_the_episode(local):
    clock = Clock()

    class Short(Walk):
        max_turns = 3
        max_seconds = 60.0

    client = local(Short, clock=clock)
    session = await client.open("short", seed=1)
    await play(session, 0, 0)
    clock.now += 40
    one, two = await session.fork(2)
    assert (await one.step(walk(0))).status is SessionStatus.TRUNCATED_TURNS
    clock.now += 30
    assert (await two.step(walk(0))).status is SessionStatus.TRUNCATED_TIME


async def test_fork_of_a_fork_has_its_state(local):
    session = await local(Walk).open("walk", seed=5)
    await play(session, 1)
    (fork,) = await session.fork()
    await play(fork, 0)
    (second,) = await fork.fork()
    assert (session.turn, fork.turn, second.turn) == (1, 2, 2)
    assert await play(second, 1, 1) == await play(fork, 1, 1)


async def test_fork_outlives_its_original(local):
    session = await local(Walk).open("walk", seed=5)
    (fork,) = await session.fork()
    await session.close()
    assert (await fork.step(walk(0))).status is SessionStatus.RUNNING


async def test_fork_waits_for_the_running_step(local):
    session = await local(SlowWalk).open("slow_walk", seed=5)
    step = asyncio.create_task(session.step(ToolCall.of("block")))
    await asyncio.sleep(0)
    fork = asyncio.create_task(session.fork())
    await asyncio.sleep(0.01)
    assert not fork.done()
    SlowWalk.blocker.set()
    await step
    assert [one.turn for one in await fork] == [1]


async def test_original_can_step_while_its_forks_are_restored(local):
    session = await local(SlowWalk).open("slow_walk", seed=5)
    SlowWalk.gate.clear()
    fork = asyncio.create_task(session.fork())
    await asyncio.sleep(0.01)
    await session.step(walk(1))
    assert not fork.done()
    SlowWalk.gate.set()
    (twin,) = await fork
    assert twin.turn == 0
    assert plain(await twin.step(walk(1))) == plain(session.last)


async def test_fork_capability_requires_snapshot_and_restore(connect):
    class Half(Guess):
        def snapshot(self):
            return self.n

    with pytest.raises(DefinitionError, match=r"Half has snapshot\(\) and no restore\(\)"):
        Half.local()
    client = await connect(Walk, Guess)
    can = {name: "fork" in task.capabilities for name, task in (await client.tasks()).items()}
    assert can == {"walk": True, "guess": False}
    with pytest.raises(NotSupported, match=r"task 'guess' cannot fork: it has no snapshot\(\) and restore"):
        await (await client.open("guess")).fork()


async def test_invalid_forks_are_rejected(connect):
    client = await connect(Walk)
    session = await client.open("walk", seed=1)
    for n in (0, -1):
        with pytest.raises(InvalidRequest):
            await session.fork(n)
    with pytest.raises(UnknownSession):
        await client.backend.call(FORK, ForkRequest(session_id="nope"))
    await session.close()
    with pytest.raises(SessionEnded):
        await session.fork()


async def test_expired_session_cannot_be_forked(local):
    clock = Clock()
    client = local(Walk, clock=clock, lease_s=60.0)
    session = await client.open("walk")
    clock.now += 61
    await expire_idle(client.backend.pool)
    with pytest.raises(SessionExpired):
        await session.fork()


async def test_forks_count_against_capacity_atomically(connect):
    client = await connect(Walk, max_sessions=3)
    session = await client.open("walk")
    with pytest.raises(ServerFull):
        await session.fork(3)
    with pytest.raises(ServerFull):
        await session.fork(200)
    forks = await session.fork(2)
    with pytest.raises(ServerFull):
        await client.open("walk")
    await forks[0].close()
    await client.open("walk")


async def test_draining_server_rejects_forks(local):
    client = local(Walk)
    session = await client.open("walk")
    drain = asyncio.create_task(client.backend.pool.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(ServerDraining):
        await session.fork()
    await session.close()
    await drain


async def test_forks_have_their_own_leases(local):
    clock = Clock()
    client = local(Walk, clock=clock, lease_s=60.0)
    session = await client.open("walk")
    (fork,) = await session.fork()
    clock.now += 40
    await session.step(walk(0))
    clock.now += 40
    assert await expire_idle(client.backend.pool) == 1
    with pytest.raises(SessionExpired):
        await fork.step(walk(0))
    await session.step(walk(0))


@pytest.mark.parametrize("at_once", [True, False])
async def test_repeated_fork_request_returns_the_same_sessions(at_once):
    pool = SessionPool([Walk], max_sessions=3)
    session_id = (await pool.open(OpenRequest(task="walk"))).session_id
    if at_once:
        asked = await asyncio.gather(*(fork_session(pool, session_id, 2, "mine") for _ in range(3)))
    else:
        asked = [await fork_session(pool, session_id, 2, "mine") for _ in range(3)]
    assert asked[0] == asked[1] == asked[2]
    assert pool.open_sessions == 3
    await pool.aclose()


async def test_cancelled_fork_request_leaves_no_sessions():
    pool = SessionPool([SlowWalk])
    session_id = (await pool.open(OpenRequest(task="slow_walk"))).session_id
    SlowWalk.gate.clear()
    fork = asyncio.create_task(fork_session(pool, session_id, 2))
    await until(lambda: len(SlowWalk.restoring) == 2)
    fork.cancel()
    await asyncio.wait((fork,))
    await until(lambda: len(SlowWalk.closed) == 2)
    await pool._capacity.all_closed()
    assert pool.open_sessions == 1
    await pool._capacity.take(1023, wait_s=60.0)  # every place except the first session's is free again
    await pool.aclose()


class Fragile(Walk):
    """Fails in the method named by ``broken``."""

    broken = ""

    def snapshot(self):
        if self.broken == "snapshot":
            raise ZeroDivisionError("author bug")
        return {"lock": threading.Lock()} if self.broken == "copy" else vars(self)

    def restore(self, state):
        if self.broken == "restore":
            raise SystemExit(3)
        super().restore(state)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("snapshot", "snapshot of task 'fragile' failed: ZeroDivisionError: author bug"),
        ("copy", "snapshot of task 'fragile' failed: TypeError: cannot pickle"),
        ("restore", "restore of task 'fragile' failed: SystemExit: 3"),
    ],
)
async def test_failing_snapshot_or_restore_affects_neither_original_nor_capacity(
    connect, monkeypatch, broken, reason
):
    client = await connect(Fragile, max_sessions=3)
    session = await client.open("fragile", seed=1)
    monkeypatch.setattr(Fragile, "broken", broken)
    with pytest.raises(EnvironmentFailed, match=reason):
        await session.fork(2)
    monkeypatch.setattr(Fragile, "broken", "")
    await session.step(walk(0))
    assert len(await session.fork(2)) == 2


def checked(environment, **options):
    (report,) = run_checks(
        lambda: EnvClient.local(environment, **options), deadline=120.0, checks=(fork_check,)
    )
    return report["fork"]


@pytest.mark.parametrize("task", [Walk, SlowWalk])
def test_correct_forking_passes_the_check(task):
    SlowWalk.blocker.set()
    assert checked(task).verdict is Verdict.PASS


def test_check_is_skipped_without_fork_support():
    assert checked(Guess).verdict is Verdict.SKIP


def test_check_is_skipped_without_capacity_for_forks():
    assert checked(Walk, max_sessions=2).verdict is Verdict.SKIP


def test_check_detects_incomplete_state():
    class Forgetful(Walk):
        def snapshot(self):
            return {"rng": self.rng, "places": [0]}

    assert "the fork differs" in checked(Forgetful).evidence


def test_check_detects_a_reseeded_generator():
    class Reseeded(Walk):
        def reset(self, sample, rng):
            self.seed = sample.seed
            return super().reset(sample, rng)

        def restore(self, state):
            super().restore(state)
            self.rng = type(self.rng)(type(self.rng.bit_generator)(self.seed))

    assert checked(Reseeded).verdict is Verdict.FAIL


def test_check_detects_shared_state():
    class Box(dict):
        def __deepcopy__(self, memo):
            return self

    class Sharing(Walk):
        def snapshot(self):
            return Box(vars(self))

    assert "snapshot() must hold all" in checked(Sharing).evidence


def test_check_detects_a_snapshot_that_changes_the_episode():
    class Restless(Walk):
        def snapshot(self):
            state = {"places": list(self.places), "rng": self.rng}
            self.places.append(self.places[-1] + 1)
            return state

    assert "the original differs" in checked(Restless).evidence


async def test_http_fork_returns_sessions_or_a_typed_error():
    pool = SessionPool([Walk, Guess])
    transport = httpx.ASGITransport(create_app(pool, Metrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        opened = [(await http.post("/v1/sessions", json={"task": task})).json() for task in ("walk", "guess")]
        walk_path, guess_path = (f"/v1/sessions/{info['session_id']}/fork" for info in opened)
        answer = await http.post(walk_path, json={"n": 2, "request_id": "a"})
        assert (answer.status_code, len(answer.json()["sessions"])) == (201, 2)
        again = await http.post(walk_path, json={"n": 2, "request_id": "a"})
        assert again.json() == answer.json()
        for bad in ({"n": 0}, {"n": "many"}, {"n": 1.5}, {"n": None}, [], {"request_id": "x" * 129}):
            answer = await http.post(walk_path, json=bad)
            assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request")
        assert (await http.post(guess_path, json={"n": 1})).status_code == 501
        assert (await http.post("/v1/sessions/nope/fork", json={"n": 1})).status_code == 404
        assert (await http.post(walk_path, json={"n": 10**18})).status_code == 422
        assert (await http.get(walk_path)).status_code == 405
    assert pool.open_sessions == 4
    await pool.aclose()
