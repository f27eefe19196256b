"""The rules of Sokoban, and boards as text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

DIRECTIONS = ("up", "down", "left", "right")
WALL, FLOOR, TARGET, BOX, PLACED, PLAYER, PLAYER_ON_TARGET = "#_O*V@+"


@dataclass(frozen=True)
class Position:
    """A player and boxes. Cells are numbered row by row."""

    player: int
    boxes: frozenset[int]


@dataclass(frozen=True)
class Board:
    """The fixed parts: walls and targets."""

    width: int
    walls: frozenset[int]
    targets: frozenset[int]
    size: int

    @cached_property
    def steps(self) -> dict[str, int]:
        """Difference of the numbers of a cell and its neighbour, by direction."""
        return dict(zip(DIRECTIONS, (-self.width, self.width, -1, 1), strict=True))

    def reach(self, player: int, boxes: Collection[int]) -> set[int]:
        """Return the cells that the player can walk to."""
        found, todo = {player}, [player]
        while todo:
            cell = todo.pop()
            for step in self.steps.values():
                other = cell + step
                if other not in found and other not in self.walls and other not in boxes:
                    found.add(other)
                    todo.append(other)
        return found

    def move(self, position: Position, direction: str) -> Position | None:
        """Return the position after a move, or None if a wall or an immovable box is in the way."""
        step = self.steps[direction]
        ahead, beyond = position.player + step, position.player + 2 * step
        if ahead in self.walls:
            return None
        if ahead not in position.boxes:
            return Position(ahead, position.boxes)
        if beyond in self.walls or beyond in position.boxes:
            return None
        return Position(ahead, position.boxes - {ahead} | {beyond})

    def solved(self, position: Position) -> bool:
        """Return True if every target has a box."""
        return position.boxes == self.targets

    def text(self, position: Position) -> str:
        """Draw a position, with one character for each cell."""
        cells = [FLOOR] * self.size
        for cell in range(self.size):
            if cell in self.walls:
                cells[cell] = WALL
            elif cell in position.boxes:
                cells[cell] = PLACED if cell in self.targets else BOX
            elif cell == position.player:
                cells[cell] = PLAYER_ON_TARGET if cell in self.targets else PLAYER
            elif cell in self.targets:
                cells[cell] = TARGET
        return "\n".join("".join(cells[i : i + self.width]) for i in range(0, self.size, self.width))


def parse(text: str) -> tuple[Board, Position]:
    """Return the board and the position of a drawing. Raises ValueError."""
    rows = text.split("\n")
    cells = "".join(rows)
    where = {sign: frozenset(i for i, cell in enumerate(cells) if cell == sign) for sign in set(cells)}

    def of(*signs: str) -> frozenset[int]:
        return frozenset().union(*(where.get(sign, frozenset()) for sign in signs))

    walls, width = of(WALL), len(rows[0])
    rim = {i for i in range(len(cells)) if i % width in (0, width - 1) or not width <= i < len(cells) - width}
    targets, boxes, players = (
        of(TARGET, PLACED, PLAYER_ON_TARGET),
        of(BOX, PLACED),
        of(PLAYER, PLAYER_ON_TARGET),
    )
    if len({len(row) for row in rows}) > 1 or set(where) - set("#_O*V@+") or not rim <= walls:
        raise ValueError("a board is rows of equal length of the characters #_O*V@+, with a wall around it")
    if len(players) != 1 or not targets or len(boxes) != len(targets):
        raise ValueError("a board has one player, and as many boxes as targets")
    return Board(width, walls, targets, len(cells)), Position(*players, boxes)
