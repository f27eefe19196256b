"""Names, checks and sessions of launchers, without a coding agent."""

import json
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from agentrl_env import Done, EnvClient, Environment, tool
from agentrl_env.sandbox.sandbox import ExecResult
from agentrl_env.types import TaskInfo
from agentrl_train.config import EnvironmentSection
from agentrl_train.errors import ConfigError
from agentrl_train.gateway.launchers import LAUNCHERS, Launcher, find_launcher
from agentrl_train.gateway.launchers.session import Output, TaskSession, shell_tool
from agentrl_train.gateway.launchers.tool_server import served_tools
from agentrl_train.placement.environments import environments

ROOT = Path(__file__).parents[3]
MINI = LAUNCHERS["mini-swe-agent"]


class Machine(Environment):
    """A machine that echoes commands, earns half for "work", and rewards its submission."""

    max_turns = 4

    def reset(self, sample, rng):
        return "Work, then call submit()."

    @tool
    def run_it(self, command: str, seconds: int = 3):
        """Run a command.

        Args:
            command: The command.
            seconds: Its limit.
        """
        return Done("crashed") if command == "crash" else f"ran {command}\n(exit code 3)"

    @tool
    def submit(self):
        """Hand in."""
        return Done("Graded.", reward=1.0, metrics={"graded": 1.0})


class Quiz(Environment):
    """A question with a shell and an answer."""

    def reset(self, sample, rng):
        return "How many?"

    @tool
    def bash_action(self, script: str):
        """Run a script.

        Args:
            script: The script.
        """
        return "7"

    @tool
    def finish_action(self, thought: str):
        """End.

        Args:
            thought: Why.
        """
        return Done("no answer")

    @tool
    def answer_action(self, answer: str):
        """Answer.

        Args:
            answer: The answer.
        """
        return Done("answered", reward=float(answer == "7"))


class Counter(Environment):
    """A task without a shell."""

    def reset(self, sample, rng):
        return "Count."

    @tool
    def add(self, number: int):
        """Add.

        Args:
            number: The number.
        """
        return "added"


def info(environment: type[Environment]) -> TaskInfo:
    with EnvClient.local_sync(environment) as client:
        (task,) = client.tasks().values()
        return task


def open_session(environment: type[Environment]) -> TaskSession:
    client = EnvClient.local_sync(environment)
    return TaskSession(client.open(), max_turns=environment.max_turns, earn=lambda reward: None)


async def served(**section: Any) -> None:
    async with environments([EnvironmentSection.model_validate(section)], max_sessions=1):
        pass


def test_names_of_launchers_are_found_and_commands_are_unchanged() -> None:
    assert find_launcher("mini-swe-agent") is MINI
    for command in ("python agent.py", "python", "agent.py:play", "./agent", "mini-swe-agent --help"):
        assert find_launcher(command) is None


async def test_unknown_launcher_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mini-swe-agent'"):
        await served(serve=["module:Task"], program="mini-swe-agnet")
    with pytest.raises(ConfigError, match="the launchers are mini-swe-agent, "):
        find_launcher("somebody-elses-agent-0")


def test_missing_agent_is_an_error_with_the_install_command() -> None:
    options = {"name": "x", "module": "x", "install": "pip install 'it'"}
    missing = Launcher(requirement="no-such-package-0>=2", **options)
    with pytest.raises(ConfigError, match=r"no-such-package-0>=2, which is not installed: pip install 'it'"):
        missing.check_installed()
    old = Launcher(requirement="pytest<1", **options)
    with pytest.raises(ConfigError, match=re.escape(f"pytest<1, and {version('pytest')} is installed")):
        old.check_installed()
    with pytest.raises(ConfigError, match="the command no-such-command-0, which is not on the PATH"):
        Launcher(program="no-such-command-0", **options).check_installed()
    Launcher(program="python", **options).check_installed()


def test_version_range_of_mini_swe_agent_matches_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(MINI.requirement) in map(Requirement, extras["agents"])


def test_agents_of_npm_are_the_versions_that_the_tests_install() -> None:
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("NPM_AGENTS")]
    installed = {f"npm install --global {agent}" for agent in line.partition(":=")[2].split()}
    assert {one.install for one in LAUNCHERS.values() if one.program} == installed


def test_task_without_a_shell_is_an_error_that_lists_its_tools() -> None:
    with pytest.raises(ConfigError, match=r"cannot play the task 'counter': .*the tools are add"):
        MINI.command(info(Counter), timeout_s=3.0)


async def test_launcher_needs_a_server_and_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launcher, "check_installed", lambda self: None)
    (tmp_path / "questions.jsonl").write_text("{}\n")
    program = {"run": "mini-swe-agent", "samples": str(tmp_path / "questions.jsonl")}
    with pytest.raises(ConfigError, match="give serve or url instead of samples"):
        await served(program=program)


def test_command_keeps_the_limits_of_the_task() -> None:
    command = MINI.command(info(Machine), timeout_s=30.0)
    assert command[-4:] == ["--max-turns", "4", "--timeout", "30.0"]


@pytest.mark.parametrize(
    ("environment", "found"),
    [(Machine, ("run_it", "command")), (Quiz, ("bash_action", "script"))],
)
def test_shell_of_a_task_is_found(environment: type[Environment], found: tuple[str, str]) -> None:
    assert shell_tool(info(environment).tools) == found


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (ExecResult(code=0, stdout="fine (exit code 7) it said\n", stderr=""), 0),
        (ExecResult(code=3, stdout="some\n", stderr="more\n"), 3),
        (ExecResult(code=3, stdout="", stderr="", note="The output was cut."), 3),
    ],
)
def test_exit_code_is_parsed_from_the_text_of_a_sandbox(result: ExecResult, code: int) -> None:
    assert Output(text=result.text, invalid=False).code == code


def test_last_turn_of_a_task_is_left_for_its_submission() -> None:
    session = open_session(Machine)
    for _ in range(3):
        assert not session.exhausted
        assert session.run("ls").code == 3
    assert session.exhausted
    assert not session.over
    assert session.end()["reward"] == 1.0
    assert session.over


def test_end_gives_the_reward_and_metrics_of_the_last_step() -> None:
    ended = open_session(Machine).end("an answer that submit() has no place for")
    assert (ended["reward"], ended["metrics"]["graded"]) == (1.0, 1.0)


def test_command_that_ends_the_task_is_not_submitted_again() -> None:
    session = open_session(Machine)
    session.run("crash")
    assert session.over
    assert session.end()["reward"] == 0.0


def test_command_of_another_type_is_rejected_by_the_task() -> None:
    output = open_session(Machine).run(5)
    assert "should be a valid string, got 5" in output.text
    assert output.code == 1


@pytest.mark.parametrize(("answer", "reward"), [("7\n", 1.0), ("8", 0.0), ("", 0.0)])
def test_answer_is_submitted_if_the_task_accepts_one(answer: str, reward: float) -> None:
    session = open_session(Quiz)
    assert session.takes_answer
    assert session.end(answer)["reward"] == reward


def test_tools_are_served_by_mcp_until_the_task_ends() -> None:
    session = open_session(Machine)
    with served_tools(session) as (tools, url), httpx.Client(trust_env=False) as client:

        def ask(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return client.post(url, json=body).json()

        assert ask("initialize", protocolVersion="2025-03-26")["result"]["protocolVersion"] == "2025-03-26"
        notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert client.post(url, json=notification).status_code == 202
        assert [one["name"] for one in ask("tools/list")["result"]["tools"]] == ["run_it", "submit"]
        called = ask("tools/call", name="run_it", arguments={"command": "ls"})["result"]
        assert called == {"content": [{"type": "text", "text": "ran ls\n(exit code 3)"}], "isError": False}
        assert ask("tools/call", name="nothing", arguments={})["result"]["isError"]
        assert ask("prompts/list")["error"]["code"] == -32601
        assert client.post(url + "x", json={}).status_code == 404
        assert client.get(url).status_code == 405
        with pytest.raises(
            httpx.ReadTimeout
        ):  # an agent that received the answer would call the policy again
            client.post(
                url,
                content=json.dumps({"id": 2, "method": "tools/call", "params": {"name": "submit"}}),
                timeout=1.0,
            )
        assert tools.ended.is_set()
    assert session.end()["reward"] == 1.0
