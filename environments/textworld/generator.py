"""Generates TextWorld games: rooms, things and a quest of a given length; runs in the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
from textworld import Game, GameOptions
from textworld.generator import QuestGenerationError, make_game
from textworld.generator.data import KnowledgeBase
from textworld.generator.game import GameProgression
from textworld.logic import Action

SPLITS = ("train", "validation", "test")
ATTEMPTS = 60


class Level(NamedTuple):
    """Number of rooms, of things other than doors, and of actions of the shortest solution."""

    rooms: int
    things: int
    quest: int


LEVELS = {1: Level(2, 5, 4), 2: Level(5, 10, 6), 3: Level(9, 18, 9)}


@cache
def knowledge() -> KnowledgeBase:
    """Return TextWorld's rules and grammar. Parsing them takes longer than generating a game."""
    return KnowledgeBase.load()


def make(split: str, level: int, number: int) -> Game:
    """Return the game with a number: the first from its seeds with a quest of the level's length.

    Each thing of the shortest solution has a distinct name, such as "safe" only in a game without an "old
    safe".
    """
    rooms, things, quest = LEVELS[level]
    seeds = np.random.default_rng([SPLITS.index(split), level, number])
    for _ in range(ATTEMPTS):
        options = GameOptions()
        options.kb = knowledge()
        options.nb_rooms, options.nb_objects, options.quest_length = rooms, things, quest
        options.grammar.only_last_action = True  # the objective tells the goal and not the way
        options.seeds = {name: int(seeds.integers(2**31)) for name in ("map", "objects", "quest", "grammar")}
        try:
            game = make_game(options)
        except QuestGenerationError:
            continue
        way = GameProgression(game).winning_policy or ()
        if len(way) == quest and not ambiguous(_named(game, way), game.objects_names):
            return game
    raise RuntimeError(f"no game in {ATTEMPTS} attempts")


def ambiguous(names: Iterable[str], others: Iterable[str]) -> bool:
    """Return True if another name has all words of a name, so that the parser asks which is meant."""
    pairs = [
        (frozenset(one.lower().split()), frozenset(other.lower().split()))
        for one, other in product(names, others)
    ]
    return any(one < other for one, other in pairs)


def _named(game: Game, way: Sequence[Action]) -> set[str]:
    """Return the names of the things in the actions of a solution."""
    ids = {variable.name for action in way for variable in action.variables}
    return {info.name for info in game.infos.values() if info.id in ids and info.name in game.objects_names}
