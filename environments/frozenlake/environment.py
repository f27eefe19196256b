"""Frozen lake: walk to the goal over ice with holes. The engine is Gymnasium's FrozenLake.

Above level 1 the ice is slippery.
"""

from __future__ import annotations

import re
from typing import Literal

from agentrl_env import Done, Environment, Message, ToolCall, tool

from .lakes import LEVELS, MAX_MOVES, NUM_SAMPLES, Lakes, best_move, engine, values

ACTIONS = ("left", "down", "right", "up")
"""Directions in the order of Gymnasium's actions."""
PLAYER = "@"
LAKE = re.compile(r"S[FHG\n]*")
LEGEND = "Walk to the goal over the ice. Holes end the episode.\nF ice, H hole, S start (ice), G goal, @ you"
SLIPPERY = "The ice is slippery: one move in three goes as you want, the others to its left or right."


class Frozenlake(Environment):
    """Walk over a frozen lake to the goal, without falling into a hole."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = MAX_MOVES

    @classmethod
    def samples(cls, split):
        """Return the lakes of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Lakes(name, int(level or 1))

    def reset(self, sample, rng):
        lake, self.slippery = sample.data["lake"], bool(sample.data["slippery"])
        if not isinstance(lake, list) or not LAKE.fullmatch("\n".join(lake)) or len(set(map(len, lake))) > 1:
            raise ValueError("a lake is rows of equal length of the letters S, F, H and G, where S is first")
        self._open("\n".join(lake), 0, rng)
        self.moves = 0
        return "\n".join([LEGEND, *[SLIPPERY] * self.slippery, "", self._view()])

    @tool
    def move(self, direction: Literal["left", "down", "right", "up"]):
        """Walk one cell.

        Args:
            direction: Where to walk.
        """
        _, reward, ended, _, _ = self.game.step(ACTIONS.index(direction))
        self.moves += 1
        if ended:
            end = "You are at the goal." if reward else "You fell into a hole."
            return Done(f"{end}\n{self._view()}", reward=float(reward))
        return self._view()

    def score(self):
        """Return the success probability of the best policy on this lake from the start."""
        return {"best_chance": float(values(self.lake, self.slippery)[MAX_MOVES, 0])}

    def expert(self, rng):
        """Return the move with the best chance to reach the goal in the remaining moves."""
        action = best_move(self.lake, self.slippery, int(self.game.s), MAX_MOVES - self.moves)
        return Message.assistant(None, ToolCall.of("move", direction=ACTIONS[action]))

    def snapshot(self):
        return {
            "lake": self.lake,
            "slippery": self.slippery,
            "moves": self.moves,
            "state": int(self.game.s),
            "rng": self.game.np_random,
        }

    def restore(self, state):
        self.slippery, self.moves = state["slippery"], state["moves"]
        self._open(state["lake"], state["state"], state["rng"])

    def _open(self, lake, state, rng):
        self.lake, self.game = lake, engine(lake, self.slippery)
        self.game.reset(seed=0)
        self.game.s, self.game.np_random = state, rng

    def _view(self):
        width = self.lake.index("\n") + 1
        row, column = divmod(int(self.game.s), width - 1)
        place = row * width + column
        return self.lake[:place] + PLAYER + self.lake[place + 1 :]
