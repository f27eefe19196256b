"""The terminal task is solvable at every level and graded by the real state of the files."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, SessionStatus, ToolCall
from agentrl_env.errors import SandboxUnavailable
from agentrl_env.hosting.loader import load_target
from agentrl_env.sandbox.bubblewrap import check_available

Terminal = load_target(str(Path(__file__).parents[2] / "environments" / "terminal"))
try:
    check_available()
except SandboxUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

every_level = pytest.mark.parametrize("level", ["", "-2", "-3"])


@pytest.fixture
async def client():
    async with EnvClient.local(Terminal) as client:
        yield client


async def call(session, name, **arguments):
    return await session.step(Message.assistant(None, ToolCall.of(name, **arguments)))


@every_level
async def test_expert_always_succeeds(client, level):
    for split in ("train", "test"):
        for index in range(8):  # one request of each form
            session, reward = await client.open("terminal", split=split + level, index=index), 0.0
            while not session.status.final:
                reward += (await session.step(await session.expert())).reward
            assert (reward, session.turn) == (1.0, 2)


@every_level
async def test_answer_without_the_work_is_wrong(client, level):
    for index in range(6):
        session = await client.open("terminal", split="train" + level, index=index)
        result = await call(session, "answer", text="done")
        assert (result.status, result.reward) == (SessionStatus.COMPLETED, 0.0)


@pytest.mark.parametrize(
    ("split", "ask", "command", "output"),
    [
        ("train", "occurrences", "cat {folder}/*.txt | grep -c {word}", "[0-9]+"),
        ("train", "count_either", "cat {folder}/*.txt | grep -c {word}", "[0-9]+"),
        ("train-2", "highest", "tail -n +2 orders.csv | cut -d, -f{number} | sort -n | tail -n 1", "[0-9]+"),
        (
            "train-2",
            "most",
            "tail -n +2 orders.csv | awk -F, '{{ sum[$1] += ${number} }} END {{ for (name in sum) "
            "print sum[name], name }}' | sort -rn | head -n 1 | cut -d' ' -f2",
            "[a-z]+",
        ),
    ],
)
async def test_command_that_overlooks_a_part_of_the_request_is_never_right_by_luck(
    client, split, ask, command, output
):
    asked = [index for index, sample in enumerate(Terminal.samples(split)) if sample["ask"] == ask]
    for index in asked[:10]:
        session = await client.open("terminal", split=split, index=index, seed=index)
        data = session.info.sample.data
        number = ("name", "price", "quantity", "weight").index(data.get("column", "name")) + 1
        result = await call(session, "shell", command=command.format(**data, number=number))
        answer = result.messages[0].content.strip()
        assert re.fullmatch(output, answer)
        assert (await call(session, "answer", text=answer)).reward == 0.0


async def test_state_check_is_independent_of_replaced_programs(client):
    session = await client.open("terminal", split="train-3", index=0)
    forge = (
        "cd /usr/local/bin; for p in cat grep ls; do printf '#!/bin/sh\\necho moss' >$p; chmod +x $p; done"
    )
    assert (await call(session, "shell", command=forge)).messages[0].content == "(no output)"
    assert (await call(session, "answer", text="done")).reward == 0.0


async def test_additional_changes_are_wrong(client):
    session = await client.open("terminal", split="train-3", index=0)
    await session.step(await session.expert())
    await call(session, "shell", command="rm -rf */one.txt */two.txt")
    assert (await call(session, "answer", text="done")).reward == 0.0


async def test_fork_has_its_own_files(client):
    session = await client.open("terminal", split="train-3", index=1)
    (twin,) = await session.fork(1)
    await call(twin, "shell", command="rm -rf *")
    assert (await call(twin, "shell", command="ls")).messages[0].content == "(no output)"
    while not session.status.final:
        result = await session.step(await session.expert())
    assert result.reward == 1.0


@every_level
def test_a_thousand_requests_of_a_split_differ(level):
    for split in ("train", "test"):
        samples = Terminal.samples(split + level)
        assert len({json.dumps(problem) for problem in samples}) >= 1000
        asked = Counter(problem["ask"] for problem in samples)
        assert len(asked) >= 6
        assert max(asked.values()) - min(asked.values()) <= 1


@every_level
async def test_repeated_request_is_about_another_machine(client, level):
    samples = Terminal.samples("test" + level)
    again = next(i for i, problem in enumerate(samples) if problem["machine"] == 2)
    first = samples.index({**samples[again], "machine": 1})
    texts, files = set(), set()
    for index in (first, again):
        session = await client.open("terminal", split="test" + level, index=index, seed=5)
        texts.add(str(session.messages))
        files.add((await call(session, "shell", command="cat */* *.csv")).messages[-1].content)
    assert len(texts) == 1
    assert len(files) == 2


@every_level
def test_splits_share_words_but_no_problem(level):
    train, test = (
        {json.dumps(problem | {"machine": 1}) for problem in Terminal.samples(split + level)}
        for split in ("train", "test")
    )
    assert train
    assert test
    assert not train & test
    assert 0.1 < len(test) / len(train) < 0.5
