"""Random lakes of every level, and the success probability of the best policy on a lake."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from agentrl_env.dataset import stable_seed

MAX_MOVES = 60
NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all lakes that belong to a split, by a hash that a lake and its transpose share."""


@dataclass(frozen=True)
class Level:
    """Lakes of a level."""

    side: int
    frozen: float
    """Probability that a cell is ice instead of a hole."""
    slippery: bool
    least: float
    """Minimum success probability of the best policy."""


LEVELS = {
    1: Level(side=6, frozen=0.7, slippery=False, least=1.0),
    2: Level(side=7, frozen=0.8, slippery=True, least=0.4),
    3: Level(side=8, frozen=0.82, slippery=True, least=0.3),
}


class Lakes:
    """The lakes of a split and a level. Each is generated when it is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        level, attempt = LEVELS[self.level], 0
        while True:
            seed = stable_seed("frozenlake", self.split, self.level, index, attempt)
            lake = generate_random_map(level.side, level.frozen, seed % 2**32)
            if tenth(lake) in SHARES[self.split]:
                best = values("\n".join(lake), level.slippery)[MAX_MOVES, 0]
                if best >= level.least:
                    return {"level": self.level, "lake": lake, "slippery": level.slippery}
            attempt += 1


def alike(lake: list[str]) -> str:
    """Return the same text for a lake and its transpose."""
    return min("\n".join(lake), "\n".join(map("".join, zip(*lake, strict=True))))


def tenth(lake: list[str]) -> int:
    """Return the tenth of all lakes that contains a lake (see SHARES)."""
    return stable_seed("frozenlake", alike(lake)) % 10


def engine(lake: str, slippery: bool) -> FrozenLakeEnv:
    """Return Gymnasium's engine of a lake."""
    return FrozenLakeEnv(desc=lake.split("\n"), is_slippery=slippery)


@lru_cache(512)
def _choices(lake: str, slippery: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of the next state and the expected rewards, by state and action."""
    chances = engine(lake, slippery).P
    follows, rewards = np.zeros((len(chances), 4, len(chances))), np.zeros((len(chances), 4))
    for state, actions in chances.items():
        for action, outcomes in actions.items():
            for probability, other, reward, ended in outcomes:
                rewards[state, action] += probability * reward
                follows[state, action, other] += 0.0 if ended else probability
    return follows, rewards


@lru_cache(512)
def values(lake: str, slippery: bool) -> np.ndarray:
    """Return the best policy's success probability by remaining moves and state (value iteration)."""
    follows, rewards = _choices(lake, slippery)
    found = np.zeros((MAX_MOVES + 1, len(rewards)))
    for left in range(1, MAX_MOVES + 1):
        found[left] = (rewards + follows @ found[left - 1]).max(axis=1)
    return found


def best_move(lake: str, slippery: bool, state: int, left: int) -> int:
    """Return the action with the best chance in the remaining moves, and of equal actions the fastest."""
    follows, rewards = _choices(lake, slippery)
    chances = rewards[state] + values(lake, slippery)[: max(left, 1)] @ follows[state].T
    best = chances[-1] >= chances[-1].max() - 1e-9
    return int(np.where(best, chances.sum(axis=0), -1.0).argmax())
