"""BabyAI: follow an instruction in a grid world of rooms, doors and things. The engine is minigrid."""

from __future__ import annotations

from typing import Annotated, Literal

from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError
from pydantic import Field

from agentrl_env import Done, Environment, Reply, ToolCall, tool

from .levels import LEVELS, NUM_SAMPLES, Problems, start
from .view import describe

MAX_STEPS = 10
"""Maximum number of cells in one call of ``forward``."""
RULES = (
    "Carry out the mission in a grid of rooms. You see a square of cells in front of you, up to 6 ahead and "
    "3 to each side. To pick up, open or unlock a thing, stand directly in front of it."
)


class Babyai(Environment):
    """Follow an instruction in a grid world of rooms, doors and things."""

    splits = tuple(f"{name}-{level}" if level > 1 else name for level in LEVELS for name in NUM_SAMPLES)
    max_turns = 128

    env = None

    @classmethod
    def samples(cls, split):
        """Return the problems of "train", "validation" or "test" (level 1), or of "train-2", "test-3" ..."""
        name, _, level = split.partition("-")
        return Problems(name, int(level or 1))

    def reset(self, sample, rng):
        self._begin(sample.data)
        return f"{RULES}\n\n{describe(self, self.seen, None)}"

    @tool
    def turn(self, direction: Literal["left", "right"]):
        """Turn by 90 degrees.

        Args:
            direction: Where to turn.
        """
        return self._act([direction])

    @tool
    def forward(self, steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1):
        """Walk straight ahead, up to the first cell that is not free.

        Args:
            steps: Number of cells.
        """
        return self._act(["forward"] * steps)

    @tool
    def pick_up(self):
        """Pick up the thing right in front of you; you can carry one."""
        return self._act(["pickup"])

    @tool
    def drop(self):
        """Put down what you carry onto the free cell in front of you."""
        return self._act(["drop"])

    @tool
    def toggle(self):
        """Open or close the door in front of you, unlock it with the right key, or open a box."""
        return self._act(["toggle"])

    def score(self):
        return {"steps": float(self.env.unwrapped.step_count)}

    def expert(self, rng):
        """Return the next action of BabyAI's own bot, which replans after any other action."""
        if self.bot is None:
            self.bot, self.advice, self.taken = BabyAIBot(self.env), None, None
        if self.advice is None:
            self.advice = self._advice()
        name = self.env.unwrapped.actions(self.advice).name
        if name in ("left", "right"):
            return ToolCall.of("turn", direction=name)
        if name == "forward":
            return ToolCall.of("forward", steps=1)
        return ToolCall.of({"pickup": "pick_up", "drop": "drop"}.get(name, "toggle"))

    def _advice(self):
        world = self.env.unwrapped
        try:
            return self.bot.replan(self.taken)
        except (DisappearedBoxError, AssertionError):
            # The bot has no plan after an opened box, or with a thing in hand that it did not pick up.
            self.bot = None
            free = world.grid.get(*world.front_pos) is None
            return world.actions.drop if world.carrying and free else world.actions.right

    def close(self):
        if self.env is not None:
            self.env.close()

    def snapshot(self):
        return {"data": self.data, "actions": self.actions}

    def restore(self, state):
        self._begin(state["data"])
        for name in state["actions"]:
            self._step(name)

    def _begin(self, data):
        level, seed = data["level"], data["seed"]
        if level not in {name for names in LEVELS.values() for name in names} or not isinstance(seed, int):
            raise ValueError("a problem has a level, one of those in levels.py, and a whole number as seed")
        self.data, self.actions, self.bot, self.advice, self.taken = dict(data), [], None, None, None
        self.env, self.seen = start(level, seed)

    def _act(self, names):
        """Take actions in order, up to an action without effect. The moves of one call are one turn."""
        for name in names:
            before = self.env.unwrapped.agent_pos
            reward, terminated, truncated = self._step(name)
            if terminated or truncated:
                success = float(terminated and reward > 0)
                end = "The mission is complete." if success else "The mission has failed."
                text = "The steps are used up." if truncated and not terminated else end
                return Done(text, reward=success, truncated=truncated and not terminated)
            if name == "forward" and tuple(before) == tuple(self.env.unwrapped.agent_pos):
                break
        return Reply(describe(self, self.seen, None))

    def _step(self, name):
        action = self.env.unwrapped.actions[name]
        if self.bot is not None and self.advice is None:  # the bot has to see the result of every action
            self.bot = None
        elif self.bot is not None:
            self.taken, self.advice = action, None
        self.seen, reward, terminated, truncated, _ = self.env.step(action)
        self.actions.append(name)
        return reward, terminated, truncated
