"""Questions about the generated encyclopedia. Each has one answer, given the facts of its world.

Chains of relations have one answer because every relation is a function. A bridge question describes a thing
instead of naming it, by two facts. Exactly one thing has both facts, but several have the first. A comparison
names the things that it compares. A question never contains its own answer, and neither do the pages before
the last page of a chain.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import takewhile
from typing import Any

from agentrl_env.dataset import stable_seed

from .prose import named
from .world import RELATIONS, YEAR, Thing, World, world

NUM_QUESTIONS = {"train": 5_000, "validation": 1_000, "test": 1_000}
"""Number of different questions of each level."""
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all questions that belong to a split, by a hash of the question's meaning."""
LEVELS = {1: "chain", 2: "chain", 3: "chain", 4: "chain", 5: "bridge", 6: "comparison"}
"""Level -> kind of its questions. A chain's level is its number of relations."""
STARTS = (
    "{who} is {it}?",
    "Name {it}.",
    "Tell me {it}.",
    "Can you find out {it}?",
    "I would like to know {it}.",
)
OF_KIND = {
    kind: [name for name in RELATIONS if name.startswith(f"{kind}.")]
    for kind in dict.fromkeys(relation.subject for relation in RELATIONS.values())
}
"""Kind -> names of its relations."""
DATED = {kind: next((n for n in names if RELATIONS[n].object == YEAR), "") for kind, names in OF_KIND.items()}
"""Kind -> its relation to a year, if it has one."""
Question = dict[str, Any]


class Questions:
    """The questions of a split and a level, generated when the first one is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_QUESTIONS[self.split]

    def __getitem__(self, index: int) -> Question:
        return _questions(self.split, self.level)[index]


@cache
def _questions(split: str, level: int) -> list[Question]:
    rng, kind = random.Random(stable_seed("search_qa", split, level)), LEVELS[level]
    drawn: dict[tuple[object, ...], Question] = {}
    while len(drawn) < NUM_QUESTIONS[split]:
        meaning = {"chain": _chain, "bridge": _bridge, "comparison": _comparison}[kind](world(), rng, level)
        if meaning in drawn or tenth(meaning) not in SHARES[split]:
            continue
        question = _ask(world(), meaning, rng)
        if question is not None:
            drawn[meaning] = {"level": level, "kind": kind, **question}
    return list(drawn.values())


def tenth(meaning: tuple[object, ...]) -> int:
    """Return the tenth of all questions that contains a question (see SHARES)."""
    return stable_seed("search_qa", meaning) % 10


def _chain(world: World, rng: random.Random, length: int) -> tuple[object, ...]:
    """Draw a thing and the relations that lead from it to the answer."""
    kind, relations = rng.choice(list(OF_KIND)), []
    start = rng.choice(world.of_kind[kind])
    while len(relations) < length:
        last = len(relations) == length - 1
        names = [name for name in OF_KIND[kind] if last or RELATIONS[name].object != YEAR]
        relations.append(rng.choice(names))
        kind = RELATIONS[relations[-1]].object
    return ("chain", start, *relations)


def _bridge(world: World, rng: random.Random, _: int) -> tuple[object, ...]:
    """Draw a thing, the two relations that describe it, and the requested relation."""
    kind = rng.choice([kind for kind, names in OF_KIND.items() if len(names) > 2])
    described = rng.sample(OF_KIND[kind], 3)
    return ("bridge", rng.choice(world.of_kind[kind]), *described)


def _comparison(world: World, rng: random.Random, _: int) -> tuple[object, ...]:
    """Draw things of one kind, and the requested relation of the first or last of them by year.

    If the relation is the year itself, the question asks for the difference.
    """
    kind = rng.choice([kind for kind, name in DATED.items() if name])
    things = rng.sample(world.of_kind[kind], rng.choice((2, 2, 3)))
    asked = rng.choice(OF_KIND[kind])
    if asked == DATED[kind]:
        return ("difference", asked, *sorted(things[:2]))
    return (rng.choice(("first", "last")), asked, *sorted(things))


def _ask(world: World, meaning: tuple[Any, ...], rng: random.Random) -> Question | None:
    """Put a meaning into words. Return None if it has no answer or several, or if it reveals the answer."""
    kind, *rest = meaning
    asked = (
        _ask_chain(world, *rest) if kind == "chain"
        else _ask_bridge(world, *rest) if kind == "bridge"
        else _ask_comparison(world, kind, *rest)
    )  # fmt: skip
    if asked is None:
        return None
    it, answer, kind, steps = asked
    who = {"person": "Who", YEAR: "What", "number": "What"}.get(kind, f"Which {kind}")
    if it.startswith(f"the {kind} "):  # no "Which city is the city ..."
        who = "What"
    question = rng.choice(STARTS).format(who=who, it=it)
    if answer.lower() in question.lower():
        return None
    return {"question": question, "answer": [answer], "steps": steps}


def _ask_chain(world: World, start: int, *names: str):
    if len(set(names)) < len(names):
        return None
    things, value, it = [world.things[start]], start, named(world.things[start])
    for name in names:
        it, value = _of(name, it), world.facts[name][value]
        if RELATIONS[name].object != YEAR:
            things.append(world.things[value])
    passed = things[: len(names)]
    if len(set(passed)) < len(names) or any(_tells(world, thing, names[-1], value) for thing in passed[:-1]):
        return None
    return it, world.text_of(names[-1], value), RELATIONS[names[-1]].object, _steps(*passed)


def _ask_bridge(world: World, number: int, one: str, other: str, asked: str):
    thing = world.things[number]
    values = [world.facts[name][number] for name in (one, other)]
    of_one, of_other = (world.inverse[name][value] for name, value in zip((one, other), values, strict=True))
    if RELATIONS[one].object == YEAR or len(of_one) < 2 or len(set(of_one) & set(of_other)) != 1:
        return None
    words = [
        str(value) if RELATIONS[name].object == YEAR else named(world.things[value])
        for name, value in zip((one, other), values, strict=True)
    ]
    verbs = [f"{RELATIONS[name].verb}{' in' * (RELATIONS[name].object == YEAR)}" for name in (one, other)]
    facts = _joined([f"{verb} {word}" for verb, word in zip(verbs, words, strict=True)], verbs)
    it = _of(asked, f"the {thing.kind} {'who' if thing.kind == 'person' else 'that'} {facts}")
    answer = world.text_of(asked, world.facts[asked][number])
    return it, answer, RELATIONS[asked].object, [[" ".join([thing.kind, *words]), thing.title]]


def _ask_comparison(world: World, which: str, asked: str, *numbers: int):
    things = [world.things[number] for number in numbers]
    dated = DATED[things[0].kind]
    years = [world.facts[dated][number] for number in numbers]
    if len(set(years)) < len(years):
        return None
    names, steps = [named(thing) for thing in things], _steps(*things)
    if which == "difference":
        it = f"the number of years between {_of(dated, names[0])} and {_of(dated, names[1])}"
        return it, str(abs(years[0] - years[1])), "number", steps
    values = [world.facts[asked][number] for number in numbers]
    chosen = years.index(min(years) if which == "first" else max(years))
    if values.count(values[chosen]) > 1:
        return None
    kind, verb = things[0].kind, RELATIONS[dated].verb.replace("first ", "")
    listed = f"{', '.join(names[:-1])} or {names[-1]}"
    it = f"{_of(asked, f'the {kind} that {verb} {which}')}: {listed}"
    return it, world.text_of(asked, values[chosen]), RELATIONS[asked].object, steps


def _joined(facts: list[str], verbs: list[str]) -> str:
    """Return two facts as one predicate without repeating words that both verbs start with."""
    words = zip(*(verb.split() for verb in verbs), strict=False)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], words)]
    rest = " ".join(facts[1].split()[len(shared) :])
    return f"{facts[0]} {rest}" if shared and shared != ["was"] else f"{facts[0]} and {rest}"


def _of(name: str, it: str) -> str:
    """Return the words for the object of a relation of something."""
    relation = RELATIONS[name]
    return f"the year in which {it} {relation.verb}" if relation.object == YEAR else relation.noun.format(it)


def _steps(*things: Thing) -> list[list[str]]:
    """Return a search and the title of the page that it should find, for each of the things."""
    return [[named(thing).removeprefix("the "), thing.title] for thing in things]


def _tells(world: World, thing: Thing, name: str, value: int) -> bool:
    """Return True if a fact on a thing's page names the object of a relation."""
    kind = RELATIONS[name].object
    return any(RELATIONS[own].object == kind and world.facts[own][thing.number] == value
               for own in OF_KIND[thing.kind]) or any(
        world.facts[own][value] == thing.number
        for own in OF_KIND.get(kind, ()) if RELATIONS[own].object == thing.kind
    )  # fmt: skip
