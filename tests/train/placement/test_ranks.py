"""Two learner processes match a single process (gloo, FSDP2, Ulysses)."""

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

from agentrl_train.config import TrainSection
from agentrl_train.errors import RanksLost
from agentrl_train.learner import Learner
from agentrl_train.learner.sharding import GatheredWeights, buckets, deal
from agentrl_train.placement.ranks import LeadLearner, decode, encode
from agentrl_train.types import MicroBatch
from tests.train.learner.test_learner import made, qwen, with_
from tests.train.placement.ranked import CASES, Case, Facts, batches, learner_of, train

ROOT = Path(__file__).parents[3]
ranks = pytest.mark.slow
"""Marks tests that start processes, because each process imports PyTorch."""


def run_ranks(count: int, *arguments: str, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """Run ``python -m`` with these arguments on every rank and return the results."""
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
    """Use one thread, like the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def alone(name: str) -> Facts:
    """Return the results of a case in one process."""
    case = CASES[name]
    return train(learner_of(case), case, Path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints, including one written by a single process after ten steps."""
    folder = tmp_path_factory.mktemp("ranks")
    learner = learner_of(Case())
    train(learner, Case(steps=10), folder)
    learner.snapshot().write(folder / "alone at ten")
    return folder


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Mapping[str, Facts]:
    """Return the results of every case on two ranks."""
    for ended in run_ranks(2, "tests.train.placement.ranked", str(folder)):
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
def test_two_ranks_match_one(name: str, ranked: Mapping[str, Facts]) -> None:
    same(alone(name), ranked[name])


@ranks
def test_no_rank_holds_the_whole_model_while_it_is_read(ranked: Mapping[str, Facts]) -> None:
    facts = ranked["read from a file"]
    assert 0 < facts["largest"] < 0.2 * facts["whole"]
    assert facts["peak"] < 0.5 * facts["whole"] + 2.5 * facts["largest"] < facts["whole"]


@ranks
def test_losses_of_twenty_steps_match_single_process(ranked: Mapping[str, Facts]) -> None:
    both = alone("twenty steps"), ranked["twenty steps"]
    losses = [[step["loss"] for step in facts["metrics"]] for facts in both]
    assert len(losses[0]) == 20
    assert np.abs(np.subtract(*losses)).max() < 1e-5


@ranks
def test_two_ranks_resume_from_one(ranked: Mapping[str, Facts]) -> None:
    straight = alone("twenty steps")
    same({**straight, "metrics": straight["metrics"][10:]}, ranked["resumed"])


@ranks
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves])
def test_one_rank_resumes_from_two(name: str, ranked: Mapping[str, Facts], folder: Path) -> None:
    case = CASES[name]
    on = Case(first=case.steps, options=case.options)
    straight, resumed = learner_of(case), learner_of(case)
    train(straight, case, folder)
    resumed.load(folder / name)
    assert resumed.num_updates == case.steps
    same(train(straight, on, folder), train(resumed, on, folder))


@ranks
def test_state_is_sharded_over_ranks_and_parameters_are_written_once(
    ranked: Mapping[str, Facts], folder: Path
) -> None:
    written = folder / "twenty steps"
    files = sorted((written / "learner" / "optimizer").iterdir())
    assert [path.name for path in files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert len(list((written / "model").glob("*.safetensors"))) == 1
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) < 0.7 * sum(sizes)


@ranks
def test_non_finite_value_on_one_rank_is_rejected_by_all(ranked: Mapping[str, Facts]) -> None:
    assert "the parameters were not changed" in ranked["refused"]["sentence"]


@ranks
def test_other_ranks_execute_commands_of_rank_0(ranked: Mapping[str, Facts]) -> None:
    facts = ranked["led"]
    assert "the parameters were not changed" in facts["refused"]
    assert (facts["updates"], facts["updates after loading"]) == (8, 1)
    one = Learner(qwen(), TrainSection(learning_rate=1e-3))
    one.step(batches(CASES["every option"], 0))
    assert facts["names"] == list(one.weights())
    assert torch.allclose(facts["first"], next(iter(one.weights().values())), atol=1e-5)
    assert torch.equal(facts["first"], facts["again"])


# --- failures on rank 0 ---


class Others:
    """A fake ``Ranks`` that records the commands of rank 0."""

    timeout_s = 600.0
    mesh = storage = None
    device = "cpu"

    def __init__(self) -> None:
        self.sent: list[str] = []

    def broadcast(self, name: str, *_arguments: object) -> None:
        self.sent.append(name)


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> LeadLearner:
    """Return a ``LeadLearner`` without a model."""
    monkeypatch.setattr(Learner, "__init__", lambda self, *_, **__: setattr(self, "num_updates", 0))
    return LeadLearner(None, ranks=Others())  # type: ignore[arg-type]


def failing(error: Exception) -> Any:
    def step(*_arguments: object) -> None:
        raise error

    return step


def test_out_of_memory_on_rank_0_propagates_unchanged(
    lead: LeadLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "step", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        lead.step([])
    lead.close()
    assert lead._ranks.sent == ["step"]  # type: ignore[attr-defined]


def test_other_error_on_rank_0_raises_ranks_lost(lead: LeadLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "step", failing(RuntimeError("Connection closed by peer")))
    with pytest.raises(RanksLost, match="Connection closed by peer"):
        lead.step([])
    lead.close()
    assert lead._ranks.sent == ["step"]  # type: ignore[attr-defined]


def test_close_does_not_wait_for_hanging_call(lead: LeadLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    began, end = threading.Event(), threading.Event()
    monkeypatch.setattr(Learner, "step", lambda *_: (began.set(), end.wait()))
    monkeypatch.setattr("agentrl_train.placement.ranks.CLOSE_TIMEOUT_S", 0.05)
    hanging = threading.Thread(target=lead.step, args=([],))
    hanging.start()
    began.wait()
    lead.close()
    assert lead._ranks.sent == ["step"]  # type: ignore[attr-defined]
    end.set()
    hanging.join()


def test_other_ranks_are_stopped_once(lead: LeadLearner) -> None:
    lead.close()
    lead.close()
    assert lead._ranks.sent == ["stop"]  # type: ignore[attr-defined]


# --- commands on the wire ---


def test_commands_round_trip_bit_for_bit() -> None:
    (batch,) = batches(Case(), 0)
    sequence = with_(made(1)[0], rollout=5)
    sent = ["step", 3, [batch], [sequence], Path("/some/folder"), ["a", "b"], None]
    name, updates, (received,), (row,), *rest = decode(encode(sent))
    assert [name, updates, *rest] == ["step", 3, Path("/some/folder"), ["a", "b"], None]
    assert (received.num_sequences, received.num_slots) == (batch.num_sequences, batch.num_slots)
    assert len(received.micro_batches) == len(batch.micro_batches)
    for ours, theirs in zip(batch.micro_batches, received.micro_batches, strict=True):
        for field in MicroBatch.__slots__:
            assert torch.equal(getattr(ours, field), getattr(theirs, field))
            assert getattr(ours, field).dtype == getattr(theirs, field).dtype
    for field in ("token_ids", "loss_mask", "logprobs", "versions", "advantages"):
        assert getattr(row, field).dtype == getattr(sequence, field).dtype
        assert np.array_equal(getattr(row, field), getattr(sequence, field))
    assert (row.task, row.group_id, row.rollout) == (sequence.task, sequence.group_id, 5)


# --- sharding of work ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sequences", [1, 2, 9])
def test_shares_have_equal_length_and_cover_every_row(count: int, sequences: int) -> None:
    (batch,) = batches(Case(sequences=sequences, packing={"max_tokens": 60, "packed": False}), 0)
    shares = [deal(batch.micro_batches, index, count) for index in range(count)]
    assert len({len(share) for share in shares}) == 1
    dealt = sum(int(micro.loss_mask.sum()) for share in shares for micro in share)
    assert dealt == batch.num_loss_tokens
    weight = sum(float(micro.weights.sum()) for share in shares for micro in share)
    assert weight == pytest.approx(sum(float(micro.weights.sum()) for micro in batch.micro_batches))
    if count == 1:
        assert all(a is b for a, b in zip(shares[0], batch.micro_batches, strict=True))


def test_weights_are_gathered_per_bucket() -> None:
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


def test_generated_sequences_fill_several_micro_batches() -> None:
    """The cases above rely on this."""
    assert len(batches(CASES["twenty steps"], 0)[0].micro_batches) > 2
    assert len(made(5, seed=99)) == 5
