"""Transcripts of a run's episodes as text."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_train.errors import ConfigError
from agentrl_train.report.transcript import last_episodes, transcript


def episode(index: int, *, task: str = "shop", success: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "task": task,
        "split": "train",
        "index": index,
        "success": success,
        "reward": float(success),
        "end": "terminated",
        "messages": [],
        **more,
    }


def write(run: Path, name: str, *episodes: dict[str, Any]) -> None:
    (run / "trajectories").mkdir(exist_ok=True)
    lines = "".join(json.dumps(one) + "\n" for one in episodes)
    (run / "trajectories" / f"{name}.jsonl").write_text(lines)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path, "held_out_before", episode(0))
    write(tmp_path, "step_000001", episode(1), episode(2, success=False))
    write(tmp_path, "step_000002", episode(3), episode(4, task="sql", success=False))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last": 3}, [2, 3, 4]),
        ({"last": 99}, [0, 1, 2, 3, 4]),
        ({"last": 2, "task": "shop"}, [2, 3]),
        ({"last": 2, "failed": True}, [2, 4]),
        ({"last": 2, "task": "none"}, []),
    ],
)
def test_last_episodes_are_chosen_by_task_and_success(
    options: dict[str, Any], expected: list[int], run: Path
) -> None:
    assert [one.episode["index"] for one in last_episodes(run, **options)] == expected


def test_folder_without_episodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder; give the path of a run folder"):
        last_episodes(tmp_path / "nowhere", last=1)
    with pytest.raises(ConfigError, match="has no recorded episodes: name the folder of a run"):
        last_episodes(tmp_path, last=1)


def test_transcript_shows_calls_results_and_turns_without_control_characters() -> None:
    call = {"function": {"name": "search", "arguments": '{"text": "lamp"}'}}
    turn = {"tokens": 9, "finish_reason": "length", "invalid_calls": 1, "reward": 0.5}
    messages = [
        {"role": "user", "content": "Buy a lamp."},
        {"role": "assistant", "content": "\x1b[31mred", "tool_calls": [call], "turn": turn},
        {"role": "tool", "content": "no lamp"},
    ]
    text = transcript(episode(7, success=False, messages=messages), source="step_000003")
    assert text.splitlines() == [
        "=== step_000003: shop, train sample 7, no success, reward 0, terminated",
        "",
        "[user]",
        "Buy a lamp.",
        "",
        "[assistant] 9 tokens, cut off, 1 invalid calls, reward +0.5",
        "\N{REPLACEMENT CHARACTER}[31mred",
        '-> search({"text": "lamp"})',
        "",
        "[tool]",
        "no lamp",
    ]
