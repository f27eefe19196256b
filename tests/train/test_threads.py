"""CPU threads follow the work. A component that computes alone gets all threads."""

import asyncio
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from agentrl_train.batch import pack
from agentrl_train.config import load_config
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.learner import Learner
from agentrl_train.models.architecture import Threads, release_idle_threads
from agentrl_train.training.compose import open_launcher, threads_of
from agentrl_train.types import SamplingParams
from tests.tiny_models import make_model
from tests.train.models.test_architectures import made

CONFIG = "examples/quickstart/train.toml"


class Counted:
    """Records the number of threads in each forward pass of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.threads: set[int] = set()
        model.register_forward_pre_hook(self._record)

    def _record(self, *_: Any) -> None:
        self.threads.add(torch.get_num_threads())


@pytest.fixture(autouse=True)
def restored() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("others", "expected"), [(0, 4), (1, 2)])
async def test_engine_shares_threads_with_others_that_compute(others: int, expected: int) -> None:
    threads, model = Threads(4), make_model()
    engine = TorchEngine(
        {"current": model}, stop_token_ids=[], max_sequences=2, max_context=64, threads=threads
    )
    counted = Counted(model.base_model)
    try:
        with threads.working() if others else nullcontext():
            await engine.generate([5, 6, 7], sampling=SamplingParams(max_new_tokens=4), session_key="a")
    finally:
        await engine.close()
    assert counted.threads == {expected}


@pytest.mark.parametrize(("others", "expected"), [(0, 4), (1, 2)])
async def test_learner_shares_threads_with_others_that_compute(others: int, expected: int) -> None:
    threads, model = Threads(4), make_model()
    learner, counted = Learner(model, threads=threads), Counted(model.base_model)
    with threads.working() if others else nullcontext():
        await asyncio.to_thread(learner.step, pack(made()))
        await asyncio.to_thread(learner.logprobs, made())
    assert counted.threads == {expected}


def test_learner_takes_the_threads_of_others_within_a_step() -> None:
    threads, seen, others = Threads(4), list[int](), ExitStack()
    learner = Learner(make_model(), threads=threads)

    def record(*_: Any) -> None:
        seen.append(torch.get_num_threads())
        others.close()

    learner.model.base_model.register_forward_pre_hook(record)
    others.enter_context(threads.working())
    learner.step(pack(made(), max_tokens=30))
    assert len(seen) > 1
    assert seen == [2] + [4] * (len(seen) - 1)


@pytest.mark.parametrize(
    ("overrides", "is_shared"),
    [
        ([], True),
        (["rollout.max_staleness=0"], False),
        (["engine.kind=vllm"], False),
    ],
)
def test_engine_and_learner_of_an_asynchronous_run_share_threads(
    overrides: list[str], is_shared: bool
) -> None:
    config = load_config(CONFIG, ["run.threads=4", *overrides])
    with open_launcher(config) as launcher:
        engine, learner = threads_of(config, launcher)
    assert (engine is learner) == is_shared


def test_unset_number_of_threads_is_unchanged() -> None:
    torch.set_num_threads(3)
    with Threads().working():
        assert torch.get_num_threads() == 3


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc, and needs GNU OpenMP")
def test_paused_part_keeps_no_threads() -> None:
    def compute() -> None:
        torch.set_num_threads(6)
        (torch.ones(512, 512) @ torch.ones(512, 512)).sum()

    def running() -> int:
        return len(os.listdir("/proc/self/task"))

    release_idle_threads()
    before = running()
    compute()
    assert running() >= before + 5
    release_idle_threads()
    until = time.monotonic() + 60
    while running() > before and time.monotonic() < until:
        time.sleep(0.001)
    assert running() <= before
    compute()
    assert running() >= before + 5
