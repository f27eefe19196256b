"""Hidden specifications: a function over records. Each of its aspects has one of several options.

A specification is a domain (the words), and an option with its parameters for each aspect of the level. It
determines the partner's sentences, the reference code, and the inputs of the hidden tests.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from agentrl_env.dataset import stable_seed

NUM_SAMPLES = {"train": 5_000, "validation": 1_000, "test": 1_000}
SHARES = {"test": range(1), "validation": range(1, 2), "train": range(2, 10)}
"""Tenths of all specifications that belong to a split, by a hash of their choices."""
LEVELS = {
    1: ("filter", "output"),
    2: ("missing", "filter", "value", "output"),
    3: ("duplicates", "missing", "filter", "value", "order", "limit", "output"),
}
"""Level -> the aspects that the partner decides, in the order in which the function applies them."""
NUM_CASES = 40
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")


class Domain(NamedTuple):
    """The words of a specification. ``amount`` and ``number`` are whole numbers."""

    purpose: str
    function: str
    things: str
    label: str
    group: str
    groups: tuple[str, ...]
    amount: str
    number: str


DOMAINS = {
    domain.things: domain
    for domain in (
        Domain(
            "our sales report",
            "report_sales",
            "sales",
            "customer",
            "country",
            ("France", "Japan", "Kenya", "Peru"),
            "price",
            "items",
        ),
        Domain(
            "the payroll",
            "review_staff",
            "employees",
            "name",
            "department",
            ("design", "legal", "support", "research"),
            "bonus",
            "years",
        ),
        Domain(
            "the weather service",
            "check_readings",
            "readings",
            "sensor",
            "station",
            ("coast", "hill", "harbour", "forest"),
            "pressure",
            "gusts",
        ),
        Domain(
            "the airline",
            "list_flights",
            "flights",
            "pilot",
            "airport",
            ("Oslo", "Quito", "Lagos", "Hanoi"),
            "delay",
            "seats",
        ),
        Domain(
            "the library",
            "remind_loans",
            "loans",
            "reader",
            "branch",
            ("north", "south", "centre", "campus"),
            "fine",
            "weeks",
        ),
        Domain(
            "the courier",
            "plan_parcels",
            "parcels",
            "recipient",
            "zone",
            ("red", "green", "blue", "yellow"),
            "weight",
            "stops",
        ),
        Domain(
            "the help desk",
            "triage_tickets",
            "tickets",
            "owner",
            "team",
            ("web", "mobile", "billing", "network"),
            "cost",
            "replies",
        ),
        Domain(
            "the farm",
            "sum_harvest",
            "harvests",
            "picker",
            "field",
            ("east", "west", "upper", "lower"),
            "yield",
            "hours",
        ),
    )
}


class Option(NamedTuple):
    """One option of an aspect. In text and code, {names} are words of the domain and parameters."""

    text: str
    code: str
    parameters: Mapping[str, Sequence[Any]] = {}
    """Name -> its possible values. "groups" stands for the groups of the domain."""


_AMOUNT, _NUMBER = {"n": range(40, 161)}, {"n": range(5, 16)}
ASPECTS: dict[str, dict[str, Option]] = {
    "duplicates": {
        "first": Option(
            "If an id occurs more than once, only the first of its {things} counts. "
            "Apply this before anything else.",
            "seen = set()\nrows = [row for row in rows if not (row['id'] in seen or seen.add(row['id']))]",
        ),
        "last": Option(
            "If an id occurs more than once, only the last of its {things} counts, in its own position. "
            "Apply this before anything else.",
            "rows = [row for i, row in enumerate(rows) if row['id'] not in [r['id'] for r in rows[i + 1:]]]",
        ),
        "none": Option(
            "If an id occurs more than once, none of its {things} count. Apply this before anything else.",
            "ids = [row['id'] for row in rows]\nrows = [row for row in rows if ids.count(row['id']) == 1]",
        ),
    },
    "missing": {
        "skip": Option(
            "{things} whose {amount} is None are left out.",
            "rows = [row for row in rows if row['{amount}'] is not None]",
        ),
        "default": Option(
            "A {amount} of None counts as {n}, everywhere.",
            "rows = [{{**row, '{amount}': {n}}} if row['{amount}'] is None else row for row in rows]",
            {"n": range(5, 200, 5)},
        ),
    },
    "filter": {
        "amount above": Option(
            "Only {things} with a {amount} of more than {n} count.",
            "rows = [row for row in rows if row['{amount}'] > {n}]",
            _AMOUNT,
        ),
        "amount from": Option(
            "Only {things} with a {amount} of {n} or more count.",
            "rows = [row for row in rows if row['{amount}'] >= {n}]",
            _AMOUNT,
        ),
        "amount below": Option(
            "Only {things} with a {amount} of less than {n} count.",
            "rows = [row for row in rows if row['{amount}'] < {n}]",
            _AMOUNT,
        ),
        "amount to": Option(
            "Only {things} with a {amount} of {n} or less count.",
            "rows = [row for row in rows if row['{amount}'] <= {n}]",
            _AMOUNT,
        ),
        "number above": Option(
            "Only {things} with more than {n} {number} count.",
            "rows = [row for row in rows if row['{number}'] > {n}]",
            _NUMBER,
        ),
        "number below": Option(
            "Only {things} with fewer than {n} {number} count.",
            "rows = [row for row in rows if row['{number}'] < {n}]",
            _NUMBER,
        ),
        "group": Option(
            "Only {things} whose {group} is {g} and whose {number} are at least {n} count.",
            "rows = [row for row in rows if row['{group}'] == '{g}' and row['{number}'] >= {n}]",
            {"g": "groups", "n": range(3, 13)},
        ),
        "other groups": Option(
            "All {things} count, except those whose {group} is {g} and whose {number} exceed {n}.",
            "rows = [row for row in rows if row['{group}'] != '{g}' or row['{number}'] <= {n}]",
            {"g": "groups", "n": range(5, 15)},
        ),
    },
    "value": {
        "raise": Option(
            "Once it is clear which {things} count, raise each {amount} by {n} percent.",
            "rows = [{{**row, '{amount}': row['{amount}'] * (100 + {n}) / 100}} for row in rows]",
            {"n": range(2, 60)},
        ),
        "fee": Option(
            "Once it is clear which {things} count, subtract {n} from each {amount}, but stop at 0.",
            "rows = [{{**row, '{amount}': max(0, row['{amount}'] - {n})}} for row in rows]",
            {"n": range(10, 80)},
        ),
        "cap": Option(
            "Once it is clear which {things} count, lower each {amount} over {n} to {n}.",
            "rows = [{{**row, '{amount}': min({n}, row['{amount}'])}} for row in rows]",
            {"n": range(40, 160)},
        ),
        "extra": Option(
            "Once it is clear which {things} count, add {n} to each {amount} for each of its {number}.",
            "rows = [{{**row, '{amount}': row['{amount}'] + {n} * row['{number}']}} for row in rows]",
            {"n": range(2, 12)},
        ),
    },
    "order": {
        "amount": Option(
            "Sort them by the {amount} that results, the highest first; among equals, by id from the lowest.",
            "rows = sorted(rows, key=lambda row: (-row['{amount}'], row['id']))",
        ),
        "number": Option(
            "Sort them by {number}, the lowest first; among equals, by id from the highest.",
            "rows = sorted(rows, key=lambda row: (row['{number}'], -row['id']))",
        ),
        "label": Option(
            "Sort them by {label} in alphabetical order; among equals, by id from the lowest.",
            "rows = sorted(rows, key=lambda row: (row['{label}'], row['id']))",
        ),
    },
    "limit": {
        "first": Option(
            "After sorting, keep the first {n} and drop the rest.", "rows = rows[:{n}]", {"n": range(2, 6)}
        ),
        "skip": Option(
            "After sorting, drop the first {n} and keep the rest.", "rows = rows[{n}:]", {"n": range(2, 4)}
        ),
    },
    "output": {
        "labels": Option(
            "Return a list with the {label} of each.", "return [row['{label}'] for row in rows]"
        ),
        "ids": Option("Return a list of their ids.", "return [row['id'] for row in rows]"),
        "pairs": Option(
            "Return a list of pairs, each a list of the id and the {amount}.",
            "return [[row['id'], row['{amount}']] for row in rows]",
        ),
        "total": Option(
            "Return a list of two numbers: how many there are, and their total {amount}.",
            "return [len(rows), sum(row['{amount}'] for row in rows)]",
        ),
        "groups": Option(
            "Return a dict from each {group} that is left to its total {amount}.",
            "sums = {{}}\nfor row in rows:\n"
            "    sums[row['{group}']] = sums.get(row['{group}'], 0) + row['{amount}']\nreturn sums",
        ),
        "people": Option(
            "Return a dict from each {label} that is left to a list of the ids.",
            "found = {{}}\nfor row in rows:\n"
            "    found.setdefault(row['{label}'], []).append(row['id'])\nreturn found",
        ),
    },
}
"""Aspect -> option -> its words and its code."""
PLAIN_OUTPUTS = ("labels", "ids", "people")
"""Outputs without the amount. Only level 1 has them, because higher levels change the amount."""
DEFAULTS = {
    "duplicates": "No id occurs more than once.",
    "missing": "No value is ever missing.",
    "value": "Take each {amount} as it is.",
    "order": "Keep them in the order in which they come.",
    "limit": "There is no limit; keep all that count.",
}
"""Aspect -> the sentence about it if the level does not use it."""


class InvalidSpecification(ValueError):
    """A sample's data is not a valid specification. The message has the reason."""


class Specification:
    """The partner's specification.

    Attributes:
        level: Its level.
        domain: Its words.
        choices: Aspect -> name of the option and its parameters.
    """

    def __init__(self, level: int, things: str, choices: Mapping[str, Any]) -> None:
        if level not in LEVELS or things not in DOMAINS or set(choices) != set(LEVELS.get(level, ())):
            raise InvalidSpecification(
                f"level {level!r} of {things!r:.80} with {sorted(choices)!r:.200} is no specification: "
                f"levels are {', '.join(map(str, LEVELS))}, domains {', '.join(DOMAINS)}, and aspects those "
                "of the level"
            )
        self.level, self.domain = level, DOMAINS[things]
        self.choices = {aspect: self._valid(aspect, *choices[aspect]) for aspect in LEVELS[level]}

    def _valid(self, aspect: str, name: object, parameters: object = None) -> tuple[str, dict[str, Any]]:
        option = ASPECTS[aspect].get(str(name))
        given = dict(parameters) if isinstance(parameters, Mapping) else {}
        allowed = values_of(option, self.domain) if option else {}
        if option is None or given.keys() != allowed.keys() or any(
            type(given[key]) not in (int, str) or given[key] not in allowed[key] for key in allowed
        ):  # fmt: skip
            raise InvalidSpecification(f"{aspect} has no option {name!r:.80} with {given!r:.200}")
        return str(name), given

    def text(self, aspect: str) -> str:
        """Return the sentence that decides an aspect."""
        if aspect not in self.choices:
            return self._fill(DEFAULTS[aspect])
        name, parameters = self.choices[aspect]
        return self._fill(ASPECTS[aspect][name].text, **parameters)

    def reference(self) -> str:
        """Return Python code that implements the specification."""
        lines = ["rows = records"]
        for aspect, (name, parameters) in self.choices.items():
            lines += ASPECTS[aspect][name].code.format(**self.domain._asdict(), **parameters).split("\n")
        body = "\n".join(f"    {line}" for line in lines)
        return f"def {self.domain.function}(records):\n{body}\n"

    def privileged(self) -> dict[str, Any]:
        """Return the information for critics that is hidden from the agent."""
        return {
            "specification": {aspect: self.text(aspect) for aspect in self.choices},
            "reference": self.reference(),
        }

    def data(self) -> dict[str, Any]:
        """Return the specification as the data of a sample."""
        choices = {aspect: list(choice) for aspect, choice in self.choices.items()}
        return {
            "level": self.level,
            "domain": self.domain.things,
            "choices": choices,
            "privileged": self.privileged(),
        }

    def cases(self, seed: int) -> list[list[dict[str, Any]]]:
        """Draw inputs that distinguish options: values at bounds, ties, None, repeated ids."""
        rng, domain = random.Random(seed), self.domain
        bounds = [
            value for _, given in self.choices.values() for value in given.values() if value in range(999)
        ]
        near = [max(0, bound + shift) for bound in bounds for shift in (-1, 0, 1)]
        named = [
            value for _, given in self.choices.values() for value in given.values() if value in domain.groups
        ]
        groups = [*domain.groups, *(named * 4)]
        cases: list[list[dict[str, Any]]] = [[]]
        while len(cases) < NUM_CASES:
            ids = rng.sample(range(1, 100), 16)
            if "duplicates" in self.choices:
                ids = rng.choices(ids[:12], k=16)
            missing = 0.15 if "missing" in self.choices else 0.0
            cases.append(
                [
                    {
                        "id": number,
                        domain.label: rng.choice(NAMES),
                        domain.group: rng.choice(groups),
                        domain.amount: None
                        if rng.random() < missing
                        else rng.choice(near)
                        if rng.random() < 0.4
                        else rng.randint(0, 200),
                        domain.number: rng.choice(near) if rng.random() < 0.2 else rng.randint(0, 20),
                    }
                    for number in ids[: rng.randint(1, 16)]
                ]
            )
        return cases

    def expected(self, cases: list[list[dict[str, Any]]]) -> list[Any]:
        """Return the results of the reference. Its code consists only of parts of this module."""
        names: dict[str, Any] = {}
        exec(compile(self.reference(), "reference", "exec"), names)
        return [names[self.domain.function](case) for case in cases]

    def _fill(self, text: str, **parameters: Any) -> str:
        words = text.format(**self.domain._asdict(), **parameters)
        return words[:1].upper() + words[1:]


def values_of(option: Option, domain: Domain) -> dict[str, Sequence[Any]]:
    """Return the values that each parameter of an option can have."""
    return {
        name: domain.groups if values == "groups" else values for name, values in option.parameters.items()
    }


class Specifications:
    """The samples of a split and a level, drawn when the first one is read."""

    def __init__(self, split: str, level: int) -> None:
        self.split, self.level = split, level

    def __len__(self) -> int:
        return NUM_SAMPLES[self.split]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return Specification(self.level, *_drawn(self.split, self.level)[index]).data()


@cache
def _drawn(split: str, level: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(stable_seed("collab", split, level))
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    while len(found) < NUM_SAMPLES[split]:
        things = rng.choice(list(DOMAINS))
        choices = {aspect: _choose(level, aspect, DOMAINS[things], rng) for aspect in LEVELS[level]}
        meaning = stable_seed("collab", things, choices)
        if meaning % 10 in SHARES[split]:
            found.setdefault(meaning, (things, choices))
    return list(found.values())


def _choose(level: int, aspect: str, domain: Domain, rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice([one for one in ASPECTS[aspect] if level == 1 or one not in PLAIN_OUTPUTS])
    allowed = values_of(ASPECTS[aspect][name], domain)
    return name, {parameter: rng.choice(values) for parameter, values in allowed.items()}
