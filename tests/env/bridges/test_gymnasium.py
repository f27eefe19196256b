"""Gymnasium environments as tasks: actions, observations, seeds, ends, failures and targets."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.bridges.gymnasium.task import GymnasiumTask
from agentrl_env.client.schema_sampler import CannotSample, sample_call
from agentrl_env.errors import DefinitionError, EnvironmentFailed, TargetError
from agentrl_env.hosting.loader import load_target
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.testing import run_checks
from tests.env.bridges.gymnasium_tasks import SPACES, Answering

ROOT = Path(__file__).parents[3]
TOY = "tests.env.bridges.gymnasium_tasks"


def step(**arguments):
    return ToolCall.of("step", **arguments)


def schema(target):
    (spec,) = load_target(target).tool_specs()
    return spec.function.parameters["properties"]


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1"])
def test_episode_equals_gymnasiums_with_the_same_seed(name):
    """Observations, rewards and ends are equal for ten seeds and random actions."""
    task = load_target(f"gym:{name}")
    for seed in range(10):
        env = gymnasium.make(name)
        observation, _ = env.reset(seed=seed)
        env.action_space.seed(seed)
        with task.session(seed=seed) as session:
            texts = [session.messages[-1].content]
            observations = [observation]
            for _ in range(60):
                action = env.action_space.sample()
                observation, reward, terminated, truncated, _ = env.step(action)
                result = session.step(step(action=int(action)))
                observations.append(observation)
                texts.append(result.messages[0].content)
                assert (result.reward, result.terminated) == (pytest.approx(float(reward)), terminated)
                assert result.truncated == truncated
                if result.done:
                    break
        for text, observation in zip(texts, observations, strict=True):
            shown = json.loads(text.rpartition("Observation: ")[2])
            assert shown == pytest.approx(np.asarray(observation, float).tolist(), rel=1e-5)


def test_text_rendering_shows_where_the_player_is():
    with load_target("gym:FrozenLake-v1?is_slippery=false").session(seed=1) as session:
        assert "[S]FFF\nFHFH\nFFFH\nHFFG\nObservation: 0" in session.messages[0].content
        assert (
            session.step(step(action=2))
            .messages[0]
            .content.endswith("S[F]FF\nFHFH\nFFFH\nHFFG\nObservation: 1")
        )


def test_documentation_of_the_environment_describes_task_and_tool():
    task = load_target("gym:FrozenLake-v1")
    assert "crossing a frozen lake" in task.description()
    assert "Version History" not in task.description()
    (spec,) = task.tool_specs()
    assert "- 0: Move left" in spec.function.description
    assert (task.name, task.max_turns) == ("FrozenLake-v1", 100)


def test_options_of_the_target_are_arguments_of_gymnasium_make():
    task = load_target("gym:FrozenLake-v1?map_name=8x8&is_slippery=false&max_episode_steps=7")
    assert task.options == {"map_name": "8x8", "is_slippery": False, "max_episode_steps": 7}
    assert task.max_turns == 7
    with task.session() as session:
        assert "[S]FFFFFFF" in session.messages[0].content


def test_function_named_by_the_target_renders_the_observations():
    task = load_target(f"gym:FrozenLake-v1?is_slippery=false#{TOY}:cell")
    with task.session() as session:
        assert session.step(step(action=1)).messages[0].content == "cell 4 after 1 steps"


def test_subclass_sets_options_names_of_actions_and_text():
    class Lake(GymnasiumTask):
        """Cross the lake."""

        env_id = "FrozenLake-v1"
        options: ClassVar = {"is_slippery": False}
        actions: ClassVar = {"left": 0, "down": 1, "right": 2, "up": 3}

        def render(self, observation, info):
            return f"You are on cell {observation}."

    with Lake.session() as session:
        assert session.messages[0].content == "Cross the lake.\n\nYou are on cell 0."
        for direction in ("down", "down", "right", "right", "down", "right"):
            result = session.step(step(action=direction))
        assert (result.reward, result.metrics["success"], result.terminated) == (1.0, 1.0, True)
    assert schema_of(Lake)["action"]["enum"] == ["left", "down", "right", "up"]


def schema_of(task):
    return task.tool_specs()[0].function.parameters["properties"]


@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("Numbered", "Graph", "Huge")])
def test_calls_drawn_from_the_schema_are_actions_of_the_space(name):
    task, rng = load_target(f"gym:{TOY}:{name}-v0"), np.random.default_rng(1)
    with task.session(seed=1) as session:
        for _ in range(20):
            try:
                call = sample_call(task.tool_specs(), rng)
            except CannotSample:
                continue
            result = session.step(call)
            assert result.status is SessionStatus.RUNNING
            assert result.metrics["invalid_calls"] == 0.0
            outside = name in ("Word", "Odd") and "not in the action space" in result.messages[0].content
            assert outside or result.messages[0].content.startswith("Observation: ")


@pytest.mark.parametrize(
    ("name", "arguments", "seen"),
    [
        ("Numbers", {"action": [1, 3]}, [1, 3]),
        ("Switches", {"action": [1, 0, 1]}, [1, 0, 1]),
        ("Point", {"action": [0.5, 4]}, [0.5, 4.0]),
        ("Level", {"action": 0.25}, 0.25),
        ("Free", {"action": [[1, 2], [3, 1e6]]}, [[1.0, 2.0], [3.0, 1e6]]),
        ("Word", {"action": "cab"}, "cab"),
        ("Form", {"kind": 3, "where": [0, 9]}, {"kind": 3, "where": [0, 9]}),
        ("Odd", {"action": {"a b": 1, "class": "xy"}}, {"a b": 1, "class": "xy"}),
        ("Pair", {"action": [1, [2, 0]]}, [1, [2, 0]]),
    ],
)
def test_action_of_every_space_arrives(name, arguments, seen):
    with load_target(f"gym:{TOY}:{name}-v0").session() as session:
        result = session.step(step(**arguments))
        assert json.loads(result.messages[0].content.removeprefix("Observation: ")) == seen


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Numbers", {"action": [1, 0]}),
        ("Numbers", {"action": [1]}),
        ("Switches", {"action": [2, 0, 0]}),
        ("Point", {"action": [0, -0.1]}),
        ("Point", {"action": "0"}),
        ("Level", {"action": None}),
        ("Word", {"action": "xyz"}),
        ("Word", {"action": ""}),
        ("Form", {"kind": 0, "where": [0, 9]}),
        ("Form", {"kind": 1}),
        ("Odd", {"action": {"a b": 1}}),
        ("Pair", {"action": [1, [3]]}),
    ],
)
def test_action_outside_the_space_is_an_error_that_the_model_reads(name, arguments):
    with load_target(f"gym:{TOY}:{name}-v0").session() as session:
        result = session.step(step(**arguments))
        assert "argument" in result.messages[0].content or "action space" in result.messages[0].content
        assert (result.reward, result.status) == (0.0, SessionStatus.RUNNING)


def test_rendering_can_be_a_stream_or_nothing():
    task = load_target(f"gym:{TOY}:Printed-v0")
    with task.session(seed=1) as session:
        assert "the board\nObservation: " in session.messages[-1].content
    with task.session(seed=13) as session:
        assert "None" not in session.messages[-1].content


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gym:Nope-v1", "`Nope` doesn't exist"),
        ("gym:FrozenLake-v9", "versioned environments"),
        ("gym:FrozenLake-v1?bad=1", "unexpected keyword argument 'bad'"),
        ("gym:no_such_module:X-v0", "No module named 'no_such_module'"),
        ("gym:?a=1", "name an environment"),
        ("gym:CartPole-v1#nothing", "cannot load the renderer 'nothing'"),
        ("gym:CartPole-v1#math:pi", "is not a function"),
        (f"gym:{TOY}:Graph-v0", "has no JSON form"),
        (f"gym:{TOY}:Numbered-v0", "the key 0 is not a string"),
        (f"gym:{TOY}:Huge-v0", "1,000 numbers"),
    ],
)
def test_target_that_cannot_be_a_task_raises_one_sentence(target, message):
    with pytest.raises(TargetError, match=message) as caught:
        load_target(target)
    assert "\n" not in str(caught.value)


def test_name_of_an_action_outside_the_space_raises_definition_error():
    with pytest.raises(DefinitionError, match="the action 'fly'"):

        class Lake(GymnasiumTask):
            env_id = "FrozenLake-v1"
            actions: ClassVar = {"fly": 4}


def test_limit_of_steps_within_a_message_truncates_the_episode():
    task = load_target("gym:FrozenLake-v1?is_slippery=false&max_episode_steps=3")
    with task.session() as session:
        calls = [step(action=0, call_id=f"call_{number}") for number in range(4)]
        result = session.step(Message.assistant(None, *calls))
        assert (result.terminated, result.truncated) == (False, True)
        assert result.status is SessionStatus.TRUNCATED_TURNS
        assert result.messages[3].content == "Not executed: the task has ended."
        assert result.metrics["success"] == 0.0


def test_success_follows_the_reward_threshold_or_the_last_reward():
    with load_target("gym:CartPole-v1").session(seed=1) as session:
        while not session.status.final:
            result = session.step(step(action=0))
        assert (result.reward, result.metrics["success"]) == (1.0, 0.0)
    wins, task = [], load_target("gym:Blackjack-v1")
    for seed in range(20):
        with task.session(seed=seed) as session:
            result = session.step(step(action=0))
            wins.append(result.metrics["success"] == float(result.reward > 0))
    assert all(wins)


async def test_failure_of_an_environment_ends_only_its_session():
    class Faulty(GymnasiumTask):
        env_id = f"{TOY}:Faulty-v0"
        tool_timeout = 0.5

    async with EnvClient.local(Faulty) as client:
        neighbour = await client.open("faulty", seed=1)
        for action, reason in ((1, "the engine broke"), (2, "0.5 s"), (3, "finite")):
            session = await client.open("faulty", seed=1)
            result = await session.step(Message.assistant(None, step(action=action)))
            assert result.status is SessionStatus.FAILED_ENVIRONMENT
            assert (result.terminated, result.reward) == (False, 0.0)
            assert reason in result.info["error"]["message"]
            assert "success" not in result.metrics
        with pytest.raises(EnvironmentFailed, match="an unlucky number"):
            await client.open("faulty", seed=13)
        assert (await neighbour.step(Message.assistant(None, step(action=0)))).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((0, None, True, False, {}), "the reward must be a number or boolean, got None"),
        ((0, "one", True, False, {}), "the reward must be a number or boolean, got 'one'"),
        ((0, np.ones(2), True, False, {}), "the reward must be a number or boolean"),
        ((0, 1.0, "no", False, {}), "terminated or truncated must be a number or boolean, got 'no'"),
        ((0, 1.0, True, {}), "must return a tuple of observation, reward, terminated, truncated, info"),
        ((0, 1.0, True, False, None), "info, which is a dict, got"),
        ((0, 1.0, True, False, {"is_success": "yes"}), "info['is_success'] must be a number or boolean"),
    ],
)
async def test_invalid_answer_of_step_is_a_failure_with_the_required_form(answer, message, monkeypatch):
    monkeypatch.setattr(Answering, "answer", answer)
    async with EnvClient.local(load_target("gym:Answering-v0")) as client, await client.open() as session:
        result = await session.step(step(action=0))
        assert result.status == "failed_environment"
        assert message in result.info["error"]["message"]


@pytest.mark.parametrize("kind", [tuple, list])
async def test_reward_can_be_an_array_with_one_number_and_the_answer_a_list(kind, monkeypatch):
    answer = kind((0, np.ones(1), np.True_, False, {"is_success": np.True_}))
    monkeypatch.setattr(Answering, "answer", answer)
    async with EnvClient.local(load_target("gym:Answering-v0")) as client, await client.open() as session:
        result = await session.step(step(action=0))
        assert (result.status, result.reward, result.metrics["success"]) == ("completed", 1.0, 1.0)


async def test_fork_continues_from_the_state_of_the_original():
    async with EnvClient.local("gym:FrozenLake-v1") as client:
        for seed in range(5):
            session = await client.open("", seed=seed)
            for action in (2, 2, 1):
                await session.step(Message.assistant(None, step(action=action)))
            if session.status.final:
                continue
            (fork,) = await session.fork(1)
            results = [await one.step(Message.assistant(None, step(action=1))) for one in (session, fork)]
            assert results[0].messages == results[1].messages


async def test_fork_of_a_nondeterministic_environment_fails_or_is_unsupported_if_registered_so():
    async with EnvClient.local(f"gym:{TOY}:Drifting-v0") as client:
        session = await client.open("")
        await session.step(Message.assistant(None, step(action=1)))
        with pytest.raises(EnvironmentFailed, match="not deterministic"):
            await session.fork(1)
    async with EnvClient.local(f"gym:{TOY}:Unseeded-v0") as client:
        assert (await client.tasks())["Unseeded-v0"].capabilities == ()


def test_vector_environment_steps_its_episodes_together():
    envs = load_target("gym:FrozenLake-v1?is_slippery=false").gym_vec(4)
    observations, _ = envs.reset(seed=1)
    assert len(observations) == 4
    action = {"name": "step", "arguments": {"action": 2}}
    observations, rewards, terminations, truncations, _ = envs.step((action,) * 4)
    assert not np.any([rewards, terminations, truncations])
    assert all("S[F]FF" in str(observation) for observation in observations)
    envs.close()


async def test_served_task_is_the_same_over_http():
    server = EnvServer(["gym:Blackjack-v1", "gym:CliffWalking-v1"], port=0, drain_s=0)
    await server.start()
    async with EnvClient.connect(server.url) as client:
        sessions = await asyncio.gather(*(client.open("Blackjack-v1", seed=seed) for seed in range(8)))
        for seed, session in enumerate(sessions):
            with load_target("gym:Blackjack-v1").session(seed=seed) as local:
                assert session.messages == local.messages
            await session.close()
    await server.stop()


def test_check_command_accepts_the_target():
    reports = run_checks(load_target("gym:FrozenLake-v1").local, deadline=120.0)
    assert [report.task for report in reports] == ["FrozenLake-v1"]
    assert all(report.ok for report in reports)


def test_command_line_reports_an_unknown_environment():
    command = [sys.executable, "-m", "agentrl_env", "serve", "gym:Nope-v1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert "gym:Nope-v1: cannot make the environment" in done.stderr
    assert "Traceback" not in done.stderr
