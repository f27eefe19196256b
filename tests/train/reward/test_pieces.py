"""Pieces of rewards and their combination: published values and invariants."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_env.types import Message, ToolCall
from agentrl_train.reward import (
    answer,
    length_penalty,
    matches,
    most_repeated,
    number,
    repetition,
    repetitive,
    rubric,
    similarity,
    squared_error,
    tool_use,
    valid_calls,
    void,
)
from agentrl_train.reward.combining import adaptive, fairness, highest, lowest, standardized, weighted
from agentrl_train.types import Completion, EpisodeEnd, Trajectory, Turn
from agentrl_train.types import TaskSample as Sample

VECTORS = {"reference": [1.0, 0.0], "half": [0.5, math.sqrt(0.75)], "against": [-0.3, math.sqrt(0.91)]}
VECTORS |= {"near": [0.9, math.sqrt(0.19)]}
COMBINATIONS = (weighted, lowest, highest, standardized, adaptive)
shares = st.floats(0, 1)


def episode(*messages: Message, invalid_calls: int = 0, reward: float = 0.0, **data: object) -> Trajectory:
    completion = Completion(token_ids=[5, 6], logprobs=[-1.0, -1.0], versions=[0, 0], finish_reason="stop")
    turns = [
        Turn(
            prompt_ids=[1],
            completion=completion,
            message=message,
            reply=[],
            reward=reward / len(messages),
            invalid_calls=invalid_calls,
        )
        for message in messages
    ]
    return Trajectory(
        sample=Sample(task="t", data=data),
        opening=[Message(role="user", content="Go.")],
        turns=turns,
        end=EpisodeEnd.TERMINATED,
        reward=reward,
        success=False,
    )


def said(*texts: str) -> Trajectory:
    return episode(*(Message.assistant(text) for text in texts))


def test_answer_is_the_last_text_of_the_policy() -> None:
    assert answer(said("first", "last")) == "last"
    assert answer(episode(Message.assistant(None, ToolCall.of("look")))) == ""
    assert answer(said()) == ""


def test_rubric_is_the_weighted_mean_of_its_checks() -> None:
    checks = {
        "short": (3.0, lambda one: len(answer(one)) < 10),
        "polite": (1.0, lambda one: "please" in answer(one)),
        "half": (2.0, lambda one: 0.5),
    }
    assert rubric(said("now"), checks) == pytest.approx(4 / 6)
    assert rubric(said("please"), checks) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        rubric(said("now"), {"wrong": (1.0, lambda one: 2.0)})
    with pytest.raises(ValueError, match="weights above 0"):
        rubric(said("now"), {"wrong": (0.0, lambda one: 1.0)})
    with pytest.raises(ValueError, match="at least one check"):
        rubric(said("now"), {})


@given(st.lists(st.tuples(st.floats(0.01, 10), shares), min_size=1, max_size=6))
def test_rubric_lies_between_its_worst_and_its_best_check(pairs: list[tuple[float, float]]) -> None:
    checks = {str(n): (weight, lambda _, share=share: share) for n, (weight, share) in enumerate(pairs)}
    found = rubric(said("x"), checks)
    values = [share for _, share in pairs]
    assert min(values) - 1e-9 <= found <= max(values) + 1e-9
    assert rubric(said("x"), dict(reversed(checks.items()))) == pytest.approx(found)


def test_format_matches_the_whole_text_across_lines() -> None:
    pattern = r"<think>.*</think>\s*<answer>\d+</answer>"
    assert matches("  <think>a\nb</think>\n<answer>7</answer> ", pattern) == 1.0
    assert matches("<answer>7</answer>", pattern) == 0.0
    assert matches("<think></think><answer>7</answer> and more", pattern) == 0.0


def test_valid_calls_is_the_share_of_turns_without_invalid_calls() -> None:
    assert valid_calls(said("a", "b")) == 1.0
    assert valid_calls(episode(Message.assistant("a"), invalid_calls=2)) == 0.0
    assert valid_calls(said()) == 1.0


def test_tool_use_rises_by_a_tenth_for_each_turn_with_calls_up_to_1() -> None:
    call = Message.assistant(None, ToolCall.of("look"))
    assert tool_use(episode(call, Message.assistant("text"), call)) == pytest.approx(0.2)
    assert tool_use(episode(*[call] * 15)) == 1.0


def test_similarity_has_the_published_values_and_embeds_each_text_once() -> None:
    asked: list[str] = []

    def embed(text: str) -> list[float]:
        asked.append(text)
        return VECTORS[text]

    similar = similarity(embed, power=2.0)
    found = [similar(text, "reference") for text in ("half", "against", "near", "reference", "near")]
    assert found == pytest.approx([0.25, 0.0, 0.81, 1.0, 0.81])
    assert sorted(asked) == sorted(VECTORS)
    assert similarity(embed, floor=0.6)("half", "reference") == 0.0
    assert similarity(lambda text: [0.0, 0.0])("a", "b") == 0.0
    with pytest.raises(ValueError, match="not finite"):
        similarity(lambda text: [math.nan])("a", "b")


@given(st.text(max_size=20), st.text(max_size=20), st.floats(0.5, 4))
def test_similarity_is_symmetric_and_1_for_equal_texts(one: str, other: str, power: float) -> None:
    def hashed(text: str) -> np.ndarray:
        vector = np.zeros(16)
        for letter in f"^{text}":
            vector[ord(letter) % 16] += 1.0
        return vector

    similar = similarity(hashed, power=power)
    assert similar(one, one) == pytest.approx(1.0)
    assert 0.0 <= similar(one, other) <= 1.0
    assert similar(one, other) == pytest.approx(similar(other, one))


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7.0), ("from 3 to -1,234.5!", -1234.5), ("2e-3 then .5", 0.5), ("1e3", 1000.0), ("none", None)],
)
def test_number_is_the_last_one_of_a_text(text: str, value: float | None) -> None:
    assert number(text) == value


def test_squared_error_makes_the_mean_the_best_answer_and_not_the_mode() -> None:
    def risk(digit: int) -> float:
        return 0.6 * squared_error(f"{digit}", 1, missing=-99) + 0.4 * squared_error(
            f"{digit}", 9, missing=-99
        )

    assert (risk(1), risk(4)) == (pytest.approx(-25.6), pytest.approx(-15.4))
    assert max(range(10), key=risk) == 4
    assert squared_error("I do not know", 1, missing=-99) == -99


def test_length_penalty_falls_linearly_behind_the_free_tokens() -> None:
    found = [length_penalty(tokens, free=100, limit=200) for tokens in (0, 100, 150, 200, 900)]
    assert found == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])
    with pytest.raises(ValueError, match="below limit"):
        length_penalty(5, free=10, limit=10)


def test_repetition_is_the_share_of_repeated_n_grams() -> None:
    assert repetition(list("abcde"), 2) == 0.0
    assert repetition([1, 1, 1, 1, 1], 2) == pytest.approx(0.75)
    assert repetition([1], 4) == 0.0
    assert most_repeated([1, 2] * 30, 20) == 21
    assert most_repeated([], 20) == 0
    with pytest.raises(ValueError, match="at least 1"):
        repetition([1], 0)


def test_void_and_repetitive_episodes_are_recognized() -> None:
    call = Message.assistant(None, ToolCall.of("look"))
    assert [void(one) for one in (said("a", "b"), said("a", ""), episode(call), said())] == [
        False,
        True,
        False,
        False,
    ]
    loop = said("again")
    (turn,) = loop.turns
    ids = [7, 8] * 20
    completion = replace(turn.completion, token_ids=ids, logprobs=[-1.0] * 40, versions=[0] * 40)
    loop = replace(loop, turns=[replace(turn, completion=completion)])
    assert repetitive(loop)
    assert not repetitive(loop, times=12)
    assert not repetitive(said("once"))


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_repetition_is_below_1_and_is_0_only_without_repetition(units: list[int], size: int) -> None:
    found = repetition(units, size)
    assert 0.0 <= found < 1.0
    assert (found == 0.0) == (most_repeated(units, size) <= 1)


def scores(**values: list[float]) -> dict[str, np.ndarray]:
    return {name: np.array(each) for name, each in values.items()}


def test_weighted_lowest_and_highest_combine_by_weight() -> None:
    given_scores, weights = scores(a=[1.0, 0.0], b=[0.5, 0.5]), {"b": 3.0}
    assert weighted(given_scores, weights).tolist() == [2.5, 1.5]
    assert lowest(given_scores, weights).tolist() == [1.0, 0.0]
    assert highest(given_scores, weights).tolist() == [1.5, 1.5]


def test_standardized_scores_count_only_by_their_weights() -> None:
    found = standardized(scores(a=[1.0, 0.0], b=[0.0, 1000.0], c=[5.0, 5.0]), {"b": 2.0})
    assert found.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_adaptive_combination_has_the_published_values() -> None:
    values = scores(first=[0.8], second=[0.2])
    assert fairness(np.array([[0.8], [0.2]])) == pytest.approx(0.735294, abs=1e-6)
    found = adaptive(values, {}, alignment={"first": 0.9, "second": 0.5})
    assert found[0] == pytest.approx(0.109531, abs=1e-6)
    assert adaptive(values, {}, fair=0.7)[0] == pytest.approx(0.5)
    # A huge score isolates each weight.
    far = 1e4
    for name, share in (("first", 0.017986), ("second", 0.982014)):
        one = {other: np.array([far if other == name else 0.0]) for other in values}
        leaning = adaptive(one, {}, alignment={"first": 0.9, "second": 0.5})[0]
        assert (leaning + math.log(2)) / far == pytest.approx(share, abs=1e-6)


def test_scores_that_agree_are_perfectly_fair() -> None:
    assert fairness(np.full((3, 4), 0.3)) == pytest.approx(1.0)
    assert fairness(np.zeros((3, 4))) == 1.0
    assert fairness(np.array([[1.0], [-1.0]])) == 0.0


@given(
    st.lists(st.tuples(shares, shares, shares), min_size=1, max_size=5),
    st.permutations(["a", "b", "c"]),
    st.sampled_from(COMBINATIONS),
)
def test_order_of_scores_changes_no_combination(rows, order, combine) -> None:
    values = dict(zip("abc", np.array(rows).T, strict=True))
    weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    found = combine(values, weights)
    assert found.shape == (len(rows),)
    assert combine({name: values[name] for name in order}, weights) == pytest.approx(found, abs=1e-9)


@given(st.lists(shares, min_size=1, max_size=5))
def test_single_score_is_the_reward(values: list[float]) -> None:
    for combine in (weighted, lowest, highest, adaptive):
        assert combine({"a": np.array(values)}, {}) == pytest.approx(np.array(values))
