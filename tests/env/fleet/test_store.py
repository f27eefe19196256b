"""The store of a fleet, in memory and in a real Redis."""

import asyncio
import time
from contextlib import suppress

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import ServeError, SessionLost, StateUnavailable
from agentrl_env.fleet import redis_store
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.redis_store import RedisStore
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.fleet.session_failover import RECORD_S, Record, Records
from agentrl_env.fleet.store import CLAIM_S, MemoryStore
from agentrl_env.hosting.serve import NOWHERE, EnvServer
from agentrl_env.server.failover import MAX_TURNS_BYTES, Checkpoint
from agentrl_env.session.session import MAX_TURNS
from agentrl_env.wire import OPEN, OpenRequest
from tests.env.redis_server import RedisServer
from tests.env.tasks import Clock, Quick, until


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.parametrize("url", ["", "127.0.0.1:6379", "redis://127.0.0.1:x/0"])
def test_invalid_url_of_redis_is_rejected(url):
    with pytest.raises(ServeError, match=f"--redis '{url}' is not valid"):
        RedisStore(url)


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    in_memory = request.param == "memory"
    made = MemoryStore() if in_memory else RedisStore(request.getfixturevalue("redis").url)
    await made.start()
    yield made
    await made.aclose()


async def test_first_claim_of_an_opening_wins(store):
    assert await store.claimed("r") is None
    assert await store.claim("r", "a") == "a"
    assert await store.claim("r", "b") == "a"
    assert await store.claimed("r") == "a"


@pytest.mark.parametrize("error", [None, OSError("closed")])
async def test_cancellation_ends_a_call_even_if_the_client_drops_it(redis, monkeypatch, error):
    sent = asyncio.Event()

    async def drops_cancellation(self, name):
        sent.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        if error:
            raise error
        return "a"

    monkeypatch.setattr("redis.asyncio.Redis.get", drops_cancellation)
    store = RedisStore(redis.url)
    call = asyncio.create_task(store.claimed("r"))
    await sent.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await store.aclose()


async def test_only_the_owner_drops_a_claim(store):
    await store.claim("r", "a")
    await store.unclaim("r", "b")
    assert await store.claimed("r") == "a"
    await store.unclaim("r", "a")
    assert await store.claim("r", "b") == "b"


async def test_servers_are_recorded_as_alive_and_lost(store):
    assert not await store.knows("a")
    assert not await store.is_alive("a", 60)
    await store.report_alive("a")
    assert await store.knows("a")
    assert await store.is_alive("a", 60)
    assert not await store.is_alive("a", 0)
    assert not await store.is_lost("a")
    await store.report_lost("a")
    assert await store.is_lost("a")


async def test_call_of_a_closed_store_keeps_no_connection(redis):
    late, store = RedisStore(redis.url), RedisStore(redis.url)
    await late.start()
    await late.aclose()
    await late.report_alive("a")
    assert await store.knows("a")
    assert len(await store._redis.client_list()) == 1
    await store.aclose()


async def test_liveness_in_redis_does_not_depend_on_the_clock_of_a_controller(redis, monkeypatch):
    store = RedisStore(redis.url)
    await store.start()
    await store.report_alive("a")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert await store.is_alive("a", 60)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert await store.is_alive("a", 60)
    assert not await store.is_alive("b", 60)
    await store.aclose()


def checkpoint(session_id, seq, text, turns=()):
    return Checkpoint(session_id=session_id, seq=seq, task="t", client="c", state=text.decode(), turns=turns)


def record(holder, seq, text, deaths=0):
    return Record(holder, checkpoint("a.1", seq, text), deaths)


@pytest.fixture
def records(store):
    return Records(store)


async def test_checkpoints_are_kept_only_for_the_holder(records):
    assert await records.find("a.1") is None
    assert await records.keep("a", checkpoint("a.1", 1, b"one"))
    assert await records.keep("a", checkpoint("a.1", 2, b"two"))
    assert not await records.keep("b", checkpoint("a.1", 3, b"three"))
    assert await records.keep("a", checkpoint("a.1", 1, b"one, late"))
    assert await records.find("a.1") == record("a", 2, b"two")


def turns(*numbers, size=1):
    return tuple((f"{number}" * size, "", "") for number in numbers)


async def test_turns_are_joined_in_order_however_often_they_are_sent(records):
    for seq, text, sent in (
        (0, b"zero", ()),
        (1, b"one", (1,)),
        (1, b"one", (1,)),
        (3, b"three", (1, 2, 3)),
        (2, b"late", (2,)),
    ):
        await records.keep("a", checkpoint("a.1", seq, text, turns(*sent)))
    assert (await records.find("a.1")).last.turns == turns(1, 2, 3)
    await records.move("a.1", "a", "b", died=True)
    await records.keep("b", checkpoint("a.1", 4, b"four", turns(1, 2, 3, 4)))
    assert (await records.find("a.1")).last.turns == turns(1, 2, 3, 4)
    await records.keep("b", checkpoint("a.1", 7, b"seven", turns(6, 7)))  # the fifth was never sent
    assert (await records.find("a.1")).last.turns == turns(6, 7)
    await records.forget("a.1", "b")
    assert (await records.find("a.1")).last.turns == ()


async def test_only_the_last_turns_are_kept(records):
    for seq in range(1, MAX_TURNS + 10):
        await records.keep("a", checkpoint("a.1", seq, b"here", turns(seq)))
    assert (await records.find("a.1")).last.turns == turns(*range(10, MAX_TURNS + 10))
    size = MAX_TURNS_BYTES // 4
    await records.keep("a", checkpoint("a.2", 9, b"here", turns(*range(1, 10), size=size)))
    assert (await records.find("a.2")).last.turns == turns(6, 7, 8, 9, size=size)
    await records.keep("a", checkpoint("a.2", 11, b"here", turns(1, 2, size=MAX_TURNS_BYTES)))
    assert (await records.find("a.2")).last.turns == turns(1, 2, size=MAX_TURNS_BYTES)


async def test_only_moves_from_the_current_holder_succeed(records):
    assert not await records.move("a.1", "a", "b", died=True)
    await records.keep("a", checkpoint("a.1", 1, b"one"))
    moved = [await records.move("a.1", "a", server, died=True) for server in ("b", "c")]
    assert moved == [record("b", 1, b"one", deaths=1), None]
    assert await records.move("a.1", "b", "c", died=False)
    assert await records.find("a.1") == record("c", 1, b"one", deaths=1)
    assert not await records.keep("a", checkpoint("a.1", 1, b"late"))
    assert await records.keep("c", checkpoint("a.1", 1, b"two"))
    assert await records.find("a.1") == record("c", 1, b"two")


async def test_only_the_holder_can_forget_a_session(records):
    for session_id in ("a.1", "a.2"):
        await records.keep("a", checkpoint(session_id, 1, b"one"))
    await records.forget("a.1", "b")
    assert await records.find("a.1") is not None
    await records.forget("a.1", "a")
    assert await records.find("a.1") is None
    await records.move("a.2", "a", "b", died=True)
    await records.forget("a.2", "b")
    known = await records.find("a.2")
    assert (known.holder, known.last.seq, known.last.state, known.deaths) == ("b", 1, None, 1)
    await records.forget("a.3", "a")


async def test_concurrent_writes_of_a_record_are_compared_and_set(store):
    assert await store.write("a.1", b"one", "", 60)
    record, version = await store.read("a.1")
    written = await asyncio.gather(*(store.write("a.1", b"%d" % n, version, 60) for n in range(5)))
    assert (record, sorted(written)) == (b"one", [False] * 4 + [True])
    assert not await store.write("a.1", b"new", "", 60)
    _, version = await store.read("a.1")
    assert await store.write("a.1", None, version, 60)
    assert await store.read("a.1") == (None, "")


async def test_malformed_record_raises_session_lost(store):
    await store.write("a.1", b'{"holder":1}', "", 60)
    with pytest.raises(SessionLost, match="malformed"):
        await Records(store).find("a.1")
    assert await Records(store).find("a.1") is None


def test_records_in_memory_are_bounded():
    async def run() -> None:
        clock = Clock()
        store = MemoryStore(clock, size=10)
        records = Records(store)
        for number in range(50):
            await records.keep("a", checkpoint(f"a.{number}", 1, b"here"))
        assert [number for number in range(50) if await records.find(f"a.{number}")] == [*range(40, 50)]
        clock.now += RECORD_S
        assert await records.find("a.49") is None
        await records.keep("a", checkpoint("a.50", 1, b"here"))
        assert len(store._records) == 1

    asyncio.run(run())


async def test_records_in_redis_expire(redis):
    store = RedisStore(redis.url)
    await store.start()
    records = Records(store)
    await records.keep("a", checkpoint("a.1", 1, b"one", turns(1)))
    await records.move("a.1", "a", "b", died=True)
    assert CLAIM_S < await store._redis.ttl(store._key("session", "a.1")) <= RECORD_S
    await records.forget("a.1", "b")
    assert 0 < await store._redis.ttl(store._key("session", "a.1")) <= CLAIM_S
    await store.aclose()


def test_claims_and_servers_in_memory_are_bounded():
    async def run() -> None:
        clock = Clock()
        store = MemoryStore(clock, size=10)
        for number in range(50):
            await store.claim(f"r{number}", "a")
            await store.report_alive(f"s{number}")
            await store.report_lost(f"s{number}")
        assert await store.claimed("r39") is None
        assert await store.claimed("r40") == "a"
        assert not await store.knows("s39")
        assert await store.is_lost("s49")
        clock.now += 1e6
        await store.claim("new", "a")
        assert await store.claimed("r49") is None

    asyncio.run(run())


async def test_fleets_in_one_redis_are_separate(redis):
    one, two, other = RedisStore(redis.url), RedisStore(redis.url), RedisStore(redis.url, fleet="other")
    for store in (one, two, other):
        await store.start()
    await one.claim("r", "a")
    assert await two.claimed("r") == "a"
    assert await other.claimed("r") is None
    for store in (one, two, other):
        await store.aclose()


async def test_missing_redis_raises_serve_error(tmp_path):
    store = RedisStore(f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(ServeError, match="Redis does not answer"):
        await store.start()
    await store.aclose()


async def test_hanging_redis_times_out(redis, monkeypatch):
    monkeypatch.setattr(redis_store, "ANSWER_S", 0.1)
    store = RedisStore(redis.url)
    await store.start()
    redis.pause()
    with pytest.raises(StateUnavailable):
        await store.claimed("r")
    redis.go_on()
    assert await store.claimed("r") is None
    await store.aclose()


class Pair:
    """Two controllers of a fleet with one Redis, and a server linked to both."""

    def __init__(self, redis: RedisServer, clock: Clock) -> None:
        self.controllers = [
            ControllerServer(
                FleetService(store=RedisStore(redis.url), clock=clock, queue_s=2.0), port=0, token="secret"
            )
            for _ in range(2)
        ]

    async def __aenter__(self) -> "Pair":
        for controller in self.controllers:
            await controller.start()
        urls = [controller.url for controller in self.controllers]
        self.server = EnvServer([Quick], host=NOWHERE, controllers=urls, token="secret", drain_s=0)
        await self.server.start()
        await until(lambda: all(c.fleet.servers for c in self.controllers))
        self.clients = [EnvClient.connect(c.url, token="secret", timeout=60) for c in self.controllers]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in self.clients:
            await client.aclose()
        await self.server.stop()
        for controller in self.controllers:
            await controller.stop()


async def test_every_controller_serves_the_same_sessions(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        await session.step(ToolCall.of("note", text="one"))
        elsewhere = await pair.clients[1].resume(session.session_id)
        result = await elsewhere.step(ToolCall.of("note", text="two"))
        assert result.messages[0].content.startswith("2 ")


async def test_sessions_continue_over_the_other_controller(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        await pair.controllers[0].stop()
        elsewhere = await pair.clients[1].resume(session.session_id)
        assert (await elsewhere.step(ToolCall.of("finish"))).terminated
        assert (await pair.clients[1].open("quick")).turn == 0


async def test_opening_repeated_at_another_controller_returns_the_same_session(redis):
    async with Pair(redis, Clock()) as pair:
        request = OpenRequest(task="quick", request_id="again")
        asking = [client.backend.call(OPEN, request) for client in pair.clients * 3]
        assert len({info.session_id for info in await asyncio.gather(*asking)}) == 1
        assert pair.server.pool.open_sessions == 1


async def test_server_heard_by_another_controller_is_not_lost(redis):
    clock = Clock()
    async with Pair(redis, clock) as pair:
        deaf, hearing = (controller.fleet for controller in pair.controllers)
        (server,) = deaf.servers.values()
        server.seen -= 100
        await hearing.registry.check()
        await deaf.registry.check()
        assert not await deaf.store.is_lost(server.server_id)
        assert server.server_id in deaf.servers


async def test_server_lost_for_one_controller_is_lost_for_all(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        old = pair.server.pool.server_id
        await pair.controllers[0].fleet.registry.lose(old, "it was silent")
        for link in list(pair.server._links._open):
            link.websocket.transport.abort()
        await until(lambda: all(c.fleet.servers and old not in c.fleet.servers for c in pair.controllers))
        for client in pair.clients:
            with pytest.raises(SessionLost):
                await client.resume(session.session_id)


async def test_sessions_continue_without_redis_and_openings_wait_or_fail(redis, monkeypatch):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        redis.kill()
        request = OpenRequest(task="quick", request_id="name")
        assert (await session.step(ToolCall.of("note", text="still"))).seq == 1
        with pytest.raises(StateUnavailable, match="Redis does not answer"):
            await pair.controllers[0].fleet._opener.open(request, "name", 0.0)
        waiting = asyncio.create_task(pair.clients[1].open("quick", wait=20))
        redis.start()
        assert (await waiting).turn == 0
        assert (await session.step(ToolCall.of("finish"))).terminated
