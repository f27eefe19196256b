"""The documentation's program with OpenAI's SDK, against a real endpoint with scripted answers."""

import re
from pathlib import Path

import pytest

from tests.env.bridges.players import by_wire
from tests.env.evaluation.chat_server import ChatServer

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/bridges.md"
pytestmark = pytest.mark.bridges


async def test_program_of_the_documentation_plays_an_episode(serving):
    openai = pytest.importorskip("openai", reason="OpenAI's SDK is not installed; run make bridges")
    server = await serving(str(ROOT / "environments/household"), oracle=True)
    _, moves = await by_wire(server.url, "household", {"split": "test", "index": 3})
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = next(block for block in blocks if "chat.completions" in block)
    names = {}
    exec(program.replace("http://127.0.0.1:8000", server.url), names)

    def reply(body):
        move = moves[sum(message["role"] == "assistant" for message in body["messages"])]
        assert {tool["function"]["name"] for tool in body["tools"]} == {"look", "take", "put"}
        return {"choices": [{"message": move.wire(), "finish_reason": "tool_calls"}]}

    with ChatServer(reply) as chat:
        async with openai.AsyncOpenAI(base_url=chat.url, api_key="none") as model:
            assert await names["play"](model, "any") == 1.0
    assert len(chat.requests) == len(moves)
