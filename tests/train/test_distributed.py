"""Two processes that train one model give what one process gives (gloo, FSDP2, Ulysses)."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from agentrl_train.errors import RanksLost
from agentrl_train.learner import Learner
from agentrl_train.learner.sharding import GatheredWeights, buckets, deal
from agentrl_train.runtime.distributed import LeadLearner
from tests.train.ranked import CASES, Case, Facts, batches, learner_of, told
from tests.train.test_learner import made, qwen

ROOT = Path(__file__).parents[2]
ranks = pytest.mark.slow
"""Starts processes, each of which imports PyTorch."""


def run_ranks(count: int, *arguments: str, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python -m`` with these arguments on every rank and return how each ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    ended = []
    for process in started:
        output, errors = process.communicate(timeout=240)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return ended


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def alone(name: str) -> Facts:
    """What one process tells of a case."""
    case = CASES[name]
    return told(learner_of(case), case, Path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints go; one process has written one after ten steps."""
    folder = tmp_path_factory.mktemp("ranks")
    learner = learner_of(Case())
    told(learner, Case(steps=10), folder)
    learner.snapshot().write(folder / "alone at ten")
    return folder


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Mapping[str, Facts]:
    """What two ranks told of every case."""
    for ended in run_ranks(2, "tests.train.ranked", str(folder)):
        assert ended.returncode == 0, ended.stderr
    return pickle.loads((folder / "facts.pickle").read_bytes())


def same(left: Facts, right: Facts, *, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(left["metrics"], right["metrics"], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=tolerance)
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-4)
    for ours, theirs in zip(left["logprobs"], right["logprobs"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-3)
    assert list(left["weights"]) == list(right["weights"])
    for name, value in left["weights"].items():
        assert torch.allclose(right["weights"][name], value, atol=1e-4), name


@ranks
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loads is None])
def test_two_ranks_train_as_one_does(name: str, ranked: Mapping[str, Facts]) -> None:
    same(alone(name), ranked[name])


@ranks
def test_twenty_steps_on_two_ranks_have_the_losses_of_one(ranked: Mapping[str, Facts]) -> None:
    both = alone("twenty steps"), ranked["twenty steps"]
    losses = [[step["loss"] for step in facts["metrics"]] for facts in both]
    assert len(losses[0]) == 20
    assert np.abs(np.subtract(*losses)).max() < 1e-5


@ranks
def test_two_ranks_go_on_from_one(ranked: Mapping[str, Facts]) -> None:
    straight = alone("twenty steps")
    same({**straight, "metrics": straight["metrics"][10:]}, ranked["resumed"])


@ranks
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves])
def test_one_goes_on_from_two_ranks(name: str, ranked: Mapping[str, Facts], folder: Path) -> None:
    case = CASES[name]
    on = Case(first=case.steps, options=case.options)
    straight, resumed = learner_of(case), learner_of(case)
    told(straight, case, folder)
    resumed.load(folder / name)
    assert resumed.num_updates == case.steps
    same(told(straight, on, folder), told(resumed, on, folder))


@ranks
def test_the_state_is_written_by_both_ranks_and_the_parameters_once(
    ranked: Mapping[str, Facts], folder: Path
) -> None:
    written = folder / "twenty steps"
    assert {path.name for path in (written / "learner").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert len(list((written / "model").glob("*.safetensors"))) == 1
    sizes = [path.stat().st_size for path in (written / "learner").glob("*.distcp")]
    assert max(sizes) < 0.7 * sum(sizes)


@ranks
def test_all_ranks_refuse_what_is_not_finite_on_one(ranked: Mapping[str, Facts]) -> None:
    assert "the parameters were not changed" in ranked["refused"]["sentence"]


@ranks
def test_the_other_ranks_follow_rank_0(ranked: Mapping[str, Facts]) -> None:
    facts = ranked["led"]
    assert "the parameters were not changed" in facts["refused"]
    assert (facts["updates"], facts["updates after loading"]) == (8, 1)
    one = Learner(qwen(), learning_rate=1e-3)
    one.step(batches(CASES["every option"], 0))
    assert facts["names"] == list(one.weights())
    assert torch.allclose(facts["first"], next(iter(one.weights().values())), atol=1e-5)
    assert torch.equal(facts["first"], facts["again"])


# --- a rank 0 that cannot go on ---


class Others:
    """The other ranks, as far as rank 0 sees of them: what they are told."""

    timeout_s = 600.0
    mesh = storage = None
    device = "cpu"

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, name: str, *_arguments: object) -> None:
        self.told.append(name)


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> LeadLearner:
    """Return rank 0 without a model."""
    monkeypatch.setattr(Learner, "__init__", lambda self, *_, **__: setattr(self, "num_updates", 0))
    return LeadLearner(None, ranks=Others())  # type: ignore[arg-type]


def failing(error: Exception) -> Any:
    def step(*_arguments: object) -> None:
        raise error

    return step


def test_memory_that_runs_out_on_rank_0_stays_what_it_is_and_the_others_are_left_alone(
    lead: LeadLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "step", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        lead.step([])
    lead.close()
    assert lead._ranks.told == ["step"]  # type: ignore[attr-defined]


def test_what_else_breaks_on_rank_0_is_a_loss_of_ranks(
    lead: LeadLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "step", failing(RuntimeError("Connection closed by peer")))
    with pytest.raises(RanksLost, match="Connection closed by peer"):
        lead.step([])
    lead.close()
    assert lead._ranks.told == ["step"]  # type: ignore[attr-defined]


def test_closing_does_not_wait_for_a_call_that_hangs(
    lead: LeadLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, end = threading.Event(), threading.Event()
    monkeypatch.setattr(Learner, "step", lambda *_: (began.set(), end.wait()))
    monkeypatch.setattr("agentrl_train.runtime.distributed.CLOSE_S", 0.05)
    hanging = threading.Thread(target=lead.step, args=([],))
    hanging.start()
    began.wait()
    lead.close()
    assert lead._ranks.told == ["step"]  # type: ignore[attr-defined]
    end.set()
    hanging.join()


def test_ranks_that_follow_are_told_to_stop_once(lead: LeadLearner) -> None:
    lead.close()
    lead.close()
    assert lead._ranks.told == ["stop"]  # type: ignore[attr-defined]


# --- how work is dealt ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sequences", [1, 2, 9])
def test_dealt_shares_are_equally_many_and_hold_every_row_once(count: int, sequences: int) -> None:
    (batch,) = batches(Case(sequences=sequences, packing={"max_tokens": 60, "packed": False}), 0)
    shares = [deal(batch.micro_batches, index, count) for index in range(count)]
    assert len({len(share) for share in shares}) == 1
    dealt = sum(int(micro.loss_mask.sum()) for share in shares for micro in share)
    assert dealt == batch.num_loss_tokens
    weight = sum(float(micro.weights.sum()) for share in shares for micro in share)
    assert weight == pytest.approx(sum(float(micro.weights.sum()) for micro in batch.micro_batches))
    if count == 1:
        assert all(a is b for a, b in zip(shares[0], batch.micro_batches, strict=True))


def test_weights_are_gathered_a_bucket_at_a_time() -> None:
    asked: list[list[str]] = []

    def gather(names: Any) -> dict[str, torch.Tensor]:
        asked.append(list(names))
        return {name: torch.tensor(float(len(name))) for name in names}

    assert buckets({"a": 3, "bb": 3, "ccc": 9, "d": 1}, limit=6) == [["a", "bb"], ["ccc"], ["d"]]
    weights = GatheredWeights([["a", "bb"], ["ccc"]], gather)
    assert {name: float(value) for name, value in weights.items()} == {"a": 1, "bb": 2, "ccc": 3}
    assert asked == [["a", "bb"], ["ccc"]]
    assert float(weights["bb"]) == 2
    assert asked == [["a", "bb"], ["ccc"], ["a", "bb"]]
    assert len(weights) == 3


def test_made_sequences_fill_more_than_one_micro_batch() -> None:
    """Otherwise the cases above would not split anything."""
    assert len(batches(CASES["twenty steps"], 0)[0].micro_batches) > 2
    assert len(made(5, seed=99)) == 5
