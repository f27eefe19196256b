"""A policy that delegates clumsily learns to plan and to work from the reward of whole episodes."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agentrl_env.types import Message, ToolCall, ToolSpec
from agentrl_train.chat import ChatFormat
from agentrl_train.config import SubAgentSection, TrainSection
from agentrl_train.learner import Learner
from agentrl_train.loss import Loss, sft_loss
from agentrl_train.sft import train_sft
from agentrl_train.sub_agent import planner_tools, worker_opening, worker_tools
from agentrl_train.types import TokenSequence
from examples.quickstart.starter import new_model, new_tokenizer
from tests.train.runs.processes import finish
from tests.train.runs.vault import CODES, PLACES, Vault

pytestmark = pytest.mark.slow

ASK = SubAgentSection(
    name="ask",
    description="Ask.",
    system_prompt="Work.",
    planner_tools=("enter",),
    worker_tools=("look",),
    max_turns=3,
)
CONFIG = """
[run]
name = "run"
folder = "{folder}"
steps = 10
threads = 1
[model]
path = "model"
[[environments]]
serve = ["{target}:Vault"]
[engine]
deterministic = true
max_context = 256
max_new_tokens = 40
[algorithm]
preset = "matpo"
[rollout]
groups_per_step = 8
group_size = 8
max_staleness = 0
[rollout.sub_agent]
name = "ask"
description = "Ask."
system_prompt = "Work."
planner_tools = ["enter"]
worker_tools = ["look"]
max_turns = 3
[train]
learning_rate = 7e-4
max_grad_norm = 0.1
[eval]
samples = 60
"""


def says(name: str, **arguments: str) -> Message:
    return Message.assistant(None, ToolCall.of(name, **arguments))


def row(
    chat: ChatFormat,
    opening: Sequence[Message],
    tools: Sequence[ToolSpec],
    first: Message,
    result: str,
    last: Message,
) -> TokenSequence:
    """Return a segment of two turns as a row for supervised fine-tuning."""
    ids = chat.opening(opening, tools)
    said = chat.completion(first)
    message, _, _ = chat.parse(said, turn=1, tools=tools)
    answer = Message(role="tool", content=result, tool_call_id=message.tool_calls[0].id)
    reply = chat.reply([answer], after=message, tools=tools, stop=said[-1])
    end = chat.completion(last)
    mask = np.repeat([0.0, 1.0, 0.0, 1.0], [len(part) for part in (ids, said, reply, end)])
    return TokenSequence(
        token_ids=np.array([*ids, *said, *reply, *end]),
        loss_mask=mask.astype(np.float32),
        logprobs=np.zeros(mask.size, np.float32),
        versions=np.full(mask.size, -1),
        advantages=mask.astype(np.float32),
        task="vault",
        group_id=0,
    )


def clumsy_rows(chat: ChatFormat, tools: Sequence[ToolSpec], count: int) -> list[TokenSequence]:
    """Return segments of planners and workers that often request, look at or enter the wrong thing."""
    chance, made = random.Random(0), []
    for _ in range(count):
        place = chance.choice(PLACES)
        told = place if chance.random() < 0.4 else chance.choice(PLACES)
        looked = told if chance.random() < 0.7 else chance.choice(PLACES)
        found = chance.choice(CODES) if looked == place else "nothing"
        code = found if chance.random() < 0.8 else chance.choice(CODES)
        problem = [Message(role="user", content=f"The code is in the {place}.")]
        planner = (says("ask", task=told), found, says("enter", code=code))
        worker = (says("look", place=looked), found, Message.assistant(found))
        made.append(row(chat, problem, planner_tools(ASK, tools), *planner))
        made.append(row(chat, worker_opening(ASK, told), worker_tools(ASK, tools), *worker))
    return made


async def taught(folder: Path) -> None:
    """Write a small policy that delegates clumsily."""
    async with Vault.local() as client:
        tools = (await client.open("vault")).tools
    letters = ChatFormat(new_tokenizer([], vocab_size=0))
    texts = [letters.text(one.token_ids.tolist()) for one in clumsy_rows(letters, tools, 200)]
    tokenizer = new_tokenizer(texts, vocab_size=400)
    rows = clumsy_rows(ChatFormat(tokenizer), tools, 400)
    model = new_model(tokenizer, width=128, seed=0)
    learner = Learner(
        model,
        TrainSection(learning_rate=3e-3, warmup_steps=20, decay={"to": 0.1}),
        total_steps=150,
        loss=Loss(objective=sft_loss),
    )
    train_sft(learner, rows, steps=150, batch_size=8, micro_batch_tokens=4096, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.extended
async def test_planner_and_workers_learn_from_one_reward(tmp_path: Path) -> None:
    await taught(tmp_path / "model")
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(folder=tmp_path, target=Path(__file__).with_name("vault.py")))
    done = finish(config)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())["tasks"]["vault"]
    assert summary["after"] > summary["before"] + 0.1
    lines = (tmp_path / "run/trajectories/step_000010.jsonl").read_text().splitlines()
    agents = [[one["agent"] for one in json.loads(line).get("segments", ())] for line in lines]
    assert ["main", "ask"] in agents
    assert '<div class="segment">' in (tmp_path / "run/report.html").read_text()
