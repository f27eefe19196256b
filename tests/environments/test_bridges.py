"""The same seeded episode over every protocol."""

import asyncio
from pathlib import Path

import pytest

from agentrl_env.errors import SandboxUnavailable
from agentrl_env.hosting.loader import load_target
from agentrl_env.hosting.serve import EnvServer
from agentrl_env.sandbox.bubblewrap import check_available
from tests.env.bridges.players import by_agentrl, by_gym, by_mcp, by_openenv, by_wire

FOLDER = Path(__file__).parents[2] / "environments"
STARTER = ("household", "shop", "sql", "countdown", "frozenlake", "textcraft", "sokoban")
OTHERS = (
    "collab",
    "terminal",
    "os_interaction",
    "swe_repair",
    "dbbench",
    "search_qa",
    "babyai",
    "knowledgegraph",
)
SANDBOXED = OTHERS[:4]
ENGINES = {"babyai": "minigrid", "knowledgegraph": "pyoxigraph"}
pytestmark = pytest.mark.bridges
pytest.importorskip("openenv", reason="OpenEnv is not installed; run make bridges")


def sandbox_or_skip():
    try:
        check_available()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("choice", [{"index": 3, "seed": 7}, {"split": "test", "index": 1}], ids=str)
@pytest.mark.parametrize("name", STARTER + OTHERS)
async def test_same_episode_has_the_same_transcript_and_reward_over_every_protocol(name, choice):
    if engine := ENGINES.get(name):
        pytest.importorskip(engine, reason="its engine is not installed; run make environments")
    if name in SANDBOXED:
        sandbox_or_skip()
    server = EnvServer([load_target(str(FOLDER / name))], port=0, drain_s=0.0, oracle=True)
    await server.start()
    try:
        played, moves = await by_wire(server.url, name, choice)
        assert played.terminated
        assert len(played.answers) == len(moves)
        assert await by_mcp(server.url, name, choice, moves) == played
        assert await by_openenv(server.url, name, choice, moves) == played
        assert await by_agentrl(server.url, name, choice, moves) == played
        assert await asyncio.to_thread(by_gym, server.url, name, choice, moves) == played
    finally:
        await server.stop()
