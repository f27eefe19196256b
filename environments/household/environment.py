"""Household: search a house for a thing and bring it to a place.

Level 1 has one thing in the house. Level 2 adds look-alikes. Level 3 names the
place by another thing that must also be found. At every level most things lie at a usual place
that the task does not reveal. A policy that learns these places finds things sooner.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from agentrl_env import Done, Environment, Message, ToolCall, tool

PLACES = ("fridge", "shelf", "desk", "drawer", "sofa", "box")
USUAL_PLACE = {
    "apple": "fridge",
    "milk": "fridge",
    "book": "shelf",
    "pen": "desk",
    "sock": "drawer",
    "spoon": "drawer",
    "cushion": "sofa",
    "ball": "box",
}
COLOURS = (
    "red", "blue", "green", "black", "white", "pink", "grey", "brown", "orange", "purple",
    "yellow", "silver", "golden", "copper", "ivory", "amber", "beige", "olive", "navy", "teal",
    "mint", "plum", "ruby", "lilac", "cream", "khaki", "lemon", "peach",
)  # fmt: skip
ADJECTIVES = ("big", "small", "old", "new")
TIDINESS = {1: 0.9, 2: 0.6, 3: 0.6}
"""Probability that a thing lies at its usual place, by level."""
HABIT, HUNCH = 0.3, 0.2
"""Probabilities that a noisy expert looks at the first or the usual place. Otherwise it looks anywhere."""
NUM_SAMPLES = {"train": 10_000, "test": 1_000}


def _kind(thing: str) -> str:
    return thing.split()[-1]


@lru_cache
def _problems(level: int, split: str) -> list[dict[str, object]]:
    """List the combinations of one split. Both splits use the same words."""
    things = [" ".join(words) for words in product(COLOURS if level == 1 else ADJECTIVES, USUAL_PLACE)]
    goals = things if level == 3 else list(PLACES)
    problems = []
    for (i, thing), (j, goal) in product(enumerate(things), enumerate(goals)):
        settled = goal == USUAL_PLACE[_kind(thing)] or _kind(goal) == _kind(thing)
        if not settled and ((i + j) % 5 == 0) == (split == "test"):
            problems.append({"level": level, "thing": thing, "goal": goal})
    return [problems[i % len(problems)] for i in range(NUM_SAMPLES[split])]


class Household(Environment):
    """Find a thing in a house of six places and bring it to where it is wanted."""

    splits = ("train", "test", "train-2", "test-2", "train-3", "test-3")
    max_turns = 8
    blocking = False
    expert_noise = 0.0
    """0: the expert knows where things are. Above 0: it guesses by habit, and errs with this probability."""

    @classmethod
    def samples(cls, split):
        """Return the problems of "train" or "test" (level 1), or of "train-2", "test-3" and so on."""
        name, _, level = split.partition("-")
        return _problems(int(level or 1), name)

    def reset(self, sample, rng):
        level = sample.data["level"]
        self.thing, goal = sample.data["thing"], sample.data["goal"]
        self.contents = {place: [] for place in PLACES}
        self.hand = self.seen_at = None
        if level == 1:
            self._lay(self.thing, rng, level, besides=goal)
        else:
            others = [" ".join(words) for words in product(ADJECTIVES, USUAL_PLACE)]
            present = [x for x in others if x in (self.thing, goal) or rng.random() < 0.3]
            for thing in present:
                self._lay(thing, rng, level, besides=goal if thing == self.thing else None)
        if level < 3:
            self.goal, self.landmark_seen = goal, True
            return f"Bring the {self.thing} to the {goal}."
        self.landmark, self.landmark_seen = goal, False
        self.goal = self._place_of(goal)
        return f"Bring the {self.thing} to the place where the {goal} is."

    @tool
    def look(self, place: str):
        """See what is in a place of the house.

        Args:
            place: One of fridge, shelf, desk, drawer, sofa, box.
        """
        if place not in self.contents:
            return self._no_such(place)
        if self.thing in self.contents[place]:
            self.seen_at = place
        self.landmark_seen = self.landmark_seen or self.landmark in self.contents[place]
        return f"{place}: {', '.join(self.contents[place]) or 'nothing'}."

    @tool
    def take(self, thing: str, place: str):
        """Take a thing out of a place; you can hold one thing.

        Args:
            thing: The thing's full name, such as "red book" or "old book".
            place: The place that it is in.
        """
        if place not in self.contents:
            return self._no_such(place)
        if self.hand:
            return f"You already hold the {self.hand}."
        if thing not in self.contents[place]:
            return f"{place}: no {thing} here."
        self.contents[place].remove(thing)
        self.hand = thing
        return f"You hold the {thing}."

    @tool
    def put(self, thing: str, place: str):
        """Put the thing that you hold into a place. This ends the task, so be sure.

        Args:
            thing: The thing that you hold.
            place: The place that it was wanted in.
        """
        if place not in self.contents:
            return self._no_such(place)
        if self.hand != thing:
            return f"You do not hold the {thing}."
        right = thing == self.thing and place == self.goal
        return Done("Well done." if right else "That was not asked for.", reward=float(right))

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def expert(self, rng):
        thought = f"{self.thing} to {self.goal if self.landmark_seen else self.landmark}"
        if rng.random() < self.expert_noise:
            call = self._slip(rng)
        elif self.hand == self.thing and self.landmark_seen:
            call = ToolCall.of("put", thing=self.thing, place=self.goal)
        elif self.hand is None and self.seen_at:
            thought = f"{thought} from {self.seen_at}"
            call = ToolCall.of("take", thing=self.thing, place=self.seen_at)
        elif self.expert_noise:
            call = ToolCall.of("look", place=self._guess(rng))
        else:
            call = ToolCall.of("look", place=self.goal if self.hand else self._place_of(self.thing))
        return Message.assistant(f"{thought}.", call)

    def _guess(self, rng):
        drawn, usual = rng.random(), USUAL_PLACE[_kind(self.thing)]
        return PLACES[0] if drawn < HABIT else usual if drawn < HABIT + HUNCH else str(rng.choice(PLACES))

    def _slip(self, rng):
        place, kind = str(rng.choice(PLACES)), rng.random()
        if kind < 0.4:
            return ToolCall.of("look", place=place)
        return ToolCall.of("take" if kind < 0.6 else "put", thing=self.thing, place=place)

    def _lay(self, thing, rng, level, besides):
        """Put a thing at its usual place, or sometimes at another place, but never at ``besides``."""
        usual = USUAL_PLACE[_kind(thing)]
        tidy = rng.random() < TIDINESS[level]
        elsewhere = str(rng.choice([p for p in PLACES if p not in (usual, besides)]))
        self.contents[usual if tidy and usual != besides else elsewhere].append(thing)

    def _place_of(self, thing):
        return next(place for place, things in self.contents.items() if thing in things)

    def _no_such(self, place):
        return f"There is no {place}; the places are {', '.join(PLACES)}."
