"""Clients that strip thoughts or summarize their history, with Qwen3's template. A rollout has one weight.

For comparison, the test counts the splits by tokens of servers that render each call's messages again.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from agentrl_env.types import TaskSample
from agentrl_train.actor import Actor
from agentrl_train.batch import pack, sequences, token_weights
from agentrl_train.chat import ChatFormat
from agentrl_train.config import RolloutSection
from agentrl_train.gateway.chat_completions import ChatRequest
from agentrl_train.gateway.programs import AgentProgram
from agentrl_train.gateway.server import Gateway
from agentrl_train.types import Completion, Episode, Sampling, SamplingParams, TrajectoryGroup
from tests.train.families import FAMILIES, make_tokenizer

QWEN3 = ChatFormat(make_tokenizer(FAMILIES["Qwen3"]))
TURNS, ROLLOUTS = 4, 8
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
SYSTEM = {"role": "system", "content": "Look around."}
EPISODE = Episode(task="rooms", split="train", index=0, seed=0, draw_seed=(0, 0))
SAMPLING = Sampling(max_new_tokens=200, max_context=4000)


class ThinkingEngine:
    """Thinks before each call. Log-probabilities identify all sampled tokens."""

    def __init__(self) -> None:
        self.sampled: dict[float, int] = {}
        """Log-probability -> token."""

    async def generate(
        self, token_ids: Sequence[int], *, sampling: SamplingParams, session_key: str, policy: str = "current"
    ) -> Completion:
        await asyncio.sleep(0)
        number = len(self.sampled)
        call = f'<tool_call>\n{{"name": "look", "arguments": {{"n": {number}}}}}\n</tool_call>'
        text = f"<think>\nroom {number}?\n</think>\n\nI look.\n{call}"
        ids = [*QWEN3._encode(text), QWEN3.stop_token_ids[0]]
        logprobs = [-float(number + i + 1) for i in range(len(ids))]
        self.sampled |= dict(zip(logprobs, ids, strict=True))
        return Completion(token_ids=ids, logprobs=logprobs, versions=[3] * len(ids), finish_reason="stop")

    def release(self, session_key: str) -> None:
        return None

    async def close(self) -> None:
        return None


class Client:
    """A program of ``TURNS`` calls that edits its history before each call."""

    def __init__(self, *, summarizes: bool) -> None:
        self.summarizes = summarizes
        self.naive_rows = 0

    async def __call__(self, base_url: str, sample: TaskSample) -> float:
        messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Find the key."}]
        row: list[int] = []
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
            for number in range(TURNS):
                if self.summarizes and number == TURNS // 2:
                    messages = [
                        SYSTEM,
                        {"role": "user", "content": f"Find the key. {number} rooms are empty."},
                    ]
                body = {"messages": messages, "tools": [TOOL]}
                rendered = self.rendered(body)
                self.naive_rows += row != rendered[: len(row)] or not row
                answer = await client.post("/chat/completions", json=body | {"return_token_ids": True})
                choice = answer.raise_for_status().json()["choices"][0]
                row = [*rendered, *choice["token_ids"]]
                said = choice["message"]
                assert "room" in said["reasoning_content"]
                messages += [
                    {name: said[name] for name in ("role", "content", "tool_calls")},
                    {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "empty"},
                ]
        return float(len(self.rendered({"messages": messages})) % 2)

    @staticmethod
    def rendered(body: dict[str, Any]) -> list[int]:
        """Return the prompt of a server that renders the messages of each call."""
        asked = ChatRequest.model_validate(body)
        return QWEN3.opening(asked.conversation, asked.tools or ())


async def play(client: Client) -> tuple[ThinkingEngine, TrajectoryGroup]:
    engine = ThinkingEngine()
    async with Gateway() as gateway:
        actor = Actor(
            engine=engine,
            chat=QWEN3,
            clients={},
            sampling=SAMPLING,
            rollout=RolloutSection(environment_retries=0),
            slots=asyncio.Semaphore(3),
            programs={"rooms": AgentProgram(client, gateway=gateway, samples={"train": [{}]})},
        )
        group, failed = await actor.group(EPISODE, size=ROLLOUTS, group_id=0, admitted_version=3)
    assert failed == []
    return engine, group


@pytest.mark.parametrize(("summarizes", "segments"), [(False, 1), (True, 2)], ids=["strips", "summarizes"])
async def test_eight_rollouts_have_equal_weights_and_every_sampled_token_once(
    summarizes: bool, segments: int
) -> None:
    client = Client(summarizes=summarizes)
    engine, group = await play(client)
    rows = sequences([group], [[1.0] * ROLLOUTS])
    trained = [
        (float(logprob), int(token))
        for row in rows
        for logprob, token, mask in zip(row.logprobs, row.token_ids, row.loss_mask, strict=True)
        if mask
    ]
    assert len(trained) == len(engine.sampled)
    assert dict(trained) == engine.sampled
    assert all((row.versions[row.loss_mask > 0] == 3).all() for row in rows)

    print(f"{ROLLOUTS} rollouts: {len(rows)} rows; split by tokens: {client.naive_rows}")
    assert len(rows) == ROLLOUTS * segments
    assert client.naive_rows == ROLLOUTS * TURNS
    assert Counter(row.rollout for row in rows) == dict.fromkeys(range(ROLLOUTS), segments)
    for aggregation in ("sequence_mean", "rollout_mean"):
        weights = Counter[int | None]()
        for row, weight in zip(rows, token_weights(rows, aggregation=aggregation), strict=True):
            weights[row.rollout] += float(weight.sum())
        assert np.allclose(list(weights.values()), 1 / ROLLOUTS)
    (batch,) = pack(rows, max_tokens=4096)
    assert batch.num_loss_tokens == len(engine.sampled)
