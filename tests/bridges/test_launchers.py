"""Unmodified coding agents play a shell task through their launchers and can be trained."""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.errors import SandboxUnavailable
from agentrl_env.sandbox.bubblewrap import check_available
from agentrl_train.actor import Actor
from agentrl_train.config import EnvironmentSection, RolloutSection
from agentrl_train.errors import ConfigError, EngineError
from agentrl_train.gateway.launchers import LAUNCHERS
from agentrl_train.learner import Learner
from agentrl_train.placement.environments import environments
from agentrl_train.types import Engine, Episode, EpisodeEnd, Sampling, Trajectory
from tests.bridges.speaker import Speaker, needs, train_on_what_was_sampled
from tests.env.bridges.harbor_tasks import write_task
from tests.tiny_models import learner_arguments
from tests.train.fakes import CHAT, ScriptedEngine

TASK = str(Path(__file__).parents[2] / "environments/swe_repair")
EPISODE = Episode(task="swe_repair", split="train", index=0, seed=0, draw_seed=(0, 0))
MAX_CONTEXT = 40_000
SAMPLING = Sampling(max_new_tokens=2000, max_context=MAX_CONTEXT)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
pytestmark = [pytest.mark.bridges, pytest.mark.filterwarnings("default")]
mini_swe_agent = needs("mini-swe-agent")
try:
    check_available()
except SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


def bash(command: str) -> Message:
    return Message.assistant("I run it.", ToolCall.of("bash", command=command))


@pytest.fixture(scope="module")
def repair() -> str:
    """Return a command that fixes the episode's bug."""
    with EnvClient.local_sync(TASK) as client, client.open(index=EPISODE.index, seed=EPISODE.seed) as session:
        calls: list[ToolCall] = []
        while not calls or calls[-1].function.name != "edit":
            calls.extend(session.expert().tool_calls or ())
            session.step(calls[-1])
    edit = json.loads(calls[-1].function.arguments)
    return (
        f"python3 - <<'END'\nfrom pathlib import Path\nfile = Path({edit['path']!r})\n"
        f"file.write_text(file.read_text().replace({edit['old']!r}, {edit['new']!r}))\nEND"
    )


@asynccontextmanager
async def actor_of(
    engine: Engine, *, launcher: str = "mini-swe-agent", sampling: Sampling = SAMPLING, task: str = TASK
) -> AsyncIterator[Actor]:
    """Yield an actor for a task configured in one line."""
    section = EnvironmentSection.model_validate({"serve": [task], "program": launcher})
    async with environments([section], max_sessions=4, stated=sampling) as served:
        yield Actor(
            engine=engine,
            chat=CHAT,
            clients=served.clients,
            sampling=sampling,
            rollout=RolloutSection(environment_retries=0, episode_timeout_s=240),
            slots=asyncio.Semaphore(1),
            programs=served.programs,
        )


async def play(
    say: Callable[[int, int], Message], *, episode: Episode = EPISODE, **options: Any
) -> Trajectory:
    """Play an episode with completions from a function of the call number, counted from 1."""
    count = itertools.count(1)
    engine = ScriptedEngine(CHAT, lambda *_: say(0, next(count)))
    async with actor_of(engine, **options) as actor:
        return await actor.sibling(episode)


def replies(trajectory: Trajectory) -> list[str]:
    return [str(message.content) for turn in trajectory.turns for message in turn.reply]


@mini_swe_agent
async def test_repair_by_the_agent_is_graded_by_the_hidden_tests(repair: str) -> None:
    moves = ["ls; exit 3", repair, SUBMIT]
    trajectory = await play(lambda _, count: bash(moves[count - 1]))
    assert trajectory.error is None
    assert (trajectory.end, trajectory.reward, trajectory.success) == (EpisodeEnd.TERMINATED, 1.0, True)
    assert trajectory.metrics["tests_passed"] == 1.0
    assert (len(trajectory.turns), len(trajectory.segments)) == (3, 1)
    system, task = (str(message.content) for message in trajectory.opening)
    assert "helpful assistant" in system
    assert "A user reports" in task
    assert "README.md" in (listing := replies(trajectory)[0])
    assert '"returncode": 3' in listing


@mini_swe_agent
async def test_work_that_fixes_nothing_is_graded_zero() -> None:
    trajectory = await play(lambda _, count: bash(["ls", SUBMIT][count - 1]))
    assert (trajectory.error, trajectory.end) == (None, EpisodeEnd.TERMINATED)
    assert (trajectory.reward, trajectory.success) == (0.0, False)
    assert 0.0 < trajectory.metrics["tests_passed"] < 1.0


@mini_swe_agent
async def test_unfinished_work_is_graded_at_the_turn_limit(repair: str) -> None:
    trajectory = await play(lambda _, count: bash(repair if count == 1 else "ls"))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert len(trajectory.turns) == 19  # the last of the task's 20 turns submits


@mini_swe_agent
async def test_malformed_answers_are_turns_of_the_policy(repair: str) -> None:
    moves = [
        bash(repair),
        Message.assistant("I look around."),
        Message.assistant(None, ToolCall.of("view", path="README.md")),
        Message.assistant(None, ToolCall.of("bash", command=7)),
        bash(SUBMIT),
    ]
    trajectory = await play(lambda _, count: moves[count - 1])
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 5)
    assert any("should be a valid string, got 7" in reply for reply in replies(trajectory))


@mini_swe_agent
async def test_agent_that_gives_up_on_malformed_answers_is_graded(repair: str) -> None:
    trajectory = await play(lambda _, count: bash(repair) if count == 1 else Message.assistant("What now?"))
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 4)


@mini_swe_agent
async def test_full_context_truncates_the_episode_with_its_grade(repair: str) -> None:
    long = f"{repair}\nhead -c 6000 /dev/zero | tr '\\0' x"
    trajectory = await play(
        lambda _, count: bash(long), sampling=Sampling(max_new_tokens=500, max_context=9000)
    )
    assert trajectory.error is None
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_LENGTH, 1.0)


@mini_swe_agent
async def test_engine_failure_fails_the_episode() -> None:
    def broken(number: int, count: int) -> Message:
        raise EngineError("out of memory")

    assert (await play(broken)).end is EpisodeEnd.FAILED_ENGINE


@mini_swe_agent
async def test_agent_trains_for_two_steps_on_exactly_what_was_sampled(repair: str) -> None:
    moves = ["ls", repair, SUBMIT]

    def say(number: int, count: int) -> Message:
        """Fix the library in every second episode, so that rewards differ."""
        return bash("true" if number % 2 and count == 2 else moves[count - 1])

    engine = Speaker(say)
    learner = Learner(engine.model, **learner_arguments(learning_rate=1e-3, warmup_steps=0))
    async with actor_of(engine) as actor:
        for step in range(2):
            engine.version, engine.sampled = step, []
            group, failed = await actor.group(EPISODE, size=2, group_id=step, admitted_version=step)
            assert [one.error for one in failed] == []
            assert [one.reward for one in group.trajectories] == [1.0, 0.0]
            assert len(engine.sampled) == 6
            train_on_what_was_sampled(learner, engine, group, max_tokens=MAX_CONTEXT)


@pytest.mark.parametrize("repairs", [True, False])
@mini_swe_agent
async def test_patch_of_a_harbor_folder_is_graded_by_its_hidden_tests(repairs: bool, tmp_path: Path) -> None:
    files = {
        "instruction.md": "metres() of lengths.py is wrong. Repair it.\n",
        "environment/lengths.py": "def metres(feet):\n    return feet * 3.048\n",
        "tests/check.py": "from lengths import metres\n\nassert abs(metres(10) - 3.048) < 1e-9\n",
    }
    test = (
        "mkdir -p /logs/verifier\nPYTHONPATH=. python3 /tests/check.py && reward=1 || reward=0\n"
        "echo $reward >/logs/verifier/reward.txt\n"
    )
    for split in ("train", "test"):
        write_task(tmp_path / "repairs" / split / "lengths", test=test, files=files)
    patch = "sed -i 's/3.048/0.3048/' lengths.py" if repairs else "echo '# fine' >>lengths.py"
    commands = ["cat lengths.py; ls /tests", patch, SUBMIT]
    trajectory = await play(
        lambda _, count: bash(commands[count - 1]),
        episode=replace(EPISODE, task="repairs"),
        task=f"harbor:{tmp_path / 'repairs'}",
    )
    assert trajectory.error is None
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TERMINATED, float(repairs))
    assert "metres() of lengths.py is wrong" in str(trajectory.opening[-1].content)
    listing = replies(trajectory)[0]
    assert "feet * 3.048" in listing
    assert "No such file or directory" in listing  # the tests are hidden
    sampled = [turn.completion.token_ids for turn in trajectory.turns]
    assert sampled == [CHAT.completion(bash(command)) for command in commands]
    assert len(trajectory.segments) == 1


NAMES = {
    "claude-code": ("mcp__task__", "Bash"),
    "opencode": ("task_", "bash"),
    "codex": ("mcp__task__", "exec_command"),
}
"""The names of the task's tools in each agent, and the agent's own tool for commands."""


def command_of_npm(launcher: str) -> str:
    """Return a launcher. Skips the test if its agent is not installed."""
    try:
        LAUNCHERS[launcher].check_installed()
    except ConfigError as error:
        pytest.skip(str(error))
    return launcher


@pytest.fixture(params=NAMES)
def agent(request: pytest.FixtureRequest) -> str:
    """Return each npm agent."""
    return command_of_npm(request.param)


def by_mcp(agent: str, name: str, **arguments: str) -> Message:
    return Message.assistant("I do it.", ToolCall.of(f"{NAMES[agent][0]}{name}", **arguments))


@pytest.mark.parametrize(("submits", "repairs"), [(True, True), (False, True), (False, False)])
async def test_agent_plays_with_the_tools_of_the_task(
    agent: str, submits: bool, repairs: bool, repair: str
) -> None:
    moves = [
        by_mcp(agent, "bash", command=repair if repairs else "ls"),
        by_mcp(agent, "nothing"),
        by_mcp(agent, "submit") if submits else Message.assistant("It is done."),
    ]
    trajectory = await play(lambda _, count: moves[count - 1], launcher=agent)
    assert trajectory.error is None
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TERMINATED, float(repairs))
    assert (len(trajectory.turns), len(trajectory.segments)) == (3, 1)
    assert "A user reports" in str(trajectory.opening[-1].content)


async def test_command_for_the_trainers_machine_is_not_run(agent: str, tmp_path: Path) -> None:
    own = ToolCall.of(NAMES[agent][1], command=f"touch {tmp_path}/own", cmd=f"touch {tmp_path}/own")
    moves = [
        Message.assistant("I do it.", own),
        by_mcp(agent, "bash", command=f"touch {tmp_path}/sandboxed"),
        by_mcp(agent, "submit"),
    ]
    trajectory = await play(lambda _, count: moves[count - 1], launcher=agent)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 0.0, 3)
    assert os.listdir(tmp_path) == []


async def test_agent_is_stopped_at_the_turn_limit_of_the_task(agent: str, repair: str) -> None:
    trajectory = await play(
        lambda _, count: by_mcp(agent, "bash", command=repair if count == 1 else "ls"), launcher=agent
    )
    assert (trajectory.error, trajectory.end, trajectory.reward) == (None, EpisodeEnd.TERMINATED, 1.0)
    assert len(trajectory.turns) == 19  # the last of the task's 20 turns submits


async def test_agent_trains_for_a_step_on_exactly_what_was_sampled_through_mcp(
    agent: str, repair: str
) -> None:
    engine = Speaker(
        lambda number, count: (
            by_mcp(agent, "bash", command="ls" if number % 2 else repair)
            if count == 1
            else by_mcp(agent, "submit")
        )
    )
    learner = Learner(engine.model, **learner_arguments(learning_rate=1e-3, warmup_steps=0))
    async with actor_of(engine, launcher=agent) as actor:
        group, failed = await actor.group(EPISODE, size=2, group_id=0, admitted_version=0)
    assert [one.error for one in failed] == []
    assert [one.reward for one in group.trajectories] == [1.0, 0.0]
    train_on_what_was_sampled(learner, engine, group, max_tokens=MAX_CONTEXT)


async def test_full_context_truncates_the_agent_with_its_grade(agent: str, repair: str) -> None:
    sampling = Sampling(max_new_tokens=500, max_context=SAMPLING.max_context)
    long = f"{repair}\nhead -c 7000 /dev/zero | tr '\\0' x"
    trajectory = await play(
        lambda _, count: by_mcp(agent, "bash", command=long), launcher=agent, sampling=sampling
    )
    assert trajectory.error is None
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TRUNCATED_LENGTH, 1.0)


async def test_engine_failure_fails_the_episode_of_the_agent(agent: str) -> None:
    def broken(number: int, count: int) -> Message:
        raise EngineError("out of memory")

    assert (await play(broken, launcher=agent)).end is EpisodeEnd.FAILED_ENGINE
