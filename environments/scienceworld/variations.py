"""ScienceWorld's tasks, the number of their variations, and the splits of the package."""

from __future__ import annotations

from functools import cache

VARIATIONS = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "freeze": 30,
    "grow-fruit": 126,
    "grow-plant": 126,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "melt": 30,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}
SHORT = (
    "chemistry-mix-paint-secondary-color",
    "find-animal",
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "identify-life-stages-2",
    "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived",
    "lifespan-shortest-lived",
    "measure-melting-point-known-substance",
    "power-component",
    "test-conductivity",
    "test-conductivity-of-unknown-substances",
    "use-thermometer",
)
"""Tasks with a gold path of about 25 actions or fewer with all simplifications."""
UNSOLVED = {("test-conductivity", variation) for variation in range(375, 450, 3)}
"""Training problems without a working gold path, because it confuses two metal pots."""
ON_SUBSTANCE = ("use thermometer on substance",)
ON_PLANES = ("move block to plane 1", "move block to plane 2")
MEASUREMENTS = {
    "inclined-plane-determine-angle": ON_PLANES,
    "inclined-plane-friction-named-surfaces": ON_PLANES,
    "inclined-plane-friction-unnamed-surfaces": ON_PLANES,
    "measure-melting-point-known-substance": ON_SUBSTANCE,
    "measure-melting-point-unknown-substance": ON_SUBSTANCE,
    "test-conductivity-of-unknown-substances": (
        "task object is at least partially connected to power source through wire",
    ),
    "use-thermometer": ("use instrument on object",),
}
"""Task with two answers -> the subgoals that measure. Without them, a guess would be right half of the time.

Two such tasks are omitted: some gold paths of test-conductivity do not measure, and mendelian-genetics has
long gold paths that were not all checked.
"""
ACTIONS = {1: 60, 2: 300, 3: 300}
"""Actions of an episode of each level."""
ELECTRICAL = ("power-component", "test-conductivity")
"""Prefixes of the tasks that need electrical actions, which "easy" removes."""
NAMES = {"train": "train", "validation": "dev", "test": "test"}


def variations(task: str, split: str) -> range:
    """Return the variations of a task in a split: half for train, and a quarter each for dev and test."""
    count = VARIATIONS[task]
    quarter = count // 4
    bounds = {"train": (0, 2 * quarter), "dev": (2 * quarter, 3 * quarter), "test": (3 * quarter, count)}
    return range(*bounds[NAMES[split]])


def simplifications(task: str, level: int) -> str:
    """Return the simplifications of a level: all possible ones below level 3, and none at level 3."""
    if level == 3:
        return ""
    return (
        "openContainers,openDoors,selfWateringFlowerPots,teleportAction"
        if task.startswith(ELECTRICAL)
        else "easy"
    )


@cache
def problems(split: str, level: int) -> list[dict]:
    """List the variations of a split's tasks, one of each task in turn."""
    tasks = SHORT if level == 1 else tuple(VARIATIONS)
    found = [
        (position, task, variation)
        for task in tasks
        for position, variation in enumerate(variations(task, split))
        if (task, variation) not in UNSOLVED
    ]
    return [
        {
            "task": task,
            "variation": variation,
            "simplifications": simplifications(task, level),
            "actions": ACTIONS[level],
            "measurements": list(MEASUREMENTS.get(task, ())),
        }
        for _, task, variation in sorted(found)
    ]
