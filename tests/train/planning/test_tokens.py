"""Estimates of the tokens per step, from experts and from limits."""

import numpy as np

from agentrl_train.planning.tokens import Lengths, measured_lengths, of_limits, step_tokens, turn_lengths
from agentrl_train.types import Sampling, TaskSource, TokenSequence
from tests.train.fakes import CHAT, Countdown

SAMPLING = Sampling(max_context=2048, max_new_tokens=50)


def sequence(mask: list[int]) -> TokenSequence:
    numbers = np.array(mask, np.float32)
    ids = np.zeros(len(mask), np.int64)
    return TokenSequence(
        token_ids=ids,
        loss_mask=numbers,
        logprobs=numbers,
        versions=ids,
        advantages=numbers,
        task="a",
        group_id=0,
    )


def test_turns_are_runs_of_sampled_tokens() -> None:
    assert turn_lengths(sequence([0, 0, 1, 1, 1, 0, 1])) == [3, 1]


async def test_lengths_of_a_task_with_an_expert_are_measured() -> None:
    async with Countdown.local(oracle=True) as client:
        (found,) = await measured_lengths(
            {"countdown": client},
            CHAT,
            sources=[TaskSource(task="countdown")],
            sampling=SAMPLING,
            max_turns={},
            episodes=3,
        )
    call = CHAT.tokenizer.encode('<tool_call>\n{"name": "down", "arguments": {}}\n</tool_call><|im_end|>')
    assert found.by_expert
    assert found.success == 1.0
    assert found.turns == 3
    assert found.longest_turn == len(call)
    assert found.sampled == 3 * len(call)
    assert found.opening + found.sampled < found.total <= found.longest


async def test_lengths_of_a_task_without_an_expert_follow_from_its_limits() -> None:
    async with Countdown.local(oracle=False) as client:
        (found,) = await measured_lengths(
            {"countdown": client},
            CHAT,
            sources=[TaskSource(task="countdown")],
            sampling=SAMPLING,
            max_turns={"countdown": 5},
        )
    assert not found.by_expert
    assert found.turns == 5
    assert found.sampled == 5 * SAMPLING.max_new_tokens
    assert found.total == SAMPLING.max_context


def test_bound_of_sampled_tokens_leaves_room_for_the_opening() -> None:
    found = of_limits("a", opening=2000, turns=8, sampling=SAMPLING)
    assert found.sampled == 48


def test_siblings_share_their_opening_in_a_step() -> None:
    lengths = Lengths(
        task="a",
        opening=100,
        sampled=30,
        total=150,
        turns=3,
        longest_turn=10,
        longest=160,
        by_expert=True,
    )
    step = step_tokens([lengths], groups=2, group_size=4)
    assert step.episodes == 8
    assert step.sampled == 8 * 30
    assert step.prefilled == 2 * 100 + 8 * 20
    assert step.trained == 2 * 100 + 8 * 50
