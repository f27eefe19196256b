"""The BabyAI levels of each difficulty, and the problems of every split."""

from __future__ import annotations

from functools import lru_cache

import gymnasium
import numpy as np
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.envs.babyai.core.verifier import PickupInstr
from minigrid.utils.baby_ai_bot import BabyAIBot

from agentrl_env.dataset import stable_seed

from .view import Sight

# minigrid prints a line for every draw that it rejects. Keep these lines out of the server's output.
roomgrid_level.print = lambda *text: None

LEVELS = {
    1: ("GoToLocal", "GoToLocalS8N7", "PickupDist", "PickupLoc"),
    2: ("OpenDoorColor", "OpenDoorLoc", "PutNextLocalS6N4", "PutNextLocal"),
    3: ("GoToObjMazeS4", "UnlockLocalDist", "KeyCorridorS3R2", "KeyCorridorS4R3"),
}
"""BabyAI's names of the levels: one room; doors and two things; several rooms and locked doors."""
MAX_STEPS = {1: 18, 2: 48, 3: 128}
"""Actions of an episode. BabyAI's bot needs at most 14, 32 and 104 in the first 200 test problems."""
LEAST_IN_VIEW = 4
"""Number of things in view at the start of a problem of level 1."""
NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(2), "validation": range(2, 4), "train": range(4, 10)}
"""Tenths of all problems that belong to a split, by a hash of the problem."""


class Problems:
    """The problems of a split and a difficulty. Each is generated when it is read."""

    def __init__(self, split: str, difficulty: int) -> None:
        self.split, self.difficulty = split, difficulty

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return dict(_problem(self.split, self.difficulty, index))


@lru_cache(maxsize=4_096)
def _problem(split: str, difficulty: int, index: int) -> dict[str, object]:
    """Draw the problem of an index."""
    names = LEVELS[difficulty]
    name, place, attempt = names[index % len(names)], index // len(names) % LEAST_IN_VIEW, 0
    env = make(name)
    while True:
        seed = stable_seed("babyai", split, difficulty, index, attempt) % 2**31
        seen, _ = env.reset(seed=seed)
        fits = difficulty > 1 or has_place(env, seen["image"], place)
        if fits and tenth(env) in SHARES[split] and (difficulty > 1 or can_be_won(env)):
            return {"level": name, "seed": seed}
        attempt += 1


def make(name: str) -> gymnasium.Env:
    """Return a BabyAI level by its name."""
    difficulty = next(number for number, names in LEVELS.items() if name in names)
    steps = MAX_STEPS[difficulty]
    return gymnasium.make(f"BabyAI-{name}-v0", disable_env_checker=True, max_steps=steps)


def has_place(env: gymnasium.Env, image: np.ndarray, place: int) -> bool:
    """Return True if several things are in view, and the wanted thing has this place among them.

    Places are counted from the nearest thing. At place 0 the wanted thing is not in view. No problem asks for
    the nearest thing, and all other places are equally frequent.
    """
    world, sight = env.unwrapped, Sight(image)
    listed = sight.places()
    wanted = [sight.place_of(*world.get_view_coords(*where)) for where in world.instrs.desc.obj_poss]
    places = sorted(listed.index(where) for where in wanted if where in listed)
    return len(listed) >= LEAST_IN_VIEW and places[:1] == ([place] if place else [])


def can_be_won(env: gymnasium.Env) -> bool:
    """Return True if BabyAI's bot completes the mission in strict mode. It fails if things block the way."""
    be_strict(env)
    bot, action, done, reward = BabyAIBot(env), None, False, 0.0
    while not done:
        action = bot.replan(action)
        _, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
    return reward > 0


def be_strict(env: gymnasium.Env) -> None:
    """Let picking up a wrong thing fail the mission, as in BabyAI's strict mode.

    Otherwise, picking up one thing after the other would find the right thing.
    """
    if isinstance(env.unwrapped.instrs, PickupInstr):
        env.unwrapped.instrs.strict = True


def start(name: str, seed: int) -> tuple[gymnasium.Env, dict]:
    """Return a level with a problem, and its first observation."""
    env = make(name)
    seen, _ = env.reset(seed=seed)
    if name in LEVELS[1]:
        be_strict(env)
    return env, seen


def tenth(env: gymnasium.Env) -> int:
    """Return the tenth of all problems that contains the current problem (see SHARES)."""
    world = env.unwrapped
    start = [world.mission, [int(x) for x in world.agent_pos], int(world.agent_dir)]
    return stable_seed("babyai", *start, world.grid.encode().tobytes().hex()) % 10
