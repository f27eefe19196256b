"""Presets that change the episodes or the learner's passes, in real runs."""

import json
import math
import tomllib
from pathlib import Path

import pytest

from agentrl_train.weights import FOREIGN
from tests.tiny_models import make_model, make_tokenizer
from tests.train.runs.processes import finish, steps, write_config

pytestmark = pytest.mark.slow


CORE = ("dapo", "a3po", "gigpo", "ppo_turn", "sweet_dpo")
EXTENDED = (
    *("remax", "tis", "gspo", "scaling_inter", "starpo_s", "ppo", "ppo_bi_level"),
    *("practitioner", "archer", "sweet", "matpo", "lightning", "spear"),
)


@pytest.mark.parametrize(
    "preset", [*CORE, *(pytest.param(name, marks=pytest.mark.extended) for name in EXTENDED)]
)
def test_preset_trains_and_its_keys_are_recorded(preset: str, tmp_path: Path) -> None:
    task = "riddles.py:Riddles" if preset.startswith("sweet") else "vowels.py:Vowels"
    config, run = write_config(tmp_path, target=task), tmp_path / "run"
    chosen = (
        f"algorithm.preset={preset}",
        "run.steps=2",
        "rollout.max_staleness=1",
        "rollout.groups_per_step=4",
        "engine.max_context=1024",
    )
    done = finish(config, *chosen)
    assert done.returncode == 0, done.stderr
    assert [step["step"] for step in steps(run)] == [1, 2]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps(run))
    recorded = tomllib.loads((run / "config.toml").read_text())["algorithm"]
    assert recorded["preset"] == preset
    assert recorded.keys() >= {"credit", "baseline", "scale", "anchor", "ratio", "region", "aggregation"}


@pytest.mark.extended
def test_turns_of_a_second_model_are_also_trained_on_after_a_resume(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    make_model(seed=5).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    second = ("rollout.stale.fraction=0.5", "rollout.stale.model=other", "checkpoint.every=1")
    for length, resume in ((1, False), (2, True)):
        done = finish(config, *second, f"run.steps={length}", "metrics.trajectories=100", resume=resume)
        assert done.returncode == 0, done.stderr
    assert [step["step"] for step in steps(run)] == [1, 2]
    for step in (1, 2):
        lines = (run / "trajectories" / f"step_{step:06}.jsonl").read_text().splitlines()
        messages = [message for line in lines for message in json.loads(line)["messages"]]
        turns = [message["turn"] for message in messages if "turn" in message]
        versions = {(turn["policy"], version) for turn in turns for version in turn["versions"]}
        assert versions == {("stale", FOREIGN), ("current", step - 1)}
