"""Programs on the frameworks that people use play episodes, and are trained, as they are."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request

from agentrl_env import Message, ToolCall
from agentrl_train.actor import Actor
from agentrl_train.batch import pack, sequences
from agentrl_train.config import RolloutSection
from agentrl_train.gateway import server
from agentrl_train.gateway.programs import AgentProgram
from agentrl_train.gateway.server import Gateway
from agentrl_train.learner import Learner
from agentrl_train.types import Completion, Episode, Sampling, SamplingParams, TrajectoryGroup
from tests.bridges import client_programs
from tests.tiny_models import learner_arguments, make_model
from tests.train.fakes import CHAT

ROOT = Path(__file__).parents[2]
SAMPLE = {"a": 17, "b": 25}
EPISODE = Episode(task="sums", split="train", index=0, seed=0, draw_seed=(0, 0))
SAMPLING = Sampling(max_new_tokens=300, max_context=40_000)
pytestmark = [pytest.mark.bridges, pytest.mark.filterwarnings("default")]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = []
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing} of the extra [agents]: make bridges")


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
    """A client, what the policy says to it, and the parameters with which it demands a form of the answer."""

    final: Any
    packages: tuple[str, ...]
    first: Message | None = ADD
    sends: tuple[str, ...] = ()
    segments: int = 1
    """2 for a client that writes the answers of the policy anew."""


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
TRAINED = ("anthropic", "smolagents_tools", "pydantic_ai", "mini_swe_agent")


class Speaker:
    """An engine that says what the case states, with the log-probabilities of a real model.

    It says what the client demands, and has no need of its grammar. Every second session ends with a wrong
    answer, so that rewards differ.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = make_model().eval()
        self.version = 0
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Context and completion of each call."""
        self._calls: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    async def generate(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, session_key: str, policy: str = "current"
    ) -> Completion:
        await asyncio.sleep(0)
        session = session_key.rpartition("/")[0] or session_key
        number = self._numbers.setdefault(session, len(self._numbers))
        count = self._calls[session] = self._calls.get(session, 0) + 1
        right = sum(SAMPLE.values())
        first = self.case.first if count == 1 else None
        ids = CHAT.completion(first or self.case.final(right + number % 2))
        self.sampled.append((tuple(token_ids), tuple(ids)))
        with torch.no_grad():
            logits = self.model(torch.tensor([[*token_ids, *ids]])).logits[0, len(token_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        return Completion(
            token_ids=ids,
            logprobs=logprobs.tolist(),
            versions=[self.version] * len(ids),
            finish_reason="stop",
            policy=policy,
        )

    def release(self, session_key: str) -> None:
        return None

    async def close(self) -> None:
        return None


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
    """Return the bodies of the requests that clients send from now on."""
    found: list[dict[str, Any]] = []
    parsed = server._parsed

    async def spy(request: Request, *args: Any, **options: Any) -> Any:
        found.append(await request.json())
        return await parsed(request, *args, **options)

    monkeypatch.setattr(server, "_parsed", spy)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*case.packages)) for name, case in CASES.items()]
)
async def test_client_plays_an_episode(name: str, bodies: list[dict[str, Any]]) -> None:
    case = CASES[name]
    engine = Speaker(case)
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
    engine = Speaker(case)
    learner = Learner(engine.model, **learner_arguments(learning_rate=1e-3, warmup_steps=0))
    for step in range(2):
        engine.version, engine.sampled = step, []
        before = {key: value.clone() for key, value in engine.model.state_dict().items()}
        group, failed = await play(getattr(client_programs, name), engine)
        assert [one.error for one in failed] == []
        rows = sequences([group], [[1.0, -1.0]])
        trained = []
        for row in rows:
            ends = np.flatnonzero(np.diff(row.loss_mask, append=0.0) < 0) + 1
            starts = np.flatnonzero(np.diff(row.loss_mask, prepend=0.0) > 0)
            ids = row.token_ids.tolist()
            trained += [(tuple(ids[:a]), tuple(ids[a:b])) for a, b in zip(starts, ends, strict=True)]
            assert (row.versions[row.loss_mask > 0] == step).all()
        assert sorted(trained) == sorted(engine.sampled)
        for row, recomputed in zip(rows, learner.logprobs(rows), strict=True):
            sampled = row.loss_mask > 0
            np.testing.assert_allclose(recomputed[sampled], row.logprobs[sampled], atol=1e-4)
        metrics = learner.step(pack(rows, max_tokens=40_000))
        assert np.isfinite(metrics["loss"])
        assert any(not torch.equal(before[key], value) for key, value in engine.model.state_dict().items())
