import json
import subprocess
import sys

import pytest

from agentrl_env import EnvClient
from agentrl_env.client.benchmark import measure
from agentrl_env.errors import AgentRLError, UnknownTask
from tests.env.tasks import Guess, Quick


def test_measure_counts_steps_and_episodes_of_all_sessions():
    load = measure(lambda: EnvClient.local(Guess), task=None, sessions=5, seconds=0.2, warmup=0.0)
    assert (load.task, load.sessions, load.failures, load.first_failure) == ("guess", 5, 0, None)
    assert load.steps > load.episodes > 5
    assert 0 < load.p50_ms <= load.p99_ms
    assert load.steps_per_s == pytest.approx(load.steps / load.seconds)


class Closed(Guess):
    def reset(self, sample, rng):
        raise OSError("no database")


def test_measure_raises_if_no_step_succeeds():
    with pytest.raises(AgentRLError, match=r"no step of 'closed' succeeded: .*no database"):
        measure(lambda: EnvClient.local(Closed), task=None, sessions=2, seconds=0.1, warmup=0.0)


def test_task_must_be_chosen_if_several_are_served():
    with pytest.raises(UnknownTask, match="choose one with task= or --task: guess, quick"):
        measure(lambda: EnvClient.local(Guess, Quick), task=None, sessions=1, seconds=0.1)


def test_bench_command_prints_json():
    command = [sys.executable, "-m", "agentrl_env", "bench", "tests/env/tasks.py:Guess"]
    done = subprocess.run(
        [*command, "--seconds", "0.2", "--sessions", "2", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] > 0
