"""What controllers share: one contract for the state in memory and the state in a real Redis."""

import asyncio

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.errors import ServeError, SessionLost, StateUnavailable
from agentrl_env.fleet import redis_store as redis_state
from agentrl_env.fleet.controller import Fleet
from agentrl_env.fleet.redis_store import RedisState
from agentrl_env.fleet.serve import Controller
from agentrl_env.fleet.store import CLAIM_S, STANDING_S, KeptSession, MemoryState
from agentrl_env.server.failover import MAX_TURNS_BYTES
from agentrl_env.server.serve import NOWHERE, EnvServer
from agentrl_env.session.history import KEPT_TURNS
from agentrl_env.wire import OpenRequest
from tests.env.redis_server import RedisServer
from tests.env.tasks import Clock, Quick, until


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "redis"])
async def state(request):
    in_memory = request.param == "memory"
    made = MemoryState() if in_memory else RedisState(request.getfixturevalue("redis").url)
    await made.start()
    yield made
    await made.aclose()


async def test_an_opening_belongs_to_the_first_server_that_claims_it(state):
    assert await state.claimed("r") is None
    assert await state.claim("r", "a") == "a"
    assert await state.claim("r", "b") == "a"
    assert await state.claimed("r") == "a"


async def test_a_claim_is_given_up_by_its_owner_alone(state):
    await state.claim("r", "a")
    await state.unclaim("r", "b")
    assert await state.claimed("r") == "a"
    await state.unclaim("r", "a")
    assert await state.claim("r", "b") == "b"


async def test_a_server_is_known_once_it_was_seen_and_lost_for_good(state):
    assert not await state.knows("a")
    assert not await state.seen("a", 60)
    await state.saw("a")
    assert await state.knows("a")
    assert await state.seen("a", 60)
    assert not await state.seen("a", 0)
    assert not await state.is_lost("a")
    await state.lose("a")
    assert await state.is_lost("a")


async def test_where_a_session_stands_is_kept_for_its_holder_alone(state):
    assert await state.kept("a.1") is None
    assert await state.keep("a.1", "a", 1, b"one")
    assert await state.keep("a.1", "a", 2, b"two")
    assert not await state.keep("a.1", "b", 3, b"three")
    assert await state.keep("a.1", "a", 1, b"one, told late")
    assert await state.kept("a.1") == KeptSession(holder="a", seq=2, kept=b"two")


def turns(*numbers, size=1):
    return tuple(b"%d" % number * size for number in numbers)


async def test_turns_are_kept_one_after_the_other_however_often_they_are_told(state):
    await state.keep("a.1", "a", 0, b"zero")
    await state.keep("a.1", "a", 1, b"one", turns(1))
    await state.keep("a.1", "a", 1, b"one", turns(1))
    await state.keep("a.1", "a", 3, b"three", turns(1, 2, 3))
    await state.keep("a.1", "a", 2, b"late", turns(2))
    assert (await state.kept("a.1")).turns == turns(1, 2, 3)
    await state.move("a.1", "a", "b", died=True)
    await state.keep("a.1", "b", 4, b"four", turns(1, 2, 3, 4))
    assert (await state.kept("a.1")).turns == turns(1, 2, 3, 4)
    await state.keep("a.1", "b", 7, b"seven", turns(6, 7))  # the fifth was never told
    assert (await state.kept("a.1")).turns == turns(6, 7)
    await state.forget_kept("a.1", "b")
    assert (await state.kept("a.1")).turns == ()


async def test_of_many_or_large_turns_the_last_are_kept(state):
    for seq in range(1, KEPT_TURNS + 10):
        await state.keep("a.1", "a", seq, b"here", turns(seq))
    assert (await state.kept("a.1")).turns == turns(*range(10, KEPT_TURNS + 10))
    await state.keep("a.2", "a", 9, b"here", turns(*range(1, 10), size=MAX_TURNS_BYTES // 4))
    assert (await state.kept("a.2")).turns == turns(6, 7, 8, 9, size=MAX_TURNS_BYTES // 4)
    await state.keep("a.2", "a", 11, b"here", turns(1, 2, size=MAX_TURNS_BYTES))
    assert (await state.kept("a.2")).turns == turns(1, 2, size=MAX_TURNS_BYTES)


async def test_a_session_is_given_on_by_who_knows_its_holder(state):
    assert not await state.move("a.1", "a", "b", died=True)
    await state.keep("a.1", "a", 1, b"one")
    moved = [await state.move("a.1", "a", server, died=True) for server in ("b", "c")]
    assert moved == [True, False]
    assert await state.move("a.1", "b", "c", died=False)
    assert await state.kept("a.1") == KeptSession(holder="c", seq=1, kept=b"one", deaths=1)
    assert not await state.keep("a.1", "a", 1, b"late")
    assert await state.keep("a.1", "c", 1, b"two")
    assert await state.kept("a.1") == KeptSession(holder="c", seq=1, kept=b"two")


async def test_a_session_is_forgotten_by_its_holder_alone(state):
    for session_id in ("a.1", "a.2"):
        await state.keep(session_id, "a", 1, b"one")
    await state.forget_kept("a.1", "b")
    assert await state.kept("a.1") is not None
    await state.forget_kept("a.1", "a")
    assert await state.kept("a.1") is None
    await state.move("a.2", "a", "b", died=True)
    await state.forget_kept("a.2", "b")
    assert await state.kept("a.2") == KeptSession(holder="b", seq=1, kept=None, deaths=1)
    await state.forget_kept("a.3", "a")


def test_the_memory_of_where_sessions_stand_is_bounded():
    async def run() -> None:
        clock = Clock()
        state = MemoryState(clock, kept=10)
        for number in range(50):
            await state.keep(f"a.{number}", "a", 1, b"here")
        assert [number for number in range(50) if await state.kept(f"a.{number}")] == [*range(40, 50)]
        clock.now += STANDING_S
        assert await state.kept("a.49") is None
        await state.keep("a.50", "a", 1, b"here")
        assert len(state._sessions) == 1

    asyncio.run(run())


async def test_redis_forgets_where_sessions_stand_in_time(redis):
    state = RedisState(redis.url)
    await state.start()
    await state.keep("a.1", "a", 1, b"one", turns(1))
    await state.move("a.1", "a", "b", died=True)
    for key in state._session("a.1"):
        assert 0 < await state._redis.ttl(key) <= STANDING_S
    await state.forget_kept("a.1", "b")
    key, turns_key = state._session("a.1")
    assert 0 < await state._redis.ttl(key) <= CLAIM_S
    assert not await state._redis.exists(turns_key)
    await state.keep("a.2", "a", 1, b"one", turns(1))
    for key in state._session("a.2"):
        assert 0 < await state._redis.ttl(key) <= STANDING_S
    await state.aclose()


def test_the_memory_of_openings_and_servers_is_bounded():
    async def run() -> None:
        clock = Clock()
        state = MemoryState(clock, kept=10)
        for number in range(50):
            await state.claim(f"r{number}", "a")
            await state.saw(f"s{number}")
            await state.lose(f"s{number}")
        assert await state.claimed("r39") is None
        assert await state.claimed("r40") == "a"
        assert not await state.knows("s39")
        assert await state.is_lost("s49")
        clock.now += 1e6
        await state.claim("new", "a")
        assert await state.claimed("r49") is None

    asyncio.run(run())


async def test_controllers_share_the_state_of_their_fleet_alone(redis):
    one, two, other = RedisState(redis.url), RedisState(redis.url), RedisState(redis.url, fleet="other")
    for state in (one, two, other):
        await state.start()
    await one.claim("r", "a")
    assert await two.claimed("r") == "a"
    assert await other.claimed("r") is None
    for state in (one, two, other):
        await state.aclose()


async def test_no_redis_is_one_clear_sentence(tmp_path):
    state = RedisState(f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(ServeError, match="Redis does not answer"):
        await state.start()
    await state.aclose()


async def test_a_redis_that_hangs_is_not_waited_for_without_end(redis, monkeypatch):
    monkeypatch.setattr(redis_state, "ANSWER_S", 0.1)
    state = RedisState(redis.url)
    await state.start()
    redis.pause()
    with pytest.raises(StateUnavailable):
        await state.claimed("r")
    redis.go_on()
    assert await state.claimed("r") is None
    await state.aclose()


class Pair:
    """Two controllers of one fleet, in one Redis, and a server that dials both."""

    def __init__(self, redis: RedisServer, clock: Clock) -> None:
        self.controllers = [
            Controller(Fleet(state=RedisState(redis.url), clock=clock, queue_s=2.0), port=0, token="secret")
            for _ in range(2)
        ]

    async def __aenter__(self) -> "Pair":
        for controller in self.controllers:
            await controller.start()
        urls = [controller.url for controller in self.controllers]
        self.server = EnvServer([Quick], host=NOWHERE, controllers=urls, token="secret", drain_s=0)
        await self.server.start()
        await until(lambda: all(c.fleet.members for c in self.controllers))
        self.clients = [EnvClient.connect(c.url, token="secret", timeout=20) for c in self.controllers]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for client in self.clients:
            await client.aclose()
        await self.server.stop()
        for controller in self.controllers:
            await controller.stop()


async def test_a_server_dials_every_controller_and_each_serves_the_same_sessions(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        await session.step(ToolCall.of("note", text="one"))
        elsewhere = await pair.clients[1].resume(session.session_id)
        result = await elsewhere.step(ToolCall.of("note", text="two"))
        assert result.messages[0].content.startswith("2 ")


async def test_a_controller_can_die_and_the_other_goes_on(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        await pair.controllers[0].stop()
        elsewhere = await pair.clients[1].resume(session.session_id)
        assert (await elsewhere.step(ToolCall.of("finish"))).terminated
        assert (await pair.clients[1].open("quick")).turn == 0


async def test_an_opening_repeated_at_another_controller_is_the_same_session(redis):
    async with Pair(redis, Clock()) as pair:
        request = OpenRequest(task="quick", request_id="again")
        asking = [client.backend.open(request) for client in pair.clients * 3]
        assert len({info.session_id for info in await asyncio.gather(*asking)}) == 1
        assert pair.server.pool.open_sessions == 1


async def test_a_server_that_one_controller_hears_is_not_lost_for_the_other(redis):
    clock = Clock()
    async with Pair(redis, clock) as pair:
        deaf, hearing = (controller.fleet for controller in pair.controllers)
        (member,) = deaf.members.values()
        member.seen -= 100
        await hearing.roster.look()
        await deaf.roster.look()
        assert not await deaf.state.is_lost(member.server_id)
        assert member.server_id in deaf.members


async def test_what_one_controller_declares_lost_is_lost_for_all(redis):
    async with Pair(redis, Clock()) as pair:
        session = await pair.clients[0].open("quick")
        old = pair.server.pool.server_id
        await pair.controllers[0].fleet.roster.lose(old, "it was silent")
        for link in list(pair.server._dialer._open):
            link.websocket.transport.abort()
        await until(lambda: all(c.fleet.members and old not in c.fleet.members for c in pair.controllers))
        for client in pair.clients:
            with pytest.raises(SessionLost):
                await client.resume(session.session_id)


async def test_while_redis_is_away_sessions_go_on_and_openings_wait_or_are_refused(redis, monkeypatch):
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
