from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl_train.batch import sequences
from agentrl_train.telemetry.metrics import MetricsLog, read_jsonl
from agentrl_train.telemetry.tokens import SUFFIX, read_tokens, trained_advantages
from agentrl_train.types import Segment
from tests.train.telemetry.test_metrics import make_group, make_trajectory


def test_recorded_episode_has_the_advantage_that_each_token_was_trained_with(tmp_path: Path):
    groups = [make_group(0, "shop"), make_group(1, "sql")]
    rows = sequences(groups, [[-1.0, 2.0, 0.0], [-0.5, 0.5, 0.25]])
    log = MetricsLog(tmp_path, trajectories=4)
    log.log_step(1, policy_version=1, elapsed_s=1.0, metrics={}, tasks={}, groups=groups, rows=rows)
    log.close()
    episodes = read_jsonl(tmp_path / "trajectories" / "step_000001.jsonl")
    tokens = [read_tokens(tmp_path / "trajectories" / f"step_000001{SUFFIX}", i) for i in range(4)]
    shown = [
        (episode["task"], episode["sibling"], record["turns"][0]["advantages"])
        for episode, record in zip(episodes, tokens, strict=True)
    ]
    assert shown == [
        ("shop", 1, [2.0] * 3),
        ("sql", 1, [0.5] * 3),
        ("shop", 0, [-1.0] * 3),
        ("sql", 0, [-0.5] * 3),
    ]
    assert tokens[0]["turns"][0]["token_ids"] == [5, 6, 7]
    assert tokens[0]["turns"][0]["logprobs"] == [-0.1, -0.2, -0.3]
    assert tokens[0]["turns"][0]["versions"] == [3, 3, 4]


def test_segments_have_the_advantages_of_their_turns():
    one = make_trajectory()
    turns = [one.turns[0], replace(one.turns[0], segment=1), one.turns[0]]
    child = Segment(parent=0, after_turn=0, reason="sub_agent")
    group = replace(
        make_group(0, "shop"),
        trajectories=(replace(one, turns=tuple(turns), segments=(one.segments[0], child)),),
    )
    rows = sequences([group], [[np.array([1.0, 2.0, 3.0])]])
    assert len(rows) == 2
    assert trained_advantages([group], rows) == {0: [[1.0] * 3, [2.0] * 3, [3.0] * 3]}


def test_episodes_that_are_not_trained_on_have_no_advantages(tmp_path: Path):
    group = make_group(0, "shop")
    assert trained_advantages([group], sequences([group], [[None, 1.0, None]])).keys() == {1}
    log = MetricsLog(tmp_path)
    log.log_evaluation("before", policy_version=0, results={"shop": [make_trajectory()]})
    log.close()
    record = read_tokens(tmp_path / "trajectories" / f"held_out_before{SUFFIX}", 0)
    assert record is not None
    assert record["turns"][0]["advantages"] is None


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08\x00", b"not gzip"])
def test_file_that_is_not_complete_has_no_tokens(tmp_path: Path, content: bytes):
    path = tmp_path / f"step_000001{SUFFIX}"
    assert read_tokens(path, 0) is None
    path.write_bytes(content)
    assert read_tokens(path, 0) is None
