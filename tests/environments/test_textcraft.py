"""TextCraft: recipes of every level, crafting, and attacks by a policy."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_env import EnvClient, Message, TaskSample, ToolCall, ToolError
from agentrl_env.errors import DefinitionError
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

FOLDER = str(Path(__file__).parents[2] / "environments" / "textcraft")
Textcraft = load_target(FOLDER)
recipes = sys.modules[f"{Textcraft.__module__.rpartition('.')[0]}.recipes"]
LEVELS = ("", "-2", "-3")
TABLE = {
    "level": 1,
    "target": "oak table",
    "recipes": [["oak table", 1, [["oak plank", 3]]], ["oak plank", 2, [["oak log", 1]]]],
    "idle": [],
}


@pytest.fixture
async def client():
    async with EnvClient.local(Textcraft) as client:
        yield client


def opened(data=TABLE):
    environment = Textcraft()
    environment.reset(TaskSample(task="textcraft", seed=1, data=data), np.random.default_rng(1))
    return environment


@pytest.mark.parametrize("level", LEVELS)
async def test_expert_crafts_sixty_held_out_targets(client, level):
    for index in range(60):
        transcript, reward, _ = await play(await client.open("textcraft", split="test" + level, index=index))
        assert reward == 1.0, transcript


@pytest.mark.extended
@pytest.mark.parametrize("level", [1, 2, 3])
def test_splits_have_a_thousand_different_problems_and_share_none(level):
    drawn = {}
    for split, share in recipes.SHARES.items():
        problems = [recipes.Problems(split, level)[index] for index in range(1000)]
        assert {recipes.tenth(problem) for problem in problems} <= set(share)
        drawn[split] = {(one["target"], json.dumps(sorted(recipes.needed(one)))) for one in problems}
    assert len(drawn["test"]) == len(drawn["validation"]) == 1000
    assert not drawn["train"] & (drawn["test"] | drawn["validation"])
    assert not drawn["test"] & drawn["validation"]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_recipes_have_the_depth_of_their_level(level):
    for index in range(50):
        data = recipes.Problems("train", level)[index]
        parts = {item: [part for part, _ in row] for item, _, row in data["recipes"]}

        def depth(item, parts=parts):
            return 1 + max(map(depth, parts[item])) if item in parts else 0

        assert depth(data["target"]) == recipes.LEVELS[level].depth
        assert len(parts) == len(data["recipes"])


async def test_same_seed_gives_the_same_transcript(client):
    first, second = [
        [
            (await play(await client.open("textcraft", split="test" + level, index=5, seed=3)))[0]
            for level in LEVELS
        ]
        for _ in range(2)
    ]
    assert first == second


def test_crafting_uses_up_ingredients_and_takes_multiples():
    environment = opened()
    assert environment.get("2 oak log") == "Got 2 oak log."
    assert environment.craft("4 oak plank", "2 oak log") == "Crafted 4 oak plank."
    assert environment.inventory() == "Inventory: 4 oak plank."
    done = environment.craft("1 Oak Table", " 3 oak plank ")
    assert done.reward == 1.0
    assert environment.inventory() == "Inventory: 1 oak plank, 1 oak table."


async def test_noisy_expert_loses_time_and_sometimes_the_target():
    noisy = type("Noisy", (Textcraft,), {"name": "textcraft", "expert_noise": 0.5, "max_turns": 8})
    async with EnvClient.local(noisy) as client:
        sessions = [await client.open("textcraft", split="train-2", index=n) for n in range(24)]
        assert {(await play(session)).reward for session in sessions} == {0.0, 1.0}


async def test_expert_continues_from_the_existing_inventory(client):
    session = await client.open("textcraft", sample=TABLE)
    await session.step(Message.assistant(None, ToolCall.of("get", items="1 oak log")))
    await session.step(Message.assistant(None, ToolCall.of("craft", item="2 oak plank", using="1 oak log")))
    transcript, reward, _ = await play(session)
    assert reward == 1.0
    assert "Got 1 oak log." in transcript


async def test_fork_has_its_own_inventory(client):
    session = await client.open("textcraft", sample=TABLE)
    await session.step(await session.expert())
    (fork,) = await session.fork(1)
    assert (await play(session))[1] == (await play(fork))[1] == 1.0


# Minecraft's format


def write(folder, name, data):
    (folder / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path,
        "ladder",
        {
            "type": "minecraft:crafting_shaped",
            "pattern": ["# #", "###", "# #"],
            "key": {"#": {"item": "minecraft:stick"}},
            "result": {"item": "minecraft:ladder", "count": 3},
        },
    )
    write(
        tmp_path,
        "stick",
        {
            "type": "crafting_shaped",
            "pattern": ["#", "#"],
            "key": {"#": [{"tag": "minecraft:planks"}, {"item": "minecraft:bamboo"}]},
            "result": {"id": "minecraft:stick", "count": 4},
        },
    )
    write(tmp_path, "glass", {"type": "minecraft:smelting", "ingredient": {}, "result": "minecraft:glass"})
    for one, other in (("iron_block", "iron_ingot"), ("iron_ingot", "iron_block")):
        data = {"type": "crafting_shapeless", "ingredients": [f"minecraft:{other}"], "result": {"item": one}}
        write(tmp_path, one, data)
    return tmp_path


async def test_folder_of_minecraft_recipes_is_played(folder, monkeypatch):
    monkeypatch.setenv("TEXTCRAFT_RECIPES", str(folder))
    official = load_target(str(shutil.copytree(FOLDER, folder / "textcraft")))
    found = {
        problem["target"]: (split, index)
        for split in official.splits
        for index, problem in enumerate(official.samples(split))
    }
    assert set(found) == {"ladder", "stick"}
    async with EnvClient.local(official) as client:
        for split, index in found.values():
            assert (await play(await client.open("textcraft", split=split, index=index)))[1] == 1.0
        split, index = found["ladder"]
        session = await client.open("textcraft", split=split, index=index)
        assert "craft 3 ladder using 7 stick" in session.messages[0].content


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"type": 3}', '{"type": "crafting_shapeless", "ingredients": []}', "[" * 100_000],
)
def test_invalid_recipe_file_is_named(folder, text):
    write(folder, "broken", text)
    with pytest.raises(DefinitionError, match=r"broken\.json is no recipe"):
        recipes.read_folder(folder)


def test_folder_without_recipes_reports_what_is_missing(tmp_path):
    with pytest.raises(DefinitionError, match="TEXTCRAFT_RECIPES names a folder"):
        recipes.read_folder(tmp_path)


# A hostile policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "oak log",
        "0 oak log",
        "-1 oak log",
        "1e9 oak log",
        "9" * 10_000 + " oak log",
        "\u0661 oak log",
        "1\u00a0oak log",
        "1 oak log, 1 oak log",
        "1.5 oak log",
        "1 __class__",
        "1 oak log\n1 oak table",
        "," * 100_000,
        "1 oak log " * 100_000,
    ],
)
def test_invalid_count_or_thing_is_rejected_and_changes_nothing(text):
    environment = opened()
    for call in (
        lambda: environment.get(text),
        lambda: environment.craft(text, "3 oak plank"),
        lambda: environment.craft("1 oak table", text),
    ):
        with pytest.raises(ToolError) as refused:
            call()
        assert len(str(refused.value)) < 400
    assert environment.inventory() == "Inventory: nothing."


def test_target_and_crafted_things_cannot_be_taken():
    environment = opened()
    for thing in ("1 oak table", "1 oak plank", "1 Oak  Table", "1 diamond"):
        with pytest.raises(ToolError):
            environment.get(thing)
    assert environment.inventory() == "Inventory: nothing."


def test_nothing_is_crafted_from_less_than_its_recipe():
    environment = opened()
    environment.get("1 oak log")
    for item, using in (
        ("1 oak table", "1 oak log"),
        ("1 oak plank", "1 oak log"),
        ("4 oak plank", "1 oak log"),
        ("4 oak plank", "2 oak log"),
        ("2 oak plank, 1 oak table", "1 oak log"),
        ("1 oak table", "3 oak plank"),
    ):
        with pytest.raises(ToolError):
            environment.craft(item, using)
    assert environment.inventory() == "Inventory: 1 oak log."


def test_inventory_is_bounded():
    environment = opened()
    environment.get("1000000 oak log")
    with pytest.raises(ToolError, match="at most"):
        environment.get("1 oak log")
