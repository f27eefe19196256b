"""``tool_choice`` and response formats, sampled by the torch engine under a constraint."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from agentrl_env.types import Message, TaskSample
from agentrl_train.batch import pack, sequences
from agentrl_train.chat import ChatFormat
from agentrl_train.engine.torch import TorchEngine
from agentrl_train.gateway.programs import trajectory
from agentrl_train.gateway.server import Gateway, Session
from agentrl_train.learner import Learner
from agentrl_train.placement.ranks import decode, encode
from agentrl_train.storage.journal import decode_group, encode_group
from agentrl_train.types import (
    AllowedSets,
    Completion,
    EpisodeEnd,
    Sampling,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from tests.tiny_models import learner_arguments, make_model, make_tokenizer

pytest.importorskip("llguidance")

CHAT = ChatFormat(make_tokenizer())
GUESS = {
    "name": "guess",
    "parameters": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 20}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
STOP = {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": one} for one in (GUESS, STOP)]
HELLO = {"role": "user", "content": "hello"}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": COLOUR}}
TEMPERATURE = 0.7


class EngineSampler:
    """Samples with consecutive seeds."""

    def __init__(self, engine: TorchEngine, **options: Any) -> None:
        self.sampling = Sampling(
            **{"max_context": 900, "max_new_tokens": 200, "temperature": TEMPERATURE} | options
        )
        self._engine = engine
        self._seed = 0

    async def complete(
        self,
        context: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        segment: int = 0,
        grammar: str = "",
        seed: int | None = None,
    ) -> Completion:
        self._seed += 1
        sampling = self.sampling.request(context, seed=self._seed, limit=max_new_tokens, grammar=grammar)
        return await self._engine.generate(context, sampling=sampling, session_key=f"{id(self)}/{segment}")


@asynccontextmanager
async def opened(
    chat: ChatFormat = CHAT, *, ignored: Sequence[str] = (), **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Session]]:
    """Yield a client of a session on a real engine with a random model."""
    engine = TorchEngine(
        {"current": make_model(vocabulary=300)},
        stop_token_ids=chat.stop_token_ids,
        tokenizer=chat.tokenizer,
        max_sequences=4,
        max_context=1000,
    )
    sampler = EngineSampler(engine, **options)
    try:
        async with Gateway() as gateway:
            session = gateway.open(chat=chat, sampler=sampler, stated=sampler.sampling, ignored=ignored)
            url = gateway.base_url(session)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as client:
                yield client, session
    finally:
        await engine.close()


async def ask(client: httpx.AsyncClient, path: str = "/chat/completions", **body: Any) -> httpx.Response:
    return await client.post(path, json={"model": "any"} | body)


async def answer(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await ask(client, messages=[HELLO], **body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


async def test_required_choice_forces_valid_calls_of_a_random_model() -> None:
    async with opened() as (client, session):
        for _ in range(2):
            calls = called(await answer(client, tools=TOOLS, tool_choice="required"))
            assert calls
            for name, arguments in calls:
                assert arguments == {} if name == "stop" else 1 <= arguments["n"] <= 20
        turns, _ = session.recorder.rollout()
    assert all(turn.invalid_calls == 0 and not turn.tolerant for turn in turns)


async def test_json_schema_forces_content() -> None:
    async with opened() as (client, _):
        for _ in range(2):
            message = await answer(client, response_format=FORMAT)
            assert json.loads(message["content"])["colour"] in ("red", "green")
            assert "tool_calls" not in message


def allowed_of(turn: Turn, vocabulary: int = 300) -> torch.Tensor:
    """Return the allowed tokens at each sampled token, [tokens, vocabulary]."""
    held = turn.completion.allowed
    assert held is not None
    assert min(held.places) > 0
    sets = [np.unpackbits(np.frombuffer(one, np.uint8), bitorder="little")[:vocabulary] for one in held.sets]
    return torch.from_numpy(np.stack([sets[place - 1] for place in held.places])).bool()


def by_hand(model: torch.nn.Module, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies of a turn, renormalized over the allowed tokens."""
    ids = torch.tensor([*turn.prompt_ids, *turn.completion.token_ids])
    logits = model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1].double() / TEMPERATURE
    logprobs, entropies = [], []
    for row, allowed, token in zip(logits, allowed_of(turn), turn.completion.token_ids, strict=True):
        assert allowed[token]
        kept = row[allowed]
        scores = kept - kept.logsumexp(0)
        logprobs.append(row[token] - kept.logsumexp(0))
        entropies.append(-(scores.exp() * scores).sum())
    return torch.stack(logprobs), torch.stack(entropies)


async def sampled() -> tuple[list[Turn], TrajectoryGroup]:
    """Return the first turns of separate conversations, some constrained, and their group."""
    turns: list[Turn] = []
    episodes = []
    async with opened() as (client, session):
        for number, body in enumerate(
            [
                {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
                {"response_format": FORMAT},
                {"response_format": {"type": "json_object"}, "max_tokens": 16},
                {"max_tokens": 12},
            ]
        ):
            said = {"role": "user", "content": f"hello {number}"}
            await ask(client, messages=[said], **body)
        whole = trajectory(session, sample=TaskSample(task="t"), end=EpisodeEnd.TERMINATED)
        for turn in whole.turns:
            turns.append(replace(turn, segment=0))
            episodes.append(replace(whole, turns=[turns[-1]], segments=whole.segments[:1]))
    return turns, TrajectoryGroup(group_id=0, task="t", trajectories=episodes, admitted_version=0)


async def test_recorded_log_probabilities_are_renormalized_over_the_allowed_tokens() -> None:
    model = make_model(vocabulary=300)
    turns, _ = await sampled()
    for turn in turns[:3]:
        expected, _ = by_hand(model, turn)
        assert torch.tensor(turn.completion.logprobs) == pytest.approx(expected.detach().numpy(), abs=1e-5)
    assert turns[3].completion.allowed is None
    # Most positions in a forced text allow one token, which has probability 1.
    assert sum(one == 0.0 for one in turns[0].completion.logprobs) > 10


async def test_learner_matches_recorded_log_probabilities_and_reference_gradients() -> None:
    turns, group = await sampled()
    advantages = [1.0, -0.5, 2.0, -1.0]
    rows = sequences([group], [advantages])
    (batch,) = pack(rows, aggregation="token_mean")
    learner = Learner(
        make_model(vocabulary=300), temperature=TEMPERATURE, **learner_arguments(entropy_coefficient=0.1)
    )
    for row, found in zip(rows, learner.logprobs(rows), strict=True):
        assert found == pytest.approx(row.logprobs, abs=1e-5)

    gradients: dict[str, torch.Tensor] = {}
    learner._check_update = lambda loss, norm: gradients.update(  # type: ignore[method-assign]
        {name: value.grad.clone() for name, value in learner.model.named_parameters()}
    )
    learner.settings = learner.settings.model_copy(update={"max_grad_norm": 1e9})
    metrics = learner.step([batch])

    model = make_model(vocabulary=300).double()
    count = sum(len(turn.completion.token_ids) for turn in turns)
    loss = torch.zeros((), dtype=torch.float64)
    for turn, advantage in zip(turns, advantages, strict=True):
        if turn.completion.allowed is None:
            ids = torch.tensor([*turn.prompt_ids, *turn.completion.token_ids])
            scores = (model(ids[None]).logits[0, len(turn.prompt_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs = scores.gather(-1, ids[len(turn.prompt_ids) :, None])[:, 0]
            entropies = -(scores.exp() * scores).sum(-1)
        else:
            logprobs, entropies = by_hand(model, turn)
        # At the behaviour policy, the gradient of the ratio equals the gradient of the log-probability.
        loss = loss - (advantage * logprobs + 0.1 * entropies).sum() / count
    loss.backward()
    assert metrics["entropy"] > 0
    assert gradients
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(gradients[name].double(), parameter.grad, atol=1e-5, rtol=1e-4), name


async def test_named_tool_is_called_once() -> None:
    async with opened() as (client, _):
        named = {"type": "function", "function": {"name": "stop"}}
        assert called(await answer(client, tools=TOOLS, tool_choice=named)) == [("stop", {})]


async def test_forbidden_calls_are_not_sampled_and_the_tools_stay_in_the_prompt() -> None:
    async with opened(max_new_tokens=20) as (client, session):
        message = await answer(client, tools=TOOLS, tool_choice="none")
        (turn,) = session.recorder.rollout()[0]
    assert "tool_calls" not in message
    assert "guess" in CHAT.text(turn.prompt_ids)
    opening = CHAT.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert not allowed_of(turn)[:, opening].any()


async def test_all_apis_accept_a_choice_and_a_schema() -> None:
    flat = [{"type": "function", **GUESS}, {"type": "function", **STOP}]
    own = [{"name": one["name"], "input_schema": one["parameters"]} for one in (GUESS, STOP)]
    async with opened() as (client, _):
        named = {"type": "function", "name": "stop"}
        response = await ask(client, "/responses", input="hello", tools=flat, tool_choice=named)
        (item,) = response.json()["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", "stop", "{}")
        schema = {"type": "json_schema", "name": "colour", "schema": COLOUR}
        response = await ask(client, "/responses", input="hello", text={"format": schema})
        assert json.loads(response.json()["output"][0]["content"][0]["text"])["colour"] in ("red", "green")
        choice = {"type": "tool", "name": "stop"}
        response = await ask(client, "/messages", messages=[HELLO], tools=own, tool_choice=choice)
        (block,) = response.json()["content"]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", "stop", {})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"not": {"type": "null"}}},
                }
            },
            ['"not"', "environments.program.ignore = ['response_format']"],
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"uniqueItems": True}}}
                ],
                "tool_choice": "required",
            },
            ["uniqueItems", "environments.program.ignore = ['tool_choice']"],
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "up"}}}, ["'up'"]),
    ],
)
async def test_constraint_that_cannot_be_compiled_is_refused(body: dict[str, Any], words: list[str]) -> None:
    async with opened() as (client, session):
        response = await ask(client, messages=[HELLO], **body)
        assert session.failure is None
        assert not session.recorder.rollout()[0]
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]["message"]


def test_rows_keep_their_sets_in_the_journal_and_between_ranks() -> None:
    held = AllowedSets(sets=(b"\x01\x00", b"\xf0\x0f"), places=(2, 1, 0))
    completion = Completion(
        token_ids=(5, 0, 3),
        logprobs=(-1.0, 0.0, -2.0),
        versions=(0, 0, 0),
        finish_reason="stop",
        allowed=held,
    )
    turn = Turn(
        prompt_ids=(1, 2), completion=completion, message=Message.assistant("x"), reply=(), reward=0.0
    )
    whole = Trajectory(
        sample=TaskSample(task="t"),
        opening=(),
        turns=(turn,),
        end=EpisodeEnd.TERMINATED,
        reward=0.0,
        success=False,
    )
    group = TrajectoryGroup(group_id=0, task="t", trajectories=(whole,), admitted_version=0)
    (read,) = decode_group(encode_group(group)).trajectories
    assert read.turns[0].completion.allowed == held
    free = replace(whole, turns=(replace(turn, completion=replace(completion, allowed=None)),))
    both = replace(group, trajectories=(whole, free, whole))
    ((batch,),) = [decode(encode([*pack(sequences([both], [[1.0, 1.0, 1.0]]))]))]
    (micro,) = batch.micro_batches
    sets = micro.allowed_sets.numpy()
    assert len(sets) == 3
    assert sets[0].tolist() == [255, 255]
    packed = {bytes(sets[place]) for place in micro.allowed[micro.loss_mask > 0].tolist()}
    assert packed == {b"\xff\xff", *held.sets}
    assert not micro.allowed[micro.loss_mask == 0].any()
