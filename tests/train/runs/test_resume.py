"""Killed runs lose no finished group and train none twice."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agentrl_train.storage.journal import decode_group, read_records
from tests.train.runs.processes import begin, finish, kill, steps, until_step, write_config

pytestmark = pytest.mark.faults

STEPS, PER_STEP = 14, 3
AHEAD = ("rollout.max_staleness=2", "rollout.window=5")


@pytest.mark.parametrize("every", [4, pytest.param(100, marks=pytest.mark.extended)])
def test_killed_run_loses_no_finished_group_and_trains_none_twice(tmp_path: Path, every: int) -> None:
    config, run, draw = write_config(tmp_path), tmp_path / "run", random.Random(every)
    options = (
        *AHEAD,
        f"run.steps={STEPS}",
        f"rollout.groups_per_step={PER_STEP}",
        f"checkpoint.every={every}",
    )
    for number in range(2):
        process = begin(config, *options, resume=number > 0)
        until_step(process, run, 3 + 4 * number)
        time.sleep(draw.uniform(0, 0.1))
        kill(process)
    done = finish(config, *options, resume=True)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = Counter(group for step in steps(run) for group in step["groups"])
    assert trained == Counter(range(STEPS * PER_STEP))
    assert [step["step"] for step in steps(run)] == list(range(1, STEPS + 1))
    if every == 100:  # only the first checkpoint exists, so the journal still holds every finished group
        segments = sorted((run / "journal").iterdir())
        records = [record for path in segments for record in read_records(path.read_bytes())]
        played = Counter(decode_group(record).group_id for record in records)
        assert played == trained


@pytest.mark.extended
def test_interrupted_run_stops_cleanly_and_prints_resume_command(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    process = begin(config, *AHEAD, "run.steps=100000")
    until_step(process, run, 1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in output
    assert "Traceback" not in errors
    assert (run / "report.html").exists()


def test_resumed_run_continues_the_evaluation_in_which_it_was_killed(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    options = ("run.steps=4", "checkpoint.every=2", "checkpoint.keep=3", "eval.every=2", "eval.samples=2")
    options = (*options, "environments.0.eval_split=train")
    done = finish(config, *options)
    assert done.returncode == 0, done.stderr
    # The state of the folder after a kill during the evaluation of step 2.
    shutil.rmtree(run / "checkpoints" / "step_000004")
    evaluations = run / "evaluations.jsonl"
    before, *_ = evaluations.read_text().splitlines(keepends=True)
    evaluations.write_text(before)
    interrupted, later = (run / f"evaluations/step_00000{n}/babble/episodes.jsonl" for n in (2, 4))
    played = interrupted.read_text().splitlines(keepends=True)
    assert len(played) == 3  # the settings and two episodes
    interrupted.write_text("".join(played[:2]))
    of_other_weights = later.read_text()
    done = finish(config, *options, resume=True)
    assert done.returncode == 0, done.stderr
    again = interrupted.read_text().splitlines(keepends=True)
    assert again[:2] == played[:2]
    assert len(again) == 3
    assert not set(later.read_text().splitlines()[1:]) & set(of_other_weights.splitlines())
    lines = [json.loads(line) for line in evaluations.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["before", "step 2", "after"]
    best = json.loads((run / "best" / "evaluation.json").read_text())
    assert best["success"] == max(line["success"] for line in lines)
    assert best["step"] == next(
        line["policy_version"] for line in lines if line["success"] == best["success"]
    )


@pytest.mark.extended
def test_model_with_the_best_evaluation_is_kept_if_training_makes_the_policy_worse(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    options = ("run.steps=3", "checkpoint.every=100", "checkpoint.keep=1", "eval.every=1", "eval.samples=8")
    done = finish(config, *options, "train.learning_rate=10.0", "environments.0.eval_split=train")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    highest = max(lines, key=lambda line: line["success"])  # the first of them
    best = json.loads((run / "best" / "evaluation.json").read_text())
    assert best == {"step": highest["policy_version"], "success": highest["success"]}
    assert AutoModelForCausalLM.from_pretrained(run / "best").num_parameters() > 0
