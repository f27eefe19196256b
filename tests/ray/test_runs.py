"""Runs on a real local Ray cluster match local runs, even if actors are killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.ray.processes import MarkedRun
from tests.train.runs.processes import finish, steps, until_step, write_config
from tests.train.runs.test_repeats import reproducible, weights

pytestmark = pytest.mark.ray
OPTIONS = ("engine.deterministic=true", "run.steps=4", "train.processes=2", "metrics.trace=false")
RAY = "placement.launcher=ray"


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=150)
    return process.returncode, errors


def test_ray_run_with_killed_engine_matches_local_run_bit_for_bit(
    tmp_path: Path,
) -> None:
    local, config = write_config(tmp_path / "local"), write_config(tmp_path / "ray")
    on_ray = MarkedRun(config, (*OPTIONS, RAY))
    with on_ray.running() as process:
        until_step(process, tmp_path / "ray/run", 2)
        on_ray.kill("ray::EngineHost")
        status, errors = ended(process)
        left = on_ray.left_over()
    assert status == 0, errors
    assert "is restarted" in errors
    assert left == []
    done = finish(local, *OPTIONS)
    assert done.returncode == 0, done.stderr
    ours, theirs = steps(tmp_path / "ray/run"), steps(tmp_path / "local/run")
    assert [line["step"] for line in ours] == [1, 2, 3, 4]
    assert [reproducible(line)["loss"] for line in ours] == [reproducible(line)["loss"] for line in theirs]
    trained, expected = weights(tmp_path / "ray/run"), weights(tmp_path / "local/run")
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


def test_killed_rank_ends_run_and_leaves_no_processes(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    on_ray = MarkedRun(config, (*OPTIONS, RAY, "run.steps=1000"))
    with on_ray.running() as process:
        until_step(process, tmp_path / "run", 1)
        on_ray.kill("ray::RankHost.run")
        status, errors = ended(process)
        left = on_ray.left_over()
    assert status == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith("agentrl-train: ")
    assert "rank" in last
    assert "--resume" in last
    assert left == []
