"""A resumed run matches an uninterrupted run, bit for bit if it is synchronous."""

import json
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.runs.processes import begin, finish, kill, steps, until, until_step, write_config

OF_THE_PROCESS = re.compile(r"seconds|_s$|_s_ceiling$|_idle$|(sampled|filled|discarded)_tokens$")
"""Metrics of the process's time and work rather than of training."""

SPEAR = (
    "algorithm.preset=spear",
    "algorithm.leave_out=['void', 'repetitive']",
    "algorithm.replay.warmup_steps=2",
)
"""A preset with a buffer that is stored in checkpoints."""

CROSSED = ("rollout.stale.fraction=0.5", "rollout.stale.interval=6")
"""An older copy of the policy samples half of the turns. Runs are killed between its refreshes."""


def reproducible(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not OF_THE_PROCESS.search(name)}


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").iterdir())
    return load_file(newest / "model" / "model.safetensors")


def critic_state(run: Path) -> dict[str, torch.Tensor]:
    state = max((run / "checkpoints").iterdir()) / "critic" / "learner"
    found = load_file(state / "rank-00000.safetensors") | load_file(
        state / "optimizer" / "rank-00000.safetensors"
    )
    return {name: value for name, value in found.items() if name.startswith(("weights/", "optimizer/"))}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("every", "preset"),
    [
        (3, ()),
        pytest.param(100, (), marks=pytest.mark.extended),
        pytest.param(3, SPEAR, marks=pytest.mark.extended),
        (1, CROSSED),
    ],
)
def test_resumed_synchronous_run_matches_uninterrupted_run_bit_for_bit(
    tmp_path: Path, every: int, preset: tuple[str, ...]
) -> None:
    options = ("engine.deterministic=true", f"checkpoint.every={every}", *preset)
    one, other = write_config(tmp_path / "one"), write_config(tmp_path / "other")
    done = finish(one, *options)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "other" / "run"
    for resume, step in ((False, 2), (True, 5)):
        process = begin(other, *options, resume=resume)
        until_step(process, run, step)
        kill(process)
    done = finish(other, *options, resume=True)
    assert done.returncode == 0, done.stderr
    undisturbed = steps(tmp_path / "one" / "run")
    assert len(undisturbed) == 8
    assert list(map(reproducible, steps(run))) == list(map(reproducible, undisturbed))
    ours, theirs = weights(run), weights(tmp_path / "one" / "run")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.extended
@pytest.mark.faults
def test_resumed_run_with_a_critic_matches_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    options = ("engine.deterministic=true", "algorithm.preset=ppo", "algorithm.credit.learning_rate=1e-3")
    options = (*options, "algorithm.credit.warmup_steps=2")
    one, other = write_config(tmp_path / "one"), write_config(tmp_path / "other")
    done = finish(one, *options)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "other" / "run"
    for resume, step in ((False, 2), (True, 5)):
        process = begin(other, *options, resume=resume)
        until_step(process, run, step)
        kill(process)
    done = finish(other, *options, resume=True)
    assert done.returncode == 0, done.stderr
    undisturbed = steps(tmp_path / "one" / "run")
    assert len(undisturbed) == 8
    assert all(("grad_norm" in step) == (step["step"] > 2) for step in undisturbed)
    assert all("explained_variance" in step for step in undisturbed)
    assert list(map(reproducible, steps(run))) == list(map(reproducible, undisturbed))
    ours, theirs = (critic_state(tmp_path / name / "run") for name in ("one", "other"))
    assert ours.keys() == theirs.keys()
    assert {name.partition("/")[0] for name in ours} == {"weights", "optimizer"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.faults
def test_resumed_asynchronous_run_trains_same_samples(tmp_path: Path) -> None:
    config, run, draw = write_config(tmp_path), tmp_path / "run", random.Random(1)
    options = ("rollout.max_staleness=2", "rollout.window=4", "run.steps=10")
    for resume in (False, True):
        process = begin(config, *options, resume=resume)
        until_step(process, run, draw.randrange(3, 6) + 3 * resume)
        kill(process)
    done = finish(config, *options, resume=True)
    assert done.returncode == 0, done.stderr
    assert Counter(group for line in steps(run) for group in line["groups"]) == Counter(range(30))
    assert [line["policy_version"] for line in steps(run)] == list(range(1, 11))
    assert {line["tasks"]["babble"]["episodes"] for line in steps(run)} == {9.0}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.extended)],
)
def test_signal_stops_run_after_current_step_and_resume_matches(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    options = ("engine.deterministic=true", "checkpoint.every=100")
    one, other = write_config(tmp_path / "one"), write_config(tmp_path / "other")
    assert finish(one, *options).returncode == 0
    run = tmp_path / "other" / "run"
    process = begin(other, *options)
    until_step(process, run, 3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert "--resume" in output
    step = steps(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{step:06d}").is_dir()
    assert finish(other, *options, resume=True).returncode == 0
    assert list(map(reproducible, steps(run))) == list(map(reproducible, steps(tmp_path / "one" / "run")))


@pytest.mark.extended
@pytest.mark.faults
def test_signal_interrupts_evaluation_and_resume_repeats_it(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    process = begin(config, "eval.samples=1000")
    until(process, lambda: (run / "trace.json").exists() and b"turn 2" in (run / "trace.json").read_bytes())
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Stopped after step 0" in output
    done = finish(config, "eval.samples=2", "run.steps=1", resume=True)
    assert done.returncode == 0, done.stderr
    evaluations = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in evaluations] == ["before", "after"]


@pytest.mark.extended
@pytest.mark.faults
def test_full_disk_ends_run_with_clear_error_and_run_resumes(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    options = ("engine.deterministic=true", "checkpoint.every=1")
    process = begin(config, *options, limit_bytes=150_000)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith("agentrl-train: The disk of")
    assert "--resume" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert finish(config, *options, resume=True).returncode == 0
    assert [line["step"] for line in steps(run)] == list(range(1, 9))
