"""Train the quickstart configuration for 20 steps with ``engine.kind = "vllm"``, and kill one engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
STEPS, KILL_AFTER = 20, 6
TOLERANCE = 1e-3
SHORT = {
    "run.name": "vllm",
    "run.steps": STEPS,
    "engine.kind": "vllm",
    "engine.vllm.push": "in_flight",
    "engine.vllm.args.kv_cache_memory_bytes": 2**27,
    "engine.max_sessions": 32,
    "rollout.groups_per_step": 6,
    "rollout.group_size": 4,
    "rollout.episode_timeout_s": 600,
    "checkpoint.every": 100,
    "metrics.trajectories": 24,
    "eval.samples": 0,
}


def started(python: str, folder: Path, errors: Path, **other: Any) -> subprocess.Popen[bytes]:
    """Start the run. ``other`` overrides settings, with __ instead of dots."""
    chosen = {name.replace("__", "."): value for name, value in other.items()}
    settings = {**SHORT, **chosen, "run.folder": str(folder), "engine.vllm.python": python}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with errors.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "agentrl_train", "run", "examples/quickstart/train.toml", *options],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
        )


def records(run: Path) -> list[dict[str, Any]]:
    """Return the recorded steps. The last line can be incomplete."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def engines_of(run: int) -> list[int]:
    """Return the pids of a run's engine processes."""
    leaders = subprocess.run(["pgrep", "-P", str(run)], capture_output=True, text=True, check=False).stdout
    cores = []
    for leader in leaders.split():
        below = subprocess.run(
            ["pgrep", "-f", "EngineCore", "-P", leader], capture_output=True, text=True, check=False
        )
        cores += [int(number) for number in below.stdout.split()]
    return cores


def wait_for_step(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    deadline = time.monotonic() + 480
    while len(records(run)) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def test_training_with_in_flight_updates_survives_killed_engine(python: str, tmp_path: Path) -> None:
    run, errors = tmp_path / "vllm", tmp_path / "output"
    process = started(python, tmp_path, errors)
    try:
        wait_for_step(process, run, KILL_AFTER)
        victims = engines_of(process.pid)
        assert victims, errors.read_text()
        os.kill(victims[0], signal.SIGKILL)
        assert process.wait(480) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
    assert "was lost and is restarted" in errors.read_text()
    steps = records(run)
    assert len(steps) == STEPS
    assert 0.0 < max(step["canary_drift"] for step in steps) < TOLERANCE
    assert 0.0 < max(step["logprob_drift"] for step in steps) < TOLERANCE
    assert steps[-1]["failed_episodes"] == steps[-1]["dropped_groups"] == 0
    assert json.loads((run / "summary.json").read_text())["policy_version"] == STEPS
    print(f"largest difference from the learner after a push: {max(s['canary_drift'] for s in steps):.1e}")


@pytest.mark.skipif(find_spec("ray") is None, reason="`make ray` installs Ray")
def test_two_ray_engines_load_drained_weights(python: str, tmp_path: Path) -> None:
    run, errors = tmp_path / "vllm", tmp_path / "output"
    process = started(
        python,
        tmp_path,
        errors,
        run__steps=3,
        train__warmup_steps=1,
        placement__launcher="ray",
        engine__vllm__replicas=2,
        engine__vllm__push="drained",
        rollout__stale__fraction=0.0,
    )
    try:
        assert process.wait(480) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
    steps = records(run)
    assert len(steps) == 3
    assert 0.0 < max(step["canary_drift"] for step in steps) < TOLERANCE
    assert steps[-1]["failed_episodes"] == 0
    assert changed_in_the_middle(run) == 0


@pytest.mark.extended
def test_adapters_are_evaluated_during_training_and_by_the_command(python: str, tmp_path: Path) -> None:
    run, errors = tmp_path / "vllm", tmp_path / "output"
    process = started(
        python,
        tmp_path,
        errors,
        run__steps=4,
        environments=f"[{{serve = ['{ROOT}/environments/shop']}}]",
        train__lora="{rank = 4, alpha = 8}",
        train__warmup_steps=0,
        train__learning_rate=0.01,
        rollout__groups_per_step=3,
        rollout__stale__fraction=0.0,
        rollout__window=1,
        eval__samples=12,
        eval__every=2,
        eval__temperature=0.0,
        eval__concurrent=True,
        metrics__trajectories=100,
    )
    try:
        assert process.wait(480) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    played = [(one["name"], one["policy_version"], one["episodes"]) for one in found]
    assert played == [("before", 0, 12), ("step 2", 2, 12), ("after", 4, 12)]
    assert len(records(run)) == 4
    assert max(step["canary_drift"] for step in records(run)) < TOLERANCE
    for name, version in (("before", 0), ("step_2", 2), ("after", 4)):
        lines = (run / "trajectories" / f"held_out_{name}.jsonl").read_bytes().splitlines()
        assert {pair for line in lines for pair in _versions(json.loads(line))} == {(version, version)}
    # The command merges the adapters of the newest checkpoint. Greedy episodes must be equal.
    command = [sys.executable, "-m", "agentrl_train", "eval", str(run / "config.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert f" {found[-1]['success']:.1%} " in done.stdout, (done.stdout, found)


def changed_in_the_middle(run: Path) -> int:
    """Return the number of completions sampled by two versions of the weights."""
    count = 0
    for path in (run / "trajectories").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            count += sum(low < high for low, high in _versions(json.loads(line)))
    return count


def _versions(node: Any) -> list[tuple[int, int]]:
    if isinstance(node, dict):
        found = [tuple(node["versions"])] if "versions" in node else []
        return found + [pair for value in node.values() for pair in _versions(value)]
    if isinstance(node, list):
        return [pair for value in node for pair in _versions(value)]
    return []
