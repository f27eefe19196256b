"""The three starter tasks at every level."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target

FOLDER = Path(__file__).parents[2] / "environments"
TASKS = {name: load_target(str(FOLDER / name)) for name in ("household", "shop", "sql")}
sql_questions = sys.modules[f"{TASKS['sql'].__module__.rpartition('.')[0]}.questions"]
every_task = pytest.mark.parametrize("task", TASKS)
every_level = pytest.mark.parametrize("level", ["", "-2", "-3"])


def noisy(task, noise):
    return type(task, (TASKS[task],), {"expert_noise": noise})


async def play_by_expert(client, task, **which):
    """Return the conversation, the total reward and the number of turns."""
    session = await client.open(task, **which)
    conversation, total = list(session.messages), 0.0
    while not session.status.final:
        move = await session.expert()
        result = await session.step(move)
        assert result.metrics["invalid_calls"] == 0
        conversation += [move, *result.messages]
        total += result.reward
    return conversation, total, session.turn


async def first_search(client, task, **which):
    """Return the kind of the requested thing, and the place of the expert's first search."""
    word, name = {"household": ("thing", "look"), "shop": ("kind", "view"), "sql": ("thing", "open")}[task]
    session = await client.open(task, **which)
    kind = session.info.sample.data[word].split()[-1]
    while not session.status.final:
        move = await session.expert()
        function = move.tool_calls[0].function
        if function.name == name:
            await session.close()
            return kind, function.arguments
        await session.step(move)
    return kind, None


@every_task
@every_level
async def test_noiseless_expert_always_succeeds_in_three_to_eight_turns(task, level):
    async with EnvClient.local(TASKS[task]) as client:
        for split in ("train", "test"):
            for index in range(15):
                _, reward, turns = await play_by_expert(client, task, split=split + level, index=index)
                assert reward == 1.0
                assert 3 <= turns <= 8


@every_task
async def test_noisy_expert_leaves_headroom_at_level_1(task):
    async with EnvClient.local(noisy(task, 0.5)) as client:
        rewards = [
            (await play_by_expert(client, task, split="train", index=index))[1] for index in range(100)
        ]
    assert 0.2 < np.mean(rewards) < 0.65


@every_task
def test_first_200_held_out_samples_of_level_1_are_distinct_problems(task):
    held_out = [json.dumps(problem) for problem in TASKS[task].samples("test")]
    assert len(set(held_out[:200])) == 200


@every_level
def test_sql_has_a_thousand_different_problems_in_each_split(level):
    for split in ("train", "test"):
        assert len({json.dumps(problem) for problem in TASKS["sql"].samples(split + level)}) >= 1000


@pytest.mark.parametrize(
    ("split", "indices"), [("test", (0, 224, 448)), ("test-2", (8, 215, 422)), ("test-3", (4, 256, 508))]
)
async def test_stores_of_sql_have_their_own_databases_and_answers(split, indices):
    transcripts = {}
    async with EnvClient.local(TASKS["sql"]) as client:
        for index in indices:
            played, reward, _ = await play_by_expert(client, "sql", split=split, index=index, seed=5)
            assert reward == 1.0
            transcripts[played[0].content] = transcripts.get(played[0].content, set()) | {str(played)}
    (stores,) = transcripts.values()
    assert len(stores) == 3


@pytest.mark.parametrize("level", ["-2", "-3"])
def test_sql_asks_many_forms_of_questions_equally_often_at_higher_levels(level):
    task = TASKS["sql"]
    for split in ("train", "test"):
        asked = Counter(problem["ask"] for problem in task.samples(split + level))
        assert len(asked) >= 7
        assert max(asked.values()) - min(asked.values()) <= 1
    with (
        task.session(split="test" + level, index=0) as first,
        task.session(split="test" + level, index=7) as other,
    ):
        assert first.messages != other.messages


@pytest.mark.parametrize("level", ["-2", "-3"])
def test_query_of_sql_without_one_of_its_parts_is_never_right_by_luck(level):
    task = TASKS["sql"]
    for index, problem in enumerate(task.samples("train" + level)[:45]):
        _, _, *incomplete = sql_questions.fill(problem)
        assert incomplete
        for query in incomplete:
            with task.session(split="train" + level, index=index, seed=index) as session:
                session.step(ToolCall.of("open", database=problem["department"]))
                rows = session.step(ToolCall.of("query", sql=query)).messages[0].content.splitlines()
                assert session.step(ToolCall.of("answer", value=rows[1])).reward == 0.0


@every_task
@every_level
def test_splits_share_words_but_no_problem(task, level):
    train, test = (
        {json.dumps(problem | {"store": 1}) for problem in TASKS[task].samples(split + level)}
        for split in ("train", "test")
    )
    assert train
    assert test
    assert not train & test
    words = [
        {word for problem in problems for word in map(str, json.loads(problem).values())}
        for problems in (train, test)
    ]
    assert words[1] <= words[0]
    assert 0.1 < len(test) / len(train) < 0.5


@every_task
@every_level
def test_no_word_is_mostly_held_out(task, level):
    """A split rule can be balanced overall and still hold out nearly all problems of one word."""
    train, test = (
        {json.dumps(problem) for problem in TASKS[task].samples(split + level)} for split in ("train", "test")
    )
    held_out, kept = (
        Counter(pair for problem in problems for pair in json.loads(problem).items())
        for problems in (test, train)
    )
    assert all(held_out[pair] <= count for pair, count in kept.items())


@every_task
@every_level
async def test_sessions_of_a_sample_have_the_same_problem(task, level):
    async with EnvClient.local(noisy(task, 0.5)) as client:
        for index in range(10):
            first, again = [
                await play_by_expert(client, task, split="train" + level, index=index) for _ in range(2)
            ]
            assert first == again


@every_task
async def test_other_seeds_give_other_problems(task):
    async with EnvClient.local(TASKS[task]) as client:
        answers = {str((await play_by_expert(client, task, index=0, seed=seed))[0]) for seed in range(30)}
    assert len(answers) > 1


async def test_offers_count_one_coin_and_questions_have_fitting_adjectives():
    async with EnvClient.local(TASKS["shop"]) as client:
        seen = []
        for index in range(60):
            conversation, *_ = await play_by_expert(client, "shop", split="test-3", index=index)
            seen += [str(message.content) for message in conversation]
    assert any(", shipping 1 coin," in text for text in seen)
    assert not [text for text in seen if re.search(r"\b1 (coins|stars)\b", text)]
    asked = {sql_questions.fill(data)[0] for data in sql_questions.questions(2, "test", 1000)}
    assert any("has the greatest length" in text for text in asked)
    assert not [text for text in asked if re.search(r"(high|low)est (stock|weight|length)", text)]


@every_task
async def test_unknown_words_are_answered_and_cost_a_turn(task):
    async with EnvClient.local(TASKS[task]) as client:
        for spec in (await client.tasks())[task].tools:
            session = await client.open(task, index=0)
            words = dict.fromkeys(spec.function.parameters["properties"], "xyzzy")
            call = ToolCall.of(spec.function.name, **words)
            result = await session.step(Message.assistant("Hm.", call))
            assert result.reward == 0.0
            assert result.messages[-1].content
            await session.close()


@every_task
def test_tools_and_arguments_have_descriptions(task):
    for spec in TASKS[task].tool_specs():
        assert spec.function.description
        for argument in spec.function.parameters["properties"].values():
            assert argument["description"]


@every_task
async def test_hidden_regularity_holds_on_both_splits(task):
    """At level 1 the kind of thing determines where to look in nine of ten samples."""
    async with EnvClient.local(TASKS[task]) as client:
        where = {}
        for split, count in (("train", 200), ("test", 60)):
            for index in range(count):
                kind, place = await first_search(client, task, split=split, index=index)
                where.setdefault((split, kind), []).append(place)
    hits = [
        place == max(set(where["train", asked]), key=where["train", asked].count)
        for (split, asked), places in where.items()
        if split == "test"
        for place in places
    ]
    assert np.mean(hits) > 0.8


@every_task
async def test_noisy_expert_prefers_a_wrong_place_and_knows_the_usual_one_a_little(task):
    """A policy that imitates the expert can find the usual place by sampling but not by greedy decoding."""
    async with EnvClient.local(TASKS[task]) as client, EnvClient.local(noisy(task, 0.01)) as guesses:
        usual, guessed = {}, []
        for index in range(200):
            kind, place = await first_search(client, task, split="train", index=index)
            usual.setdefault(kind, []).append(place)
            guessed.append(await first_search(guesses, task, split="train", index=index))
    habit = max((place for _, place in guessed), key=[place for _, place in guessed].count)
    elsewhere = [
        (place, best)
        for kind, place in guessed
        if (best := max(set(usual[kind]), key=usual[kind].count)) != habit
    ]
    assert 0.3 < np.mean([place == habit for place, _ in elsewhere]) < 0.5
    assert 0.2 < np.mean([place == best for place, best in elsewhere]) < 0.37
