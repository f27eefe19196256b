import re

import numpy as np
import pytest

from agentrl_env.errors import AgentRLError
from agentrl_train.chat import ChatFormat
from agentrl_train.cli.commands import expert_warnings
from agentrl_train.errors import ConfigError
from agentrl_train.sft import ExpertEpisodes, expert_sequences, longest_turn
from agentrl_train.types import TaskSource, TokenSequence
from tests.tiny_models import make_tokenizer
from tests.train.fakes import Countdown

CHAT = ChatFormat(make_tokenizer())
SOURCES = {"countdown": TaskSource(task="countdown", split="train")}


async def test_expert_episode_becomes_tokens() -> None:
    async with Countdown.local(max_sessions=2) as client:
        sequences, success, failures = await expert_sequences(
            {"countdown": client}, CHAT, sources=SOURCES, count=7, max_sessions=2
        )
    assert failures == {"countdown": []}
    assert success == {"countdown": 1.0}
    assert len(sequences) == 7
    said = sequences[0].token_ids[sequences[0].loss_mask > 0]
    call = '<tool_call>\n{"name": "down", "arguments": {}}\n</tool_call><|im_end|>'
    assert CHAT.tokenizer.decode(said) == call * 3


@pytest.mark.parametrize(("broken", "count"), [(1, 1), (2, 3)])
async def test_expert_that_mostly_fails_raises(broken: int, count: int) -> None:
    Countdown.broken_steps = broken
    async with Countdown.local() as client:
        with pytest.raises(AgentRLError, match="failed_environment"):
            await expert_sequences({"countdown": client}, CHAT, sources=SOURCES, count=count)


async def test_failed_episodes_of_an_expert_are_omitted() -> None:
    Countdown.broken_steps = 2
    async with Countdown.local() as client:
        episodes = await expert_sequences({"countdown": client}, CHAT, sources=SOURCES, count=5)
    assert len(episodes.sequences) == 3
    assert episodes.success == {"countdown": 1.0}
    (warning,) = expert_warnings(episodes)
    assert re.match("omitted 2 expert episodes of countdown that failed, first: .*failed_env", warning)


def test_expert_that_never_succeeds_is_reported() -> None:
    episodes = ExpertEpisodes(sequences=[], success={"a": 0.0, "b": 0.1}, failures={"a": [], "b": []})
    assert list(expert_warnings(episodes)) == [
        "the expert of a never succeeded, so the policy imitates failures: correct the expert"
    ]


async def test_small_split_is_repeated_with_other_seeds() -> None:
    class Seeded(Countdown):
        """Count down from a number given by the seed."""

        name = "countdown"

        @classmethod
        def samples(cls, split: str) -> list[dict[str, int]]:
            return [{"n": 1}, {"n": 2}]

        def reset(self, sample, rng):  # type: ignore[no-untyped-def]
            opening = super().reset(sample, rng)
            return f"{opening} {rng.integers(10**6)}"

    sources = {"countdown": TaskSource(task="countdown", split="train", num_samples=2)}
    async with Seeded.local() as client:
        sequences, *_ = await expert_sequences({"countdown": client}, CHAT, sources=sources, count=6)
    assert [sequence.group_id for sequence in sequences] == [0, 1, 0, 1, 0, 1]
    assert len({tuple(sequence.token_ids) for sequence in sequences}) == 6


async def test_template_that_refuses_a_later_reply_is_an_error_of_the_configuration() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template += (
        "{% for m in messages if m.role == 'tool' and m.content == '1' %}{{ raise_exception('no digits') }}"
        "{% endfor %}"
    )
    chat = ChatFormat(tokenizer)
    async with Countdown.local() as client:
        with pytest.raises(
            ConfigError,
            match=r"cannot render the messages of countdown \(TemplateError: no digits\): set model",
        ):
            await expert_sequences({"countdown": client}, chat, sources=SOURCES, count=1)


def test_longest_turn_is_the_longest_run_of_sampled_tokens() -> None:
    def sequence(mask: list[float]) -> TokenSequence:
        size = len(mask)
        return TokenSequence(
            token_ids=np.zeros(size, dtype=np.int64),
            loss_mask=np.array(mask, dtype=np.float32),
            logprobs=np.zeros(size, dtype=np.float32),
            versions=np.zeros(size, dtype=np.int64),
            advantages=np.zeros(size, dtype=np.float32),
            task="t",
            group_id=0,
        )

    assert longest_turn([sequence([0, 1, 1, 0, 1, 1, 1]), sequence([1, 0, 1])]) == 3
    assert longest_turn([sequence([0, 0])]) == 0
