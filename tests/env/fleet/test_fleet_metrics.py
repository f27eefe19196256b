"""Metrics of a controller: the sums over its servers."""

import asyncio
import os
import signal
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl_env import EnvClient, ToolCall
from agentrl_env.fleet.controller import FleetService
from agentrl_env.fleet.registry import MAX_SOURCES, FleetCounts
from agentrl_env.fleet.remote_server import RemoteServer
from agentrl_env.fleet.serve import ControllerServer
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.server.telemetry.metrics import BUCKETS_S, Metrics
from agentrl_env.types import Counts, Durations, TaskCounts
from agentrl_env.wire import Beat, Hello
from tests.env.fleet.test_controller import Site, kill
from tests.env.fleet.test_supervisor import ask, serving, workers_of
from tests.env.tasks import Clock, Guess, Quick, until


async def scrape(url, token=None):
    """Return every sample by name and labels, ordered by name."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
        answer = await http.get(f"{url}/metrics")
    answer.raise_for_status()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def play(session, *, reward=1.0):
    await session.step(ToolCall.of("gain", amount=0.25))
    await session.step(ToolCall.of("made up"))
    await session.step(ToolCall.of("finish", reward=reward))


async def scraped_until(url, token, *conditions):
    """Scrape until the last heartbeats have arrived."""
    end = time.monotonic() + 60
    while True:
        found = await scrape(url, token)
        if all(found.get(key) == value for key, value in conditions):
            return found
        assert time.monotonic() < end, {key: found.get(key) for key, _ in conditions}
        await asyncio.sleep(0.05)


async def whole(url, token, episodes):
    return await scraped_until(
        url,
        token,
        (("agentrl_sessions_ended_total", "completed", "quick"), episodes),
        (("agentrl_steps_total", "quick"), 3 * episodes),
    )


async def test_one_server_counts_success_and_reward_by_task():
    server = EnvServer([Quick, Guess], port=0, drain_s=0.0)
    await server.start()
    try:
        async with EnvClient.connect(server.url) as client:
            await play(await client.open("quick"), reward=1.0)
            await play(await client.open("quick"), reward=-0.5)
            crashed = await client.open("quick")
            await crashed.step(ToolCall.of("crash"))
            await (await client.open("quick")).close()
        found = await scrape(server.url)
        fleet = await server.pool.fleet()
    finally:
        await server.stop()
    assert found["agentrl_episodes_succeeded_total", "quick"] == 1
    assert found["agentrl_episode_reward_count", "quick"] == 2  # a failure is not a reward of zero
    assert found["agentrl_episode_reward_sum", "quick"] == 1.0
    quick = fleet.counts["quick"]
    assert (quick.scored, quick.succeeded, quick.reward, quick.steps) == (2, 1, 1.0, 7)
    assert dict(quick.ended) == {"completed": 2, "failed_environment": 1, "cancelled": 1}
    assert fleet.servers[0].steps == 7


async def test_controller_exports_the_sums_of_its_servers():
    async with Site() as site:
        for _ in range(2):  # they do not listen on an address
            await site.serve(Quick)
        held = [await site.client.open("quick") for _ in range(4)]
        for session in held:
            await play(session)
        found = await whole(site.controller.url, "secret", 4)
        assert all(server.metrics.steps["quick"] == 6 for server in site.servers)
        assert found["agentrl_sessions_opened_total", "quick"] == 4
        assert found["agentrl_invalid_tool_calls_total", "quick"] == 4
        assert found["agentrl_episodes_succeeded_total", "quick"] == 4
        assert found["agentrl_episode_reward_count", "quick"] == 4
        assert found["agentrl_episode_reward_sum", "quick"] == 5.0
        assert found["agentrl_step_seconds_count",] == 12
        assert found["agentrl_step_seconds_bucket", "+Inf"] == 12
        assert found["agentrl_step_seconds_sum",] > 0
        assert found["agentrl_tool_seconds_count", "quick", "gain"] == 4
        assert found["agentrl_tool_seconds_count", "quick", "finish"] == 4
        fleet = await site.fleet.fleet()
        assert fleet.counts["quick"].succeeded == 4
        assert [server.steps for server in fleet.servers] == [6, 6]


async def test_no_count_falls_or_doubles_when_a_server_is_replaced():
    async with Site(lost_after_s=60.0) as site:
        first = await site.serve(Quick)
        await play(await site.client.open("quick"))
        before = await whole(site.controller.url, "secret", 1)
        source = first.metrics.counts().source
        await kill(first)
        await site.fleet.registry.lose(first.pool.server_id, "no heartbeat")
        assert (await whole(site.controller.url, "secret", 1)) is not None
        assert (await scrape(site.controller.url, "secret"))["agentrl_fleet_servers_lost",] >= 1
        await first._links.start()  # it was away for too long and returns with another id
        await until(lambda: len(site.fleet.servers) == 1)
        assert first.metrics.counts().source == source
        await site.serve(Quick)
        for _ in range(2):
            await play(await site.client.open("quick"))
        after = await whole(site.controller.url, "secret", 3)
        counted = [key for key in before if key[0].endswith(("_total", "_count", "_bucket"))]
        counted = [
            key for key in counted if not key[0].startswith("agentrl_server_")
        ]  # disappear with their server
        assert all(after[key] >= before[key] for key in counted)


async def test_counts_are_complete_on_a_controller_that_starts_later():
    async with Site() as site:
        later = ControllerServer(FleetService(), port=0, token="secret")
        await site.serve(Quick, controllers=[later.url])
        await play(await site.client.open("quick"))
        await later.start()
        try:
            await whole(later.url, "secret", 1)
        finally:
            await later.stop()


@pytest.mark.slow
async def test_counts_of_workers_stay_complete_if_one_is_killed():
    with serving("--workers", "2", "--drain", "0") as (_, url):
        async with EnvClient.connect(url, timeout=60) as client:
            found = await workers_of(client)  # four steps
            key = ("agentrl_steps_total", "process")
            await scraped_until(url, None, (key, 4))
            dead = next(iter(found))
            os.kill(dead, signal.SIGKILL)
            # The replacement serves, and no count has fallen.
            await scraped_until(url, None, (key, 4), (("agentrl_fleet_servers_lost",), 1))
            await scraped_until(url, None, (key, 4), (("agentrl_fleet_servers",), 2))
            assert await ask(await client.open("process", wait=20)) != dead
            scraped = await scraped_until(url, None, (key, 5))
            assert scraped["agentrl_tool_seconds_count", "process", "ask"] == 5
            assert scraped["agentrl_step_seconds_count",] == 5


def hello(*tasks):
    return Hello(server_id="a", tasks=tasks, capacity=4)


async def test_false_reports_affect_only_the_reporters_own_tasks():
    server = EnvServer([Quick], port=0, drain_s=0.0)
    (task,) = (await server.pool.tasks()).tasks
    await server.stop()
    metrics = Metrics()
    counts, remote = FleetCounts(metrics), RemoteServer(hello(task))

    def tell(source="x", **fields):
        counts.add(remote, Beat(counts=Counts(source=source, **fields)).counts)

    calls = Durations(buckets=(1,) * (len(BUCKETS_S) + 1), seconds=1.0)
    tell(
        tasks={"quick": TaskCounts(steps=5, ended={"completed": 2, "won": 9}), "other": TaskCounts(steps=7)},
        tools={"quick": {"gain": calls, "x" * 1000: calls}, "other": {"gain": calls}},
        step_seconds=calls,
    )
    tell(tasks={"quick": TaskCounts(steps=3)}, step_seconds=Durations())  # it decreases
    tell(tasks={"quick": TaskCounts(steps=3)}, step_seconds=Durations(buckets=(1, 2), seconds=9.0))
    for number in range(3):
        tell(str(number), tasks={"quick": TaskCounts(opened=2**53, reward=1e300)})
    assert metrics.steps == {"quick": 5}
    assert dict(metrics.ended) == {("quick", "completed"): 2}
    assert set(metrics.tool_seconds) == {("quick", "gain")}
    assert metrics.step_seconds.counted() == calls
    assert b"\x00" not in metrics.render({})
    assert metrics.by_task()["quick"].opened == 2**53
    for number in range(MAX_SOURCES + 10):
        tell(f"source {number}")
    assert len(counts._last) == MAX_SOURCES


async def test_lost_server_is_listed_for_ten_minutes():
    clock = Clock()
    async with Site(clock=clock) as site:
        server = await site.serve(Guess)
        await site.client.open("guess")
        await site.fleet.registry.lose(server.pool.server_id, "its process ended")
        clock.now += 30
        (lost,) = (await site.fleet.fleet()).lost
        assert (lost.tasks, lost.open, lost.reason, lost.lost_s) == (("guess",), 1, "its process ended", 30)
        assert site.fleet.gauges()["agentrl_fleet_servers_lost"] == 1
        assert site.fleet.metrics.ended["guess", "session_lost"] == 1
        assert (await site.fleet.fleet()).counts["guess"].ended == {"session_lost": 1}
        clock.now += 600
        assert (await site.fleet.fleet()).lost == ()


async def test_server_that_stops_cleanly_is_not_lost_and_reports_its_last_counts():
    async with Site() as site:
        server = await site.serve(Quick)
        await play(await site.client.open("quick"))
        await server.stop()
        await until(lambda: not site.fleet.servers)
        fleet = await site.fleet.fleet()
        assert fleet.lost == ()
        assert (fleet.counts["quick"].steps, dict(fleet.counts["quick"].ended)) == (3, {"completed": 1})
