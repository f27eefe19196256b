"""A run with customers played by a model. Its text is not trained on, and its failures are not rewards."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.env.evaluation.chat_server import Answer, ChatServer, completion
from tests.train.runs.processes import finish, steps, write_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
REWARD = Path(__file__).with_name("spoken.py")
SETTINGS = (
    f'environments=[{{serve=["{ROOT / "environments/support"}"]}}]',
    f'model.chat_template="{ROOT / "examples/quickstart/chat_template.jinja"}"',
    f'reward.functions=["{REWARD}:vowels"]',
    "reward.weights={environment = 0.0}",
    "run.steps=2",
    "engine.max_context=4000",
    "engine.max_new_tokens=8",
    "rollout.groups_per_step=4",
    "rollout.group_size=2",
    "metrics.trajectories=100",
)


def is_refused(body: dict[str, Any]) -> bool:
    """Return True for about a third of the customers, depending on their instructions."""
    return zlib.crc32(body["messages"][0]["content"].encode()) % 3 == 0


def customer(body: dict[str, Any]) -> Answer:
    """Send a text that depends on the seed, and end after the second answer."""
    heard = sum(message["role"] == "user" for message in body["messages"]) - 1
    if heard and is_refused(body):
        return 400, {"text": "this customer is refused"}
    return completion(text=f"Request {body['seed']}, part {heard}." + " [END]" * (heard == 2))


def test_run_trains_only_the_policy_and_counts_the_users_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    model = tmp_path / "model" / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | {"max_position_embeddings": 4000}))
    with ChatServer(customer) as server:
        monkeypatch.setenv("SUPPORT_USER_URL", server.url)
        monkeypatch.setenv("SUPPORT_USER_CACHE", str(tmp_path / "cache"))
        done = finish(config, *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run / "trajectories").glob("step_*.jsonl"))
    )
    for step, episodes in zip(steps(run), (first, second), strict=True):
        rewards: dict[str, set[float]] = {}
        for one in episodes:
            rewards.setdefault(one["group_id"], set()).add(one["reward"])
        trained = [one for one in episodes if len(rewards[one["group_id"]]) > 1]
        turns = [message["turn"] for one in trained for message in one["messages"] if "turn" in message]
        assert step["loss_tokens"] == sum(turn["tokens"] for turn in turns) > 0
        means = step["tasks"]["support"]
        assert means["metric.user_requests"] == means["metric.user_messages"]
        assert means["metric.user_tokens_out"] == 5 * means["metric.user_requests"]
        assert means["metric.user_seconds"] > 0
    for one in first + second:
        said = [m["content"] for m in one["messages"] if m["role"] == "user"]
        assert said == [f"Request {one['seed']}, part {number}." for number in range(len(said))]
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert {failure["end"] for failure in failures} == {"failed_environment"}
    assert all("this customer is refused" in failure["error"] for failure in failures)
    groups = {one["group_id"] for one in first + second}
    assert not groups & {failure["group_id"] for failure in failures}
    assert len(list((tmp_path / "cache").glob("*.json"))) == sum(
        not is_refused(body) or len(body["messages"]) == 2 for body in server.requests
    )
