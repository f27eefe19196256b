"""Distil two specialists into one policy, in real runs."""

from pathlib import Path
from statistics import fmean

import pytest

from tests.tiny_models import make_model, make_tokenizer
from tests.train.runs.processes import finish, steps, write_config

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SETTINGS = (
    "engine.max_new_tokens=6",
    "engine.max_sessions=64",
    "rollout.groups_per_step=4",
    "rollout.group_size=16",
    "rollout.max_staleness=1",
    "train.learning_rate=5e-3",
)
"""Settings of the specialists."""


def reward(run: Path, task: str) -> list[float]:
    return [line["tasks"][task]["reward"] for line in steps(run)]


@pytest.mark.extended
def test_two_specialists_become_one_policy(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="vowels.py:Vowels")
    learnt = {}
    for task in ("vowels", "capitals"):
        target = f'environments.0.serve=["{HERE / task}.py:{task.capitalize()}"]'
        done = finish(config, *SETTINGS, f"run.name={task}", "run.steps=20", target)
        assert done.returncode == 0, done.stdout + done.stderr
        learnt[task] = reward(tmp_path / task, task)
    both = ", ".join(f'"{HERE / task}.py:{task.capitalize()}"' for task in learnt)
    teachers = ", ".join(f'{task} = "{task}/checkpoints/step_000020/model"' for task in learnt)
    done = finish(
        config,
        *SETTINGS,
        "algorithm.preset=distill",
        "run.name=both",
        "run.steps=40",
        f"environments.0.serve=[{both}]",
        f"algorithm.distill.teachers={{{teachers}}}",
        "rollout.group_size=8",
        "train.learning_rate=1e-2",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = steps(tmp_path / "both")
    for task, rewards in learnt.items():
        start, specialist = fmean(rewards[:2]), fmean(rewards[-3:])
        assert specialist > start + 0.1
        student = fmean(reward(tmp_path / "both", task)[-3:])
        assert student > start + 0.6 * (specialist - start), (task, start, student, specialist)
        gaps = [line[f"teacher_kl/{task}"] for line in lines]
        assert fmean(gaps[-3:]) < 0.5 * fmean(gaps[:3])


@pytest.mark.extended
def test_invalid_distillation_is_rejected(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="vowels.py:Vowels")
    chosen = ("algorithm.preset=distill", "run.steps=1")
    done = finish(config, *chosen)
    assert "give teachers, such as" in done.stderr
    done = finish(config, *chosen, "algorithm.distill.teachers={vowels = 'gone'}")
    assert "algorithm.distill.teachers.vowels: there is no" in done.stderr
    done = finish(config, *chosen, "algorithm.distill.teachers={consonants = 'model'}")
    assert "'consonants', which is not a task of this run" in done.stderr
    starter = Path(__file__).parents[3] / "examples/quickstart/starter"
    done = finish(config, *chosen, f"algorithm.distill.teachers={{'*' = '{starter}'}}")
    assert "has other tokens than the policy" in done.stderr


@pytest.mark.extended
def test_teachers_are_sharded_like_the_policy(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    make_model(seed=1).save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    chosen = ("algorithm.preset=distill", "algorithm.distill.teachers={'*' = 'teacher'}", "run.steps=2")
    found = []
    for processes in (1, 2):
        done = finish(config, *chosen, f"run.name=of-{processes}", f"train.processes={processes}")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append([(line["teacher_kl"], line["loss"]) for line in steps(tmp_path / f"of-{processes}")])
    one, two = found
    assert one[0][0] > 0.1
    assert two == [pytest.approx(line, rel=1e-3) for line in one]
