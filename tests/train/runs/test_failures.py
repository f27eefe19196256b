"""Samples that always fail are recorded, counted and never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CHAT_TEMPLATE
from tests.train.runs.fragile import BROKEN, COUNT
from tests.train.runs.processes import finish, steps, write_config

pytestmark = pytest.mark.slow


def test_failing_sample_is_recorded_and_other_samples_are_trained(tmp_path: Path) -> None:
    config = write_config(tmp_path, target="fragile.py:Fragile")
    done = finish(config, "run.steps=4", "rollout.groups_per_step=2", "metrics.trajectories=100")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    failures = [json.loads(line) for line in (run / "failures.jsonl").read_text().splitlines()]
    assert failures
    for failure in failures:
        assert failure["task"] == "fragile"
        assert failure["index"] % COUNT == BROKEN
        assert failure["episodes"] == 3
        assert failure["dropped"]
        assert failure["end"] == "failed_environment"
        assert "the database is gone" in failure["error"]
    trained_groups = [group_id for step in steps(run) for group_id in step["groups"]]
    assert len(steps(run)) == 4
    assert len(trained_groups) == len(set(trained_groups)) == 8
    assert not set(trained_groups) & {failure["group_id"] for failure in failures}
    last = steps(run)[-1]
    assert (last["failed_episodes"], last["dropped_groups"]) == (3 * len(failures), len(failures))
    trained = [path.read_text() for path in (run / "trajectories").glob("step_*.jsonl")]
    assert trained
    assert not any("the database is gone" in text for text in trained)
    assert "the database is gone" in done.stderr


def test_run_is_refused_where_the_template_hides_the_tools_and_its_advice_helps(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "template.jinja").write_text(CHAT_TEMPLATE[CHAT_TEMPLATE.index("{%- for message") :])
    settings = ("run.steps=1", 'model.chat_template="template.jinja"', "engine.max_context=1024")
    refused = finish(config, *settings)
    assert refused.returncode != 0
    assert "does not show the tool" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = finish(config, *settings, 'model.tool_parser="prompt"', "run.name=again")
    assert done.returncode == 0, done.stderr
    assert "completions was read as a tool call in the syntax 'hermes'" in " ".join(done.stderr.split())
