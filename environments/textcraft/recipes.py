"""Recipes: generated recipes of every level, and recipes in a folder of Minecraft-format JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_env.dataset import stable_seed
from agentrl_env.errors import DefinitionError

NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all problems that belong to a split, by a hash of target and recipes."""
MATERIALS = (
    "oak", "birch", "spruce", "acacia", "bamboo", "clay", "stone", "granite", "basalt", "quartz",
    "copper", "iron", "silver", "golden", "bone", "leather", "woolen", "paper", "glass", "amber",
)  # fmt: skip
RAW = ("log", "ore", "dust", "shard", "fibre", "lump", "scrap", "seed")
MADE = (
    "plank", "rod", "plate", "string", "block", "brick", "gear", "tube", "cloth", "nail",
    "panel", "wheel", "frame", "chest", "lamp", "bell", "shield", "ladder", "table", "clock",
)  # fmt: skip
MAX_TURNS = 40
"""Maximum number of turns that a generated problem needs."""
MAX_COUNT = 1_000_000
"""Maximum number of pieces of an item in an inventory."""


@dataclass(frozen=True)
class Recipe:
    """One way to craft an item."""

    item: str
    count: int
    ingredients: tuple[tuple[str, int], ...]

    def command(self) -> str:
        """Return the command that crafts the item once."""
        return f"craft {self.count} {self.item} using {amounts(dict(self.ingredients))}"


@dataclass(frozen=True)
class Level:
    """Problems of a level: longest chain of recipes, most ingredients of a recipe, unneeded recipes."""

    depth: int
    ingredients: int
    beside: int


LEVELS = {
    1: Level(depth=1, ingredients=2, beside=2),
    2: Level(depth=2, ingredients=2, beside=4),
    3: Level(depth=4, ingredients=3, beside=6),
}


def amounts(items: Mapping[str, int]) -> str:
    """Write items with their counts."""
    return ", ".join(f"{count} {item}" for item, count in items.items())


class Problems:
    """The generated problems of a split and a level. Each is generated when it is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = random.Random(stable_seed("textcraft", self.split, self.level, index))
        while True:
            problem = _draw(LEVELS[self.level], rng)
            turns = sum(1 + len(parts) for _, _, parts in needed(problem))
            if turns <= MAX_TURNS and tenth(problem) in SHARES[self.split]:
                return {"level": self.level, **problem}


def needed(problem: Mapping[str, Any]) -> list[list[Any]]:
    """Return the recipes on the way to the target. The others are not needed."""
    return sorted(recipe for recipe in problem["recipes"] if recipe[0] not in problem["idle"])


def tenth(problem: Mapping[str, Any]) -> int:
    """Return the tenth of all problems that contains a problem (see SHARES)."""
    return stable_seed("textcraft", problem["target"], needed(problem)) % 10


def _draw(level: Level, rng: random.Random) -> dict[str, Any]:
    """Draw a target with a tree of recipes of the level's depth, shuffled among unneeded recipes."""
    names = [f"{material} {thing}" for material in MATERIALS for thing in MADE]
    basics = [f"{material} {thing}" for material in MATERIALS for thing in RAW]
    rng.shuffle(names)
    rng.shuffle(basics)
    recipes: list[list[Any]] = []
    idle: list[str] = []

    def craft(item: str, depth: int) -> None:
        parts = []
        for number in range(rng.randint(2 if item == target else 1, level.ingredients)):
            deeper = depth > 1 and (number == 0 or rng.random() < 0.4)
            parts.append(names.pop() if deeper else basics.pop())
            if deeper:
                craft(parts[-1], depth - 1)
        recipes.append([item, rng.choice((1, 1, 2, 4)), [[part, rng.randint(1, 3)] for part in parts]])

    target = names.pop()
    craft(target, level.depth)
    shared = [part for _, _, parts in recipes for part, _ in parts]
    for _ in range(level.beside):
        idle.append(names.pop())
        parts = rng.sample([*shared, *basics[:4]], rng.randint(1, 2))
        recipes.append([idle[-1], 1, [[part, rng.randint(1, 3)] for part in dict.fromkeys(parts)]])
    rng.shuffle(recipes)
    return {"target": target, "recipes": recipes, "idle": sorted(idle)}


def read_folder(folder: str | Path) -> list[Recipe]:
    """Return the crafting recipes of a folder in Minecraft's JSON format. Smelting recipes are omitted.

    If an ingredient has alternatives, the first is used. A tag such as ``minecraft:planks`` counts as an
    item. Raises DefinitionError.
    """
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            recipe = _read(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise DefinitionError(f"{path} is no recipe in Minecraft's format: {error!r}") from error
        found += [recipe] if recipe else []
    if not found:
        raise DefinitionError(f"{folder} has no crafting recipes; TEXTCRAFT_RECIPES names a folder of *.json")
    return found


def _read(data: dict[str, Any]) -> Recipe | None:
    kind = data["type"].removeprefix("minecraft:")
    if kind == "crafting_shaped":
        parts = [data["key"][sign] for row in data["pattern"] for sign in row if sign != " "]
    elif kind == "crafting_shapeless":
        parts = data["ingredients"]
    else:
        return None
    counts: dict[str, int] = {}
    for part in parts:
        name = _name(part)
        counts[name] = counts.get(name, 0) + 1
    result = data["result"]
    count = result.get("count", 1) if isinstance(result, dict) else 1
    if not counts or not isinstance(count, int) or not 1 <= count <= 64:
        raise ValueError("a recipe has ingredients, and makes 1 to 64 pieces")
    return Recipe(_name(result), count, tuple(counts.items()))


def _name(part: Any) -> str:
    if isinstance(part, list):
        part = part[0]
    if isinstance(part, dict):
        part = part.get("item") or part.get("id") or part["tag"]
    return part.removeprefix("#").removeprefix("minecraft:").replace("_", " ").lower()


def way(recipes: Mapping[str, Recipe], target: str) -> list[str] | None:
    """Return the items to craft for a target, ingredients first, or None if recipes form a cycle."""
    order: list[str] = []
    state: dict[str, bool] = {}
    todo = [target]
    while todo:
        item = todo[-1]
        parts = [part for part, _ in recipes[item].ingredients if part in recipes]
        if item not in state:
            state[item] = False
            if any(state.get(part) is False for part in parts):
                return None
            todo += [part for part in parts if part not in state]
            continue
        todo.pop()
        if not state[item]:
            state[item] = True
            order.append(item)
    return order


def split_official(recipes: list[Recipe]) -> dict[str, list[dict[str, Any]]]:
    """Return the problems of a folder's recipes by split: every item with recipes that form no cycle."""
    by_item: dict[str, Recipe] = {}
    for recipe in recipes:
        by_item.setdefault(recipe.item, recipe)
    problems: dict[str, list[dict[str, Any]]] = {split: [] for split in NUM_SAMPLES}
    for item in sorted(by_item):
        order = way(by_item, item)
        if order is None:
            continue
        used = [by_item[one] for one in order]
        beside = [one for one in sorted(by_item) if one not in order]
        drawn = random.Random(stable_seed("textcraft", item)).sample(beside, min(6, len(beside)))
        rows = [[one.item, one.count, [list(part) for part in one.ingredients]] for one in used]
        rows += [
            [one, by_item[one].count, [list(part) for part in by_item[one].ingredients]] for one in drawn
        ]
        random.Random(stable_seed("textcraft", "order", item)).shuffle(rows)
        place = stable_seed("textcraft", item) % 10
        split = next(split for split, share in SHARES.items() if place in share)
        problems[split].append({"level": 1, "target": item, "recipes": rows, "idle": sorted(drawn)})
    return problems
