"""Evaluations during training. Training continues, and each result belongs to one version of the weights."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs.patient import RELEASED
from tests.train.runs.processes import begin, finish, kill, steps, until_step, write_config

pytestmark = pytest.mark.faults

STEPS, SAMPLES = 8, 6
OPTIONS = (
    "eval.concurrent.max_sessions=2",
    f"eval.samples={SAMPLES}",
    f"run.steps={STEPS}",
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "rollout.max_staleness=1",
    "environments.0.eval_split=test",
)


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that releases held-out episodes."""
    path = tmp_path / "released"
    monkeypatch.setenv(RELEASED, str(path))
    return path


def evaluations(run: Path) -> list[dict[str, Any]]:
    path = run / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled_by(run: Path, name: str) -> set[tuple[str, int]]:
    """Return the policy and version of all turns of an evaluation."""
    episodes = map(json.loads, (run / "trajectories" / f"held_out_{name}.jsonl").read_bytes().splitlines())
    turns = [message["turn"] for one in episodes for message in one["messages"] if "turn" in message]
    return {(turn["policy"], version) for turn in turns for version in turn["versions"]}


def require_whole(run: Path, names: dict[str, int]) -> None:
    """Check that these evaluations are recorded once, each with all episodes of one version."""
    found = evaluations(run)
    assert [(one["name"], one["policy_version"]) for one in found] == list(names.items())
    assert {one["episodes"] for one in found} == {SAMPLES}
    for name, version in names.items():
        policy = "current" if name == "after" else "evaluation"
        assert sampled_by(run, name.replace(" ", "_")) == {(policy, version)}
    trained = Counter(group for step in steps(run) for group in step["groups"])
    assert trained == Counter(range(3 * STEPS))  # steps do not contain episodes of evaluations
    best = json.loads((run / "best" / "evaluation.json").read_text())
    highest = max(found, key=lambda one: one["success"])  # the first of them
    assert best == {"step": highest["policy_version"], "success": highest["success"]}


def test_steps_are_trained_while_an_evaluation_plays(tmp_path: Path, released: Path) -> None:
    run = tmp_path / "run"
    process = begin(write_config(tmp_path, target="patient.py:Patient"), *OPTIONS, "eval.every=5")
    until_step(process, run, 3)
    assert evaluations(run) == []
    assert (run / "checkpoints" / "step_000000").exists()
    released.touch()
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors
    require_whole(run, {"before": 0, "step 5": 5, "after": STEPS})
    assert not (run / "checkpoints" / "step_000000").exists()


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_stopped_evaluation_is_repeated_with_its_own_weights(
    tmp_path: Path, released: Path, end: signal.Signals
) -> None:
    config, run = write_config(tmp_path, target="patient.py:Patient"), tmp_path / "run"
    process = begin(config, *OPTIONS)
    until_step(process, run, 3)
    if end is signal.SIGKILL:
        kill(process)
    else:
        process.send_signal(end)
        output, errors = process.communicate(timeout=600)
        assert "--resume" in output, output + errors
    assert evaluations(run) == []
    released.touch()
    done = finish(config, *OPTIONS, resume=True)
    assert done.returncode == 0, done.stdout + done.stderr
    require_whole(run, {"before": 0, "after": STEPS})
