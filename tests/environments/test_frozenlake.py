"""The frozen lake: lakes of every level, the best policy, and attacks by a policy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

Frozenlake = load_target(str(Path(__file__).parents[2] / "environments" / "frozenlake"))
lakes = sys.modules[f"{Frozenlake.__module__.rpartition('.')[0]}.lakes"]
LEVELS = ("", "-2", "-3")
SMALL = {"level": 1, "lake": ["SF", "HG"], "slippery": False}
SLIPPERY = {"level": 2, "lake": ["SFF", "FFH", "FFG"], "slippery": True}


@pytest.fixture
async def client():
    async with EnvClient.local(Frozenlake) as client:
        yield client


def move(direction):
    return Message.assistant(None, ToolCall.of("move", direction=direction))


async def test_expert_crosses_sixty_held_out_lakes_that_are_not_slippery(client):
    for index in range(60):
        session = await client.open("frozenlake", split="test", index=index)
        transcript, reward, metrics = await play(session)
        assert (reward, metrics["best_chance"]) == (1.0, 1.0), transcript
        assert 10 <= session.turn <= 20


@pytest.mark.extended
@pytest.mark.parametrize("level", LEVELS[1:])
async def test_expert_reaches_the_proven_chance_on_sixty_slippery_lakes(client, level):
    """The number of successes is within four standard deviations of the expected number."""
    rewards, chances = [], []
    for index in range(60):
        _, reward, metrics = await play(await client.open("frozenlake", split="test" + level, index=index))
        rewards.append(reward)
        chances.append(metrics["best_chance"])
    chances = np.array(chances)
    assert min(chances) >= lakes.LEVELS[int(level[1:])].least
    assert abs(sum(rewards) - chances.sum()) < 4 * np.sqrt((chances * (1 - chances)).sum())


def test_chance_of_the_best_policy_matches_enumeration_of_all_policies():
    """On a lake of four cells with two moves, no policy exceeds the computed value."""
    lake, moves = "SF\nFG", 2
    chances = lakes.engine(lake, True).P

    def best(state, left):
        if left == 0:
            return 0.0
        return max(
            sum(
                p * (reward + (0 if ended else best(other, left - 1))) for p, other, reward, ended in outcomes
            )
            for outcomes in chances[state].values()
        )

    assert lakes.values(lake, True)[moves, 0] == pytest.approx(best(0, moves))
    assert 0 < best(0, moves) < 1


def check_splits(level, size):
    drawn = {}
    for split, share in lakes.SHARES.items():
        made = lakes.Lakes(split, level)
        samples = [made[index]["lake"] for index in range(size)]
        drawn[split] = {lakes.alike(lake) for lake in samples}
        assert {lakes.tenth(lake) for lake in samples} <= set(share)
    assert not drawn["train"] & (drawn["test"] | drawn["validation"])
    assert not drawn["test"] & drawn["validation"]
    return drawn


@pytest.mark.parametrize("level", [1, 2, 3])
def test_splits_share_no_lake(level):
    check_splits(level, 60)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_thousand_held_out_lakes_differ(level):
    drawn = check_splits(level, 1000)
    assert len(drawn["test"]) == len(drawn["validation"]) == 1000


async def test_same_seed_gives_the_same_transcript_and_another_slips_elsewhere(client):
    async def played(seed):
        return [
            (await play(await client.open("frozenlake", split="test" + level, index=5, seed=seed)))[0]
            for level in LEVELS
        ]

    assert await played(3) == await played(3)
    assert (await played(3))[1:] != (await played(4))[1:]


async def test_hole_ends_the_episode_without_a_reward_and_the_goal_with_a_reward(client):
    fallen = await (await client.open("frozenlake", sample=SMALL)).step(move("down"))
    assert (fallen.terminated, fallen.reward) == (True, 0.0)
    session = await client.open("frozenlake", sample=SMALL)
    assert (await session.step(move("right"))).messages[0].content == "S@\nHG"
    arrived = await session.step(move("down"))
    assert (arrived.terminated, arrived.reward) == (True, 1.0)


async def test_fork_slips_as_the_original_does(client):
    session = await client.open("frozenlake", split="test-3", index=1)
    await session.step(move("right"))
    (fork,) = await session.fork(1)
    first, second = [await play(one) for one in (session, fork)]
    assert first[0][1:] == second[0][-len(first[0]) + 1 :]


# A hostile policy


@pytest.mark.parametrize(
    "direction", ["", "RIGHT", "right ", "right;up", 2, 10**400, None, ["right"], {"x": 1}, "٢"]
)
async def test_invalid_direction_is_rejected_and_moves_nothing(client, direction):
    session = await client.open("frozenlake", sample=SMALL)
    result = await session.step(move(direction))
    assert (result.status, result.reward, result.metrics["invalid_calls"]) == ("running", 0.0, 1.0)
    await session.step(move("right"))
    assert (await session.step(move("down"))).reward == 1.0


async def test_slips_cannot_be_predicted_from_the_messages(client):
    """Episodes on one lake with the same first turns continue differently."""
    seen = set()
    for seed in range(40):
        session = await client.open("frozenlake", sample=SLIPPERY, seed=seed)
        seen.add((await session.step(move("right"))).messages[0].content)
    assert len(seen) == 3


@pytest.mark.parametrize("lake", [[], [""], ["FS", "FG"], ["SF", "G"], ["SX", "FG"], ["SS", "FG"], "SFFG"])
async def test_invalid_lake_fails_without_a_score(client, lake):
    with pytest.raises(Exception, match="a lake is rows"):
        await client.open("frozenlake", sample={**SMALL, "lake": lake})
