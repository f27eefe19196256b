"""The configurations of examples with a starter policy. They load, and train after imitating the expert."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_train import load_config

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
FILES = sorted((EXAMPLES / "agentbench").glob("*.toml"))
TASKS = {"alfworld", "dbbench", "knowledgegraph", "os_interaction", "webshop"}


def test_every_task_has_a_configuration_and_one_trains_all():
    assert {file.stem for file in FILES} == TASKS | {"five"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_configuration_loads_and_serves_its_tasks(file):
    config = load_config(file, [f"model.path={ROOT / 'examples/quickstart/starter'}"])
    assert config.run.name == file.stem
    assert config.eval.greedy
    served = [Path(path).resolve() for one in config.environments for path in one.serve]
    tasks = TASKS if file.stem == "five" else {file.stem}
    assert sorted(served) == [ROOT / "environments" / task for task in sorted(tasks)]


def test_configuration_of_boxes_loads_and_serves_its_task():
    path = EXAMPLES / "boxes" / "train.toml"
    config = load_config(path, [f"model.path={EXAMPLES / 'quickstart/starter'}"])
    assert [Path(one).resolve() for one in config.environments[0].serve] == [EXAMPLES / "boxes"]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize(
    ("target", "config"), [("dbbench", "agentbench/dbbench.toml"), (EXAMPLES / "boxes", "boxes/train.toml")]
)
def test_run_continues_from_a_starter_that_imitates_the_expert(target, config, tmp_path):
    starter = tmp_path / "starter"
    script = [sys.executable, EXAMPLES / "quickstart/starter.py", "--tasks", target, "--width", "64"]
    subprocess.run([*script, "--traces", "40", "--steps", "4", "--output", starter], check=True, timeout=900)
    values = {
        "model.path": starter,
        "run.folder": tmp_path,
        "run.steps": 2,
        "train.warmup_steps": 0,
        "rollout.groups_per_step": 2,
        "eval.samples": 4,
    }
    options = [text for name, value in values.items() for text in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "agentrl_train", "run", EXAMPLES / config]
    subprocess.run([*command, *options], check=True, timeout=900, cwd=tmp_path)
    (task,) = json.loads(next(tmp_path.glob("*/summary.json")).read_text())["tasks"].values()
    assert task["episodes"] > 0
    assert {"before", "after", "before_greedy", "after_greedy"} <= set(task)
