"""Sweeps in real processes. Killed sweeps resume, and failed runs do not stop the others."""

import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs.processes import begin, finish, kill, steps, until, until_step, write_config

pytestmark = pytest.mark.slow

SWEEP = """
name = "tiny"
config = "train.toml"
folder = "{folder}"
seeds = [0, 1]
presets = ["grpo", "rloo"]
processes = 2

[set]
run.steps = 5
checkpoint.every = 1
eval = {{ samples = 4, every = 2, greedy = true }}
metrics = {{ tensorboard = false, trace = false }}
"""


def write_sweep(folder: Path, *more: str) -> Path:
    write_config(folder, target="vowels.py:Vowels")
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(folder=folder) + "\n".join(more))
    return path


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "agentrl_train", "sweep", str(path), *options]
    return subprocess.Popen(
        command, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = process.communicate(timeout=900)
    return process.returncode, output + errors


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tiny/results.json").read_text())


def trained(folder: Path) -> dict[str, list[int]]:
    runs = (folder / "tiny").glob("*/seed-*/")
    return {f"{run.parent.name} {run.name}": [line["step"] for line in steps(run)] for run in runs}


@pytest.mark.extended
def test_killed_sweep_resumes_from_its_checkpoints_and_keeps_finished_runs(tmp_path: Path) -> None:
    path = write_sweep(tmp_path)
    process = start(path)
    until(process, lambda: any(2 in numbers for numbers in trained(tmp_path).values()))
    first = next(run for run, numbers in trained(tmp_path).items() if 2 in numbers)
    kill(process)
    status, output = end(start(path))
    assert status == 0, output
    assert trained(tmp_path) == {f"{p} seed-{s}": [1, 2, 3, 4, 5] for p in ("grpo", "rloo") for s in (0, 1)}
    assert "resuming after step" in (tmp_path / "tiny" / f"{first.replace(' ', '/')}.log").read_text()
    found = results(tmp_path)
    assert (found["finished"], found["planned"]) == (4, 4)
    assert sorted(found["ranking"]) == ["grpo", "rloo"]
    for variant in found["variants"]:
        assert variant["final"]["success"]["n"] == 2
        assert [row[0] for row in variant["curves"]["held_out_success"]["steps"]] == [0, 2, 4, 5]
        assert [row[0] for row in variant["curves"]["held_out_success"]["samples"]] == [0, 18, 36, 45]
        assert all(run["processor_s"] > 0 for run in variant["runs"])
    page = (tmp_path / "tiny/report.html").read_text()
    assert "To repeat it" in page
    assert str(path) in page

    status, output = end(start(path))
    assert status == 0
    assert "4 of 4 runs are finished already" in output
    assert "begins" not in output

    path.write_text(path.read_text().replace("run.steps = 5", "run.steps = 6"))
    status, output = end(start(path))
    assert status == 1
    assert "grpo, seed 0: run.steps was 5, and is 6" in output.replace("\n", " ")

    path.write_text(path.read_text().replace("seeds = [0, 1]", "seeds = [1]"))
    status, output = end(start(path, "--replace"))
    assert status == 0, output
    assert trained(tmp_path)["rloo seed-1"] == [1, 2, 3, 4, 5, 6]
    assert trained(tmp_path)["rloo seed-0"] == [1, 2, 3, 4, 5]  # no longer in the sweep


@pytest.mark.extended
def test_failed_run_is_reported_and_the_others_finish(tmp_path: Path) -> None:
    broken = '[variants.broken]\nenvironments = [{ serve = ["missing.py:Task"] }]\n'
    path = write_sweep(tmp_path, broken)
    (tmp_path / "missing.py").write_text("raise OSError('no engine here')\n")
    path.write_text(path.read_text().replace("seeds = [0, 1]", "seeds = [3]").replace('"grpo", ', ""))
    path.write_text(
        path.read_text().replace("[set]", "keep_checkpoints = false\n[set]\ntrain.warmup_steps = 9")
    )
    status, output = end(start(path))
    assert status == 1
    assert not (tmp_path / "tiny/rloo/seed-3/checkpoints").exists()
    assert output.count("train.warmup_steps is 4 instead of 9") == 1
    found = {variant["name"]: variant for variant in results(tmp_path)["variants"]}
    assert found["rloo"]["runs"][0]["status"] == "finished"
    assert found["broken"]["runs"][0]["status"] == "failed"
    assert "no engine here" in found["broken"]["runs"][0]["error"]
    assert found["broken"]["final"]["success"] is None
    assert "broken, seed 3: failed: " in output


@pytest.mark.extended
def test_runs_do_not_import_a_module_of_the_working_directory_in_place_of_a_standard_one(
    tmp_path: Path,
) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "random.py").write_text("raise ImportError('not the random of Python')")
    changes = {"[0, 1]": "[0]", '"grpo", "rloo"': '"grpo"', "run.steps = 5": "run.steps = 1"}
    text = path.read_text()
    for before, after in changes.items():
        text = text.replace(before, after)
    path.write_text(text)
    status, output = end(start(path))
    assert status == 0, output
    assert trained(tmp_path) == {"grpo seed-0": [1]}


def test_interrupted_sweep_stops_its_runs_cleanly_and_prints_how_to_continue(tmp_path: Path) -> None:
    path, first = write_sweep(tmp_path), tmp_path / "tiny/grpo/seed-0"
    path.write_text(path.read_text().replace("run.steps = 5", "run.steps = 1000"))
    process = start(path)
    until(process, lambda: any(line["step"] >= 1 for line in steps(first)))
    process.send_signal(signal.SIGTERM)
    status, output = end(process)
    assert status == 143, output
    assert f"continue with: agentrl-train sweep {path}" in output
    assert "grpo, seed 0: stopped, with a checkpoint" in output
    manifests = list((first / "checkpoints").glob("step_*/manifest.json"))
    assert manifests
    assert tomllib.loads((first / "config.toml").read_text())["run"]["seed"] == 0


@pytest.mark.extended
def test_curriculum_advances_to_harder_levels_even_in_a_resumed_run(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, target="levels.py:Levels"), tmp_path / "run"
    rules = '{levels = {levels = ["train", "train-2", "train-3"]}, window = 6, raise_at = 0.5}'
    options = (f"rollout.curriculum={rules}", "run.steps=10", "checkpoint.every=4")
    process = begin(config, *options)
    until_step(process, run, 6)
    kill(process)
    done = finish(config, *options, resume=True)
    assert done.returncode == 0, done.stderr
    assert [line["tasks"]["levels"]["level"] for line in steps(run)] == [1, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    changes = [json.loads(line) for line in (run / "curriculum.jsonl").read_text().splitlines()]
    assert [(line["draw"], line["levels"]) for line in changes] == [(6, {"levels": 1}), (12, {"levels": 2})]
    episodes = [
        json.loads(line)
        for number in (1, 3, 6, 10)
        for line in (run / f"trajectories/step_{number:06d}.jsonl").read_text().splitlines()
    ]
    assert {episode["split"] for episode in episodes} == {"train", "train-2", "train-3"}
