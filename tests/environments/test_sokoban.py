"""Sokoban: rules, boards of every level, the solver, and attacks by a policy."""

import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, TaskSample, ToolCall
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

Sokoban = load_target(str(Path(__file__).parents[2] / "environments" / "sokoban"))
PACKAGE = Sokoban.__module__.rpartition(".")[0]
board, generator, solver = (sys.modules[f"{PACKAGE}.{name}"] for name in ("board", "generator", "solver"))
LEVELS = ("", "-2", "-3")
CORRIDOR = "######\n#@*_O#\n######"


@pytest.fixture
async def client():
    async with EnvClient.local(Sokoban) as client:
        yield client


def opened(text):
    environment = Sokoban()
    sample = TaskSample(task="sokoban", seed=1, data={"board": text})
    environment.reset(sample, np.random.default_rng(1))
    return environment


def move(*directions):
    return Message.assistant(None, ToolCall.of("move", directions=list(directions)))


async def solves(client, split, indices):
    for index in indices:
        session = await client.open("sokoban", split=split, index=index)
        transcript, reward, _ = await play(session)
        assert reward == 1.0, transcript


@pytest.mark.extended
@pytest.mark.parametrize("level", LEVELS)
async def test_expert_solves_boards_of_every_level(client, level):
    for split in generator.NUM_SAMPLES:
        await solves(client, split + level, range(15))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
async def test_expert_solves_two_hundred_held_out_boards(client, level):
    await solves(client, "test" + level, range(200))


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_thousand_held_out_boards_differ_even_when_turned(level):
    for split in ("validation", "test"):
        boards = generator.Boards(split, level)
        assert len({generator.alike(boards[i]["board"]) for i in range(len(boards))}) >= 1000


@pytest.mark.extended
@pytest.mark.parametrize("level", [1, 2, 3])
def test_splits_share_no_board_even_when_turned(level):
    drawn = {
        split: {generator.alike(generator.Boards(split, level)[i]["board"]) for i in range(60)}
        for split in generator.NUM_SAMPLES
    }
    assert not set.intersection(drawn["train"], drawn["test"] | drawn["validation"])
    assert not drawn["test"] & drawn["validation"]
    for split, share in generator.SHARES.items():
        assert {generator.tenth(text) for text in drawn[split]} <= set(share)
    shares = [set(share) for share in generator.SHARES.values()]
    assert len(set.union(*shares)) == sum(map(len, shares)) == 10


@pytest.mark.parametrize("level", [1, 2, 3])
def test_boards_have_the_size_and_the_minimum_pushes_of_their_level(level):
    limits = generator.LEVELS[level]
    for index in range(40):
        layout, position = board.parse(generator.Boards("train", level)[index]["board"])
        assert layout.width == limits.side + 2
        assert len(position.boxes) == limits.boxes
        assert not position.boxes & layout.targets
        assert solver.solve(layout, position).pushes >= limits.least


def test_plan_has_the_fewest_pushes():
    """A search through all positions finds no solution with fewer pushes."""
    for index in range(30):
        layout, start = board.parse(generator.Boards("test", 1)[index]["board"])
        wave, seen, pushes = {start}, set(), 0
        while not any(layout.solved(position) for position in wave):
            todo, wave = list(wave), set()
            while todo:
                position = todo.pop()
                seen.add(position)
                for direction in board.DIRECTIONS:
                    other = layout.move(position, direction)
                    if other is None or other in seen:
                        continue
                    if other.boxes == position.boxes:
                        todo.append(other)
                    else:
                        wave.add(other)
            pushes += 1
        assert solver.solve(layout, start).pushes == pushes


async def test_same_seed_gives_the_same_transcript(client):
    first, second = [
        [
            (await play(await client.open("sokoban", split="test" + level, index=5, seed=3)))[0]
            for level in LEVELS
        ]
        for _ in range(2)
    ]
    assert first == second


def test_box_is_pushed_but_neither_pulled_nor_through_walls_and_boxes():
    environment = opened("########\n#_@*_*O#\n#__O___#\n########")
    environment.move(["right", "right"])
    assert environment.board.text(environment.position).split("\n")[1] == "#__@**O#"
    environment.move(["left"])
    assert environment.board.text(environment.position).split("\n")[1] == "#_@_**O#"
    assert "Move 1, up, is blocked" in environment.move(["up"]).content


async def test_boxes_on_targets_are_a_metric_of_every_turn(client):
    text = "########\n#@*O*_O#\n########"
    session = await client.open("sokoban", sample={"level": 1, "board": text})
    result = await session.step(move("right"))
    assert result.metrics["boxes_placed"] == 1.0
    assert "Boxes on targets: 1 of 2" in result.messages[0].content
    result = await session.step(Message.assistant(None, ToolCall.of("restart")))
    assert result.metrics["boxes_placed"] == -1.0


async def test_expert_restarts_if_a_box_is_stuck(client):
    text = "######\n#____#\n#_*@_#\n#__O_#\n######"
    session = await client.open("sokoban", sample={"level": 1, "board": text})
    await session.step(move("left"))
    call = await session.expert()
    assert call.tool_calls[0].function.name == "restart"
    assert (await play(session))[1] == 1.0


async def test_fork_continues_from_the_position_of_the_original(client):
    session = await client.open("sokoban", split="test-2", index=0)
    await session.step(await session.expert())
    (fork,) = await session.fork(1)
    await session.step(Message.assistant(None, ToolCall.of("restart")))
    assert (await play(fork))[1] == (await play(session))[1] == 1.0


# A hostile policy


@pytest.mark.parametrize(
    "directions",
    [
        [],
        ["up"] * 21,
        ["up", "UP"],
        ["\u0660"],
        [None],
        "up",
        {"up": 1},
        [["up"]],
        10**400,
        ["up" * 10**5],
        None,
    ],
)
async def test_invalid_list_of_directions_is_rejected_and_moves_nothing(client, directions):
    session = await client.open("sokoban", sample={"level": 1, "board": CORRIDOR})
    result = await session.step(Message.assistant(None, ToolCall.of("move", directions=directions)))
    assert result.status == "running"
    assert result.reward == 0.0
    assert result.metrics["invalid_calls"] == 1.0
    assert len(result.messages[0].content) < 3000
    assert (await session.step(move("right", "right"))).reward == 1.0


async def test_moves_after_the_last_box_and_calls_after_the_end_earn_nothing_more(client):
    session = await client.open("sokoban", sample={"level": 1, "board": CORRIDOR})
    result = await session.step(move("right", "right", "left", "left", "right", "right"))
    assert result.terminated
    assert result.reward == 1.0
    assert result.metrics["boxes_on_target"] == 1.0


async def test_pushing_a_box_on_and_off_a_target_earns_nothing(client):
    text = "#########\n#@*O_*_O#\n#_______#\n#########"
    session = await client.open("sokoban", sample={"level": 1, "board": text})
    total = 0.0
    while not session.status.final:
        for call in (move("right"), Message.assistant(None, ToolCall.of("restart"))):
            total += 0.0 if session.status.final else (await session.step(call)).reward
    assert total == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#",
        "###\n#@#\n###",
        "####\n#@*#\n####",
        "#####\n#@*O_\n#####",
        "####\n#@x#\n####",
        "###\n#@*O#\n###",
    ],
)
async def test_invalid_board_fails_without_a_score(client, text):
    with pytest.raises(Exception, match="a board"):
        await client.open("sokoban", sample={"level": 1, "board": text})
