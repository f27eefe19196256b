"""The pool of engine processes: session affinity, weight updates and restarts."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl_train.engine.options import ServingOptions
from agentrl_train.engine.pool import EnginePool
from agentrl_train.errors import EngineError
from agentrl_train.types import SamplingParams
from tests.engine_contract import MAX_CONTEXT, STOP, Subject, contract_model, prompt, sampled, version_seed
from tests.processes import process_ids

pytestmark = pytest.mark.slow

SESSIONS, OPENING, REPLY = 8, 60, 4


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ServingOptions:
    """Return the options of a torch engine process."""
    folder = tmp_path_factory.mktemp("pool")
    contract_model(0).save_pretrained(folder)
    return ServingOptions(
        model=str(folder),
        stop_token_ids=[STOP],
        max_sessions=16,
        max_context=MAX_CONTEXT,
        module="agentrl_train.placement.serving",
    )


@pytest.fixture(scope="module")
def pool(options: ServingOptions) -> Iterator[Subject]:
    """Return a pool of two torch engine processes. Their supervision is the same as for vLLM."""
    engine = EnginePool(options, replicas=2, deadline_s=120.0, liveness_s=10.0)
    yield Subject(engine, tolerance=1e-4)
    asyncio.run(engine.close())


async def prefilled(pool: Subject) -> float:
    """Return the number of prefilled tokens after the next heartbeat."""
    before, now = -1.0, pool.engine.statistics()["prefilled_tokens"]
    while now != before:
        await asyncio.sleep(0.6)  # four heartbeats per second
        before, now = now, pool.engine.statistics()["prefilled_tokens"]
    return now


@pytest.mark.extended
async def test_session_stays_on_replica_with_its_prefix(pool: Subject) -> None:
    contexts = [prompt(n, OPENING) for n in range(SESSIONS)]

    async def turn(number: int) -> None:
        done = await pool.generate(contexts[number], key=f"session {number}", seed=number)
        contexts[number] = [*contexts[number], *done.token_ids, *prompt(number, REPLY)]

    await asyncio.gather(*(turn(n) for n in range(SESSIONS)))
    before = await prefilled(pool)
    assert before >= SESSIONS * (OPENING - 1)
    await asyncio.gather(*(turn(n) for n in range(SESSIONS)))
    assert 0 < await prefilled(pool) - before <= SESSIONS * (REPLY + 1)


async def test_every_replica_loads_weights(pool: Subject) -> None:
    engine = pool.engine
    assert isinstance(engine, EnginePool)
    version = await pool.publish(version_seed(pool), "current")
    sampling = SamplingParams(max_new_tokens=8, seed=1)
    done = await asyncio.to_thread(engine.probe, prompt(1), sampling=sampling, policies=("current",))
    assert len(done) == 2
    for completion in done:
        assert set(completion.versions) == {version}
        assert pool.difference(prompt(1), completion) < pool.tolerance


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.extended)])
async def test_dead_or_hung_engine_is_restarted_with_last_weights_and_loses_no_completion(
    pool: Subject, number: signal.Signals
) -> None:
    engine = pool.engine
    assert isinstance(engine, EnginePool)
    version = await pool.publish(version_seed(pool), "current")
    restarts = engine.restarts
    before, victim = engine.statistics()["sampled_tokens"], process_ids(engine)[0]

    async def session(n: int) -> float:
        context, worst = prompt(n), 0.0
        for turn in range(4):
            done = await pool.generate(context, key=f"killed {n}", max_new_tokens=110, seed=turn)
            assert set(done.versions) == {version}
            worst = max(worst, pool.difference(context, done))
            context = [*context, *done.token_ids]
        return worst

    running = [asyncio.create_task(session(n)) for n in range(SESSIONS)]
    await sampled(engine, before + SESSIONS)
    os.kill(victim, number)
    assert max(await asyncio.gather(*running)) < pool.tolerance
    sampling = SamplingParams(max_new_tokens=8, seed=1)
    done = await asyncio.to_thread(engine.probe, prompt(1), sampling=sampling, policies=("current",))
    assert [set(completion.versions) for completion in done] == [{version}, {version}]
    assert engine.restarts == restarts + 1
    with pytest.raises(ProcessLookupError):
        os.killpg(victim, 0)


@pytest.mark.extended
async def test_engine_does_not_import_a_module_of_the_working_directory_in_place_of_a_standard_one(
    options: ServingOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not the random of Python')")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    engine = EnginePool(options, deadline_s=120.0)
    try:
        sampling = SamplingParams(max_new_tokens=4, seed=1)
        done = await engine.generate(prompt(0), sampling=sampling, session_key="one")
        assert len(done.token_ids) > 0
    finally:
        await engine.close()


@pytest.mark.extended
async def test_repeatedly_failing_engine_is_abandoned_with_reason(
    options: ServingOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    engine = EnginePool(replace(options, module="tests.train.engine.breaking"), deadline_s=120.0)
    try:
        with pytest.raises(
            EngineError, match=r"not restarted any more: EngineError: the engine failed .* a cable was pulled"
        ):
            await engine.generate(
                prompt(0), sampling=SamplingParams(max_new_tokens=4, seed=1), session_key="one"
            )
        assert engine.restarts == 2
    finally:
        await engine.close()
