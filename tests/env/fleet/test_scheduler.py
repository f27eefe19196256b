"""Placement and the fair queue, with servers without links."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.fleet.remote_server import Outbox, RemoteServer
from agentrl_env.fleet.scheduler import Placement, least_loaded
from agentrl_env.types import TaskInfo
from agentrl_env.wire import Beat, Hello, SessionRow


def remote(
    name: str, *, capacity: int = 2, tasks: tuple[str, ...] = ("shop",), held: int = 0
) -> RemoteServer:
    rows = tuple(SessionRow(session_id=f"{name}.{n}", task=tasks[0]) for n in range(held))
    infos = tuple(TaskInfo(name=task, max_turns=3) for task in tasks)
    made = RemoteServer(Hello(server_id=name, tasks=infos, capacity=capacity, sessions=rows), lambda: 0.0)
    made.link(Outbox())
    return made


def fleet(*members: RemoteServer, task_limits=None, client_limit=None) -> Placement:
    by_id = {m.server_id: m for m in members}
    return Placement(by_id, task_limits=task_limits or {}, client_limit=client_limit)


def test_server_with_the_smallest_load_is_chosen():
    small, large = remote("small", capacity=2, held=1), remote("large", capacity=10, held=4)
    assert least_loaded([small, large], "shop") is large


@pytest.mark.parametrize("state", ["draining", "leaving", "full"])
def test_unavailable_server_is_not_chosen(state):
    first, second = remote("a"), remote("b", held=1)
    setattr(first, state, True)
    assert least_loaded([first, second], "shop") is second


def test_server_without_a_link_or_the_task_is_not_chosen():
    away, other = remote("a"), remote("b", tasks=("sql",))
    away.unlink(away._outbox)
    assert least_loaded([away, other], "shop") is None


async def test_reserved_place_counts_until_the_session_is_open():
    server = remote("a", capacity=1)
    placement = fleet(server)
    assert await placement.take("shop", "", 0) is server
    assert await placement.take("shop", "", 0) is None
    server.hear_beat(Beat(opened=(SessionRow(session_id="a.1", task="shop"),)))
    placement.release(("shop", ""), server)
    assert await placement.take("shop", "", 0) is None
    server.hear_beat(Beat(ended=("a.1",)))
    assert await placement.take("shop", "", 0) is server


async def test_finished_groups_are_removed():
    server = remote("a", capacity=1)
    placement = fleet(server)
    for number in range(50):
        client, session_id = f"job-{number}", f"a.{number}"
        assert await placement.take("shop", client, 0) is server
        server.hear_beat(Beat(opened=(SessionRow(session_id=session_id, task="shop", client=client),)))
        placement.release(("shop", client), server)
        server.hear_beat(Beat(ended=(session_id,)))
    assert not server.held
    assert not placement._reserved


async def test_clients_take_turns_and_each_is_served_in_order():
    server = remote("a", capacity=1, held=1)
    placement, served = fleet(server), []

    async def want(client: str, number: int) -> None:
        assert await placement.take("shop", client, 60) is server
        served.append((client, number))

    waiting = [asyncio.create_task(want("greedy", n)) for n in range(3)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(want("modest", 0)))
    await asyncio.sleep(0)
    assert placement.waiting == 4
    server.hear_beat(Beat(ended=("a.0",)))
    placement.serve()
    for _ in range(4):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if len(served) < 4:
            placement.release(("shop", served[-1][0]), server)
    await asyncio.gather(*waiting)
    assert served == [("greedy", 0), ("modest", 0), ("greedy", 1), ("greedy", 2)]


async def test_task_limit_applies_to_the_whole_fleet():
    servers = [remote("a", tasks=("shop", "sql")), remote("b", tasks=("shop", "sql"))]
    placement = fleet(*servers, task_limits={"shop": 1})
    assert await placement.take("shop", "", 0) is not None
    assert await placement.take("shop", "", 0) is None
    assert await placement.take("sql", "", 0) is not None


async def test_client_limit_does_not_affect_other_clients():
    placement = fleet(remote("a", capacity=10), client_limit=2)
    taken = [await placement.take("shop", "one", 0) for _ in range(3)]
    assert [place is None for place in taken] == [False, False, True]
    assert await placement.take("shop", "two", 0) is not None


async def test_blocked_group_does_not_block_others():
    shop, sql = remote("a", capacity=1, held=1), remote("b", tasks=("sql",), capacity=1, held=1)
    placement = fleet(shop, sql)
    first = asyncio.create_task(placement.take("shop", "", 60))
    second = asyncio.create_task(placement.take("sql", "", 60))
    await asyncio.sleep(0)
    sql.hear_beat(Beat(ended=("b.0",)))
    placement.serve()
    assert await second is sql
    assert not first.done()
    first.cancel()


async def test_cancelled_opening_releases_its_place():
    server = remote("a", capacity=1)
    placement = fleet(server)
    assert await placement.take("shop", "", 0) is server
    waiting = asyncio.create_task(placement.take("shop", "", 60))
    await asyncio.sleep(0)
    placement.release(("shop", ""), server)  # is reserved for the waiting opening
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert server.opening == 0
    assert placement.waiting == 0


async def test_wait_for_a_place_times_out():
    assert await fleet(remote("a", capacity=1, held=1)).take("shop", "", 0.001) is None


@given(st.lists(st.tuples(st.sampled_from("tre"), st.integers(0, 3)), max_size=60))
def test_reservations_never_exceed_the_capacity(moves):
    """Counts are correct for any order of take (t), release (r) and end (e)."""

    async def run() -> None:
        servers = [remote("a", capacity=2), remote("b", capacity=1)]
        placement, promised, opened = fleet(*servers, client_limit=2), [], []
        for number, (move, which) in enumerate(moves):
            if move == "t":
                client = f"c{which}"
                place = await placement.take("shop", client, 0)
                if place is not None:
                    promised.append((place, client))
            elif move == "r" and promised:
                place, client = promised.pop(which % len(promised))
                row = SessionRow(session_id=f"{place.server_id}.{number}", task="shop", client=client)
                place.hear_beat(Beat(opened=(row,)))
                placement.release(("shop", client), place)
                opened.append((place, row))
            elif move == "e" and opened:
                place, row = opened.pop(which % len(opened))
                place.hear_beat(Beat(ended=(row.session_id,)))
            for server in servers:
                assert len(server.sessions) + server.opening <= server.capacity
                assert sum(server.held.values()) == len(server.sessions)
            clients = [client for _, client in promised] + [row.client for _, row in opened]
            assert all(clients.count(client) <= 2 for client in clients)

    asyncio.run(run())
