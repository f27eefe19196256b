"""Runs with two learner processes, started from the command line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs.processes import begin, command, finish, steps, until_step, write_config

pytestmark = pytest.mark.slow
TWO = "train.processes=2"


def losses(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in steps(run)]


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the pids of the ranks of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            line = (folder / "cmdline").read_bytes()
        except (OSError, ProcessLookupError):
            continue
        if parent == process.pid and b"agentrl_train\0run" in line:
            found.append(int(folder.name))
    return found


def gone(pids: list[int]) -> bool:
    """Return True if all processes exit within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def straight(config: Path) -> list[tuple[float, float]]:
    """Return the losses of an uninterrupted run with one process."""
    done = finish(config, 'run.name="one"')
    assert done.returncode == 0, done.stderr
    return losses(config.parent / "one")


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.extended)])
def test_run_resumes_with_different_number_of_processes(
    config: Path, straight: list[tuple[float, float]], before: int, after: int
) -> None:
    name = f"from{before}"
    run = config.parent / name
    process = begin(config, f'run.name="{name}"', f"train.processes={before}")
    until_step(process, run, 4)
    assert losses(run), "the run did not start in time"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert 4 <= len(losses(run)) < 8
    done = finish(config, f'run.name="{name}"', f"train.processes={after}", resume=True)
    assert done.returncode == 0, done.stderr
    assert len(losses(run)) == len(straight) == 8
    for ours, theirs in zip(straight, losses(run), strict=True):
        assert theirs[0] == pytest.approx(ours[0], abs=1e-5)
        assert theirs[1] == pytest.approx(ours[1], abs=1e-3)


@pytest.mark.extended
def test_torchrun_starts_ranks(config: Path, straight: list[tuple[float, float]]) -> None:
    line = command(config, 'run.name="torchrun"')[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *line]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(straight, losses(config.parent / "torchrun"), strict=True):
        assert theirs[0] == pytest.approx(ours[0], abs=1e-5)


@pytest.mark.extended
def test_critic_learns_the_same_with_two_ranks_as_with_one(config: Path) -> None:
    found = []
    for processes in (1, 2):
        options = (f"train.processes={processes}", "algorithm.preset=ppo_turn", "run.steps=3")
        done = finish(
            config, f'run.name="critic{processes}"', *options, "algorithm.credit.learning_rate=1e-3"
        )
        assert done.returncode == 0, done.stderr
        lines = steps(config.parent / f"critic{processes}")
        found.append([(line["loss"], line["critic_loss"], line["value_mean"]) for line in lines])
    assert len(found[0]) == len(found[1]) == 3
    assert found[0][-1][2] != 0.0
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.extended)])
def test_lost_rank_ends_run_with_clear_error(config: Path, number: signal.Signals) -> None:
    name = f"gone{int(number)}"
    options = (f'run.name="{name}"', TWO, "train.rank_timeout_s=20", "run.steps=500")
    process = begin(config, *options)
    until_step(process, config.parent / name, 2)
    (worker,) = workers_of(process)
    os.kill(worker, number)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "agentrl-train: " in errors
    assert "of the learner" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors.splitlines()[-1]
    assert gone([worker])
    shutil.rmtree(config.parent / name)


@pytest.mark.extended
def test_other_ranks_exit_when_rank_0_is_killed(config: Path) -> None:
    process = begin(config, 'run.name="headless"', TWO, "run.steps=500")
    until_step(process, config.parent / "headless", 1)
    workers = workers_of(process)
    assert len(workers) == 1
    process.kill()
    process.communicate(timeout=60)
    assert gone(workers)
