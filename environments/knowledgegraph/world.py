"""Generates the world, 50,000 typed entities with relations and attributes, and questions about it.

Relations are named as in Freebase, ``domain.type.property``, and each has an inverse. A question is generated
backwards from one of its answers, so that it always has an answer. Its answers are all entities of its
logical form in the world. Two splits never share a question, because the first entity of a question
determines the split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

from agentrl_env.dataset import stable_seed

SEED = 2501
NUM_QUESTIONS = {"train": 5_000, "validation": 1_000, "test": 1_000}
"""Number of different questions of each level."""
SHARES = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Last digits of the number of a question's first entity, for each split."""
MAX_ANSWERS = 50
MAX_BETWEEN = 1_000
"""Maximum number of entities in an intermediate set of a question."""
LEAST_LISTED = 7
"""Minimum number of relations of the entity of a level 1 question. The first is never right."""

TYPES = {
    "people.person": 20_000,
    "film.film": 6_000,
    "book.book": 5_000,
    "music.album": 4_500,
    "visual_art.painting": 3_760,
    "business.company": 4_000,
    "location.city": 2_000,
    "music.band": 1_500,
    "education.university": 800,
    "geography.river": 700,
    "geography.mountain": 600,
    "sports.team": 500,
    "visual_art.museum": 300,
    "location.country": 120,
    "language.language": 80,
    "award.award": 76,
    "people.profession": 24,
    "film.genre": 20,
    "music.style": 20,
}


class Fact(NamedTuple):
    """A relation, its inverse, their phrases, and how many objects a subject has."""

    subject: str
    object: str
    forward: str
    forward_phrase: str
    inverse: str
    inverse_phrase: str
    least: int
    most: int


PERSON, FILM, BOOK, CITY = "people.person", "film.film", "book.book", "location.city"
COUNTRY, COMPANY, BAND, TEAM = "location.country", "business.company", "music.band", "sports.team"
FACTS = tuple(
    Fact(*fact)
    for fact in (
        (PERSON, CITY, "people.person.place_of_birth", "the birthplaces of {}",
         "location.city.people_born_here", "the people born in {}", 1, 1),
        (PERSON, "people.profession", "people.person.profession", "the professions of {}",
         "people.profession.people_with_this_profession", "the people whose professions include {}", 1, 2),
        (PERSON, "education.university", "people.person.education", "the universities attended by {}",
         "education.university.alumni", "the alumni of {}", 0, 2),
        (PERSON, PERSON, "people.person.children", "the children of {}",
         "people.person.parents", "the parents of {}", 0, 2),
        (PERSON, COMPANY, "people.person.employer", "the employers of {}",
         "business.company.employees", "the employees of {}", 0, 1),
        (PERSON, "language.language", "people.person.languages", "the languages spoken by {}",
         "language.language.speakers", "the people who speak {}", 1, 2),
        (PERSON, "award.award", "award.winner.awards_won", "the awards won by {}",
         "award.award.winners", "the winners of {}", 0, 1),
        (FILM, PERSON, "film.film.directed_by", "the directors of {}",
         "film.director.films_directed", "the films directed by {}", 1, 2),
        (FILM, PERSON, "film.film.starring", "the actors in {}",
         "film.actor.films_acted_in", "the films with {} in the cast", 2, 4),
        (FILM, "film.genre", "film.film.genre", "the genres of {}",
         "film.genre.films_in_this_genre", "the films whose genres include {}", 1, 2),
        (FILM, CITY, "film.film.featured_locations", "the filming locations of {}",
         "film.location.films_shot_here", "the films shot in {}", 1, 2),
        (FILM, COMPANY, "film.film.produced_by", "the producers of {}",
         "film.producer.films_produced", "the films produced by {}", 1, 1),
        (FILM, BOOK, "film.film.based_on", "the books adapted into {}",
         "book.book.film_adaptations", "the films based on {}", 0, 1),
        (BOOK, PERSON, "book.book.author", "the authors of {}",
         "book.author.books_written", "the books written by {}", 1, 2),
        (BOOK, "language.language", "book.book.original_language", "the original languages of {}",
         "language.language.books", "the books written in {}", 1, 1),
        (BOOK, COMPANY, "book.book.publisher", "the publishers of {}",
         "book.publisher.books_published", "the books published by {}", 1, 1),
        ("music.album", BAND, "music.album.artist", "the bands that recorded {}",
         "music.band.albums", "the albums of {}", 1, 1),
        ("music.album", "music.style", "music.album.style", "the styles of {}",
         "music.style.albums", "the albums whose styles include {}", 1, 2),
        (BAND, PERSON, "music.band.members", "the members of {}",
         "music.musician.bands", "the bands that have {} among their members", 2, 5),
        (BAND, CITY, "music.band.origin", "the home towns of {}",
         "location.city.bands_formed_here", "the bands formed in {}", 1, 1),
        ("visual_art.painting", PERSON, "visual_art.painting.painter", "the painters of {}",
         "visual_art.painter.paintings", "the paintings by {}", 1, 1),
        ("visual_art.painting", "visual_art.museum", "visual_art.painting.owned_by", "the owners of {}",
         "visual_art.museum.collection", "the paintings owned by {}", 1, 1),
        ("visual_art.museum", CITY, "visual_art.museum.city", "the cities that host {}",
         "location.city.museums", "the museums in {}", 1, 1),
        (COMPANY, CITY, "business.company.headquarters", "the headquarters of {}",
         "location.city.companies_based_here", "the companies based in {}", 1, 1),
        (COMPANY, PERSON, "business.company.founders", "the founders of {}",
         "business.founder.companies_founded", "the companies founded by {}", 1, 2),
        (TEAM, CITY, "sports.team.home_city", "the home cities of {}",
         "location.city.teams", "the sports teams of {}", 1, 1),
        (TEAM, PERSON, "sports.team.players", "the players of {}",
         "sports.player.teams", "the sports teams that {} played for", 5, 12),
        (TEAM, COMPANY, "sports.team.sponsors", "the sponsors of {}",
         "sports.sponsor.teams_sponsored", "the sports teams sponsored by {}", 1, 2),
        ("education.university", CITY, "education.university.campus", "the campus cities of {}",
         "location.city.universities", "the universities in {}", 1, 1),
        (CITY, COUNTRY, "location.city.country", "the countries that contain {}",
         "location.country.cities", "the cities in {}", 1, 1),
        (COUNTRY, "language.language", "location.country.official_languages", "the official languages of {}",
         "language.language.official_in", "the countries that have {} among their official languages", 1, 3),
        ("geography.river", COUNTRY, "geography.river.countries", "the countries crossed by {}",
         "location.country.rivers", "the rivers that flow through {}", 1, 3),
        ("geography.mountain", COUNTRY, "geography.mountain.countries", "the countries that share {}",
         "location.country.mountains", "the mountains in {}", 1, 2),
    )
)  # fmt: skip
ATTRIBUTES = {
    PERSON: {"people.person.height": (1_450, 2_100), "people.person.year_of_birth": (1_880, 2_005)},
    FILM: {"film.film.runtime": (4_000, 12_000), "film.film.release_year": (1_920, 2_024)},
    BOOK: {"book.book.number_of_pages": (60, 1_400), "book.book.publication_year": (1_800, 2_024)},
    "music.album": {"music.album.length": (1_200, 6_000), "music.album.release_year": (1_955, 2_024)},
    "visual_art.painting": {"visual_art.painting.height": (100, 4_000)},
    COMPANY: {"business.company.number_of_employees": (3, 200_000)},
    CITY: {"location.city.population": (2_000, 9_000_000), "location.city.elevation": (0, 3_500)},
    COUNTRY: {"location.country.area": (1_000, 9_000_000)},
    BAND: {"music.band.founding_year": (1_955, 2_020)},
    TEAM: {"sports.team.founding_year": (1_860, 2_010)},
    "education.university": {"education.university.number_of_students": (400, 90_000)},
    "geography.river": {"geography.river.length": (30, 6_000)},
    "geography.mountain": {"geography.mountain.height": (500, 8_800)},
}
EXTREMES = {
    "runtime": ("longest", "shortest"),
    "length": ("greatest", "shortest"),
    **dict.fromkeys(("population", "area"), ("largest", "smallest")),
    **dict.fromkeys(
        ("number of pages", "number of employees", "number of students"), ("largest", "smallest")
    ),
    "elevation": ("highest", "lowest"),
}
"""Attribute -> the adjectives of its highest and its lowest value, unless it is a year or these are usual."""
SHAPES = {
    1: ("n1",),
    2: ("n2", "and11"),
    3: ("n3", "and21", "arg2", "count2"),
    4: ("n4", "and22", "and31", "then21", "arg21", "count21"),
}
"""Level -> shapes of its questions. The digits count relations: n3 is a chain of three, and21 intersects a
chain of two with one relation, then21 follows a relation from such an intersection."""

WITH_ARTICLE = ("education.university", "geography.river", "visual_art.museum", TEAM, "award.award")
"""Types with names that need an article within a sentence."""
GENRES = "comedy tragedy western thriller horror romance musical war crime fantasy adventure heist disaster "
GENRES += "spy satire noir mystery sport family history"
STYLES = "jazz blues folk rock punk soul disco techno house reggae ska swing opera gospel country ambient "
STYLES += "grunge metal tango samba"
PROFESSIONS = (
    "actor baker carpenter dentist engineer farmer gardener historian inventor judge lawyer mechanic "
)
PROFESSIONS += "novelist optician painter pilot potter sailor singer surgeon tailor teacher violinist weaver"
SINGLE = {
    "film.genre": GENRES.split(),
    "music.style": STYLES.split(),
    "people.profession": PROFESSIONS.split(),
}
ADJECTIVES = "Amber Bitter Brave Broken Burning Crimson Distant Empty Endless Fallen Final Forgotten Frozen "
ADJECTIVES += "Gentle Golden Hidden Hollow Hungry Iron Jealous Last Little Lonely Lost Lucky Marble Midnight "
ADJECTIVES += "Nameless Naked Northern Open Pale Patient Paper Perfect Quiet Restless Rising Sacred Savage "
ADJECTIVES += "Scarlet Second Secret Sleepy Shattered Silent Silver Sleeping Southern Stolen Stubborn Sudden "
ADJECTIVES += (
    "Sunken Sweet Tender Thirsty Twisted Unknown Velvet Violet Wandering Wicked Wild Winter Wooden Young"
)
NOUNS = (
    "Anchor Angel Apple Arrow Ash Autumn Bell Bird Bishop Blade Border Bread Bridge Brother Candle Castle "
)
NOUNS += (
    "Circus Clock Cloud Coast Crown Dancer Daughter Desert Door Dragon Dream Echo Empire Engine Falcon Farm "
)
NOUNS += (
    "Fever Field Fire Flower Forest Fountain Fox Garden Ghost Glass Guest Harbour Harvest Heart Hill Horizon "
)
NOUNS += (
    "Horse Hotel Hour Hunter Island Journey Key King Kitchen Lake Lantern Letter Library Lighthouse Lion "
)
NOUNS += "Market Meadow Mirror Moon Mother Mountain Museum Night Ocean Orchard Palace Patient Piano Pilgrim "
NOUNS += "Prince Promise Queen Rain River Road Rose Sailor Season Shadow Ship Sister Snow Song Sparrow Star "
NOUNS += (
    "Stone Storm Stranger Summer Thief Tiger Tower Traveller Valley Village Voyage Wall Water Window Wolf"
)
ONSETS = ("b", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n")
ONSETS += ("p", "pr", "qu", "r", "s", "sh", "st", "t", "tr", "v", "w", "z")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
CODAS = ["", "", "l", "m", "n", "r", "s", "th", "nd", "rt"]


class World:
    """The entities, their names and their facts, as plain lists and dicts.

    Entities are numbered. ``ids`` has their Freebase-like identifiers, which reveal nothing about them.
    """

    def __init__(self, seed: int = SEED) -> None:
        rng = random.Random(seed)
        self.of_type: dict[str, range] = {}
        self.types: list[str] = []
        for name, size in TYPES.items():
            self.of_type[name] = range(len(self.types), len(self.types) + size)
            self.types += [name] * size
        self.names = _names(rng, self.of_type)
        numbers = rng.sample(range(16**6), len(self.types))
        self.ids = [f"m.0{number:06x}" for number in numbers]
        self.edges: dict[str, dict[int, list[int]]] = {}
        self.values: dict[str, dict[int, int]] = {}
        for fact in FACTS:
            self._relate(fact, rng)
        for kind, ranges in ATTRIBUTES.items():
            for attribute, (low, high) in ranges.items():
                self.values[attribute] = {entity: rng.randint(low, high) for entity in self.of_type[kind]}

    def _relate(self, fact: Fact, rng: random.Random) -> None:
        forward: dict[int, list[int]] = {}
        inverse: dict[int, list[int]] = {}
        objects = self.of_type[fact.object]
        for subject in self.of_type[fact.subject]:
            chosen = {rng.choice(objects) for _ in range(rng.randint(fact.least, fact.most))} - {subject}
            if chosen:
                forward[subject] = sorted(chosen)
            for entity in sorted(chosen):
                inverse.setdefault(entity, []).append(subject)
        self.edges[fact.forward], self.edges[fact.inverse] = forward, inverse

    def triples(self, ns: str) -> Iterator[bytes]:
        """Yield the world as N-Triples, with the schema that the tools read."""
        integer = "http://www.w3.org/2001/XMLSchema#integer"
        names = [f"<{ns}{entity}>" for entity in self.ids]
        yield "\n".join(
            [
                f"<{ns}{name}> <{ns}type.property.expected_type> <{ns}{kind}> ."
                for name, kind in RANGES.items()
            ]
            + [
                f"{name} <{ns}type.object.type> <{ns}{kind}> ."
                for name, kind in zip(names, self.types, strict=True)
            ]
        ).encode()
        for relation, edges in self.edges.items():
            lines = [
                f"{names[one]} <{ns}{relation}> {names[other]} ."
                for one, others in edges.items()
                for other in others
            ]
            yield "\n".join(lines).encode()
        for name, values in self.values.items():
            lines = [f'{names[one]} <{ns}{name}> "{value}"^^<{integer}> .' for one, value in values.items()]
            yield "\n".join(lines).encode()

    def follow(self, members: set[int], relation: str) -> set[int]:
        """Return the entities that a relation leads to, or nothing if there are too many."""
        edges, reached = self.edges[relation], set()
        for one in members:
            reached.update(edges.get(one, ()))
            if len(reached) > MAX_BETWEEN:
                return set()
        return reached

    def extreme(self, members: set[int], operation: str, attribute: str) -> set[int]:
        """Return the entities with the highest or lowest value of an attribute."""
        values = self.values[attribute]
        best = (max if operation == "argmax" else min)(values[one] for one in members)
        return {one for one in members if values[one] == best}


RANGES = {fact.forward: fact.object for fact in FACTS} | {fact.inverse: fact.subject for fact in FACTS}
PHRASES = {fact.forward: fact.forward_phrase for fact in FACTS}
PHRASES |= {fact.inverse: fact.inverse_phrase for fact in FACTS}
INVERSES = {fact.forward: fact.inverse for fact in FACTS} | {fact.inverse: fact.forward for fact in FACTS}
LEADING_TO = {kind: [name for name, reached in RANGES.items() if reached == kind] for kind in TYPES}
"""Type -> relations that lead to entities of it."""


@lru_cache(maxsize=1)
def world() -> World:
    """Return the process's world."""
    return World()


class Questions:
    """The questions of a split and a level, drawn when the first one is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_QUESTIONS[self.split]

    def __getitem__(self, index: int) -> dict:
        return _questions(self.split, self.level)[index]


@cache
def _questions(split: str, level: int) -> list[dict]:
    place, rng = world(), random.Random(stable_seed("knowledgegraph", split, level))
    asked: dict[str, dict] = {}
    while len(asked) < NUM_QUESTIONS[split]:
        record = _question(place, rng, level, SHARES[split])
        if record is not None:
            asked.setdefault(record["question"], record)
    return list(asked.values())


def _question(place: World, rng: random.Random, level: int, share: range) -> dict | None:
    """Draw one question. Return None if the draw gives no good question."""
    if level == 1:
        return _one_relation(place, rng, share)
    shape = rng.choice(SHAPES[level])
    operation, lengths = shape.rstrip("1234"), [int(digit) for digit in shape.lstrip("acdeghnortu")]
    answer = end = rng.choice(place.of_type[rng.choice(list(ATTRIBUTES if operation == "arg" else TYPES))])
    last = None
    if operation == "then":
        step = _step_back(place, rng, end)
        if step is None:
            return None
        end, last = step
    paths = [_path(place, rng, end, length) for length in lengths]
    if None in paths:
        return None
    anchors = sorted({anchor for anchor, _ in paths})
    if anchors[0] % 10 not in share or answer in anchors or len(anchors) < len(paths):
        return None
    chains = [_chain(place, anchor, relations) for anchor, relations in paths]
    if not all(members for _, members in chains):
        return None
    variable, members = chains[0]
    if len(chains) == 2:
        other, others = chains[1]
        variable, members = ("intersection", variable, other), members & others
        if members in (chains[0][1], others):
            return None  # one of the two conditions would have no effect
    if last is not None:
        variable, members = ("neighbors", variable, last), place.follow(members, last)
    if operation in ("arg", "count") and len(members) < 2:
        return None
    if operation == "arg":
        operation = rng.choice(["argmax", "argmin"])
        attribute = rng.choice(sorted(ATTRIBUTES[place.types[answer]]))
        variable, members = (operation, variable, attribute), place.extreme(members, operation, attribute)
        if len(members) > 1:
            return None
    members = members.difference(anchors)  # as in AgentBench's final query
    if operation == "count":
        variable = ("count", variable)
    elif not 1 <= len(members) <= MAX_ANSWERS:
        return None
    return _record(place, variable, anchors, members)


def _one_relation(place: World, rng: random.Random, share: range) -> dict | None:
    """Draw a question about one relation of an entity with many relations.

    All listed relations except the first are equally likely. If a path were drawn backwards from its answer,
    relations with many edges would be right most often.
    """
    anchor = rng.choice(place.of_type[rng.choice(list(TYPES))])
    listed = sorted(relation for relation, edges in place.edges.items() if anchor in edges)
    if anchor % 10 not in share or len(listed) < LEAST_LISTED:
        return None
    variable, members = _chain(place, anchor, [rng.choice(listed[1:])])
    members = members.difference([anchor])
    return _record(place, variable, [anchor], members) if 1 <= len(members) <= MAX_ANSWERS else None


def _step_back(place: World, rng: random.Random, entity: int) -> tuple[int, str] | None:
    """Return an entity and a relation that leads from it to the given one."""
    relation = rng.choice(LEADING_TO[place.types[entity]])
    before = place.edges[INVERSES[relation]].get(entity)
    return (rng.choice(before), relation) if before else None


def _path(place: World, rng: random.Random, entity: int, length: int) -> tuple[int, list[str]] | None:
    """Return an entity and ``length`` relations that lead from it to the given one."""
    path: list[str] = []
    while len(path) < length:
        step = _step_back(place, rng, entity)
        if step is None or (path and step[1] == INVERSES[path[0]]):
            return None
        entity, relation = step
        path.insert(0, relation)
    return entity, path


def _chain(place: World, anchor: int, path: list[str]) -> tuple[tuple, set[int]]:
    """Return the variable of a path, and its members."""
    variable, members = ("entity", anchor), {anchor}
    for relation in path:
        variable, members = ("neighbors", variable, relation), place.follow(members, relation)
    return variable, members


def _record(place: World, variable, anchors: list[int], members: set[int]) -> dict:
    """Return the question in AgentBench's format."""
    if variable[0] == "count":
        answer = [{"answer_type": "Value", "answer_argument": str(len(members))}]
    else:
        answer = [
            {"answer_type": "Entity", "answer_argument": place.ids[one], "entity_name": place.names[one]}
            for one in sorted(members)
        ]
    forms = {"count": "What is the number of {}?", "argmax": "{}?", "argmin": "{}?"}
    return {
        "question": forms.get(variable[0], "Name {}.").format(_phrase(place, variable)),
        "entities": {place.names[anchor]: place.ids[anchor] for anchor in anchors},
        "actions": gold_actions(_named(place, variable)),
        "answer": answer,
    }


def _phrase(place: World, variable) -> str:
    kind = variable[0]
    if kind == "entity":
        return _called(place, variable[1])
    inner = _phrase(place, variable[1])
    if kind == "neighbors":
        return PHRASES[variable[2]].format(inner)
    if kind == "intersection":
        (_, one, relation), (_, other, second) = variable[1:]
        if one[0] == other[0] == "entity" and relation == second:
            return PHRASES[relation].format(f"both {_phrase(place, one)} and {_phrase(place, other)}")
        who = "who" if RANGES[relation] == PERSON else "that"
        return f"{inner} {who} are also among {_phrase(place, variable[2])}"
    if kind == "count":
        return inner.removeprefix("the ")
    words = variable[2].split(".")[-1].replace("_", " ")
    adjectives = EXTREMES.get(words, ("latest", "earliest") if "year" in words else ("greatest", "smallest"))
    return f"Which of {inner} has the {adjectives[kind == 'argmin']} {words}"


def _called(place: World, entity: int) -> str:
    """Return the name of an entity within a sentence."""
    name, kind = place.names[entity], place.types[entity]
    return f"the {name}" if kind in WITH_ARTICLE or name.endswith((" Trio", " Quartet")) else name


def _named(place: World, variable):
    """Return the variable with identifiers instead of numbers."""
    if variable[0] == "entity":
        return ("entity", place.ids[variable[1]])
    return tuple(_named(place, part) if isinstance(part, tuple) else part for part in variable)


def gold_actions(variable) -> list[str]:
    """Return the calls that compute a variable, as AgentBench writes them."""
    actions: list[str] = []
    made = 0

    def visit(part) -> str:
        nonlocal made
        kind = part[0]
        if kind == "entity":
            return part[1]
        inner = [visit(piece) for piece in part[1:] if isinstance(piece, tuple)]
        rest = [piece for piece in part[1:] if isinstance(piece, str)]
        look = {"neighbors": "get_relations", "argmax": "get_attributes", "argmin": "get_attributes"}.get(
            kind
        )
        if look:
            actions.append(f"{look}({inner[0]})")
        name = "get_neighbors" if kind == "neighbors" else kind
        actions.append(f"{name}({','.join(inner + rest)})")
        made += 1
        return f"#{made - 1}"

    visit(variable)
    return actions


def _plural(noun: str) -> str:
    """Return the plural of one of ``NOUNS``."""
    if noun.endswith(("ief", "lf")):
        return f"{noun.rstrip('f')}ves"
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "sh", "ch", "cho")) else "s")


def _names(rng: random.Random, of_type: dict[str, range]) -> list[str]:
    """Return a unique name for every entity, in a form that suits its type."""
    taken: set[str] = set()

    def word() -> str:
        while True:
            syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 2))]
            made = ("".join(syllables) + rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)).title()
            if made not in taken:
                taken.add(made)
                return made

    nouns, adjectives = NOUNS.split(), ADJECTIVES.split()
    firsts, lasts = [word() for _ in range(160)], [word() for _ in range(400)]
    cities = [word() for _ in of_type[CITY]]

    def pairs(left: list[str], right: list[str], form: str, size: int) -> list[str]:
        choices = [form.format(one, other) for one, other in product(left, right) if one != other]
        return rng.sample(choices, size)

    def each(size: int, *forms: str) -> list[str]:
        drawn = [(rng.choice(forms), word()) for _ in range(size)]
        return [form.format(name, plural=_plural(name)) for form, name in drawn]

    made = {
        PERSON: lambda n: pairs(firsts, lasts, "{} {}", n),
        FILM: lambda n: pairs(adjectives, nouns, "The {} {}", n),
        BOOK: lambda n: pairs(nouns, nouns, "{} and {}", n),
        "music.album": lambda n: pairs(adjectives, list(map(_plural, nouns)), "{} {}", n),
        "visual_art.painting": lambda n: pairs(nouns, nouns, "{} with {}", n),
        COMPANY: lambda n: each(n, "{} Systems", "{} Foods", "{} Motors", "{} Press", "{} Group"),
        CITY: lambda n: cities,
        BAND: lambda n: each(n, "The {plural}", "{} Trio", "{} Quartet"),
        "education.university": lambda n: [f"University of {city}" for city in rng.sample(cities, n)],
        "geography.river": lambda n: each(n, "{} River"),
        "geography.mountain": lambda n: each(n, "Mount {}"),
        TEAM: lambda n: pairs(rng.sample(cities, 200), ["Lions", "Hawks", "Bears", "Sharks"], "{} {}", n),
        "visual_art.museum": lambda n: [f"{city} Museum" for city in rng.sample(cities, n)],
        COUNTRY: lambda n: each(n, "{}ia", "{}land", "{}stan"),
        "language.language": lambda n: each(n, "{}ish", "{}ese"),
        "award.award": lambda n: each(n, "{} Prize", "{} Medal"),
    }
    names = [
        name
        for kind, numbers in of_type.items()
        for name in (SINGLE[kind] if kind in SINGLE else made[kind](len(numbers)))
    ]
    assert len(set(names)) == len(names)
    return names
