"""MCP servers as tasks: real servers on the official SDK, as a process and over HTTP."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from agentrl_env import EnvClient, ToolCall
from agentrl_env.bridges.mcp.client import mcp_task
from agentrl_env.errors import TargetError
from agentrl_env.hosting.loader import load_target
from tests.env.bridges import odd_server
from tests.env.bridges.odd_server import ERRORS
from tests.env.bridges.players import mcp_session
from tests.env.tasks import Guess

CALCULATOR = Path(__file__).with_name("calculator.py")
ODD = f"{sys.executable} {odd_server.__file__}"
COMMAND = f"{sys.executable} {CALCULATOR}"


def last_answer(sample, calls, answer):
    """Reward an answer equal to the last result."""
    return float(bool(calls) and answer == calls[-1].answer)


async def right_sum(sample, calls, answer):
    return 1.0 if answer == str(sample.data["sum"]) else 0.25


@pytest.fixture(scope="module")
def calculator():
    return mcp_task(COMMAND, last_answer, prompt="2 + 3?")


@pytest.fixture(scope="module")
def odd():
    return mcp_task(ODD, last_answer)


async def test_task_has_the_tools_prompt_and_instructions_of_the_server(calculator):
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


async def test_reward_function_can_be_async_and_receives_the_sample():
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


async def test_each_session_has_its_own_server(calculator):
    async with (
        EnvClient.local(calculator) as client,
        await client.open() as first,
        await client.open() as second,
    ):
        await first.step(ToolCall.of("add", a=1, b=1))
        assert (await first.step(ToolCall.of("count"))).messages[0].content == "1"
        assert (await second.step(ToolCall.of("count"))).messages[0].content == "0"


async def test_arguments_can_have_names_that_python_reserves(calculator):
    async with EnvClient.local(calculator) as client, await client.open() as session:
        result = await session.step(ToolCall.of("odd_name", **{"from": "here"}))
        assert result.messages[0].content == "here"


@pytest.mark.parametrize("returned", [None, "right", float("nan")])
async def test_result_of_a_reward_function_that_is_no_number_is_a_failure(returned):
    task = mcp_task(COMMAND, lambda sample, calls, answer: returned)
    async with EnvClient.local(task) as client, await client.open() as session:
        result = await session.step("2")
        assert result.status == "failed_environment"
        assert repr(returned) in result.info["error"]["message"]


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
        (f"mcp:{COMMAND}#reward=calculator:reward&env=TOKEN", "write env=NAME=VALUE, not env=TOKEN"),
        (f"mcp:{COMMAND}#reward=calculator:reward&env=A=${{NO_SUCH}}", "variable NO_SUCH is not set"),
        (f"mcp:{COMMAND}#reward=calculator:reward&header=A:b", "headers require a URL"),
        ("mcp:http://localhost:1/#reward=calculator:reward&env=A=b", "variables require a command"),
        ("mcp:/no/such/command#reward=calculator:reward", "cannot connect to the MCP server"),
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


def test_tool_that_cannot_be_served_is_omitted_with_the_reason_and_the_others_are_served(odd, caplog):
    with caplog.at_level(logging.WARNING, "agentrl_env"):
        task = mcp_task(ODD, last_answer)
    names = [spec.function.name for spec in task.tool_specs()]
    assert names == ["echo", "files_read", "files_read_2", "list_"]
    for words in (
        "omitted tool 'null_part': its schema is invalid at /properties/a",
        "omitted tool 'echo': another tool has the same name",
        "omitted tool 'lost': its schema has no #/$defs/gone",
        "omitted tool 'no_schema': its schema is null, not a JSON object",
        "omitted tool '': it has no name",
        "the pattern (?<=x+)y of tool 'list!' cannot be checked here",
    ):
        assert words in caplog.text


async def test_schema_of_a_server_is_shown_unchanged_and_validates_calls(odd):
    specs = {spec.function.name: spec.function.parameters for spec in odd.tool_specs()}
    assert specs["echo"] == odd_server.ECHO
    async with EnvClient.local(odd) as client, await client.open() as session:
        right = {"start": 1, "end": 2, "$ref": "x", "tags": {"any": "value"}, "self": True}
        result = await session.step(ToolCall.of("echo", **right))
        assert json.loads(result.messages[0].content) == {"name": "echo", "arguments": right}
        for wrong in ({"end": "x"}, {"tags": {"any": 1}}, {"card": 1}, {"start": 1, "else": 2}):
            result = await session.step(ToolCall.of("echo", **wrong))
            assert result.metrics["invalid_calls"] == 1.0, wrong


async def test_names_that_models_reject_reach_the_server_in_their_original_form(odd):
    async with EnvClient.local(odd) as client, await client.open() as session:
        for name, own in (("files_read", "files.read"), ("files_read_2", "files/read"), ("list_", "list!")):
            result = await session.step(ToolCall.of(name))
            assert json.loads(result.messages[0].content)["name"] == own


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "embedded",
            "file:///notes.txt\nbuy milk\nfile:///data.json\n{}\nfile:///a.png\n[image/png, 4 bytes]",
        ),
        ("link", "file:///notes.txt, The notes, notes, what to buy, text/plain"),
        ("structured", '{"price": 12, "of": "öl"}'),
        ("image", "[image, image/png]"),
        ("both", "twelve"),
        ("unknown", '{"type": "hologram", "size": 3}'),
        ("nothing", ""),
        ("null", "[1]"),
        ("odd", '"text"\n{"type": "resource", "resource": null}'),
    ],
)
async def test_every_kind_of_result_reaches_the_model_as_text(odd, kind, text):
    async with EnvClient.local(odd) as client, await client.open() as session:
        result = await session.step(ToolCall.of("files_read", kind=kind))
        assert (result.messages[0].content, result.status) == (text, "running")


@pytest.mark.parametrize("kind", ["invalid", "raised", "own"])
async def test_error_of_a_call_is_passed_to_the_model_unchanged(odd, kind):
    async with EnvClient.local(odd) as client, await client.open() as session:
        result = await session.step(ToolCall.of("files_read", kind=kind))
        assert (result.messages[0].content, result.status) == (ERRORS[kind][1], "running")


@pytest.mark.parametrize("kind", ["unread", "lost"])
async def test_request_that_the_server_cannot_read_or_answer_fails_the_session(odd, kind):
    async with EnvClient.local(odd) as client, await client.open() as session:
        result = await session.step(ToolCall.of("files_read", kind=kind))
        assert result.status == "failed_environment"


def test_server_with_no_usable_tool_is_refused_with_the_reasons():
    with pytest.raises(TargetError, match="no tool can be served: 'lost': its schema has no"):
        mcp_task(f"{ODD} lost", last_answer)


async def test_command_gets_environment_variables_and_a_url_headers(monkeypatch, serving):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("SECRET_OF_TEST", "a=b")
    variables = "env=TOKEN=${SECRET_OF_TEST}&env=LEVEL=3"
    task = load_target(f"mcp:{ODD}#reward=calculator:reward&{variables}")
    async with EnvClient.local(task) as client, await client.open() as session:
        result = await session.step(ToolCall.of("files_read", kind="variables"))
        assert result.messages[0].content == "a=b 3"
    server = await serving(Guess, token="s3cret")
    url, header = f"{server.url}/mcp/guess", "header=Authorization: Bearer ${SECRET_OF_TEST}"
    with pytest.raises(TargetError, match="401"):
        await asyncio.to_thread(load_target, f"mcp:{url}#reward=calculator:reward&{header}")
    monkeypatch.setenv("SECRET_OF_TEST", "s3cret")
    task = await asyncio.to_thread(load_target, f"mcp:{url}#reward=calculator:reward&{header}")
    assert "s3cret" not in repr(task.endpoint)
    async with EnvClient.local(task) as client, await client.open() as session:
        assert (await session.step(ToolCall.of("guess", n=0))).messages[0].content
