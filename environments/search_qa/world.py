"""Generates the things that the encyclopedia describes, and their facts.

Every relation is a function: a thing has exactly one object of each of its relations, so that a chain of
relations from one thing leads to one answer.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import NamedTuple

SEED = 4177
NUM_PAGES = int(os.environ.get("SEARCH_QA_PAGES", 40_000))
if NUM_PAGES < 4_000:
    raise ValueError(f"SEARCH_QA_PAGES is {NUM_PAGES}; the questions need 4000 pages at least")
YEAR = "year"


def _words(text: str) -> list[str]:
    return text.split()


class Relation(NamedTuple):
    """A relation of all things of a kind, in the words of questions.

    The object of a relation to ``YEAR`` is a number between ``first`` and ``last``. ``noun`` is then unused.
    """

    subject: str
    object: str
    noun: str
    """A phrase such as "the director of {}"."""
    verb: str
    """A phrase such as "was directed by", or for a year "was released"."""
    profession: str = ""
    """Profession of the objects if they are people."""
    first: int = 0
    last: int = 0


def _year(subject: str, verb: str, first: int, last: int = 2020) -> Relation:
    return Relation(subject, YEAR, "", verb, "", first, last)


SHARES_OF_PAGES = {
    "person": 13_000,
    "film": 5_000,
    "novel": 5_000,
    "album": 4_000,
    "painting": 3_000,
    "company": 2_500,
    "city": 2_000,
    "band": 1_500,
    "ship": 1_500,
    "mountain": 700,
    "museum": 600,
    "university": 500,
    "river": 500,
    "region": 200,
}
"""Kind -> number of its pages, of 40,000."""
KINDS = {kind: count * NUM_PAGES // 40_000 for kind, count in SHARES_OF_PAGES.items()}
"""Kind -> number of its pages."""
RELATIONS = {
    "person.birthplace": Relation("person", "city", "the birthplace of {}", "was born in"),
    "person.born": _year("person", "was born", 1850, 1990),
    "person.university": Relation("person", "university", "the university where {} studied", "studied at"),
    "person.mentor": Relation("person", "person", "the mentor of {}", "was taught by"),
    "film.director": Relation("film", "person", "the director of {}", "was directed by", "director"),
    "film.composer": Relation(
        "film", "person", "the composer of the music of {}", "has music by", "composer"
    ),
    "film.studio": Relation("film", "company", "the company that produced {}", "was produced by"),
    "film.location": Relation("film", "city", "the city in which {} was shot", "was shot in"),
    "film.novel": Relation("film", "novel", "the novel on which {} is based", "is based on"),
    "film.year": _year("film", "was released", 1920),
    "novel.author": Relation("novel", "person", "the author of {}", "was written by", "novelist"),
    "novel.translator": Relation(
        "novel", "person", "the translator of {}", "was translated by", "translator"
    ),
    "novel.publisher": Relation("novel", "company", "the publisher of {}", "was published by"),
    "novel.setting": Relation("novel", "city", "the city in which {} is set", "is set in"),
    "novel.year": _year("novel", "was published", 1870),
    "album.band": Relation("album", "band", "the band that recorded {}", "was recorded by"),
    "album.producer": Relation("album", "person", "the producer of {}", "was produced by", "producer"),
    "album.label": Relation("album", "company", "the label that issued {}", "was issued by"),
    "album.studio": Relation("album", "city", "the city in which {} was recorded", "was recorded in"),
    "album.year": _year("album", "came out", 1955),
    "painting.painter": Relation("painting", "person", "the painter of {}", "was painted by", "painter"),
    "painting.museum": Relation("painting", "museum", "the museum that holds {}", "hangs in"),
    "painting.subject": Relation("painting", "mountain", "the mountain shown in {}", "shows"),
    "painting.year": _year("painting", "was completed", 1860),
    "company.founder": Relation("company", "person", "the founder of {}", "was founded by", "merchant"),
    "company.seat": Relation("company", "city", "the city in which {} is based", "is based in"),
    "company.year": _year("company", "was founded", 1840),
    "city.region": Relation("city", "region", "the region of {}", "lies in"),
    "city.mayor": Relation("city", "person", "the mayor of {}", "is governed by", "politician"),
    "city.river": Relation("city", "river", "the river of {}", "lies on"),
    "city.year": _year("city", "received its charter", 1100, 1800),
    "band.singer": Relation("band", "person", "the singer of {}", "is fronted by", "singer"),
    "band.origin": Relation("band", "city", "the home town of {}", "was formed in"),
    "band.year": _year("band", "was formed", 1955),
    "ship.builder": Relation("ship", "company", "the builder of {}", "was built by"),
    "ship.designer": Relation("ship", "person", "the designer of {}", "was designed by", "engineer"),
    "ship.port": Relation("ship", "city", "the home port of {}", "has its home port in"),
    "ship.year": _year("ship", "was launched", 1860),
    "mountain.region": Relation("mountain", "region", "the region of {}", "rises in"),
    "mountain.climber": Relation(
        "mountain", "person", "the first climber of {}", "was first climbed by", "mountaineer"
    ),
    "mountain.year": _year("mountain", "was first climbed", 1850, 1990),
    "museum.city": Relation("museum", "city", "the city of {}", "stands in"),
    "museum.architect": Relation("museum", "person", "the architect of {}", "was designed by", "architect"),
    "museum.year": _year("museum", "was opened", 1850),
    "university.city": Relation("university", "city", "the city of {}", "has its campus in"),
    "university.founder": Relation("university", "person", "the founder of {}", "was founded by", "scholar"),
    "university.year": _year("university", "was founded", 1400),
    "river.source": Relation("river", "mountain", "the mountain at the source of {}", "rises on"),
    "river.surveyor": Relation(
        "river", "person", "the first surveyor of {}", "was first surveyed by", "geographer"
    ),
    "region.capital": Relation("region", "city", "the capital of {}", "is governed from"),
    "region.governor": Relation("region", "person", "the governor of {}", "is led by", "politician"),
}
PROFESSIONS = {
    "novelist": 14, "painter": 10, "director": 10, "merchant": 12, "politician": 14, "singer": 8,
    "composer": 6, "translator": 6, "producer": 5, "engineer": 5, "architect": 4, "mountaineer": 3,
    "scholar": 3, "geographer": 2,
}  # fmt: skip
"""Profession -> its frequency."""
ABOUT = {
    "film": _words("comedy tragedy thriller romance western mystery drama fantasy"),
    "novel": _words("historical adventure detective family coming-of-age satirical war travel"),
    "album": _words("jazz folk rock soul blues disco country ambient"),
    "painting": _words("oil tempera pastel watercolour"),
    "company": _words("shipping steel publishing textile media glass trading machinery"),
    "city": _words("market harbour mining university spa border cathedral mill"),
    "band": _words("jazz folk rock soul blues disco country ambient"),
    "ship": _words("cargo passenger survey fishing training sailing"),
    "mountain": _words("granite limestone volcanic glaciated sandstone"),
    "museum": _words("art maritime history science folk"),
    "university": _words("public private technical Jesuit"),
    "river": _words("navigable mountain lowland tidal"),
    "region": _words("coastal alpine inland wooded northern southern"),
}
"""Kind -> first words of its short descriptions."""

GIVEN = _words(
    """Ada Albin Alma Anders Anka Arno Asta Aurel Bela Bernard Birgit Boris Bruna Carla Casper Celia
    Clemens Dagmar Dario Dina Doris Edgar Edith Egon Elena Elias Elsa Emil Erna Ewald Fabian Felix Flora
    Frida Gerda Gideon Greta Gustav Hanna Hector Hedda Helmut Hilda Hugo Ida Ignaz Ilse Ingrid Ivan
    Jadwiga Jana Jasper Joan Jonas Julia Kaspar Katja Klara Konrad Lars Laura Lena Leopold Lidia Linus
    Lotte Ludwig Magda Marek Marta Matthias Mila Milan Nadia Nils Nora Olaf Olga Oscar Otto Paula Pavel
    Petra Ralph Regina Robert Rosa Rufus Sabina Sandor Selma Sigrid Simon Sonja Stefan Tamara Tessa Theo
    Thora Tilda Tobias Ulla Ursula Valentin Vera Viktor Walter Wanda Wilma Xaver Yvonne Zelda"""
)
ADJECTIVES = _words(
    """Amber Bitter Brave Broken Burning Crimson Distant Empty Endless Fallen Final Forgotten Frozen Gentle
    Golden Hidden Hollow Hungry Iron Jealous Last Little Lonely Lost Lucky Marble Nameless Northern Open
    Pale Patient Paper Perfect Quiet Restless Rising Sacred Savage Scarlet Second Secret Shattered
    Silent Silver Sleeping Southern Stolen Stubborn Sudden Sunken Sweet Tender Thirsty Twisted Unknown
    Velvet Violet Wandering Winter Wooden"""
)
NOUNS = _words(
    """Anchor Angel Apple Arrow Autumn Bell Bird Bishop Blade Border Bread Bridge Brother Candle Castle
    Circus Clock Cloud Coast Crown Dancer Daughter Desert Door Dragon Dream Echo Empire Engine Falcon
    Farm Fever Field Fire Flower Forest Fountain Fox Garden Ghost Guest Harbour Harvest Heart Hill
    Horizon Horse Hunter Island Journey Key King Kitchen Lake Lantern Letter Library Lion Meadow Mirror
    Moon Mother Night Ocean Orchard Palace Piano Pilgrim Prince Promise Queen Rain Road Rose Sailor
    Season Shadow Sister Snow Song Sparrow Star Stone Storm Stranger Summer Thief Tiger Tower Traveller
    Valley Village Voyage Wall Window Wolf"""
)
ONSETS = _words("b br c d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w z")
VOWELS = _words("a e i o u ai ea io au")
CODAS = ["", "l", "m", "n", "r", "s", "th", "nd", "rt", "k"]
TRADES = _words("Line Works Press Mills Media Glass Trading Foundry Brothers Records Pictures House")
WORKS = ("film", "novel", "album", "painting", "ship")


class Thing(NamedTuple):
    """One thing, which has one page."""

    number: int
    kind: str
    name: str
    title: str
    """Title of its page: the name, with the kind if another thing has the same name."""
    about: str
    """A short description without facts."""


class World:
    """The things and their facts.

    Attributes:
        things: All things by number.
        of_kind: Kind -> the numbers of its things.
        facts: Name of a relation -> subject's number -> object's number, or year.
        inverse: Name of a relation -> object -> numbers of the subjects.
    """

    def __init__(self, seed: int = SEED) -> None:
        rng = random.Random(seed)
        self.of_kind: dict[str, range] = {}
        start = 0
        for kind, count in KINDS.items():
            self.of_kind[kind] = range(start, start + count)
            start += count
        professions = rng.choices(list(PROFESSIONS), list(PROFESSIONS.values()), k=KINDS["person"])
        self.things = _things(rng, self.of_kind, professions)
        self.workers: dict[str, list[int]] = {name: [] for name in PROFESSIONS}
        for number, profession in enumerate(professions):
            self.workers[profession].append(number)
        self.facts = {
            name: {
                subject: self._object(relation, subject, rng) for subject in self.of_kind[relation.subject]
            }
            for name, relation in RELATIONS.items()
        }
        for region, capital in self.facts["region.capital"].items():
            self.facts["city.region"][capital] = region
        self.inverse: dict[str, dict[int, list[int]]] = {name: {} for name in RELATIONS}
        for name, facts in self.facts.items():
            for subject, value in facts.items():
                self.inverse[name].setdefault(value, []).append(subject)

    def _object(self, relation: Relation, subject: int, rng: random.Random) -> int:
        if relation.object == YEAR:
            return rng.randint(relation.first, relation.last)
        if relation.subject == "region" and relation.object == "city":
            return self.of_kind["city"][subject - self.of_kind["region"].start]
        among = self.workers[relation.profession] if relation.profession else self.of_kind[relation.object]
        while (chosen := rng.choice(among)) == subject:
            pass
        return chosen

    def text_of(self, relation: str, value: int) -> str:
        """Return an object of a relation as text: its name, or the year."""
        return str(value) if RELATIONS[relation].object == YEAR else self.things[value].name


@cache
def world() -> World:
    """Return the world of this process."""
    return World()


def _things(rng: random.Random, of_kind: dict[str, range], professions: list[str]) -> list[Thing]:
    """Name the things. Names are unique within a kind, but things of different kinds often share one."""
    stems = _distinct(rng, 2_200, lambda: _word(rng).capitalize())
    surnames = [stem + rng.choice(("", "son", "er", "ski", "a", "mann")) for stem in rng.sample(stems, 450)]
    draw = {
        "person": lambda: f"{rng.choice(GIVEN)} {rng.choice(surnames)}",
        "company": lambda: f"{rng.choice(stems)} {rng.choice(TRADES)}",
        "city": lambda: rng.choice(stems),
        "band": lambda: f"The {rng.choice(ADJECTIVES)} {_plural(rng.choice(NOUNS))}",
        "mountain": lambda: f"Mount {rng.choice(stems)}",
        "museum": lambda: f"{rng.choice(stems)} Museum",
        "university": lambda: f"University of {rng.choice(stems)}",
        "river": lambda: f"River {rng.choice(stems)}",
        "region": lambda: rng.choice(stems),
    }
    names: list[str] = []
    for kind, numbers in of_kind.items():
        names += _distinct(rng, len(numbers), draw.get(kind, lambda: _work(rng)))
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    things = []
    for kind, numbers in of_kind.items():
        for number in numbers:
            name = names[number]
            about = professions[number] if kind == "person" else f"{rng.choice(ABOUT[kind])} {kind}"
            title = name if seen[name] == 1 else f"{name} ({kind})"
            things.append(Thing(number, kind, name, title, about))
    return things


def _work(rng: random.Random) -> str:
    form = rng.randrange(3)
    if form == 0:
        return f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if form == 1:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f"{rng.choice(NOUNS)} of the {rng.choice(NOUNS)}"


def _plural(noun: str) -> str:
    """Return the plural of one of ``NOUNS``."""
    if noun.endswith(("ief", "lf")):
        return f"{noun[:-1]}ves"
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "sh", "cho")) else "s")


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2)) + rng.choice(CODAS)


def _distinct(rng, count, draw):
    """Draw names until there are ``count`` different ones, and return them in random order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    names = list(found)
    rng.shuffle(names)
    return names
