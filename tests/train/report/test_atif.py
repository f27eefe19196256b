"""Recorded episodes as trajectories in Harbor's format."""

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl_train.errors import ConfigError
from agentrl_train.report.atif import atif, write_atif
from agentrl_train.report.transcript import last_episodes

HARBOR = Path(__file__).parents[3] / ".venv-harbor/bin/python"
IMAGE = "data:image/png;base64,AAAA"
VALIDATE = """
import sys
from pathlib import Path
from harbor.models.trajectories.trajectory import Trajectory
for path in sys.argv[1:]:
    print(len(Trajectory.model_validate_json(Path(path).read_text()).steps))
"""


def call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(number: int) -> dict[str, Any]:
    return {"number": number, "tokens": 2, "versions": [3, 4], "policy": "current", "reward": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with two episodes. One has tokens, calls and an image, and the other failed immediately."""
    picture = [{"type": "text", "text": "Here."}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    played = {
        "task": "shop",
        "split": "train",
        "index": 3,
        "seed": 5,
        "reward": 1.0,
        "success": True,
        "end": "terminated",
        "metrics": {"success": 1.0},
        "error": None,
        "messages": [
            {"role": "system", "content": "You buy."},
            {"role": "user", "content": picture},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("search", '{"text": "lamp"}', 1), call("buy", "{lamp", 2)],
                "turn": turn(0) | {"thought": "A lamp."},
            },
            {"role": "tool", "content": "found", "tool_call_id": "call_1"},
            {"role": "tool", "content": "no JSON", "tool_call_id": "call_2"},
            {"role": "assistant", "content": "Done.", "turn": turn(1)},
            {"role": "tool", "content": "late", "tool_call_id": "call_9"},
        ],
    }
    failed = {
        "task": "shop",
        "success": False,
        "end": "failed_environment",
        "error": "no room",
        "messages": [],
    }
    folder = tmp_path / "runs/one/trajectories"
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(one) + "\n" for one in (played, failed))
    (folder / "step_000001.jsonl").write_text(lines)
    turns = [
        {"token_ids": [7, 8], "logprobs": [-0.5, -0.25], "versions": [3, 4], "advantages": [1.5, 1.5]},
        {"token_ids": [9, 2], "logprobs": [-1.0, 0.0], "versions": [4, 4], "advantages": None},
    ]
    records = json.dumps({"turns": turns}) + "\n" + json.dumps({"turns": []}) + "\n"
    (folder / "step_000001.tokens.jsonl.gz").write_bytes(gzip.compress(records.encode()))
    return tmp_path / "runs/one"


def test_episode_keeps_messages_calls_results_and_sampled_tokens(run: Path) -> None:
    found = atif(last_episodes(run, last=2)[0], model="one")
    system, user, first, second = found["steps"]
    assert [step["step_id"] for step in found["steps"]] == [1, 2, 3, 4]
    assert (system["source"], system["message"]) == ("system", "You buy.")
    assert user["message"][1] == {"type": "image", "source": {"media_type": "image/png", "path": IMAGE}}
    assert first["reasoning_content"] == "A lamp."
    assert [one["arguments"] for one in first["tool_calls"]] == [{"text": "lamp"}, {}]
    assert first["tool_calls"][1]["extra"] == {"arguments": "{lamp"}
    assert first["observation"]["results"] == [
        {"content": "found", "source_call_id": "call_1"},
        {"content": "no JSON", "source_call_id": "call_2"},
    ]
    assert first["metrics"]["completion_token_ids"] == [7, 8]
    assert first["metrics"]["logprobs"] == [-0.5, -0.25]
    assert first["metrics"]["extra"]["versions"] == [3, 4]
    assert first["metrics"]["extra"]["advantages"] == [1.5, 1.5]
    assert "advantages" not in second["metrics"]["extra"]
    assert second["observation"]["results"] == [{"content": "late"}]  # the id of an unknown call
    assert found["final_metrics"] == {"total_completion_tokens": 4, "total_steps": 4}
    assert found["extra"]["reward"] == 1.0
    assert found["session_id"] == "one_step_000001_000000"


def test_immediately_failed_episode_has_its_error_and_no_reward(run: Path) -> None:
    found = atif(last_episodes(run, last=1)[0], model="one")
    assert [step["message"] for step in found["steps"]] == ["no room"]
    assert "reward" not in found["extra"]


def test_folder_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*file"):
        write_atif(last_episodes(run, last=1), tmp_path / "file", model="one")


def test_harbor_reads_the_files(run: Path, tmp_path: Path) -> None:
    if not HARBOR.exists():
        pytest.skip("Harbor is not installed (it needs Python 3.12)")
    write_atif(last_episodes(run, last=2), tmp_path / "atif", model="one")
    files = sorted((tmp_path / "atif").glob("*.json"))
    done = subprocess.run([HARBOR, "-c", VALIDATE, *files], capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["4", "1"], "")
