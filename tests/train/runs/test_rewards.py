"""Custom rewards in real runs. They train the policy, and a failure of the judge is not a reward."""

import json
import zlib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from agentrl_train.config import load_config
from tests.env.evaluation.chat_server import Answer, ChatServer, completion
from tests.train.runs.processes import finish, steps, write_config

FUNCTIONS = Path(__file__).with_name("judged.py")
OWN = Path(__file__).parents[3] / "examples/own-reward/train.toml"


def judged(body: dict[str, Any]) -> Answer:
    """Score a text by its share of vowels. Reject about every ninth request."""
    text = body["messages"][0]["content"].partition(": ")[2]
    if zlib.crc32(text.encode()) % 9 == 0:
        return 400, {"text": "this one is refused"}
    share = sum(letter in "aeiouAEIOU" for letter in text) / max(1, len(text))
    return completion(text=f"Score: {share:.6f}")


@pytest.mark.slow
def test_run_trains_on_a_judge_and_omits_episodes_that_it_fails_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(tmp_path, target="vowels.py:Vowels"), tmp_path / "run"
    monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "judge"))
    settings = (
        f'reward.functions=["{FUNCTIONS}:judged", "{FUNCTIONS}:varied"]',
        "reward.weights={environment = 0.0, varied = 0.1}",
        "run.steps=10",
        "engine.max_new_tokens=6",
        "rollout.groups_per_step=4",
        "rollout.group_size=12",
        "engine.max_sessions=32",
        "train.learning_rate=5e-3",
    )
    with ChatServer(judged) as server:
        monkeypatch.setenv("JUDGE_URL", server.url)
        done = finish(config, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [step["tasks"]["vowels"] for step in steps(run)]
    for line in lines:
        total = line["score.judged"] + 0.1 * line["score.varied"]
        assert line["reward"] == pytest.approx(total, abs=1e-6)
    rewards = [line["reward"] for line in lines]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.02
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert {failure["end"] for failure in failures} == {"failed_reward"}
    assert all("this one is refused" in failure["error"] for failure in failures)
    first = json.loads((run / "trajectories/step_000001.jsonl").read_text().splitlines()[0])
    assert first["scores"].keys() == {"environment", "judged", "varied"}
    assert any((tmp_path / "judge").rglob("*.json"))


@pytest.mark.extended
@pytest.mark.slow
def test_run_with_rewards_that_always_fail_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, target="vowels.py:Vowels")
    monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "judge"))
    with ChatServer(lambda body: (401, {"text": "wrong key"})) as server:
        monkeypatch.setenv("JUDGE_URL", server.url)
        done = finish(config, f'reward.functions=["{FUNCTIONS}:judged"]')
    assert done.returncode == 1
    assert "groups of task vowels failed one after another" in done.stderr
    assert "reward 'judged': ModelRefused" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.extended
def test_example_with_own_rewards_runs(tmp_path: Path) -> None:
    assert load_config(OWN).reward.fade_steps == {"named": 10}
    done = finish(OWN, "run.steps=2", f"run.folder={tmp_path}", "eval.samples=0", "run.threads=2")
    assert done.returncode == 0, done.stderr
    for step in steps(tmp_path / "own-reward"):
        assert step["tasks"]["shop"].keys() >= {"score.environment", "score.short", "score.named"}
