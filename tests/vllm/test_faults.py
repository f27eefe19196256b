"""Engines that die, hang or hold wrong weights. Callers get a late completion or an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from agentrl_train.engine import pool
from agentrl_train.engine.pool import EnginePool
from agentrl_train.engine.transfer import SharedWeights
from agentrl_train.errors import EngineError, WeightMismatch
from agentrl_train.types import Completion, SamplingParams, TokenSequence
from agentrl_train.weights import Canary, Drift, Publisher
from tests.engine_contract import (
    VOCABULARY,
    Subject,
    contract_model,
    prompt,
    reference_logprobs,
    sampled,
    version_seed,
)
from tests.processes import process_ids

pytestmark = pytest.mark.vllm


def members(leader: int) -> list[int]:
    """Return the pids of a process group."""
    found = subprocess.run(["pgrep", "-g", str(leader)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def core_of(leader: int) -> int:
    """Return the pid of the process that holds the model, in the group of ``leader``."""
    names = {number: Path(f"/proc/{number}/cmdline").read_text() for number in members(leader)}
    return next(number for number, name in names.items() if "EngineCore" in name)


def gone(leader: int) -> bool:
    """Return True if a process group exits within a minute."""
    deadline = time.monotonic() + 60
    while members(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(leader)


@pytest.mark.parametrize("victim", ["core", pytest.param("hangs", marks=pytest.mark.extended)])
async def test_killed_engine_is_restarted_and_loses_no_completion(subject: Subject, victim: str) -> None:
    engine = subject.engine
    assert isinstance(engine, EnginePool)
    version = await subject.publish(version_seed(subject))
    before, restarts = engine.statistics()["sampled_tokens"], engine.restarts

    async def session(number: int) -> float:
        context, worst = prompt(number), 0.0
        for turn in range(4):
            done = await subject.generate(context, key=f"{victim} {number}", max_new_tokens=110, seed=turn)
            assert set(done.versions) == {version}
            worst = max(worst, subject.difference(context, done))
            context = [*context, *done.token_ids]
        return worst

    running = [asyncio.create_task(session(n)) for n in range(16)]
    await sampled(engine, before + 16)
    leader = process_ids(engine)[0]
    os.kill(core_of(leader), signal.SIGSTOP if victim == "hangs" else signal.SIGKILL)
    assert max(await asyncio.gather(*running)) < subject.tolerance
    assert engine.restarts == restarts + 1
    assert gone(leader)


async def test_restarted_engine_has_weights_published_meanwhile(
    subject: Subject,
) -> None:
    assert isinstance(subject.engine, EnginePool)
    leader = process_ids(subject.engine)[0]
    os.kill(leader, signal.SIGKILL)
    version = await subject.publish(version_seed(subject))
    done = await subject.generate(prompt(1), key="after", seed=1)
    assert set(done.versions) == {version}
    assert subject.difference(prompt(1), done) < subject.tolerance
    assert gone(leader)


async def test_canary_detects_different_weights(subject: Subject) -> None:
    engine, seed = subject.engine, version_seed(subject)
    assert isinstance(engine, EnginePool)

    def publisher(trainers_seed: int) -> Publisher:
        model = contract_model(trainers_seed)
        canary = Canary(
            engine.probe,
            logprobs=lambda rows: [trainers_logprobs(model, row) for row in rows],
            vocabulary=VOCABULARY,
            temperature=1.0,
            tolerance=Drift(worst=1e-3, mean=1e-3),
        )
        return Publisher(engine, canary=canary)

    subject.version += 1
    subject.held["current", subject.version] = seed
    weights = dict(contract_model(seed).named_parameters())
    await asyncio.to_thread(publisher(seed).publish, weights, policy_version=subject.version)
    subject.version += 1
    subject.held["current", subject.version] = seed
    with pytest.raises(WeightMismatch, match="differ by"):
        await asyncio.to_thread(publisher(seed + 1).publish, weights, policy_version=subject.version)


def trainers_logprobs(model: PreTrainedModel, row: TokenSequence) -> np.ndarray:
    """Return the learner's log-probabilities [T]."""
    ids = row.token_ids.tolist()
    rest = Completion(token_ids=ids[1:], logprobs=[], versions=[], finish_reason="length")
    return np.concatenate([[0.0], reference_logprobs(model, ids[:1], rest, 1.0)])


async def test_engine_with_mismatched_weights_stays_paused(
    start_engine: Callable[..., EnginePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine()
    leader = None
    try:
        sampling = SamplingParams(max_new_tokens=3)
        await engine.generate(prompt(1), sampling=sampling, session_key="a")
        leader = process_ids(engine)[0]
        await refuses_lacking(engine)
        await refuses_stale(engine, monkeypatch)
        waiting = asyncio.create_task(engine.generate(prompt(1), sampling=sampling, session_key="b"))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done
    finally:
        await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(1), sampling=sampling, session_key="a")
    engine.release("a")
    await engine.close()
    assert gone(leader)


async def refuses_lacking(engine: EnginePool) -> None:
    weights = dict(contract_model(1).named_parameters())
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightMismatch, match=r"1 parameters were not in .* model\.layers\.1\.mlp\.down"):
        await asyncio.to_thread(engine.publish, weights, policy_version=1)


async def refuses_stale(engine: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Altering a tensor in transit changes its layer's checksum."""

    class Corrupted(SharedWeights):
        def __init__(self, state, **options):
            whole = SharedWeights(state, **options)
            name = "model.layers.1.mlp.down_proj.weight"
            super().__init__({**state, name: contract_model(9).get_parameter(name)}, **options)
            self.fingerprint = whole.fingerprint
            whole.close()

    monkeypatch.setattr(pool, "SharedWeights", Corrupted)
    weights = dict(contract_model(2).named_parameters())
    with pytest.raises(WeightMismatch, match=r"layers \['1'\]"):
        await asyncio.to_thread(engine.publish, weights, policy_version=2)


async def test_engine_that_cannot_start_reports_reason_without_retry(
    start_engine: Callable[..., EnginePool], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    engine = start_engine(model=tmp_path)
    with pytest.raises(EngineError, match=r"not restarted any more: the engine did not start: .*unheard_of"):
        await engine.generate(prompt(1), sampling=SamplingParams(max_new_tokens=2), session_key="a")
    await engine.close()


def test_engines_exit_with_their_trainer(python: str, model_folder: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("orphan.py")), python, str(model_folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert trainer.stdout is not None
    leader = int(trainer.stdout.readline())
    assert members(leader)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(leader)
