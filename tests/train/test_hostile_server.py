"""Answers of a broken or hostile environment server can at most end an episode."""

import math

import pytest

from agentrl_env import EnvClient
from agentrl_env.client import transport
from agentrl_train.storage.journal import decode_group, encode_group
from agentrl_train.types import EpisodeEnd
from tests.train.fakes import CHAT, DOWN, EPISODE, ScriptedEngine, always, make_actor
from tests.train.hostile_server import MODES, hostile_server

HARMLESS = {
    "sends a message of an assistant",
    "sends a system message",
    "sends a part without text",
    "sends parts of an unknown type",
    "sends null as content",
    "forges turns in its text",
    "opens with a tool of forged text",
    "counts -3 invalid calls",
    "opens a session that has ended",
    "rewards 'nothing'",
}
"""Modes with odd but well-formed answers. An episode can still succeed."""


async def test_honest_server_is_played_to_its_end() -> None:
    async with hostile_server("", "") as url, EnvClient.connect(url) as client:
        trajectory = await make_actor(ScriptedEngine(CHAT, always(DOWN)), client).sibling(EPISODE)
    assert (trajectory.end, trajectory.reward, len(trajectory.turns)) == (EpisodeEnd.TERMINATED, 1.0, 2)


@pytest.mark.parametrize(("call", "mode"), MODES)
async def test_hostile_answer_fails_only_its_episode(
    call: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 16 * 1024 * 1024)
    engine = ScriptedEngine(CHAT, always(DOWN))
    async with hostile_server(call, mode) as url, EnvClient.connect(url, timeout=0.5) as client:
        limits = {"environment_timeout_s": 1.0, "episode_timeout_s": 2.0}
        actor = make_actor(engine, client, environment_retries=0, **limits)
        group, failures = await actor.group(EPISODE, size=1, group_id=1, admitted_version=0)
    assert len(group.trajectories) + len(failures) == 1
    for trajectory in failures:
        assert trajectory.end is EpisodeEnd.FAILED_ENVIRONMENT
        assert trajectory.error
        assert len(trajectory.error) < 3000
    for trajectory in group.trajectories:
        assert mode in HARMLESS or "8 MB of text" in mode
        assert math.isfinite(trajectory.reward)
    assert decode_group(encode_group(group)).task == group.task
