"""Engines that release their device while the learner works, in this process and in a separate process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.training.engines import TORCH_SERVING
from agentrl_train.types import SamplingParams
from tests.engine_contract import MAX_CONTEXT, STOP, contract_model, prompt, sampled
from tests.processes import process_ids

SHORT = SamplingParams(max_new_tokens=6, seed=1)


def in_this_process() -> TorchEngine:
    return TorchEngine(
        {"current": contract_model(0)}, stop_token_ids=[STOP], max_sequences=4, max_context=MAX_CONTEXT
    )


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = in_this_process()
    yield engine
    await engine.close()


def storage(engine: TorchEngine) -> int:
    """Return the size of the KV cache in bytes."""
    cache = engine._replicas["current"]._cache
    return sum(tensor.nbytes for pair in cache._storage for tensor in pair)


async def test_sleep_drops_cache_and_wake_restores_completions(
    engine: TorchEngine,
) -> None:
    before = await engine.generate(prompt(1), sampling=SHORT, session_key="a")
    assert storage(engine) > 0
    await asyncio.to_thread(engine.sleep)
    assert storage(engine) == 0
    await asyncio.to_thread(engine.sleep)
    await asyncio.to_thread(engine.wake)
    after = await engine.generate(prompt(1), sampling=SHORT, session_key="a")
    assert list(after.token_ids) == list(before.token_ids)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def test_requests_during_sleep_are_answered_after_wake(engine: TorchEngine) -> None:
    long = SamplingParams(max_new_tokens=400, seed=3)
    alone = await engine.generate(prompt(2), sampling=long, session_key="alone")
    done = engine.statistics()["sampled_tokens"]
    under_way = asyncio.create_task(engine.generate(prompt(2), sampling=long, session_key="b"))
    await sampled(engine, done + 2)
    await asyncio.to_thread(engine.sleep)
    asked = asyncio.create_task(engine.generate(prompt(1), sampling=SHORT, session_key="c"))
    weights = dict(contract_model(0).named_parameters())
    await asyncio.to_thread(engine.publish, weights, policy_version=7)  # loads new weights during sleep
    assert not asked.done()
    await asyncio.to_thread(engine.wake)
    assert set((await asked).versions) == {7}
    assert list((await under_way).token_ids) == list(alone.token_ids)


@pytest.mark.slow
async def test_engine_process_samples_same_tokens_and_sleeps_and_restarts(
    tmp_path: Path,
) -> None:
    contract_model(0).save_pretrained(tmp_path)
    here = in_this_process()
    apart = EnginePool(
        ServingOptions(
            model=str(tmp_path),
            stop_token_ids=[STOP],
            max_sessions=4,
            max_context=MAX_CONTEXT,
            module=TORCH_SERVING,
        ),
        start_s=200.0,
    )
    try:
        for version, seed in enumerate((0, 1), start=1):
            weights = dict(contract_model(seed).named_parameters())
            for engine in (here, apart):
                await asyncio.to_thread(engine.publish, weights, policy_version=version)
            ours, theirs = [
                await e.generate(prompt(4), sampling=SHORT, session_key="a") for e in (here, apart)
            ]
            assert list(theirs.token_ids) == list(ours.token_ids)
            assert set(theirs.versions) == {version}
            assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-5)
        await asyncio.to_thread(apart.sleep)
        (process,) = process_ids(apart)
        os.kill(process, signal.SIGKILL)
        async with asyncio.timeout(60):
            while process_ids(apart):  # noqa: ASYNC110 (its death is noticed elsewhere)
                await asyncio.sleep(0.01)
        await asyncio.to_thread(apart.wake)
        again = await apart.generate(prompt(4), sampling=SHORT, session_key="a")
        assert list(again.token_ids) == list(ours.token_ids)
        assert set(again.versions) == {2}
        assert process_ids(apart) != [process]
        assert apart.restarts == 1
    finally:
        await asyncio.gather(here.close(), apart.close())
