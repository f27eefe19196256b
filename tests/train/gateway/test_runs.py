"""Processes of runs with episodes played by a program, and of the standalone gateway."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from agentrl_train.__main__ import app
from agentrl_train.config import gateway_config, load_config
from agentrl_train.errors import ConfigError
from agentrl_train.placement.environments import _read_splits
from tests.train.runs.processes import finish, steps, write_config

COUNTING = Path(__file__).with_name("counting.py")


def write_program_config(
    folder: Path, *, program: str = f"{COUNTING}:play", inside: str = "", more: str = ""
) -> Path:
    """Write a configuration with samples in a file. Return its path."""
    config = write_config(folder)
    lines = [json.dumps({"question": f"number {number}"}) for number in range(4)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    text = re.sub(
        r"serve = .*",
        f'program = {{run = "{program}", samples = "questions.jsonl"{inside}}}\n{more}',
        config.read_text(),
    )
    config.write_text(text)
    return config


def test_samples_of_a_file_are_played_by_a_function_and_trained(tmp_path: Path) -> None:
    config = write_program_config(tmp_path, inside=', eval_samples = "questions.jsonl"')
    done = finish(config, "run.steps=2", "rollout.max_staleness=1", "eval.samples=2")
    assert done.returncode == 0, done.stdout + done.stderr
    records = steps(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["tasks"]["questions"]["reward"] > 0 for record in records)
    assert max(record["logprob_drift"] for record in records) < 1e-4
    (summary,) = json.loads((tmp_path / "run/summary.json").read_text())["tasks"].values()
    assert None not in (summary["before"], summary["after"])


@pytest.mark.extended
@pytest.mark.slow
def test_run_with_a_program_that_always_fails_ends_with_the_reason(tmp_path: Path) -> None:
    config = write_program_config(tmp_path, program="python broken.py")
    (tmp_path / "broken.py").write_text("raise SystemExit('there is no agent here')")
    done = finish(config, "rollout.environment_retries=0", "rollout.group_size=2")
    assert done.returncode == 1
    assert "there is no agent here" in done.stderr


@pytest.mark.parametrize(
    ("inside", "more", "problem"),
    [
        (', eval_samples = "none.jsonl"', "", "eval_samples: there is no file"),
        ("", 'serve = ["module:Task"]', "give either serve"),
        ("", "tasks = {questions = 1.0}", "samples are one task"),
        ("", 'split = "test"', "split and eval_split are the same"),
    ],
)
def test_settings_of_programs_are_checked(inside: str, more: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config(write_program_config(tmp_path, inside=inside, more=more))


def test_paths_of_programs_are_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (section,) = load_config(write_program_config(tmp_path, program="agent.py:play")).environments
    assert section.program.run == f"{tmp_path}/agent.py:play"
    assert section.program.folder == str(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no .*missing\.py"):
        load_config(write_program_config(tmp_path, program="missing.py:play"))
    with pytest.raises(ConfigError, match="eval_samples is missing"):
        load_config(write_program_config(tmp_path), ["eval.samples=5"])


def test_half_of_a_surrogate_pair_in_a_sample_is_replaced(tmp_path: Path) -> None:
    """Data sets with texts that were cut off contain halves of emoji."""
    (section,) = load_config(write_program_config(tmp_path)).environments
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "\ud83d", "whole": "\U0001f600"}))
    assert section.program is not None
    ((sample,),) = _read_splits(section, section.program).values()
    assert sample == {"question": "?", "whole": "\U0001f600"}


def test_standalone_gateway_writes_a_line_for_each_rollout(tmp_path: Path) -> None:
    write_config(tmp_path)
    command = [sys.executable, "-m", "agentrl_train", "gateway", str(tmp_path / "model"), "--port", "0"]
    command += [
        "-o",
        "rollouts.jsonl",
        "--set",
        "engine.max_context=300",
        "--set",
        "engine.max_new_tokens=20",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "AGENTRL_TOKEN"}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            announced = process.stdout.readline()
            address = re.search(r"http://\S+(?=/v1)", announced)
            assert address, announced
            body = {"messages": [{"role": "user", "content": "hello"}], "return_token_ids": True}
            with httpx.Client(base_url=f"{address[0]}/s/mine/v1", trust_env=False, timeout=60) as client:
                answer = client.post("/chat/completions", json=body).json()
                client.post("/reward", json={"reward": 0.5}).raise_for_status()
                client.post("/end").raise_for_status()
                assert client.post("/chat/completions", json=body).status_code == 410
            with httpx.Client(base_url=f"{address[0]}/s/other/v1", trust_env=False, timeout=60) as client:
                seeded = [
                    client.post("/chat/completions", json=body | {"n": 2, "seed": -7}).json()["choices"]
                    for _ in range(2)
                ]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    first, second = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    repeated, again = [[choice["token_ids"] for choice in choices] for choices in seeded]
    assert repeated == again
    assert repeated[0] != repeated[1]
    (turn,) = first["turns"]
    assert turn["token_ids"] == answer["choices"][0]["token_ids"]
    assert len(turn["logprobs"]) == len(turn["versions"]) == len(turn["token_ids"])
    assert (first["session"], first["reward"]) == ("mine", 0.5)
    assert (second["session"], second["reward"]) == ("other", None)


def test_required_parameters_cannot_be_ignored(tmp_path: Path) -> None:
    config = write_program_config(tmp_path)
    with pytest.raises(ConfigError, match="ignore lists 'tools', which defines a request"):
        load_config(config, ["environments.0.program.ignore=['temperature', 'tools']"])


def test_gateway_of_a_run_without_a_checkpoint_reports_it(tmp_path: Path) -> None:
    (tmp_path / "runs/new/checkpoints").mkdir(parents=True)
    done = CliRunner().invoke(app, ["gateway", str(tmp_path / "runs/new")])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith("runs/new has no checkpoint yet")


def test_gateway_beyond_loopback_needs_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_TOKEN", raising=False)
    write_config(tmp_path)
    done = CliRunner().invoke(app, ["gateway", str(tmp_path / "model"), "--host", "0.0.0.0"])
    assert isinstance(done.exception, ConfigError)
    assert "set AGENTRL_TOKEN" in str(done.exception)


def test_gateway_with_a_token_that_clients_cannot_send_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_TOKEN", "tökens-are-ascii-1234")
    write_config(tmp_path)
    done = CliRunner().invoke(app, ["gateway", str(tmp_path / "model")])
    assert isinstance(done.exception, ConfigError)
    assert "not allowed in an HTTP header" in str(done.exception)


@pytest.mark.parametrize(
    ("model", "reason"), [("/nowhere/model", "there is no /nowhere/model"), ("", "path: must not be empty")]
)
def test_gateway_of_a_missing_model_names_it(model: str, reason: str) -> None:
    done = CliRunner().invoke(app, ["gateway", model])
    assert isinstance(done.exception, ConfigError)
    assert reason in str(done.exception)


def test_gateway_can_answer_greedily_but_a_run_cannot(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert gateway_config(str(tmp_path / "model"), ["engine.temperature=0"]).engine.temperature == 0.0
    with pytest.raises(ConfigError, match="no learning signal"):
        load_config(config, ["engine.temperature=0"])
