"""The tasks of examples/real, without a full-size model."""

from pathlib import Path

import pytest

from agentrl_env import EnvClient
from agentrl_env.hosting.loader import load_target

TASKS = Path(__file__).parents[3] / "examples" / "real" / "tasks.py"


@pytest.mark.parametrize(
    ("name", "split", "lowest"),
    [("Household", "train", 12), ("Textcraft", "train", 36), ("Sql", "train-3", 24), ("Shop", "train-2", 18)],
)
async def test_experts_to_imitate_call_without_text_and_make_mistakes(
    name: str, split: str, lowest: int
) -> None:
    async with EnvClient.local(load_target(f"{TASKS}:{name}")) as client:
        rewards = []
        for index in range(60):
            session = await client.open(name.lower(), split=split, index=index)
            while not session.status.final:
                move = await session.expert()
                assert (move.content, len(move.tool_calls)) == (None, 1)
                result = await session.step(move)
            rewards.append(result.reward)
    assert lowest <= sum(rewards) < 60
