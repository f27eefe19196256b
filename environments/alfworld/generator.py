"""Generates ALFWorld games from the package's own domain, grammar, goals and floor plans; runs in the engine.

A game is a PDDL problem. The floor plan determines which receptacles and things a room can have, and the seed
determines their number and positions. Floor plans are divided among the splits.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

import alfworld.gen
import alfworld.gen.constants as constants
import alfworld.gen.goal_library as goals
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

LAYOUTS = Path(alfworld.gen.__file__).with_name("layouts")
PLACE, LOOK, TWO = "pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"
APPLIANCE = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
"""Task type -> required state of its thing, and the receptacle that produces it."""
LAMPS = ("DeskLamp", "FloorLamp")
MOUNTED = {"Sink", "Bathtub", "PaintingHanger", "TowelHolder", "HandTowelHolder", "ToiletPaperHanger"}
COUNT = {"Cabinet": 6, "Drawer": 5, "CounterTop": 2, "StoveBurner": 4, "Shelf": 3, "SideTable": 2}
"""Maximum number of receptacles of a type in a room. Other types occur once."""
STATES = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}


class Level(NamedTuple):
    """Parameters of the difficulty of games."""

    tasks: tuple[str, ...]
    receptacles: int
    extras: int
    closed: bool
    """Whether the wanted thing can be in a closed receptacle."""


LEVELS = {
    1: Level((PLACE, LOOK), 5, 1, False),
    2: Level((PLACE, LOOK, *APPLIANCE), 9, 1, True),
    3: Level((PLACE, LOOK, *APPLIANCE, TWO), 20, 1, True),
}
SPLITS = {
    "train": [n for n in constants.TRAIN_SCENE_NUMBERS if n % 100 > 9],
    "validation": [n for n in constants.TRAIN_SCENE_NUMBERS if n % 100 <= 9],
    "test": constants.TEST_SCENE_NUMBERS,
}
"""Split -> floor plans. Test has the floor plans that ALFWorld holds out."""


@cache
def _inventory(scene: int) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the types in a floor plan, and the types of the receptacles that open."""
    plan = LAYOUTS / f"FloorPlan{scene}"
    have = set(json.loads(Path(f"{plan}-objects.json").read_text()))
    opens = json.loads(Path(f"{plan}-openable.json").read_text())
    if "Sink" in have:
        have.add("SinkBasin")
    return frozenset(have), tuple(name.split("|")[0] for name in opens)


def make_game(split: str, level: int, seed: int) -> dict:
    """Return a game in the format of ALFWorld's ``game.tw-pddl``, and ``traj``, its ``traj_data.json``."""
    rng = random.Random(f"{split}/{level}/{seed}")
    while True:
        game = _Draw(rng, LEVELS[level], SPLITS[split]).game()
        if game is not None:
            return game


class _Draw:
    """One attempt at a game."""

    def __init__(self, rng: random.Random, level: Level, scenes: list[int]) -> None:
        self.rng, self.level = rng, level
        self.task = rng.choice(level.tasks)
        rooms = sorted(constants.GOALS_VALID[self.task])
        self.scene = rng.choice([n for n in scenes if any(n in constants.SCENE_TYPE[room] for room in rooms)])
        have, self.opens = _inventory(self.scene)
        static = (set(constants.STATIC_RECEPTACLES) & have) - MOUNTED
        self.kinds = sorted(static - set(constants.MOVABLE_RECEPTACLES))
        self.have = have

    def game(self) -> dict | None:
        rng, appliance = self.rng, APPLIANCE.get(self.task, ("", ""))
        if appliance[1] and appliance[1] not in self.kinds:
            return None
        things = self._things()
        target = ""
        if self.task == LOOK:
            lamps = [lamp for lamp in LAMPS if lamp in self.have]
            tables = [kind for kind in self.kinds if kind in ("Desk", "SideTable", "Dresser", "CoffeeTable")]
            if not lamps or not tables or not things:
                return None
            lamp, table, thing = rng.choice(lamps), rng.choice(tables), rng.choice(things)
        else:
            lamp = table = ""
            choices = [
                (thing, kind)
                for thing in things
                for kind in self.kinds
                if kind != appliance[1] and self._fits(thing, kind)
                if not appliance[0] or thing in constants.VAL_ACTION_OBJECTS[appliance[0]]
            ]
            if not choices:
                return None
            thing, target = rng.choice(choices)
        receptacles = self._receptacles({target, table, appliance[1]} - {""}, thing)
        placed = self._place(things, thing, target, receptacles)
        needed = 2 if self.task == TWO else 1
        if sum(kind == thing for kind, _ in placed) < needed:
            return None
        if lamp:
            placed.append((lamp, rng.choice([i for i, kind in enumerate(receptacles) if kind == table])))
        return self._write(thing, target, lamp, receptacles, placed)

    def _things(self) -> list[str]:
        return sorted(
            name
            for name in self.have
            if name not in self.kinds and name not in LAMPS and not name.endswith("Sliced")
            if any(self._fits(name, kind) for kind in self.kinds)
        )

    def _fits(self, thing: str, kind: str) -> bool:
        return thing in constants.VAL_RECEPTACLE_OBJECTS.get(kind, ())

    def _receptacles(self, needed: set[str], thing: str) -> list[str]:
        """Draw the receptacles of the room, including those that the task needs and one for the thing."""
        rng = self.rng
        homes = [kind for kind in self.kinds if self._fits(thing, kind) and kind not in needed]
        if not self.level.closed:
            homes = [kind for kind in homes if kind not in constants.OPENABLE_CLASS_SET]
        kinds = sorted(needed | ({rng.choice(homes)} if homes else set()))
        others = [kind for kind in self.kinds if kind not in kinds]
        kinds += rng.sample(others, min(len(others), max(0, self.level.receptacles - len(kinds))))
        counts = {
            kind: min(self.opens.count(kind) or rng.randint(1, COUNT.get(kind, 1)), COUNT.get(kind, 1))
            for kind in sorted(kinds)
        }
        while sum(counts.values()) > self.level.receptacles and max(counts.values()) > 1:
            counts[max(counts, key=lambda kind: (counts[kind], kind))] -= 1
        return [kind for kind, count in counts.items() for _ in range(count)]

    def _place(self, things, thing, target, receptacles) -> list[tuple[str, int]]:
        """Put things into receptacles. The wanted things are not yet in their target receptacle."""
        rng = self.rng
        wanted = [thing] * (rng.randint(2, 3) if self.task == TWO else rng.randint(1, 2))
        others = [name for name in things if name != thing for _ in range(rng.randint(0, self.level.extras))]
        placed = []
        for name in wanted + others:
            places = [
                i
                for i, kind in enumerate(receptacles)
                if self._fits(name, kind) and not (name == thing and kind == target)
                if name != thing or self.level.closed or kind not in constants.OPENABLE_CLASS_SET
            ]
            if places:
                placed.append((name, rng.choice(places)))
        return placed

    def _name(self, kind: str, taken: set[str]) -> str:
        """Return an identifier in AI2-THOR's form, from the kind and a position."""
        while True:
            signs, numbers = self.rng.choices(["plus", "minus"], k=3), self.rng.choices(range(100), k=6)
            axes = [
                f"{sign}_{whole % 5:02d}_dot_{part:02d}"
                for sign, whole, part in zip(signs, numbers[:3], numbers[3:], strict=True)
            ]
            # The engine adds "basin" to the names of Sink and Bathtub, because AI2-THOR's basins are their
            # parts.
            part = f"_bar_{kind}" if kind.endswith("Basin") else ""
            name = f"{kind.removesuffix('Basin')}_bar__{'_bar__'.join(axes)}{part}"
            if name not in taken:
                taken.add(name)
                return name

    def _write(self, thing, target, lamp, receptacles, placed) -> dict:
        taken: set[str] = set()
        holders = [(self._name(kind, taken), kind) for kind in receptacles]
        things = [(self._name(kind, taken), kind, place) for kind, place in placed]
        locations = [f"loc_bar_{i}" for i in range(len(holders) + 1)]
        facts = ["(= (total-cost) 0)", f"(atLocation agent1 {locations[-1]})"]
        for (name, kind), location in zip(holders, locations, strict=False):
            facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {location})"]
            facts += [f"(openable {name})"] * (kind in constants.OPENABLE_CLASS_SET)
        for name, kind, place in things:
            facts += [
                f"(inReceptacle {name} {holders[place][0]})",
                f"(objectAtLocation {name} {locations[place]})",
                f"(objectType {name} {kind}Type)",
                f"({'toggleable' if kind == lamp else 'pickupable'} {name})",
            ]
            facts += [
                f"({state} {name})"
                for action, state in STATES.items()
                if kind in constants.VAL_ACTION_OBJECTS.get(action, ())
            ]
        kinds, types = sorted({kind for _, kind in holders}), sorted({kind for _, kind, _ in things})
        facts += [
            f"(canContain {kind}Type {one}Type)" for kind in kinds for one in types if self._fits(one, kind)
        ]
        goal = goals.gdict[self.task]
        parameters = {"obj": thing, "recep": target, "toggle": lamp}
        problem = "\n".join(
            [
                "(define (problem generated)",
                "(:domain alfred)",
                "(:objects",
                "agent1 - agent",
                *(f"{name} - object" for name, _, _ in things),
                *(f"{name} - receptacle" for name, _ in holders),
                *(f"{location} - location" for location in locations),
                *(f"{kind}Type - rtype" for kind in kinds),
                *(f"{kind}Type - otype" for kind in types),
                ")",
                "(:init",
                *facts,
                ")",
                goal["pddl"].format(**parameters).replace("#", "-"),
            ]
        )
        words = {name: value.lower() for name, value in parameters.items()}
        request = self.rng.choice(goal["templates"]).format(**words, mrecep="")
        return {
            "pddl_domain": _text(ALFRED_PDDL_PATH),
            "grammar": _text(ALFRED_TWL2_PATH).replace("UNKNOWN GOAL", request),
            "pddl_problem": problem,
            "traj": {
                "task_type": self.task,
                "pddl_params": {
                    "object_target": thing,
                    "parent_target": target,
                    "toggle_target": lamp,
                    "mrecep_target": "",
                    "object_sliced": False,
                },
                "scene": {"floor_plan": f"FloorPlan{self.scene}"},
                "turk_annotations": {"anns": []},
            },
        }


@cache
def _text(path: str) -> str:
    return Path(path).read_text()
