"""Exported Harbor task folders and the process that plays their sessions. The docker tests build them."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient
from agentrl_env.__main__ import main
from agentrl_env.bridges.harbor import container_session, container_tool
from agentrl_env.bridges.harbor.export import export
from agentrl_env.bridges.harbor.tasks import HarborTask
from agentrl_env.errors import LaunchError, UnknownSample
from tests.env.tasks import until

ROOT = Path(__file__).parents[3]
HARBOR = ROOT / ".venv-harbor/bin/python"
HOUSEHOLD = str(ROOT / "environments/household")
TOOL = Path(container_tool.__file__).read_text()
GREET = """
from agentrl_env import Done, Environment

class Greet(Environment):
    splits = ("test",)

    @classmethod
    def samples(cls, split):
        return [{"word": "hello"}]

    def reset(self, sample, rng):
        self.word = sample.data["word"]
        return f"Say {self.word}."

    def respond(self, text):
        if text == "crash":
            raise RuntimeError("broken")
        return Done("Thanks.", reward=float(text == self.word))
"""


async def test_folder_is_a_harbor_task_that_hides_the_sample_from_the_agent(tmp_path):
    (one, other) = await export(HOUSEHOLD, tmp_path, count=2)
    task = HarborTask.read(one.folder)
    assert (task.name, task.user, one.oracle) == ("household-test-0000", "agent", 1.0)
    assert task.instruction.startswith("Bring the ")
    assert "- `look` `{" in task.instruction
    sample = json.loads((one.folder / "environment/sample.json").read_text())
    async with EnvClient.local(HOUSEHOLD) as client, await client.open(split="test", index=0) as session:
        expected = {"split": "test", "index": 0, "seed": session.sample.seed}
        assert sample == {"target": "/srv/household", **expected}
        assert task.instruction.startswith(session.messages[0].content)
    assert str(sample["seed"]) not in task.instruction
    moves = (one.folder / "solution/solve.sh").read_text().splitlines()[2:]
    assert shlex.split(moves[0])[:2] == ["task", "look"]
    assert (one.folder / "tests/test.sh").stat().st_mode & 0o111
    assert other.folder.name == "household-test-0001"


@pytest.mark.bridges
@pytest.mark.skipif(
    not HARBOR.exists(), reason="Harbor is not installed (it needs Python 3.12); run make bridges"
)
async def test_folder_is_valid_for_harbor_itself(tmp_path):
    (one,) = await export(HOUSEHOLD, tmp_path, count=1)
    script = """
import sys
from harbor.models.task.task import Task
assert Task.is_valid_dir(sys.argv[1])
task = Task(sys.argv[1])
print(task.name, task.config.agent.user, task.config.environment.healthcheck.timeout_sec)
print(task.instruction)
"""
    checked = await asyncio.to_thread(
        subprocess.run, [HARBOR, "-c", script, one.folder], capture_output=True, text=True, timeout=300
    )
    assert checked.returncode == 0, checked.stderr
    first, _, instruction = checked.stdout.partition("\n")
    assert first == "household-test-0000 agent 120.0"
    assert instruction.strip() == HarborTask.read(one.folder).instruction


async def test_existing_folder_and_unknown_split_are_refused(tmp_path):
    await export(HOUSEHOLD, tmp_path, count=1)
    with pytest.raises(LaunchError, match="already exists"):
        await export(HOUSEHOLD, tmp_path, count=1)
    with pytest.raises(UnknownSample, match="no split 'none'; splits: train"):
        await export(HOUSEHOLD, tmp_path / "more", split="none")
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be written \(Not a directory\); choose another --output"):
        await export(HOUSEHOLD, tmp_path / "file", count=1)


async def test_task_without_an_expert_has_no_solution(tmp_path):
    (tmp_path / "greet").mkdir()
    (tmp_path / "greet/environment.py").write_text(GREET)
    (one,) = await export(str(tmp_path / "greet"), tmp_path / "out")
    assert one.oracle is None
    assert not (one.folder / "solution").exists()
    assert "- `respond` `{" in (one.folder / "instruction.md").read_text()


def test_command_line_prints_the_folders_and_the_rewards_of_their_solutions(tmp_path, monkeypatch, capsys):
    command = ["agentrl-env", "export", "harbor", HOUSEHOLD, "--count", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path}/household-test-0000: solution 1\n"


@pytest.fixture
async def session(tmp_path, monkeypatch):
    """Serve a session of ``Greet`` like a container's process. Return a function that runs the tool."""
    (tmp_path / "environment.py").write_text(GREET)
    sample = {"target": str(tmp_path), "split": "test", "index": 0, "seed": 1}
    (tmp_path / "sample.json").write_text(json.dumps(sample))
    path = f"{tmp_path}/socket"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    serving = asyncio.create_task(container_session.serve(listening, tmp_path, tmp_path / "reward.json"))
    await until(lambda: container_session.answers(path))
    tool = tmp_path / "task"
    tool.write_text(TOOL.replace(container_tool.SOCKET, path))

    async def run(*arguments, **options):
        command = [sys.executable, "-I", str(tool), *arguments]
        return await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60, **options
        )

    yield run
    serving.cancel()
    await asyncio.wait((serving,))


def recorded(folder):
    return json.loads((folder / "reward.json").read_text())


async def test_tool_shows_the_task_plays_it_and_the_reward_is_recorded(session, tmp_path):
    assert recorded(tmp_path) == {"reward": 0.0}
    shown = await session()
    assert shown.stdout.startswith("Say hello.\n\ntask respond {")
    bad = await session("respond", "hello")
    assert (bad.returncode, "not JSON" in bad.stderr) == (2, True)
    assert (await session("respond", "[]")).returncode == 2
    assert "shout" in (await session("shout")).stdout
    done = await session("respond", "-", input='{"text": "hello"}')
    assert (done.stdout, done.returncode) == ("Thanks.\n", 0)
    assert "The episode has ended: completed." in done.stderr
    assert recorded(tmp_path)["reward"] == 1.0
    assert "ended" in (await session("respond", '{"text": "hello"}')).stdout
    assert recorded(tmp_path)["reward"] == 1.0


async def test_failure_of_the_environment_leaves_no_reward(session, tmp_path):
    await session("respond", '{"text": "crash"}')
    assert not (tmp_path / "reward.json").exists()


async def test_malformed_and_endless_lines_do_not_affect_the_session(session, tmp_path):
    for data in (b"no JSON\n", b"[]\n", b'{"name": "respond", "arguments": 3}\n', b"x" * 2_000_000, b""):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(f"{tmp_path}/socket")
            probe.settimeout(60)
            try:
                await asyncio.to_thread(probe.sendall, data)
                probe.shutdown(socket.SHUT_WR)
                await asyncio.to_thread(probe.recv, 100)
            except OSError:
                continue  # the process closed the connection before the end
    assert (await session()).stdout.startswith("Say hello.")


def test_tool_without_an_episode_reports_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", container_tool.__file__], capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode, "the episode does not answer" in done.stderr) == (1, True)
