"""Runs that are killed: nothing finished is lost, nothing is trained twice."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from agentrl_train.runtime.journal import decode_group, read_records
from tests.conftest import make_model, make_tokenizer

STEPS, PER_STEP = 14, 3
CONFIG = """
[run]
name = "killed"
folder = "{folder}"
steps = {steps}
threads = 1
[model]
path = "model"
[[environments]]
serve = ["{target}"]
[engine]
max_sessions = 8
max_context = 512
max_new_tokens = 12
[rollout]
groups_per_step = {per_step}
group_size = 3
max_staleness = 2
window = 5
[train]
learning_rate = 1e-3
[checkpoint]
every = {every}
[eval]
samples = 0
"""


def write_config(folder: Path, *, every: int) -> Path:
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    target = f"{Path(__file__).with_name('babble.py')}:Babble"
    config = folder / "train.toml"
    text = CONFIG.format(folder=folder, steps=STEPS, per_step=PER_STEP, target=target, every=every)
    config.write_text(text)
    return config


def command(config: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "agentrl_train", "run", str(config), *options]


def lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill_after(config: Path, run: Path, *, step: int, pause_s: float, resume: bool) -> None:
    """Start the run, wait for a step's record, and kill the process a moment later."""
    process = subprocess.Popen(
        command(config, *(["--resume"] if resume else [])),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        done = lines(run)
        if done and done[-1]["step"] >= step:
            break
        time.sleep(0.005)
    time.sleep(pause_s)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, output


@pytest.mark.faults
@pytest.mark.parametrize("every", [4, 100])
def test_killed_and_resumed_runs_lose_no_finished_group_and_train_none_twice(
    tmp_path: Path, every: int
) -> None:
    config, run, draw = write_config(tmp_path, every=every), tmp_path / "killed", random.Random(every)
    for kill in range(2):
        step, pause = 3 + 4 * kill, draw.uniform(0, 0.1)
        kill_after(config, run, step=step, pause_s=pause, resume=kill > 0)
    done = subprocess.run(command(config, "--resume"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = Counter(group for line in lines(run) for group in line["groups"])
    assert trained == Counter(range(STEPS * PER_STEP))
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    if every == 100:  # no checkpoint but the first, so the journal still holds every group that finished
        segments = sorted((run / "journal").iterdir())
        records = [record for path in segments for record in read_records(path.read_bytes())]
        played = Counter(decode_group(record).group_id for record in records)
        assert played == trained


@pytest.mark.faults
def test_an_interrupted_run_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    config, run = write_config(tmp_path, every=100), tmp_path / "killed"
    process = subprocess.Popen(
        command(config, "--set", "run.steps=100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not lines(run) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in output
    assert "Traceback" not in errors
    assert (run / "report.html").exists()
