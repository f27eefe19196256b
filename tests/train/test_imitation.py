import pytest

from agentrl_env.errors import AgentRLError
from agentrl_train.engine.chat import ChatFormat
from agentrl_train.runtime.imitation import expert_sequences
from tests.conftest import make_tokenizer
from tests.train.fakes import Countdown

CHAT = ChatFormat(make_tokenizer())


async def test_expert_episodes_become_the_tokens_that_a_policy_would_have_sampled() -> None:
    async with Countdown.local(max_sessions=2) as client:
        sequences, success = await expert_sequences(
            {"countdown": client}, CHAT, split={"countdown": "train"}, count=7, max_sessions=2
        )
    assert success == {"countdown": 1.0}
    assert len(sequences) == 7
    said = sequences[0].token_ids[sequences[0].loss_mask > 0]
    call = '<tool_call>\n{"name": "down", "arguments": {}}\n</tool_call><|im_end|>'
    assert CHAT.tokenizer.decode(said) == call * 3


async def test_a_broken_session_is_no_trace_to_learn_from() -> None:
    Countdown.broken_steps = 1
    async with Countdown.local() as client:
        with pytest.raises(AgentRLError, match="failed_environment"):
            await expert_sequences({"countdown": client}, CHAT, split={"countdown": "train"}, count=1)
