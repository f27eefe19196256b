"""A policy improves over the whole path: serving over HTTP, sampling, training and publishing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs.processes import finish, steps, write_config

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/train.toml"
SETTINGS = {
    "run.name": "learning",
    "run.steps": 10,
    "run.threads": 2,
    "environments.0.tasks": "{household = 1.0}",
    "rollout.groups_per_step": 8,
    "train.warmup_steps": 2,
    "eval.samples": 0,
}


@pytest.mark.slow
@pytest.mark.extended
def test_random_policy_learns_within_twenty_steps(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="vowels.py:Vowels")
    settings = [
        "run.steps=20",
        "engine.max_sessions=32",
        "engine.max_new_tokens=6",
        "train.learning_rate=5e-3",
    ]
    settings += ["rollout.groups_per_step=4", "rollout.group_size=16", "rollout.max_staleness=1"]
    settings += ["eval.samples=4", "eval.greedy=true"]
    done = finish(config, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    records = steps(tmp_path / "run")
    reward = [record["tasks"]["vowels"]["reward"] for record in records]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.1
    assert max(record["staleness_max"] for record in records) <= 1
    (summary,) = json.loads((tmp_path / "run/summary.json").read_text())["tasks"].values()
    assert None not in (summary["before_greedy"], summary["after_greedy"])
    assert max(record["logprob_drift"] for record in records) < 1e-4


@pytest.mark.slow
@pytest.mark.extended
def test_starter_policy_improves_within_ten_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl_train", "run", str(QUICKSTART)]
    for key, value in {**SETTINGS, "run.folder": tmp_path}.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "learning/metrics.jsonl").read_text().splitlines()]
    success = [record["tasks"]["household"]["success"] for record in records]
    valid = [record["tasks"]["household"]["valid_calls"] for record in records]
    assert sum(success[-3:]) / 3 > sum(success[:3]) / 3 + 0.1
    assert min(valid) > 0.9
    assert max(record["staleness_max"] for record in records) <= 2
    assert max(record["logprob_drift"] for record in records) < 1e-4
