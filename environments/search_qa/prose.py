"""Writes the pages of the encyclopedia: varied sentences with the facts of a thing."""

from __future__ import annotations

import random
from collections.abc import Iterator

from agentrl_env.dataset import stable_seed

from .world import KINDS, RELATIONS, YEAR, Thing, World

MAX_MENTIONS = 4
"""Number of things that a page names because they have a fact about its thing."""
LEADS = {
    "person": (
        "{S} is {an_about}.",
        "{S} is known as {an_about}.",
        "{S}, {an_about}, has had a long career.",
    ),
    "work": ("{S} is {an_about}.", "{S} is the title of {an_about}.", "The {about} {s} is well remembered."),
    "place": (
        "{S} is {an_about}.",
        "{S} is the name of {an_about}.",
        "{S}, {an_about}, draws many visitors.",
    ),
}
SENTENCES = {
    "person.birthplace": (
        "{S} was born in {o}.",
        "The family came from {o}, where {s} was born.",
        "{o} is the place of birth.",
    ),
    "person.born": (
        "The year of birth is {o}.",
        "{S} was born in {o}.",
        "Records give {o} as the year of birth.",
    ),
    "person.university": (
        "{S} studied at the {o}.",
        "A degree from the {o} followed.",
        "Years at the {o} came next.",
    ),
    "person.mentor": (
        "{S} learned the craft from {o}.",
        "An early mentor was {o}.",
        "{S} often named {o} as a mentor.",
    ),
    "film.director": (
        "{o} directed {s}.",
        "{S} was directed by {o}.",
        "Behind the camera stood {o}, the director.",
    ),
    "film.composer": ("The music is by {o}.", "{o} composed the score.", "The score was composed by {o}."),
    "film.studio": (
        "It was produced by {o}.",
        "{o} was the production company.",
        "{o} produced it.",
    ),
    "film.location": (
        "It was shot in {o}.",
        "Most scenes were filmed in {o}.",
        "{o} served as the filming location.",
    ),
    "film.novel": (
        "The script is based on the novel {o}.",
        "{S} adapts the novel {o}.",
        "Its source is the novel {o}.",
    ),
    "film.year": (
        "It was released in {o}.",
        "Cinemas first showed it in {o}.",
        "{S} had its premiere in {o}.",
    ),
    "novel.author": ("{o} wrote {s}.", "It was written by {o}.", "Its author is {o}."),
    "novel.translator": (
        "The standard translation is by {o}.",
        "{o} translated it.",
        "It was translated by {o}, among others.",
    ),
    "novel.publisher": (
        "It was published by {o}.",
        "{o} is the publisher.",
        "The first edition came from {o}.",
    ),
    "novel.setting": (
        "The story is set in {o}.",
        "{S} takes place in {o}.",
        "Its setting is the city of {o}.",
    ),
    "novel.year": (
        "It was published in {o}.",
        "{S} first appeared in {o}.",
        "The year of publication is {o}.",
    ),
    "album.band": ("{o} recorded {s}.", "It was recorded by {o}.", "It is the work of the band {o}."),
    "album.producer": ("{o} produced it.", "The producer was {o}.", "{S} was produced by {o}."),
    "album.label": ("It was issued by {o}.", "{o} is the label.", "The label {o} brought it out."),
    "album.studio": (
        "The sessions took place in {o}.",
        "It was recorded in {o}.",
        "A studio in {o} was used.",
    ),
    "album.year": ("It came out in {o}.", "{S} was released in {o}.", "The year of release is {o}."),
    "painting.painter": ("{o} painted {s}.", "It was painted by {o}.", "It is the work of {o}."),
    "painting.museum": ("It hangs in the {o}.", "The {o} holds it.", "Today it belongs to the {o}."),
    "painting.subject": ("It shows {o}.", "The view is of {o}.", "{o} fills the background."),
    "painting.year": ("It was completed in {o}.", "It is dated {o}.", "The year of its completion is {o}."),
    "company.founder": ("{o} founded {s}.", "It was founded by {o}.", "Its founder was {o}."),
    "company.seat": ("It is based in {o}.", "The headquarters are in {o}.", "{S} has its seat in {o}."),
    "company.year": (
        "It was founded in {o}.",
        "Its founding dates from {o}.",
        "{S} has existed since {o}.",
    ),
    "city.region": (
        "It lies in the region of {o}.",
        "{S} belongs to the region of {o}.",
        "The region is {o}.",
    ),
    "city.mayor": ("The mayor is {o}.", "{o} is mayor.", "{S} is governed by {o}, its mayor."),
    "city.river": (
        "It lies on the {o}.",
        "The {o} flows through it.",
        "{S} grew up on the banks of the {o}.",
    ),
    "city.year": (
        "It received its charter in {o}.",
        "The charter dates from {o}.",
        "{S} has been a chartered city since {o}.",
    ),
    "band.singer": ("{o} is the singer.", "{S} is fronted by {o}.", "Its singer is {o}."),
    "band.origin": ("It was formed in {o}.", "Its members met in {o}, the home town.", "{S} comes from {o}."),
    "band.year": (
        "It was formed in {o}.",
        "{S} has played together since {o}.",
        "The year of formation is {o}.",
    ),
    "ship.builder": ("It was built by {o}.", "{o} built it.", "The builder was {o}."),
    "ship.designer": ("{o} designed {s}.", "The design is by {o}.", "It was designed by {o}."),
    "ship.port": ("Its home port is {o}.", "It sails from {o}, the home port.", "{S} is registered in {o}."),
    "ship.year": ("It was launched in {o}.", "{S} first took to the water in {o}.", "The launch was in {o}."),
    "mountain.region": ("It rises in {o}.", "{S} lies in the region of {o}.", "The region is {o}."),
    "mountain.climber": (
        "{o} was the first to climb it.",
        "The first ascent was made by {o}.",
        "It was first climbed by {o}.",
    ),
    "mountain.year": (
        "The first ascent was in {o}.",
        "It was first climbed in {o}.",
        "Climbers reached the top in {o}.",
    ),
    "museum.city": ("It stands in {o}.", "Visitors find it in {o}.", "{S} is a landmark of {o}."),
    "museum.architect": (
        "{o} was the architect.",
        "The building is by {o}.",
        "It was built to plans by {o}.",
    ),
    "museum.year": ("It was opened in {o}.", "{S} opened its doors in {o}.", "The opening was in {o}."),
    "university.city": (
        "The campus is in {o}.",
        "It is situated in {o}.",
        "Students live in {o}, around the campus.",
    ),
    "university.founder": ("{o} founded it.", "It was founded by {o}.", "Its founder was {o}."),
    "university.year": (
        "It was founded in {o}.",
        "Teaching began in {o}, the year of foundation.",
        "It dates from {o}.",
    ),
    "river.source": ("It rises on {o}.", "The source lies on {o}.", "Its springs are on the slopes of {o}."),
    "river.surveyor": (
        "{o} was the first to survey it.",
        "It was first surveyed by {o}.",
        "{o} drew the first map of it.",
    ),
    "region.capital": ("The capital is {o}.", "It is governed from {o}, the capital.", "{o} is its capital."),
    "region.governor": ("The governor is {o}.", "It is led by {o}.", "{o} has been elected governor."),
}
"""Relation -> sentences about a thing {s}, which may be "it", and the object {o}."""
MENTIONS = (
    "{other} {verb} {s}.",
    "Among others, {other} {verb} {s}.",
    "As is well known, {other} {verb} {s}.",
)
LIKE_NAMES = (
    "The name recalls {other}, but there is no connection.",
    "The name is easily confused with that of {other}.",
    "A similar name, that of {other}, has caused confusion.",
)
FILLERS = {
    "person": (
        "Letters of those years are lost.",
        "Friends describe a quiet person with a dry sense of humour.",
        "Several interviews survive.",
        "Later work has been judged less kindly.",
        "A short biography has been in print for years.",
        "Little is known about the early years.",
    ),
    "work": (
        "Critics were divided at first.",
        "It has kept a small but loyal audience.",
        "An anniversary was marked with a small exhibition.",
        "Its beginnings were troubled by a lack of money.",
        "Opinions about the ending differ.",
        "A later restoration brought out many details.",
    ),
    "place": (
        "The winters are mild and wet.",
        "A yearly fair draws people from far away.",
        "Old maps spell the name in several ways.",
        "Much was rebuilt after a great fire.",
        "Travellers praise the view from the south.",
        "A railway line reaches it from the coast.",
    ),
}
_PLACES = ("city", "mountain", "museum", "university", "river", "region")
STYLES = {kind: "person" if kind == "person" else "place" if kind in _PLACES else "work" for kind in KINDS}
"""Kind -> the sort of leads and fillers of its pages."""
_NAMED = ("person", "mountain", "museum", "university", "river")
"""Kinds with names that already say the kind."""


def named(thing: Thing) -> str:
    """Return the name of a thing within a sentence, with its kind if the name does not contain it."""
    if thing.kind in _NAMED:
        return _called(thing)
    return f"the {thing.kind} {'of ' * (thing.kind in ('city', 'region'))}{thing.name}"


def _called(thing: Thing) -> str:
    """Return the name of a thing within a sentence."""
    return f"the {thing.name}" if thing.kind in ("museum", "university", "river") else thing.name


def pages(world: World) -> Iterator[tuple[str, str, str]]:
    """Yield title, short description and text of every page."""
    alike: dict[str, list[Thing]] = {}
    for thing in world.things:
        alike.setdefault(thing.name.split()[-1], []).append(thing)
    told = {kind: [name for name in RELATIONS if name.startswith(f"{kind}.")] for kind in KINDS}
    heard = {
        kind: [name for name, relation in RELATIONS.items() if relation.object == kind] for kind in KINDS
    }
    for thing in world.things:
        like = alike[thing.name.split()[-1]]
        yield thing.title, thing.about, _text(world, thing, told[thing.kind], heard[thing.kind], like)


def _text(world: World, thing: Thing, told: list[str], heard: list[str], like: list[Thing]) -> str:
    rng = random.Random(stable_seed("search_qa", thing.number))
    style = STYLES[thing.kind]
    body = [_sentence(world, name, thing, rng) for name in told]
    mentions = [(name, other) for name in heard for other in world.inverse[name].get(thing.number, ())]
    for name, other in rng.sample(mentions, min(MAX_MENTIONS, len(mentions))):
        subject = world.things[other]
        words = {"other": named(subject), "verb": RELATIONS[name].verb, "s": _called(thing)}
        body.append(_capital(rng.choice(MENTIONS).format(**words)))
    others = [other for other in rng.sample(like, min(2, len(like))) if other.number != thing.number]
    body += [rng.choice(LIKE_NAMES).format(other=named(other)) for other in others]
    body += rng.sample(FILLERS[style], rng.randint(2, 4))
    rng.shuffle(body)
    vowel = thing.about[0] in "aeio"  # "u" is excluded because of "university"
    subject, article = _called(thing), "an" if vowel else "a"
    lead = rng.choice(LEADS[style]).format(
        s=subject, S=_capital(subject), about=thing.about, an_about=f"{article} {thing.about}"
    )
    cut = rng.randint(2, len(body) - 2)
    return f"{' '.join([lead, *body[:cut]])}\n\n{' '.join(body[cut:])}"


def _sentence(world: World, relation: str, thing: Thing, rng: random.Random) -> str:
    value = world.text_of(relation, world.facts[relation][thing.number])
    pronoun = thing.name.split()[-1] if thing.kind == "person" else "it"
    subject = rng.choice((_called(thing), pronoun))
    return rng.choice(SENTENCES[relation]).format(s=subject, S=_capital(subject), o=value)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


assert SENTENCES.keys() == RELATIONS.keys()
assert all(relation.noun for relation in RELATIONS.values() if relation.object != YEAR)
