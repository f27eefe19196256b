"""TextCraft: craft an item from gathered things, by recipes that build on each other.

The commands are the same as in TextCraft (Prasad et al. 2023). Recipes are generated, or read from the folder
of Minecraft-format JSON in the variable ``TEXTCRAFT_RECIPES``.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from agentrl_env import Done, Environment, Message, ToolCall, ToolError, tool

from .recipes import (
    LEVELS,
    MAX_COUNT,
    NUM_SAMPLES,
    Problems,
    Recipe,
    amounts,
    read_folder,
    split_official,
    way,
)

OFFICIAL = os.environ.get("TEXTCRAFT_RECIPES")
"""Folder of recipes. Without it they are generated."""
AMOUNT = re.compile(r"([0-9]{1,7}) ([a-z][a-z0-9 ':/.-]{0,63})")
INSTRUCTIONS = (
    "Craft the target. get takes things that no recipe makes; craft needs the ingredients of a recipe, or a "
    "multiple of them, in the inventory."
)


@lru_cache
def _official():
    return split_official(read_folder(OFFICIAL))


class Textcraft(Environment):
    """Craft an item by recipes that build on each other, from things that can be gathered."""

    splits = tuple(
        f"{name}-{level}" if level > 1 else name
        for level in (LEVELS if not OFFICIAL else (1,))
        for name in NUM_SAMPLES
    )
    max_turns = 60
    expert_noise = 0.0
    """Probability that the expert errs: it takes a wrong thing, follows a random recipe, or lists its
    things."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        if OFFICIAL:
            return _official()[split]
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    def reset(self, sample, rng):
        data = sample.data
        self.target, self.held = data["target"], {}
        made = [
            Recipe(item, count, tuple((part, n) for part, n in parts))
            for item, count, parts in data["recipes"]
        ]
        self.recipes = {recipe.item: recipe for recipe in made}
        commands = "\n".join(recipe.command() for recipe in made)
        return f"{INSTRUCTIONS}\n\nCrafting commands:\n{commands}\n\nGoal: craft {self.target}."

    @tool
    def get(self, items: str):
        """Take things that have no recipe.

        Args:
            items: A count and a thing, such as "3 oak log".
        """
        (item, count), *more = self._parse(items).items()
        if more:
            raise ToolError('Get one kind of thing at a time, such as "3 oak log".')
        if item in self.recipes:
            raise ToolError(f"{item} cannot be taken; craft it.")
        if not any(item == part for recipe in self.recipes.values() for part, _ in recipe.ingredients):
            raise ToolError(f"There is no {item} here.")
        self._add(item, count)
        return f"Got {count} {item}."

    @tool
    def craft(self, item: str, using: str):
        """Craft a thing with its recipe, or with a multiple of all its numbers.

        Args:
            item: A count and a thing, such as "4 oak plank".
            using: All ingredients, such as "1 oak log, 2 iron nail".
        """
        (name, count), *more = self._parse(item).items()
        given = self._parse(using)
        recipe = self.recipes.get(name)
        if more or recipe is None:
            raise ToolError(f"There is no recipe for {item!r:.80}.")
        times = count // recipe.count
        if times * recipe.count != count or given != {part: n * times for part, n in recipe.ingredients}:
            raise ToolError(f"The recipe is: {recipe.command()}; or a multiple of all its numbers.")
        lacking = {part: n for part, n in given.items() if self.held.get(part, 0) < n}
        if lacking:
            raise ToolError(f"You need {amounts(lacking)}; you have {amounts(self.held) or 'nothing'}.")
        self._add(name, count)
        for part, n in given.items():
            self.held[part] -= n
        self.held = {part: n for part, n in self.held.items() if n}
        if name == self.target:
            return Done(f"Crafted {count} {name}.", reward=1.0)
        return f"Crafted {count} {name}."

    @tool
    def inventory(self):
        """List what you have."""
        return f"Inventory: {amounts(self.held) or 'nothing'}."

    def expert(self, rng):
        """Craft the first missing item on the way to the target, or take its parts."""
        if rng.random() < self.expert_noise:
            return Message.assistant(None, self._slip(rng))
        order, wanted, times = way(self.recipes, self.target), {self.target: 1}, {}
        for item in reversed(order):
            recipe = self.recipes[item]
            short = max(wanted.get(item, 0) - self.held.get(item, 0), 0)
            times[item] = -(-short // recipe.count)
            for part, count in recipe.ingredients:
                wanted[part] = wanted.get(part, 0) + count * times[item]
        item = next(one for one in order if times[one])
        recipe = self.recipes[item]
        parts = {part: count * times[item] for part, count in recipe.ingredients}
        for part, count in parts.items():
            if part not in self.recipes and self.held.get(part, 0) < count:
                call = ToolCall.of("get", items=f"{count - self.held.get(part, 0)} {part}")
                return Message.assistant(None, call)
        made = f"{recipe.count * times[item]} {item}"
        return Message.assistant(None, ToolCall.of("craft", item=made, using=amounts(parts)))

    def _slip(self, rng):
        recipe, kind = self.recipes[str(rng.choice(list(self.recipes)))], rng.random()
        if kind < 0.2:
            return ToolCall.of("inventory")
        if kind < 0.6:
            part, _ = recipe.ingredients[int(rng.integers(len(recipe.ingredients)))]
            return ToolCall.of("get", items=f"{rng.integers(1, 5)} {part}")
        made = f"{recipe.count} {recipe.item}"
        return ToolCall.of("craft", item=made, using=amounts(dict(recipe.ingredients)))

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def _add(self, item, count):
        if self.held.get(item, 0) + count > MAX_COUNT:
            raise ToolError(f"You can hold {MAX_COUNT:,} of a thing at most.")
        self.held[item] = self.held.get(item, 0) + count

    def _parse(self, text):
        """Return the counts of the things in a text. Raises ToolError."""
        found = {}
        for one in text[:2000].split(","):
            match = AMOUNT.fullmatch(one.strip().lower())
            if match is None or int(match[1]) == 0 or match[2] in found:
                raise ToolError(f'{one.strip()!r:.80} is not a count and a thing, such as "3 oak log".')
            found[match[2]] = int(match[1])
        return found
