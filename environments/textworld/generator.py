"""Generates TextWorld games: rooms, things and a quest of a given length; runs in the engine."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from textworld import Game, GameOptions
from textworld.generator import QuestGenerationError, make_game
from textworld.generator.data import KnowledgeBase
from textworld.generator.game import GameProgression

SPLITS = ("train", "validation", "test")
ATTEMPTS = 60


class Level(NamedTuple):
    """Rooms, things beside the doors, and actions of the shortest way to win."""

    rooms: int
    things: int
    quest: int


LEVELS = {1: Level(2, 5, 4), 2: Level(5, 10, 6), 3: Level(9, 18, 9)}


@cache
def knowledge() -> KnowledgeBase:
    """Return TextWorld's rules and grammar, whose parsing takes longer than the making of a game."""
    return KnowledgeBase.load()


def make(split: str, level: int, number: int) -> Game:
    """Return the game of a number: the first that its seeds give whose quest has the level's length."""
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
        if len(GameProgression(game).winning_policy or ()) == quest:
            return game
    raise RuntimeError(f"no game in {ATTEMPTS} attempts")
