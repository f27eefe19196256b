"""BabyAI: levels and splits, the bot as expert, the view as text, and attacks by a policy."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments
pytest.importorskip("minigrid", reason="minigrid is not installed; run make .venv/.environments")

Babyai = load_target(str(Path(__file__).parents[2] / "environments" / "babyai"))
PACKAGE = Babyai.__module__.rpartition(".")[0]
levels, view = (sys.modules[f"{PACKAGE}.{name}"] for name in ("levels", "view"))
DIFFICULTIES = ("", "-2", "-3")


@pytest.fixture
async def client():
    async with EnvClient.local(Babyai) as client:
        yield client


def call(name, **arguments):
    return Message.assistant(None, ToolCall.of(name, **arguments))


async def solves(client, split, indices):
    for index in indices:
        session = await client.open("babyai", split=split, index=index)
        transcript, reward, _ = await play(session)
        assert reward == 1.0, transcript


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
async def test_bot_solves_problems_of_every_difficulty(client, difficulty):
    for split in levels.NUM_SAMPLES:
        await solves(client, split + difficulty, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
async def test_bot_solves_two_hundred_held_out_problems(client, difficulty):
    await solves(client, "test" + difficulty, range(200))


async def test_bot_solves_the_position_after_random_actions(client):
    for index in range(8):
        session = await client.open("babyai", split="test-2", index=index)
        rng = np.random.default_rng(index)
        for _ in range(6):
            name = rng.choice(["left", "right", "forward"])
            move = call("forward", steps=1) if name == "forward" else call("turn", direction=str(name))
            if not session.status.final:
                await session.expert()
                await session.step(move)
        if not session.status.final:
            assert (await play(session))[1] == 1.0


def drawn(split, difficulty, size):
    problems = levels.Problems(split, difficulty)
    found = set()
    for index in range(size):
        data = problems[index]
        env = levels.make(data["level"])
        env.reset(seed=data["seed"])
        assert levels.tenth(env) in levels.SHARES[split]
        world = env.unwrapped
        found.add((world.mission, *world.agent_pos, world.agent_dir, world.grid.encode().tobytes()))
    return found


@pytest.mark.parametrize("difficulty", levels.LEVELS)
def test_splits_share_no_problem(difficulty):
    sets = [drawn(split, difficulty, 24) for split in levels.NUM_SAMPLES]
    assert len(set.union(*sets)) == sum(map(len, sets))
    tenths = [set(share) for share in levels.SHARES.values()]
    assert len(set.union(*tenths)) == sum(map(len, tenths)) == 10


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", levels.LEVELS)
def test_nearly_all_of_a_thousand_held_out_problems_differ(difficulty):
    assert len(drawn("test", difficulty, 1000)) >= 990


async def test_picking_up_one_thing_after_the_other_fails_at_level_1(client):
    for index in range(40):
        session = await client.open("babyai", split="test", index=2 + 4 * index)  # PickupDist
        seen = session.messages[-1].content
        mission = re.search("Mission: pick up (?:a|the) (.*)", seen)[1]
        near = re.search(r"- (\w+ \w+): (\d) ahead$", seen, re.MULTILINE)
        if near and not set(mission.split()) & set(near[1].split()):
            break
    await session.step(call("forward", steps=10))
    result = await session.step(call("pick_up"))
    assert (result.terminated, result.reward) == (True, 0.0)
    assert result.messages[0].content == "The mission has failed."


def test_wanted_thing_of_level_1_is_not_listed_first():
    problems, named = levels.Problems("test", 1), 0
    for index in range(24):
        data = problems[index]
        env = levels.make(data["level"])
        seen, _ = env.reset(seed=data["seed"])
        listed, wanted = view.Sight(seen["image"]).things(), env.unwrapped.instrs.desc
        if listed and wanted.color and wanted.type and not wanted.loc:
            named += 1
            assert f"- {wanted.color} {wanted.type}:" not in listed[0]
        assert len(listed) >= levels.LEAST_IN_VIEW
    assert named >= 6


async def test_same_seed_gives_the_same_transcript(client):
    first, second = [
        [(await play(await client.open("babyai", split="test" + d, index=5)))[0] for d in DIFFICULTIES]
        for _ in range(2)
    ]
    assert first == second


def test_view_counts_cells_from_the_agent():
    image = np.zeros((7, 7, 3), np.uint8)
    image[:, :, 0] = 1  # empty
    image[3, 2] = (4, 2, 1)  # a closed blue door, four ahead
    image[2, 5] = (6, 0, 0)  # a red ball, one ahead and one left
    image[5, 6] = (2, 5, 0)  # a wall, two right
    sight = view.Sight(image)
    assert sight.line(0, 1) == "3 free cells, then a closed blue door"
    assert sight.line(1, 0) == "1 free cell, then a wall"
    assert sight.line(-1, 0) == "3 free cells"
    assert sight.things() == ["- red ball: 1 ahead, 1 left", "- closed blue door: 4 ahead"]
    image[3, 2] = (4, 0, 0)
    assert view.Sight(image).line(0, 1) == "3 free cells, then an open red door"


async def test_walk_stops_before_a_cell_that_is_not_free(client):
    session = await client.open("babyai", sample={"level": "GoToLocal", "seed": 1})
    result = await session.step(call("forward", steps=10))
    while not result.done and "Ahead: 0 free cells" not in result.messages[0].content:
        result = await session.step(call("forward", steps=10))
    assert session.turn <= 2


async def test_steps_of_the_level_truncate_the_episode(client):
    session = await client.open("babyai", sample={"level": "PickupDist", "seed": 4})
    calls = [ToolCall.of("turn", call_id=f"call_{n}", direction="left") for n in range(60)]
    result = await session.step(Message.assistant(None, *calls))
    assert (result.terminated, result.truncated, result.reward) == (False, True, 0.0)
    assert result.metrics["steps"] == levels.MAX_STEPS[1]


async def test_fork_continues_from_the_state_of_the_original(client):
    session = await client.open("babyai", split="test-3", index=2)
    for _ in range(3):
        await session.step(await session.expert())
    (fork,) = await session.fork(1)
    move = call("turn", direction="right")
    assert (await session.step(move)).messages == (await fork.step(move)).messages
    assert (await play(fork))[1] == (await play(session))[1] == 1.0


async def test_level_that_the_task_does_not_have_fails_and_scores_nothing(client):
    for data in ({"level": "KeyInBox", "seed": 1}, {"level": "GoToLocal", "seed": "1"}):
        with pytest.raises(Exception, match="a problem has a level"):
            await client.open("babyai", sample=data)


async def test_bridge_serves_minigrid_and_babyai_with_named_actions_and_this_text():
    rendered = "gym:BabyAI-GoToLocal-v0#environments.babyai.view:describe"
    for target in ("gym:MiniGrid-Empty-5x5-v0?max_steps=20", "gym:minigrid:BabyAI-GoToLocal-v0", rendered):
        task = load_target(target)
        (spec,) = task.tool_specs()
        names = spec.function.parameters["properties"]["action"]["enum"]
        assert names == ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
        with task.session(seed=1) as session:
            result = session.step(ToolCall.of("step", action="left"))
            assert "mission" in result.messages[0].content.lower()
    assert "You face" in result.messages[0].content
    assert load_target("gym:MiniGrid-Empty-5x5-v0?max_steps=20").max_turns == 20
