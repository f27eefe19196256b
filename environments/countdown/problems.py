"""Numbers and targets of every level, and the search for an expression."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

from agentrl_env.dataset import stable_seed

NUM_SAMPLES = {"train": 10_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all problems that belong to a split, by a hash of the sorted numbers and the target."""


@dataclass(frozen=True)
class Level:
    """The number of numbers of a problem, and the highest number and target."""

    numbers: int
    highest: int
    target: int


LEVELS = {1: Level(3, 25, 100), 2: Level(4, 50, 200), 3: Level(5, 100, 999)}


class Problems:
    """The problems of a split and a level, drawn when the first one is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, object]:
        return _problems(self.split, self.level)[index]


@cache
def _problems(split: str, name: int) -> list[dict[str, object]]:
    rng, level = random.Random(stable_seed("countdown", split, name)), LEVELS[name]
    drawn: dict[tuple[int, ...], dict[str, object]] = {}
    while len(drawn) < NUM_SAMPLES[split]:
        numbers = rng.sample(range(1, level.highest + 1), level.numbers)
        target = _combine(numbers, rng)
        fits = 10 <= target <= level.target and target not in numbers
        fits = fits and tenth(numbers, target) in SHARES[split]
        # If sums were as frequent as in random expressions, the sum of all numbers would often be right.
        if fits and is_sum(numbers, target) == (len(drawn) % 3 == 0):
            problem = {"level": name, "numbers": numbers, "target": target}
            drawn.setdefault((*sorted(numbers), target), problem)
    return list(drawn.values())


def is_sum(numbers: list[int], target: int) -> bool:
    """Return True if additions and subtractions alone reach the target."""
    sums = {0}
    for number in numbers:
        sums = {total + part for total in sums for part in (-number, 0, number)}
    return target in sums


def tenth(numbers: list[int], target: int) -> int:
    """Return the tenth of all problems that contains a problem (see SHARES)."""
    return stable_seed("countdown", sorted(numbers), target) % 10


def _results(one: int, other: int) -> Iterator[tuple[str, int]]:
    """Return the operations on two numbers, the larger first, with whole and positive results."""
    yield "+", one + other
    yield "*", one * other
    if one > other:
        yield "-", one - other
    if one % other == 0:
        yield "/", one // other


def _combine(numbers: list[int], rng: random.Random) -> int:
    """Combine random pairs of the numbers until one number is left, and return it."""
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        one, other = sorted((values.pop(), values.pop()), reverse=True)
        values.append(rng.choice(list(_results(one, other)))[1])
    return values[0]


@lru_cache(4096)
def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """Return an expression with the value of the target, or None if no whole positive steps reach it."""
    seen = set()

    def search(terms: list[tuple[int, str]]) -> str | None:
        key = tuple(sorted(value for value, _ in terms))
        if key in seen:
            return None
        seen.add(key)
        for value, text in terms:
            if value == target:
                return text
        for i, j in combinations(range(len(terms)), 2):
            (one, left), (other, right) = sorted((terms[i], terms[j]), reverse=True)
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign, value in _results(one, other):
                found = search([*rest, (value, f"({left} {sign} {right})")])
                if found is not None:
                    return found
        return None

    found = search([(number, str(number)) for number in numbers])
    return found[1:-1] if found is not None and found.startswith("(") else found
