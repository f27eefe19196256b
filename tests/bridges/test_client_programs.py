"""Unmodified programs on popular frameworks play episodes and can be trained."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from agentrl_env import Message, ToolCall
from agentrl_train.actor import Actor
from agentrl_train.config import RolloutSection
from agentrl_train.gateway import server
from agentrl_train.gateway.programs import AgentProgram
from agentrl_train.gateway.server import Gateway
from agentrl_train.learner import Learner
from agentrl_train.types import Episode, Sampling, TrajectoryGroup
from tests.bridges import client_programs
from tests.bridges.speaker import Speaker, needs, train_on_what_was_sampled
from tests.tiny_models import learner_arguments
from tests.train.fakes import CHAT

ROOT = Path(__file__).parents[2]
SAMPLE = {"a": 17, "b": 25}
EPISODE = Episode(task="sums", split="train", index=0, seed=0, draw_seed=(0, 0))
SAMPLING = Sampling(max_new_tokens=300, max_context=40_000)
pytestmark = [pytest.mark.bridges, pytest.mark.filterwarnings("default")]


ADD = Message.assistant(None, ToolCall.of("add", **SAMPLE))


def by_tool(name: str, key: str) -> Any:
    return lambda value: Message.assistant(None, ToolCall.of(name, **{key: value}))


def by_json(value: int) -> Message:
    return Message.assistant(f'{{"value": {value}}}')


def by_text(value: int) -> Message:
    return Message.assistant(str(value))


def by_code(value: int) -> Message:
    return Message.assistant(f"Thought: I know it.\n<code>\nfinal_answer({value})\n</code>")


def by_command(value: int) -> Message:
    command = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {value}"
    return Message.assistant("I submit.", ToolCall.of("bash", command=command))


CODE = Message.assistant("Thought: I add.\n<code>\nprint(add(17, 25))\n</code>")
COMMAND = Message.assistant("I add.", ToolCall.of("bash", command="echo $((17 + 25))"))


@dataclass(frozen=True)
class Case:
    """A client, the policy's answers to it, and the parameters that constrain the answer's form."""

    final: Any
    packages: tuple[str, ...]
    first: Message | None = ADD
    sends: tuple[str, ...] = ()
    segments: int = 1
    """2 for a client that rewrites the policy's answers."""

    def say(self, number: int, count: int) -> Message:
        """Return the answer to a call. Every second session ends with a wrong one, so that rewards differ."""
        first = self.first if count == 1 else None
        return first or self.final(sum(SAMPLE.values()) + number % 2)


CASES = {
    "anthropic": Case(by_text, ("anthropic",)),
    "smolagents_tools": Case(
        by_tool("final_answer", "answer"), ("smolagents",), sends=("tool_choice",), segments=2
    ),
    "smolagents_code": Case(by_code, ("smolagents",), first=CODE, segments=2),
    "pydantic_ai": Case(by_tool("final_result", "value"), ("pydantic-ai-slim",), sends=("tool_choice",)),
    "pydantic_ai_anthropic": Case(
        by_tool("final_result", "value"), ("pydantic-ai-slim",), sends=("tool_choice",)
    ),
    "litellm": Case(by_text, ("litellm",)),
    "mini_swe_agent": Case(by_command, ("mini-swe-agent",), first=COMMAND),
    "create_agent_tool": Case(by_tool("Sum", "value"), ("langchain",), sends=("tool_choice",)),
    "create_agent_schema": Case(by_json, ("langchain",), sends=("response_format",)),
    "agents_sdk": Case(by_json, ("openai-agents",), sends=("text",)),
    "agents_sdk_chat": Case(by_json, ("openai-agents",), sends=("response_format",)),
}
INSTRUCTOR = ROOT / ".venv-instructor/bin/python"
TRAINED = ("anthropic", "smolagents_tools", "pydantic_ai", "mini_swe_agent")


async def play(run: Any, engine: Speaker, *, size: int = 2) -> tuple[TrajectoryGroup, list[Any]]:
    async with Gateway() as gateway:
        program = AgentProgram(
            run,
            gateway=gateway,
            samples={"train": [SAMPLE]},
            stated=SAMPLING,
            folder=ROOT,
        )
        actor = Actor(
            engine=engine,
            chat=CHAT,
            clients={},
            sampling=SAMPLING,
            rollout=RolloutSection(environment_retries=0, episode_timeout_s=120),
            slots=asyncio.Semaphore(1),
            programs={"sums": program},
        )
        return await actor.group(EPISODE, size=size, group_id=0, admitted_version=engine.version)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the bodies of all further client requests."""
    found: list[dict[str, Any]] = []
    parse_body = server.parse_body

    async def spy(request: Request, *args: Any, **options: Any) -> Any:
        found.append(await request.json())
        return await parse_body(request, *args, **options)

    monkeypatch.setattr(server, "parse_body", spy)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*case.packages)) for name, case in CASES.items()]
)
async def test_client_plays_an_episode(name: str, bodies: list[dict[str, Any]]) -> None:
    case = CASES[name]
    engine = Speaker(case.say)
    group, failed = await play(getattr(client_programs, name), engine)
    assert [one.error for one in failed] == []
    assert [one.reward for one in group.trajectories] == [1.0, 0.0]
    assert [len(one.segments) for one in group.trajectories] == [case.segments] * 2
    assert len(engine.sampled) == sum(len(one.turns) for one in group.trajectories) == 4
    forms = {"tool_choice", "response_format", "text"}
    assert {key for body in bodies for key in body if body[key] is not None} & forms == set(case.sends)


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(*CASES[name].packages)) for name in TRAINED])
async def test_client_trains_for_two_steps_on_exactly_what_was_sampled(name: str) -> None:
    case = CASES[name]
    engine = Speaker(case.say)
    learner = Learner(engine.model, **learner_arguments(learning_rate=1e-3, warmup_steps=0))
    for step in range(2):
        engine.version, engine.sampled = step, []
        group, failed = await play(getattr(client_programs, name), engine)
        assert [one.error for one in failed] == []
        train_on_what_was_sampled(learner, engine, group, max_tokens=40_000)


@pytest.mark.skipif(not INSTRUCTOR.exists(), reason="instructor is not installed; run make bridges")
@pytest.mark.parametrize(
    ("mode", "final", "sends"),
    [("TOOLS", by_tool("Sum", "value"), "tool_choice"), ("JSON_SCHEMA", by_json, "response_format")],
)
async def test_instructor_plays_an_episode_from_its_own_environment(
    mode: str, final: Any, sends: str, bodies: list[dict[str, Any]]
) -> None:
    engine = Speaker(lambda number, count: final(sum(SAMPLE.values()) + number % 2))
    group, failed = await play([str(INSTRUCTOR), "tests/bridges/instructor_program.py", mode], engine)
    assert [one.error for one in failed] == []
    assert [one.reward for one in group.trajectories] == [1.0, 0.0]
    assert [len(one.turns) for one in group.trajectories] == [1, 1]
    assert all(body[sends] for body in bodies)
