"""Countdown: problems of every level, arithmetic, and attacks by a policy."""

import json
import sys
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path

import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

Countdown = load_target(str(Path(__file__).parents[2] / "environments" / "countdown"))
PACKAGE = Countdown.__module__.rpartition(".")[0]
arithmetic, problems = (sys.modules[f"{PACKAGE}.{name}"] for name in ("arithmetic", "problems"))
LEVELS = ("", "-2", "-3")
TEN = {"level": 1, "numbers": [2, 3, 4], "target": 20}


@pytest.fixture
async def client():
    async with EnvClient.local(Countdown) as client:
        yield client


def call(name, expression):
    return Message.assistant(None, ToolCall.of(name, expression=expression))


@pytest.mark.parametrize("level", LEVELS)
async def test_expert_reaches_sixty_held_out_targets(client, level):
    for index in range(60):
        transcript, reward, _ = await play(await client.open("countdown", split="test" + level, index=index))
        assert reward == 1.0, transcript


@pytest.mark.parametrize("level", [1, 2, 3])
def test_splits_have_a_thousand_different_problems_and_share_none(level):
    drawn = {}
    for split, share in problems.SHARES.items():
        made = [problems.Problems(split, level)[index] for index in range(problems.NUM_SAMPLES["test"])]
        drawn[split] = {(*sorted(one["numbers"]), one["target"]) for one in made}
        assert {problems.tenth(one["numbers"], one["target"]) for one in made} <= set(share)
        assert {len(one["numbers"]) for one in made} == {problems.LEVELS[level].numbers}
    assert len(drawn["test"]) == len(drawn["validation"]) == 1000
    assert not drawn["train"] & (drawn["test"] | drawn["validation"])
    assert not drawn["test"] & drawn["validation"]


FORMS = (
    "{0} + {1} + {2}", "{0} + {1} - {2}", "{0} - {1} - {2}", "{0} * {1} + {2}", "{0} * {1} - {2}",
    "({0} + {1}) * {2}", "({0} - {1}) * {2}", "{0} * {1} / {2}", "{0} + {1}", "{0} - {1}", "{0} * {1}",
)  # fmt: skip


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_form_of_an_expression_is_often_right(split):
    made = [problems.Problems(split, 1)[index] for index in range(1000)]
    for form, order in product(FORMS, permutations(range(3))):
        expressions = [form.format(*(sorted(one["numbers"])[i] for i in order)) for one in made]
        right = [arithmetic.evaluate(e)[0] == one["target"] for e, one in zip(expressions, made, strict=True)]
        assert sum(right) <= 150, (form, order)


@pytest.mark.parametrize("level", [2, 3])
def test_sum_of_all_numbers_is_seldom_right(level):
    made = [problems.Problems("test", level)[index] for index in range(1000)]
    assert sum(sum(one["numbers"]) == one["target"] for one in made) <= 60


async def test_same_seed_gives_the_same_transcript(client):
    first, second = [
        [
            (await play(await client.open("countdown", split="test" + level, index=5, seed=3)))[0]
            for level in LEVELS
        ]
        for _ in range(2)
    ]
    assert first == second


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        (" ( 1 + 2 ) * 3 ", 9),
        ("8/4/2", 1),
        ("10-4-3", 3),
        ("1/3", Fraction(1, 3)),
        ("8/(3-8/3)", 24),
        ("((((7))))", 7),
    ],
)
def test_arithmetic_is_exact_and_has_the_usual_precedence(text, value):
    assert arithmetic.evaluate(text)[0] == value


async def test_calculating_continues_and_a_wrong_answer_ends_the_episode(client):
    session = await client.open("countdown", sample=TEN)
    result = await session.step(call("calculate", "3 / 2"))
    assert (result.done, result.messages[0].content) == (False, "3 / 2 = 3/2")
    (fork,) = await session.fork(1)
    wrong = await session.step(call("answer", "2 + 3"))
    assert (wrong.terminated, wrong.reward) == (True, 0.0)
    right = await fork.step(call("answer", "(2 + 3) * 4"))
    assert (right.terminated, right.reward) == (True, 1.0)


# A hostile policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "20",
        "2 * 2 * 5",
        "4 * 4 + 4",
        "2 ** 3 + 4",
        "4 ** 9 ** 9 ** 9",
        "2 // 1",
        "-2 + 3",
        "2 3 4",
        "(2 + 3",
        "2 + 3)",
        "4 / (3 - 3)",
        "2 / (3 - 3)",
        "4e1 / 2",
        "0x14",
        "2_0",
        "\u0662 * \u0661\u0660",
        "\u00b2 + 4",
        "(2 + 3) \u00d7 4",
        "2\n+ 3",
        "20 # (2+3)*4",
        "self.target",
        "__import__('os').system('true')",
        "(2 + 3) * 4 == 20 or 20",
        "9" * 100_000,
        "(" * 100_000,
        "(" * 60 + "2" + ")" * 60,
        "1*" * 50_000 + "1",
        "2" + " " * 100_000 + "+ 3 $",
        "None",
        "nan",
        "inf",
    ],
)
async def test_invalid_expression_earns_nothing(client, text):
    for name in ("calculate", "answer"):
        session = await client.open("countdown", sample=TEN)
        result = await session.step(call(name, text))
        assert (result.status, result.reward) == ("running", 0.0)
        assert len(result.messages[0].content) < 300


async def test_no_message_contains_the_solution(client):
    for index in range(20):
        session = await client.open("countdown", split="test-2", index=index)
        solution = json.loads((await session.expert()).tool_calls[0].function.arguments)["expression"]
        assert solution not in session.messages[0].content
