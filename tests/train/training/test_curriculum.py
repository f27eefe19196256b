"""Levels that rise with success, weights by learning progress, and equal draws after a kill."""

import json
import random
from pathlib import Path

import pytest

from agentrl_env.types import Message, TaskSample
from agentrl_train.config import load_config
from agentrl_train.config.rollout import CurriculumSection
from agentrl_train.errors import ConfigError
from agentrl_train.training.admission import Mixer
from agentrl_train.training.curriculum import FILE, Curriculum, read_changes
from agentrl_train.types import EpisodeEnd, TaskSource, Trajectory, TrajectoryGroup

LEVELS = {"shop": ("train", "train-2", "train-3")}


def make(folder: Path, **rules) -> tuple[Curriculum, Mixer]:
    section = CurriculumSection(**{"levels": LEVELS, "window": 4, **rules})
    mixer = Mixer(
        [TaskSource(task="shop", num_samples=50), TaskSource(task="house", weight=3.0)],
        seed=1,
        harder={"shop": [TaskSource(task="shop", split=split) for split in LEVELS["shop"][1:]]},
        changes=read_changes(folder),
    )
    return Curriculum(section, mixer=mixer, folder=folder), mixer


def group(task: str, success: float, *, split: str = "train") -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=0,
        task=task,
        trajectories=[
            Trajectory(
                sample=TaskSample(task=task, split=split),
                opening=(Message(role="user", content="hello"),),
                turns=(),
                end=EpisodeEnd.TERMINATED,
                reward=float(number < 4 * success),
                success=number < 4 * success,
            )
            for number in range(4)
        ],
        admitted_version=0,
    )


def test_task_advances_to_its_next_level_when_its_success_reaches_the_bound(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path, raise_at=0.75)
    assert curriculum.trained(1, [group("shop", 0.75)] * 3) == []
    assert curriculum.trained(2, [group("shop", 0.75)]) == ["shop moves to level 2 (train-2) after step 2"]
    assert {mixer.draw().split for _ in range(8)} == {"train", "train-2"}
    assert mixer.split("shop") == "train-2"
    assert curriculum.metrics()["shop"] == {"level": 2.0, "share": 0.25}


def test_task_below_the_bound_stays_at_its_level(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path, raise_at=0.8)
    assert curriculum.trained(1, [group("shop", 0.75)] * 9) == []
    assert mixer.split("shop") == "train"


def test_groups_of_an_earlier_level_do_not_count_for_the_next(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path)
    curriculum.trained(1, [group("shop", 1.0)] * 4)
    assert curriculum.trained(2, [group("shop", 1.0)] * 4) == []
    assert curriculum.trained(3, [group("shop", 1.0, split="train-2")] * 4)
    assert curriculum.trained(4, [group("shop", 1.0, split="train-3")] * 8) == []  # already the last level
    assert mixer.split("shop") == "train-3"


def test_weights_follow_learning_progress_and_keep_a_fixed_share(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path, mix={"name": "progress", "fixed_share": 0.5, "every": 2}, levels={})
    shop = [group("shop", share) for share in (0.0, 0.25, 0.5, 0.75)]  # progress 0.5
    house = [group("house", share) for share in (0.5, 0.5, 0.25, 0.25)]  # progress 0.25, downwards
    curriculum.trained(1, [*shop, *house])
    assert mixer.weights == {"shop": 1.0, "house": 3.0}  # not due yet
    curriculum.trained(2, [])
    assert mixer.weights == pytest.approx({"shop": 0.5 + 2 * 2 / 3, "house": 1.5 + 2 / 3})


def test_weights_without_progress_are_the_configured_weights(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path, mix={"name": "progress", "every": 1}, levels={})
    curriculum.trained(1, [group("shop", 1.0), group("house", 0.0)] * 4)
    assert mixer.weights == {"shop": 1.0, "house": 3.0}


@pytest.mark.parametrize("seed", range(5))
def test_resumed_run_repeats_the_draws_since_its_checkpoint(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    curriculum, mixer = make(tmp_path, mix={"name": "progress", "every": 1}, raise_at=0.6)
    draws, saved = [], None
    for step in range(1, 13):
        if step == 5:
            saved = json.loads(json.dumps([mixer.state(), curriculum.state()])), len(draws)
        drawn = [mixer.draw() for _ in range(chance.randint(1, 6))]
        draws += drawn
        curriculum.trained(step, [group(d.task, chance.random(), split=d.split) for d in drawn])
    assert saved is not None
    resumed, again = make(tmp_path, mix={"name": "progress", "every": 1}, raise_at=0.6)
    (state, counts), done = saved
    again.restore(state)
    resumed.restore(counts)
    assert [again.draw() for _ in draws[done:]] == draws[done:]
    again.draw()  # applies a change after the last draw
    assert (again.levels, again.weights) == (mixer.levels, mixer.weights)
    assert not again.has_planned


def test_curriculum_and_weights_can_change_on_resume(tmp_path: Path) -> None:
    curriculum, mixer = make(tmp_path, mix={"name": "progress", "every": 1}, raise_at=0.9)
    shares = (0.0, 0.5, 1.0, 1.0)
    curriculum.trained(1, [group(task, share) for share in shares for task in ("shop", "house")][:-1])
    curriculum.trained(2, [group("house", 0.0)])
    assert mixer.weights != mixer.fixed_weights
    state = mixer.state()
    rest = Mixer([TaskSource(task="house", weight=2.0)], seed=1, changes=read_changes(tmp_path))
    rest.restore(state)
    fixed = Curriculum(CurriculumSection(), mixer=rest, folder=tmp_path)
    rest.draw()
    assert fixed.trained(3, [group("house", 1.0), group("shop", 1.0)]) == []
    assert rest.weights == {"house": 2.0}
    assert rest.levels == {"house": 0}


def test_partially_written_change_is_ignored_and_later_changes_are_kept(tmp_path: Path) -> None:
    curriculum, _ = make(tmp_path)
    curriculum.trained(1, [group("shop", 1.0)] * 4)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"step": 7, "dr')
    assert [change.levels for change in read_changes(tmp_path)] == [{"shop": 1, "house": 0}]
    curriculum.trained(8, [group("shop", 1.0, split="train-2")] * 4)
    assert [change.levels for change in read_changes(tmp_path)] == [
        {"shop": 1, "house": 0},
        {"shop": 2, "house": 0},
    ]


def test_run_without_a_curriculum_has_no_curriculum_metrics(tmp_path: Path) -> None:
    curriculum, _ = make(tmp_path, levels={})
    assert curriculum.metrics() == {}
    assert curriculum.trained(1, [group("shop", 1.0)] * 20) == []
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('rollout.curriculum.levels={shop = ["train", "train"]}', "must list different splits"),
        ("rollout.curriculum.levels={shop = []}", "must list different splits"),
        ("rollout.curriculum.raise_at=0", "greater than 0"),
        ("rollout.curriculum.raise_at=1.5", "less than or equal to 1"),
        ("rollout.curriculum.window=1", "greater than or equal to 2"),
        ("rollout.curriculum.mix.fixed_share=0", "greater than 0"),
        ("rollout.curriculum.mix=random", "is none of fixed, progress"),
        ("rollout.curriculum.level={}", "did you mean levels?"),
    ],
)
def test_invalid_curriculum_is_a_config_error(override: str, words: str) -> None:
    config = Path(__file__).parents[3] / "examples/quickstart/train.toml"
    with pytest.raises(ConfigError) as error:
        load_config(config, [override])
    assert words in str(error.value)
