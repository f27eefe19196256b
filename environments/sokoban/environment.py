"""Sokoban: push every box onto a target. Boxes can be pushed, one at a time, and never pulled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl_env import Done, Environment, Message, Reply, ToolCall, tool

from .board import parse
from .generator import LEVELS, NUM_SAMPLES, Boards
from .solver import solve

MAX_MOVES = 20
"""Moves of one call."""
LEGEND = (
    "Push every box onto a target. Moving into a box pushes it one cell, if a free cell is behind it; "
    "boxes cannot be pulled.\n"
    "# wall, _ floor, O target, * box, V box on a target, @ you, + you on a target"
)


class Sokoban(Environment):
    """Push every box of a small warehouse onto a target."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 30

    @classmethod
    def samples(cls, split):
        """Return the boards of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Boards(name, int(level or 1))

    def reset(self, sample, rng):
        self.board, self.start = parse(sample.data["board"])
        self.position = self.start
        return f"{LEGEND}\n\n{self._view()}"

    @tool
    def move(
        self,
        directions: Annotated[
            list[Literal["up", "down", "left", "right"]], Field(min_length=1, max_length=MAX_MOVES)
        ],
    ):
        """Move one cell in each of the directions, in order, up to one that is blocked.

        Args:
            directions: Directions such as ["up", "up", "left"].
        """
        placed = self._placed()
        for number, direction in enumerate(directions, 1):
            position = self.board.move(self.position, direction)
            if position is None:
                note = f"Move {number}, {direction}, is blocked.\n{self._view()}"
                return Reply(note, metrics={"boxes_placed": self._placed() - placed})
            self.position = position
            if self.board.solved(position):
                metrics = {"boxes_placed": self._placed() - placed}
                return Done(f"Solved.\n{self._view()}", reward=1.0, metrics=metrics)
        return Reply(self._view(), metrics={"boxes_placed": self._placed() - placed})

    @tool
    def restart(self):
        """Put everything back to where it was at first, when a box cannot be moved to a target any more."""
        placed, self.position = self._placed(), self.start
        return Reply(self._view(), metrics={"boxes_placed": self._placed() - placed})

    def score(self):
        return {"boxes_on_target": self._placed() / len(self.board.targets)}

    def expert(self, rng):
        """Walk to the next box of a plan with the fewest pushes, and push it. Restart if there is no plan."""
        plan = solve(self.board, self.position)
        if plan is None:
            return Message.assistant(None, ToolCall.of("restart"))
        moves, position = [], self.position
        for direction in plan.moves[:MAX_MOVES]:
            after = self.board.move(position, direction)
            turned = moves and direction != moves[-1]
            if turned and position.boxes != self.position.boxes:
                break
            moves.append(direction)
            position = after
        return Message.assistant(None, ToolCall.of("move", directions=moves))

    def snapshot(self):
        return {"board": self.board.text(self.start), "position": self.board.text(self.position)}

    def restore(self, state):
        self.board, self.start = parse(state["board"])
        _, self.position = parse(state["position"])

    def _placed(self):
        return float(len(self.position.boxes & self.board.targets))

    def _view(self):
        boxes = len(self.board.targets)
        return f"{self.board.text(self.position)}\nBoxes on targets: {int(self._placed())} of {boxes}"
