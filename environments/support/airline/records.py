"""The airline's records: customers and bookings, the same in every process."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta

from ..records import FIRST, TODAY, cents, day, draw_address, draw_name, money
from .flights import AIRPORTS, CANCELLED, FARES, FLOWN, LATE, SCHEDULED, Journey, draw_flights, journeys

NUM_CUSTOMERS = 500
SEED = 5
NOW = datetime(TODAY.year, TODAY.month, TODAY.day, 12)
MINUTE = "%Y-%m-%d %H:%M"
TIERS = ("basic", "silver", "gold")
CONFIRMED, CALLED_OFF = "confirmed", "cancelled"
"""The two statuses of a booking."""
BAG_PRICE, INSURANCE_PRICE, NAME_PRICE = 30_00, 15_00, 25_00
"""Prices in cents: of a bag on a leg, of a passenger's insurance, and of a corrected name."""
FREE_BAGS = {"economy": 0, "premium": 1, "business": 2}
MORE_FREE_BAGS = {"basic": 0, "silver": 1, "gold": 2}
"""Free bags of a passenger, by the cabin and by the tier of the customer. Both numbers are added."""
CARDS = ("credit card", "debit card")
CREDIT = "travel credit"


def free_bags(tier: str, cabin: str) -> int:
    """Return the free bags of each passenger of a booking."""
    return FREE_BAGS[cabin] + MORE_FREE_BAGS[tier]


def full(name: dict[str, str]) -> str:
    """Return a name as text."""
    return f"{name['first']} {name['last']}"


def was_flown(leg: dict) -> bool:
    """Return True if a leg is over, late or not."""
    return leg["status"] in (FLOWN, LATE)


class _Tables:
    """Draws the tables, one customer after another."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.flights = draw_flights(rng)
        self.customers: dict[str, dict] = {}
        self.bookings: dict[str, dict] = {}
        self.right_names: dict[str, dict[str, dict[str, str]]] = {}
        self.by_day: dict[str, list[dict]] = {}
        for flight in self.flights.values():
            self.by_day.setdefault(flight["date"], []).append(flight)
        for number in range(NUM_CUSTOMERS):
            customer = self._customer(number)
            self.customers[customer["customer_id"]] = customer
            for _ in range(rng.randrange(4, 7)):
                booking = self._booking(f"B{20_000 + len(self.bookings)}", customer)
                self.bookings[booking["booking_id"]] = booking
                customer["bookings"].append(booking["booking_id"])

    def _customer(self, number: int) -> dict:
        rng, name = self.rng, draw_name(number)
        kinds = [*rng.sample(CARDS, rng.randrange(1, 3)), CREDIT]
        methods = [{"payment_id": f"{kind[:2]}-{rng.randrange(1000, 9999)}", "kind": kind} for kind in kinds]
        methods[-1].update(
            payment_id=f"tc-{rng.randrange(1000, 9999)}", balance=money(rng.randrange(90) * 500)
        )
        return {
            "customer_id": f"T{1000 + number}",
            "name": name,
            "born": _birthday(rng, 1950, 2005),
            "email": f"{name['first']}.{name['last']}{rng.randrange(10, 99)}@example.com".lower(),
            "address": draw_address(rng),
            "tier": rng.choices(TIERS, (5, 3, 2))[0],
            "payment_methods": methods,
            "bookings": [],
        }

    def _booking(self, booking_id: str, customer: dict) -> dict:
        rng = self.rng
        days = self._days()
        legs = self._legs(days)
        booked = self._booked(days[0])
        cabin = rng.choices(tuple(FREE_BAGS), (5, 4, 3))[0]
        passengers = self._passengers(customer)
        insured = rng.random() < 0.35
        free = free_bags(customer["tier"], cabin)
        over = sum(max(0, passenger["bags"] - free) for passenger in passengers) * len(legs)
        for leg in legs:
            leg["paid"] = money(rng.randrange(35, 210) * 100 * (1 + FREE_BAGS[cabin]))
        prices = {
            "fares": money(sum(cents(leg["paid"]) for leg in legs) * len(passengers)),
            "bags": money(over * BAG_PRICE),
            "insurance": money(INSURANCE_PRICE * len(passengers) * insured),
        }
        method = rng.choice(customer["payment_methods"])["payment_id"]
        if days[0] > 0 and rng.random() < 0.3:
            self.right_names[booking_id] = _misspell(passengers, rng)
        return {
            "booking_id": booking_id,
            "customer_id": customer["customer_id"],
            "status": CONFIRMED,
            "booked_at": booked.strftime(MINUTE),
            "cabin": cabin,
            "fare": rng.choice(FARES),
            "insured": insured,
            "passengers": passengers,
            "legs": legs,
            "prices": prices,
            "payment_id": method,
            "payments": {method: money(sum(map(cents, prices.values())))},
        }

    def _days(self) -> list[int]:
        """Return the days of one or two legs, counted from today, but never today itself."""
        rng = self.rng
        first = rng.choices((rng.randrange(-20, 0), rng.randrange(1, 3), rng.randrange(4, 24)), (6, 3, 9))[0]
        second = first + rng.randrange(2, 8)
        return [first, second + (second == 0)][: rng.randrange(1, 3)]

    def _legs(self, days: list[int]) -> list[dict]:
        """Return legs there and back. Past legs are direct, and were flown if there are two."""
        origin, destination = self.rng.sample(AIRPORTS, 2)
        legs = []
        for number, when in enumerate(days, start=1):
            found = self._flights(origin, destination, when)
            if not found or (when < 0 and len(days) == 2 and found[0]["status"] == CANCELLED):
                return self._legs(days)
            cancelled = any(flight["status"] == CANCELLED for flight in found)
            legs.append(new_leg(number, found, CANCELLED if cancelled else found[0]["status"]))
            origin, destination = destination, origin
        return legs

    def _flights(self, origin: str, destination: str, when: int) -> Journey | None:
        """Return flights of a day, cancelled or not, or None if there are none."""
        flights = self.by_day[day(when)]
        direct = [[f] for f in flights if (f["origin"], f["destination"]) == (origin, destination)]
        found = direct or (when > 0 and journeys(flights, origin, destination, 1))
        return self.rng.choice(found) if found else None

    def _booked(self, first: int) -> datetime:
        """Return the time of a booking. A fifth of bookings with future legs are from the last two days."""
        rng = self.rng
        if first > 0 and rng.random() < 0.25:
            hours = rng.choice((rng.randrange(2, 23), rng.randrange(25, 47)))
            return NOW - timedelta(hours=hours, minutes=rng.randrange(60))
        return NOW + timedelta(days=min(first, 0) - rng.randrange(4, 60), minutes=rng.randrange(-300, 500))

    def _passengers(self, customer: dict) -> list[dict]:
        rng, (first, last) = self.rng, customer["name"].values()
        others = rng.sample([name for name in FIRST if name != first], rng.choices((0, 1, 2), (4, 4, 2))[0])
        people = [(first, customer["born"]), *((name, _birthday(rng, 1955, 2020)) for name in others)]
        return [
            {
                "name": {"first": name, "last": last},
                "born": born,
                "bags": rng.choices((0, 1, 2), (4, 4, 1))[0],
            }
            for name, born in people
        ]


def new_leg(number: int, journey: Journey, status: str = SCHEDULED) -> dict:
    """Return a leg of a booking, without its fare."""
    parts = ("flight", "origin", "destination", "date", "departs", "arrives")
    return {
        "leg": number,
        "origin": journey[0]["origin"],
        "destination": journey[-1]["destination"],
        "status": status,
        "flights": [{part: flight[part] for part in parts} for flight in journey],
    }


def _birthday(rng: random.Random, start: int, end: int) -> str:
    return f"{rng.randrange(start, end)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


def _misspell(passengers: list[dict], rng: random.Random) -> dict[str, dict[str, str]]:
    """Misspell the name of a passenger. Return the right name by the wrong name."""
    passenger = rng.choice(passengers)
    right = passenger["name"]
    part = rng.choice(("first", "last"))
    slips: list[Callable[[str, int], str]] = [
        lambda word, at: word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        lambda word, at: word[:at] + word[at] + word[at:],
        lambda word, at: word[:at] + word[at + 1 :],
    ]
    slip, word = rng.choice(slips), right[part]
    places = rng.sample(range(1, len(word) - 1), len(word) - 2)
    wrong = next(made for at in places if (made := slip(word, at)) not in (word, *FIRST))
    passenger["name"] = {**right, part: wrong}
    return {full(passenger["name"]): right}


_DRAWN = _Tables(random.Random(SEED))
AIRLINE = {"flights": _DRAWN.flights, "customers": _DRAWN.customers, "bookings": _DRAWN.bookings}
"""The tables ``flights``, ``customers`` and ``bookings``. No episode changes them."""
FLIGHTS_BY_DAY = _DRAWN.by_day
RIGHT_NAMES = _DRAWN.right_names
"""The right names of misspelt passengers, by booking and by the name in the booking."""
