"""The boards of every level, generated in reverse: boxes are pulled away from their targets."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentrl_env.dataset import stable_seed

from .board import Board, Position
from .solver import solve

NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all boards that belong to a split, by a hash that turned and mirrored boards share."""


@dataclass(frozen=True)
class Level:
    """Sizes of the boards: cells of a side without the outer wall, inner walls, boxes, and their pulls."""

    side: int
    walls: int
    boxes: int
    pulls: int
    least: int
    """Minimum number of pushes of the shortest solution."""


LEVELS = {
    1: Level(side=6, walls=8, boxes=1, pulls=6, least=2),
    2: Level(side=6, walls=8, boxes=2, pulls=20, least=5),
    3: Level(side=7, walls=11, boxes=3, pulls=40, least=9),
}


class Boards:
    """The boards of a split and a level. Each is generated when it is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = random.Random(stable_seed("sokoban", self.split, self.level, index))
        return {"level": self.level, "board": self._draw(rng)}

    def _draw(self, rng: random.Random) -> str:
        level = LEVELS[self.level]
        while True:
            made = _play_backwards(level, rng)
            if made is None:
                continue
            board, position = made
            text = board.text(position)
            if tenth(text) not in SHARES[self.split]:
                continue
            plan = solve(board, position)
            if plan is not None and plan.pushes >= level.least:
                return text


def _play_backwards(level: Level, rng: random.Random) -> tuple[Board, Position] | None:
    """Pull boxes away from the targets of a random room. Return None if that gives no good board."""
    width = level.side + 2
    inner = [row * width + column for row in range(1, width - 1) for column in range(1, width - 1)]
    walls = set(range(width * width)) - set(inner) | set(rng.sample(inner, level.walls))
    free = [cell for cell in inner if cell not in walls]
    targets = frozenset(rng.sample(free, level.boxes))
    board = Board(width, frozenset(walls), targets, width * width)
    player, boxes = rng.choice([cell for cell in free if cell not in targets]), set(targets)
    seen = [frozenset(boxes)]
    for _ in range(rng.randint(level.pulls // 2, level.pulls)):
        reached = board.reach(player, boxes)
        pulls = [
            (box, step)
            for box in sorted(boxes)
            for step in board.steps.values()
            if box + step in reached
            and box + 2 * step in reached
            and boxes - {box} | {box + step} not in seen
        ]
        if not pulls:
            return None
        box, step = rng.choice(pulls)
        boxes = boxes - {box} | {box + step}
        player = box + 2 * step
        seen.append(frozenset(boxes))
    if boxes & targets:
        return None
    open_cells = board.reach(player, ())
    if not open_cells >= boxes | targets:
        return None
    player = rng.choice(sorted(board.reach(player, boxes)))
    shut = frozenset(range(width * width)) - open_cells
    return Board(width, shut, targets, width * width), Position(player, frozenset(boxes))


def alike(text: str) -> str:
    """Return the same text for a board and its turned and mirrored versions."""
    rows = text.split("\n")
    forms = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*reversed(rows), strict=True)]
        forms += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return min(forms)


def tenth(text: str) -> int:
    """Return the tenth of all boards that contains a board (see SHARES)."""
    return stable_seed("sokoban", alike(text)) % 10
