"""Two engines of one policy with little memory and drained weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from agentrl_train.engine.pool import EnginePool
from agentrl_train.types import SamplingParams
from tests.engine_contract import MAX_CONTEXT, Subject, prompt, sampled, version_seed

pytestmark = pytest.mark.vllm

SESSIONS, MOST = 32, 16
KV_GIB = 4 * MAX_CONTEXT / 2**20
"""KV cache for four full contexts per engine. A token of the contract model takes one KiB."""


@pytest.fixture(scope="module")
def pair(start_engine: Callable[..., EnginePool]) -> Iterator[Subject]:
    """Return two engines of one policy."""
    engine = start_engine(replicas=2, push="drained", kv_gib=KV_GIB)
    yield Subject(engine, tolerance=1e-3)
    asyncio.run(engine.close())


@pytest.mark.extended
async def test_full_cache_loses_no_completion_and_lowers_limit(pair: Subject) -> None:
    engine = pair.engine
    assert isinstance(engine, EnginePool)
    running = [
        asyncio.create_task(pair.generate(prompt(n), key=f"full {n}", max_new_tokens=490, seed=n))
        for n in range(SESSIONS)
    ]
    assert engine.limits == [MOST, MOST]
    lowest = list(engine.limits)
    while not all(task.done() for task in running):
        await asyncio.sleep(0.05)
        lowest = [min(pair) for pair in zip(lowest, engine.limits, strict=True)]
    assert max(lowest) < MOST
    assert min(lowest) >= 1
    for number, task in enumerate(running):
        done = task.result()
        assert pair.difference(prompt(number), done) < pair.tolerance


async def test_drained_push_updates_engines_between_completions(pair: Subject) -> None:
    engine, before = pair.engine, pair.version
    assert isinstance(engine, EnginePool)
    counted = engine.statistics()["sampled_tokens"]
    running = [
        asyncio.create_task(pair.generate(prompt(n), key=f"drained {n}", max_new_tokens=200, seed=n))
        for n in range(8)
    ]
    await sampled(engine, counted + 8)
    after = await pair.publish(version_seed(pair), "current")
    done = await asyncio.gather(*running)
    assert {version for completion in done for version in completion.versions} <= {before, after}
    assert all(len(set(completion.versions)) == 1 for completion in done)
    assert any(set(completion.versions) == {before} for completion in done)
    sampling = SamplingParams(max_new_tokens=8, seed=1)
    probes = await asyncio.to_thread(engine.probe, prompt(1), sampling=sampling, policies=("current",))
    assert [set(probe.versions) for probe in probes] == [{after}, {after}]
    for number, completion in [*enumerate(done), *((1, probe) for probe in probes)]:
        assert pair.difference(prompt(number), completion) < pair.tolerance
