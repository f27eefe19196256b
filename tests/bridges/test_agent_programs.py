"""Unmodified programs on the SDKs of OpenAI and Anthropic, the Agents SDK and LangGraph can be trained."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("agent_programs.py")
EXAMPLE = ROOT / "examples/agent-program/train.toml"
pytestmark = [
    pytest.mark.bridges,
    pytest.mark.skipif(
        not all(map(find_spec, ("openai", "agents", "anthropic", "langgraph", "langchain_openai"))),
        reason="the extra [agents] is not installed; run make bridges",
    ),
]


def train(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Train the example's configuration with other settings. Return the recorded steps."""
    command = [sys.executable, "-m", "agentrl_train", "run", str(EXAMPLE)]
    for setting in (f"run.folder={folder}", "train.warmup_steps=0", *settings):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "agent-program/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_command_of_the_example_is_trained(tmp_path: Path) -> None:
    settings = ["run.steps=1", "rollout.groups_per_step=2", "rollout.group_size=2", "rollout.max_staleness=0"]
    (step,) = train(tmp_path, *settings)
    assert step["tasks"]["household"]["valid_calls"] > 0.9
    assert step["logprob_drift"] < 1e-4
    assert not (tmp_path / "agent-program/failures.jsonl").exists()


@pytest.mark.parametrize("program", ["openai_sdk", "agents_sdk_streamed", "anthropic_sdk"])
def test_program_is_trained_for_a_step(program: str, tmp_path: Path) -> None:
    (step,) = train(
        tmp_path,
        f"environments.0.program={PROGRAMS}:{program}",
        "run.steps=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=4",
        "rollout.max_staleness=0",
    )
    assert step["logprob_drift"] < 1e-4
    path = tmp_path / "agent-program/trajectories/step_000001.jsonl"
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    assert all("segments" not in episode for episode in episodes)
    assert max(len(episode["messages"]) for episode in episodes) > 4


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("program", ["agents_sdk", "langgraph"])
def test_starter_policy_learns_in_a_program(program: str, tmp_path: Path) -> None:
    records = train(tmp_path, f"environments.0.program={PROGRAMS}:{program}", "run.steps=9")
    success = [record["tasks"]["household"]["success"] for record in records]
    assert sum(success[-3:]) > sum(success[:3])
    assert max(record["logprob_drift"] for record in records) < 1e-4
