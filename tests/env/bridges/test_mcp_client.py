"""MCP servers as tasks: real servers of the official SDK, as a process and over HTTP."""

import asyncio
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Environment, ToolCall
from agentrl_env.bridges.mcp.client import mcp_task
from agentrl_env.bridges.signatures import tools_of
from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target
from tests.env.bridges.players import mcp_session
from tests.env.tasks import Guess

CALCULATOR = Path(__file__).with_name("calculator.py")
COMMAND = f"{sys.executable} {CALCULATOR}"


def last_answer(sample, calls, answer):
    """Reward an answer that is the last result."""
    return float(bool(calls) and answer == calls[-1].answer)


async def right_sum(sample, calls, answer):
    return 1.0 if answer == str(sample.data["sum"]) else 0.25


@pytest.fixture(scope="module")
def calculator():
    return mcp_task(COMMAND, last_answer, prompt="2 + 3?")


async def test_tools_prompt_and_instructions_are_those_of_the_server(calculator):
    assert calculator.name == "calc_server"
    tools = {spec.function.name: spec.function for spec in calculator.tool_specs()}
    assert set(tools) == {"add", "divide", "count", "odd_name"}
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    async with EnvClient.local(calculator) as client, await client.open() as session:
        assert [(one.role, one.content) for one in session.messages] == [
            ("system", "Use the tools to compute."),
            ("user", "2 + 3?"),
        ]


async def test_answer_ends_the_episode_with_the_reward_of_the_function(calculator):
    async with EnvClient.local(calculator) as client, await client.open() as session:
        result = await session.step(ToolCall.of("add", a=2, b=3))
        assert result.messages[0].content == "5"
        result = await session.step("5")
        assert (result.reward, result.terminated) == (1.0, True)


async def test_reward_function_may_be_async_and_sees_the_sample():
    task = mcp_task(COMMAND, right_sum, samples=lambda split: [{"prompt": "1 + 1?", "sum": 2}])
    async with EnvClient.local(task) as client:
        for answer, reward in (("2", 1.0), ("3", 0.25)):
            async with await client.open(index=0) as session:
                assert session.messages[-1].content == "1 + 1?"
                assert (await session.step(answer)).reward == reward


async def test_invalid_arguments_and_failed_calls_are_answered(calculator):
    async with EnvClient.local(calculator) as client, await client.open() as session:
        result = await session.step(ToolCall.of("add", a="x", b=1))
        assert result.metrics["invalid_calls"] == 1.0
        assert "'x' is not of type 'integer'" in result.messages[0].content
        result = await session.step(ToolCall.of("divide", a=1, b=0))
        assert "division by zero" in result.messages[0].content
        assert result.status == "running"


async def test_each_session_has_a_server_of_its_own(calculator):
    async with (
        EnvClient.local(calculator) as client,
        await client.open() as first,
        await client.open() as second,
    ):
        await first.step(ToolCall.of("add", a=1, b=1))
        assert (await first.step(ToolCall.of("count"))).messages[0].content == "1"
        assert (await second.step(ToolCall.of("count"))).messages[0].content == "0"


async def test_arguments_that_python_cannot_name_are_passed_as_one_object(calculator):
    async with EnvClient.local(calculator) as client, await client.open() as session:
        result = await session.step(ToolCall.of("odd_name", arguments={"from": "here"}))
        assert result.messages[0].content == "here"


async def test_server_that_dies_fails_the_session_without_a_reward(calculator):
    async with EnvClient.local(calculator) as client, await client.open() as session:
        result = await session.step(ToolCall.of("divide", a=1, b=13))
        assert result.status == "failed_environment"
        assert result.reward == 0.0


def test_target_on_the_command_line_names_server_reward_and_prompt(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    reward = "calculator:reward"
    task = load_target(f"mcp:{COMMAND}#reward={reward}&prompt=1%2B1%3F&name=sums&max_turns=4")
    assert (task.name, task.prompt, task.max_turns) == ("sums", "1+1?", 4)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (f"mcp:{COMMAND}", "give the reward as a function"),
        (f"mcp:{COMMAND}#reward=no_such_module:f", "write module:function"),
        (f"mcp:{COMMAND}#reward=calculator:reward&turns=4", "there is no option 'turns'"),
        ("mcp:/no/such/command#reward=calculator:reward", "no MCP server answers"),
    ],
)
def test_bad_target_is_refused_with_the_reason(target, words, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(TargetError, match=words):
        load_target(target)


async def test_task_served_over_mcp_is_a_task_again(serving):
    server = await serving(Guess)
    task = await asyncio.to_thread(mcp_task, f"{server.url}/mcp/guess?seed=7", last_answer)
    assert task.name == "guess"
    async with EnvClient.local(task) as client, await client.open() as session:
        result = await session.step(ToolCall.of("guess", n=0))
        async with mcp_session(f"{server.url}/mcp/guess?seed=7") as (direct, _):
            answer = await direct.call_tool("guess", {"n": 0})
        assert result.messages[0].content == answer.content[0].text == "higher"


def test_optional_arguments_of_a_server_may_have_no_default_or_one_that_does_not_fit():
    text = {"type": "string"}
    schema = {"type": "object", "properties": {"a": text, "b": {**text, "default": None}}}
    schema["properties"]["c"] = {**text, "default": "x"}

    async def call(environment, name, arguments):
        return ""

    methods = tools_of({"look": ("Look.", schema)}, call)
    task = type(
        "Bridged", (Environment,), {"__doc__": "Look.", "reset": lambda self, sample, rng: "", **methods}
    )
    (spec,) = task.tool_specs()
    assert spec.function.parameters["properties"] == {"a": text, "b": text, "c": {**text, "default": "x"}}
