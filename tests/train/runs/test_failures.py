"""Samples that always fail are recorded, counted and never trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.tiny_models import CHAT_TEMPLATE, make_model
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


@pytest.mark.extended
def test_run_is_rejected_if_the_template_hides_the_tools_and_its_advice_helps(tmp_path: Path) -> None:
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


@pytest.mark.extended
def test_base_model_without_a_chat_template_is_trained_with_a_configured_template(tmp_path: Path) -> None:
    config, run = write_config(tmp_path), tmp_path / "again"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template, tokenizer.eos_token = (
        None,
        "<|endoftext|>",
    )  # the token ends documents, not turns
    shutil.rmtree(tmp_path / "model")
    model = make_model()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    refused = finish(config, "run.steps=2")
    assert refused.returncode != 0
    assert "has no chat template: use an instruct model, or set model.chat_template" in refused.stderr
    (tmp_path / "template.jinja").write_text(CHAT_TEMPLATE[CHAT_TEMPLATE.index("{%- for message") :])
    settings = (
        'model.chat_template="template.jinja"',
        'model.tool_parser="prompt"',
        "engine.max_context=1024",
    )
    done = finish(config, *settings, "run.steps=2", "checkpoint.every=1", "run.name=again")
    assert done.returncode == 0, done.stderr
    trained = steps(run)
    assert [step["step"] for step in trained] == [1, 2]
    assert sum(step["loss_tokens"] for step in trained) > 0
    saved = AutoTokenizer.from_pretrained(run / "checkpoints" / "step_000002" / "model")
    assert "<|im_end|>" in saved.chat_template  # the model of a checkpoint has the format used in training
