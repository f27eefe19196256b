"""Common parts of the records of all desks: people, money and dates."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import date, timedelta

TODAY = date(2026, 6, 15)
MAX_MESSAGE = 600
"""A customer reads messages of up to this many characters with care. Facts in longer ones do not count."""
FIRST = (
    "Ada", "Ben", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tara", "Umar", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
LAST = (
    "Abbott", "Berger", "Castro", "Dalton", "Eriksen", "Fischer", "Garner", "Hansen", "Ivanova", "Jordan",
    "Kaplan", "Lopez", "Moreau", "Novak", "Okafor", "Price", "Quigley", "Rossi", "Silva", "Tanaka",
)  # fmt: skip
STREETS = (
    "Oak Street", "Mill Lane", "Station Road", "Park Avenue", "Harbour Street", "Church Road", "River Walk",
    "Hill Road", "Garden Street", "Bridge Street", "Market Square", "Forest Lane",
)  # fmt: skip
CITIES = (
    "Ashford", "Brookfield", "Clayton", "Dunmore", "Eastwick", "Fairview", "Glenwood", "Hartley", "Kingsbury",
    "Lakeside",
)  # fmt: skip


def money(cents: int) -> str:
    """Return an amount in the form that the desks use."""
    return f"{cents // 100}.{cents % 100:02d}"


def cents(amount: str) -> int:
    """Return the cents of an amount."""
    return round(float(amount) * 100)


def day(number: int) -> str:
    """Return the date this many days after today, in the form that the desks use."""
    return (TODAY + timedelta(days=number)).isoformat()


def draw_name(number: int) -> dict[str, str]:
    """Return the name of a person by number. The first 500 names differ."""
    return {"first": FIRST[number % len(FIRST)], "last": LAST[number // len(FIRST) % len(LAST)]}


def draw_address(rng: random.Random) -> dict[str, str]:
    """Return an address."""
    return {
        "street": f"{rng.randrange(1, 180)} {rng.choice(STREETS)}",
        "city": rng.choice(CITIES),
        "postcode": f"{rng.randrange(10000, 99999)}",
    }


def written(address: Mapping[str, str]) -> str:
    """Return an address in one line."""
    return f"{address['street']}, {address['postcode']} {address['city']}"


def original(tables: Mapping[str, Mapping[str, dict]], key: str) -> dict | None:
    """Return a record as it was before the episode."""
    return next((table[key] for table in tables.values() if key in table), None)
