"""Draws the requests of the airline's customers."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from typing import Any

from agentrl_env import ToolError

from ..problem import Problems
from ..records import FIRST, LAST, TODAY, day
from .flights import AIRPORTS, CABINS, CANCELLED, FARES, LAST_DAY, LATE, SCHEDULED, journeys
from .problems import REASONS, AirlineProblem, cabin_price, change_price, find_journey, numbers
from .records import AIRLINE, FLIGHTS_BY_DAY, RIGHT_NAMES, full
from .rules import (
    COVERED,
    can_cancel,
    can_move,
    compensation,
    has_time_for_bags,
    is_ahead,
    is_eligible,
    is_new,
    is_untouched,
    was_called_off,
)
from .tools import AirlineTools

_SIMPLE = ("cancel", "no_cancel", "flights", "no_flights", "bags", "no_bags", "name")
_MORE = ("no_name", "cabin", "no_cabin", "credit", "no_credit")
KINDS = {1: _SIMPLE, 2: (*_SIMPLE, *_MORE), 3: (*_SIMPLE, *_MORE, "book")}
"""Kinds of request by level. The policy refuses those that start with ``no_``."""
LOOKUPS = ("find_", "get_", "search_")
"""Prefixes of the names of tools that change nothing."""
TRIES = 3
"""Number of draws of a kind of request before another kind is drawn."""
TIMES = ("10:00", "12:00", "14:00", "16:00")
Wish = dict[str, Any]


def problems(split: str, level: int) -> Problems:
    """Return the samples of "train" or "test" at a level."""
    every = enumerate(AIRLINE["customers"].items())
    return Problems(split, level, {n: name for n, (name, row) in every if _can_ask(row)}, draw)


def _can_ask(customer: dict) -> bool:
    """Return True if a customer has enough bookings for problems: three, with one far enough ahead."""
    clear = [booking for booking in _bookings(customer) if _is_clear(booking, customer)]
    return len(clear) >= 3 and any(is_ahead(booking) and not is_new(booking) for booking in clear)


def draw(customer_id: str, level: int, rng: random.Random) -> list[Wish] | None:
    """Return requests on different bookings, or None if the customer has no bookings for them."""
    customer = AIRLINE["customers"][customer_id]
    count = 1 if level < 3 else rng.randrange(2, 4)
    clear = [booking for booking in _bookings(customer) if _is_clear(booking, customer)]
    wishes: list[Wish] = []
    for kind in rng.sample(KINDS[level], len(KINDS[level])):
        if len(wishes) == count:
            break
        used = {wish.get("booking") for wish in wishes}
        free = [booking for booking in clear if booking["booking_id"] not in used]
        tries = (_draw(kind, free, customer, level, rng) for _ in range(TRIES))
        if (wish := next((wish for wish in tries if wish is not None), None)) is not None:
            wishes.append(wish)
    if len(wishes) < count or not _is_solvable(customer_id, level, wishes):
        return None
    return wishes


def _is_solvable(customer_id: str, level: int, wishes: list[Wish]) -> bool:
    """Return True if the tools accept the solution: seats and travel credit suffice for all requests."""
    data = {"level": level, "customer": customer_id, "requests": wishes, "style": 0, "by_name": False}
    desk = AirlineTools()
    desk.open_records()
    steps = [step for request in AirlineProblem(data).requests for step in request.steps]
    try:
        for step in steps:
            if step.kind == "call" and not step.text.startswith(LOOKUPS):
                getattr(desk, step.text)(**step.given)
    except ToolError:
        return False
    return True


def _bookings(customer: dict) -> list[dict]:
    return [AIRLINE["bookings"][name] for name in customer["bookings"]]


def _is_clear(booking: dict, customer: dict) -> bool:
    """Return True if no other leg or flight of the customer has the route or the day of this booking."""
    others = [leg for other in _bookings(customer) if other is not booking for leg in other["legs"]]
    parts = [part for leg in others for part in (leg, *leg["flights"])]
    routes = {(part["origin"], part["destination"]) for part in parts}
    days = {(leg["destination"], leg["flights"][0]["date"]) for leg in others}
    return all(
        (leg["origin"], leg["destination"]) not in routes
        and (leg["destination"], leg["flights"][0]["date"]) not in days
        for leg in booking["legs"]
    )


def _draw(kind: str, free: list[dict], customer: dict, level: int, rng: random.Random) -> Wish | None:
    """Return a request of a kind on one of the bookings, or None if none suits or the draw is ambiguous."""
    if kind == "book":
        return _draw_booking(customer, rng)
    suits, fill = RULES[kind]
    pairs = [
        (booking, leg)
        for booking in free
        for leg in (booking["legs"] if kind in BY_LEG else _named_legs(booking))
        if suits(booking, leg, customer)
    ]
    if not pairs:
        return None
    booking, leg = rng.choice(pairs)
    more = fill(kind, booking, leg, customer, level, rng)
    if more is None:
        return None
    return {"kind": kind, "booking": booking["booking_id"], "leg": leg["leg"], **more}


def _named_legs(booking: dict) -> list[dict]:
    """Return the leg by which the customer names a booking: the first that has not been flown."""
    return [leg for leg in booking["legs"] if leg["status"] in (SCHEDULED, CANCELLED)][:1]


def _is_bound(booking: dict) -> bool:
    """Return True if the flights of a booking cannot be changed any more."""
    return is_ahead(booking) and booking["fare"] == "light" and not is_new(booking)


def _is_ahead(booking: dict, leg: dict, customer: dict) -> bool:
    return is_ahead(booking)


def _can_be_cancelled(booking: dict, leg: dict, customer: dict) -> bool:
    return can_cancel(booking, COVERED[0])


def _cannot_be_cancelled(booking: dict, leg: dict, customer: dict) -> bool:
    if is_untouched(booking):
        return _is_bound(booking)
    return not was_called_off(booking)


def _can_be_moved(booking: dict, leg: dict, customer: dict) -> bool:
    ahead = leg["flights"][0]["date"] > TODAY.isoformat()
    whole = is_untouched(booking) or not was_called_off(booking)
    return ahead and whole and can_move(booking, leg)


def _cannot_be_moved(booking: dict, leg: dict, customer: dict) -> bool:
    return _is_bound(booking)


def _bags_can_be_added(booking: dict, leg: dict, customer: dict) -> bool:
    return is_ahead(booking) and has_time_for_bags(booking) and booking["booking_id"] not in RIGHT_NAMES


def _bags_cannot_be_added(booking: dict, leg: dict, customer: dict) -> bool:
    return is_ahead(booking) and not has_time_for_bags(booking) and booking["booking_id"] not in RIGHT_NAMES


def _is_misspelt(booking: dict, leg: dict, customer: dict) -> bool:
    return is_ahead(booking) and booking["booking_id"] in RIGHT_NAMES


def _is_compensated(booking: dict, leg: dict, customer: dict) -> bool:
    return is_eligible(booking, customer) and compensation(AIRLINE["flights"], booking, leg) > 0


def _is_not_compensated(booking: dict, leg: dict, customer: dict) -> bool:
    if is_eligible(booking, customer):
        return leg["status"] == LATE and compensation(AIRLINE["flights"], booking, leg) == 0
    return compensation(AIRLINE["flights"], booking, leg) > 0


def _fill_reason(kind, booking, leg, customer, level, rng) -> Wish | None:
    if was_called_off(booking):
        return {"reason": "flight cancelled"}
    usual = [reason for reason in REASONS if reason != "flight cancelled"]
    fitting = [reason for reason in usual if can_cancel(booking, reason) == (kind == "cancel")]
    return {"reason": rng.choice(fitting)} if fitting else None


def _fill_journey(kind, booking, leg, customer, level, rng) -> Wish | None:
    """Return other flights for a leg, on a day that keeps the order of the legs."""
    first, last = 1, LAST_DAY
    for other in booking["legs"]:
        number = _days_from_today(other["flights"][0]["date"])
        if other["leg"] < leg["leg"]:
            first = max(first, number + 1)
        if other["leg"] > leg["leg"]:
            last = min(last, number - 1)
    if first > last:
        return None
    wish = _draw_journey(leg, booking, day(rng.randrange(first, last + 1)), level, rng)
    if wish is None or (journey := find_journey(wish, leg, booking)) is None:
        return None
    same = numbers(journey) == numbers(leg["flights"])
    if (same and wish["date"] == leg["flights"][0]["date"]) or change_price(booking, leg, journey) == 0:
        return None
    return {"journey": wish, "payment": _draw_payment(customer, rng)}


def _draw_journey(leg: dict, terms: dict, date: str, level: int, rng: random.Random) -> Wish | None:
    """Return a wish for a journey: a flight, a departure, or at level 3 conditions."""
    if level == 3:
        return {
            "date": date,
            **rng.choice(
                (
                    {"stops": [0], "best": "cheapest"},
                    {"stops": [0, 1], "best": "cheapest", "after": rng.choice(TIMES)},
                    {"stops": [0, 1], "best": "cheapest", "before": rng.choice(TIMES[1:])},
                    {"stops": [0, 1], "best": "first", "few": True},
                )
            ),
        }
    stops = rng.randrange(2)
    found = journeys(FLIGHTS_BY_DAY[date], leg["origin"], leg["destination"], stops)
    if not found:
        return None
    chosen = rng.choice(found)
    wish = {"date": date, "stops": [stops]}
    if level == 1:
        return {**wish, "flights": numbers(chosen)}
    return {**wish, "departs": chosen[0]["departs"]}


def _fill_cabin(kind, booking, leg, customer, level, rng) -> Wish | None:
    """Return another cabin, at level 3 often with a price limit."""
    own = CABINS.index(booking["cabin"])
    higher = [cabin for cabin in CABINS[own + 1 :] if cabin_price(booking, cabin) > 0]
    lower = [cabin for cabin in CABINS[:own] if cabin_price(booking, cabin) < 0]
    wish = {"payment": _draw_payment(customer, rng)}
    if level == 3 and higher and rng.random() < 0.6:
        cabin = rng.choice(higher)
        tens = cabin_price(booking, cabin) // 1000
        limit = tens + rng.randrange(1, 5) if kind == "cabin" else tens - rng.randrange(1, 5)
        return {**wish, "cabin": cabin, "limit": f"{limit}0.00"} if limit > 0 else None
    if kind == "no_cabin":
        return {**wish, "cabin": rng.choice(lower)} if lower and _is_bound(booking) else None
    fitting = higher + (lower if booking["fare"] == "flex" else [])
    return {**wish, "cabin": rng.choice(fitting)} if fitting else None


def _fill_bags(kind, booking, leg, customer, level, rng) -> Wish | None:
    count = len(booking["passengers"])
    places = sorted(rng.sample(range(count), rng.randrange(1, count + 1)))
    bags = [[place, rng.randrange(1, 3)] for place in places]
    return {"bags": bags, "payment": _draw_payment(customer, rng)}


def _fill_name(kind, booking, leg, customer, level, rng) -> Wish | None:
    wrong = RIGHT_NAMES[booking["booking_id"]]
    passenger = next(p["name"] for p in booking["passengers"] if full(p["name"]) in wrong)
    return {"passenger": passenger, "new_name": wrong[full(passenger)]}


def _fill_person(kind, booking, leg, customer, level, rng) -> Wish | None:
    """Return a name that shares no part with the passengers."""
    taken = {part for passenger in booking["passengers"] for part in passenger["name"].values()}
    first = [name for name in FIRST if name not in taken]
    last = [name for name in LAST if name not in taken and name != customer["name"]["last"]]
    names = {full(passenger["name"]) for passenger in booking["passengers"]}
    right = names - RIGHT_NAMES.get(booking["booking_id"], {}).keys()
    fitting = [p["name"] for p in booking["passengers"] if full(p["name"]) in right]
    if not fitting:
        return None
    return {
        "passenger": rng.choice(fitting),
        "new_name": {"first": rng.choice(first), "last": rng.choice(last)},
    }


def _fill_nothing(kind, booking, leg, customer, level, rng) -> Wish | None:
    return {}


Suits = Callable[[dict, dict, dict], bool]
Fill = Callable[..., "Wish | None"]
BY_LEG = ("flights", "no_flights", "credit", "no_credit")
"""Kinds of request on one leg of a booking."""
RULES: dict[str, tuple[Suits, Fill]] = {
    "cancel": (_can_be_cancelled, _fill_reason),
    "no_cancel": (_cannot_be_cancelled, _fill_reason),
    "flights": (_can_be_moved, _fill_journey),
    "no_flights": (_cannot_be_moved, _fill_journey),
    "cabin": (_is_ahead, _fill_cabin),
    "no_cabin": (_is_ahead, _fill_cabin),
    "bags": (_bags_can_be_added, _fill_bags),
    "no_bags": (_bags_cannot_be_added, _fill_bags),
    "name": (_is_misspelt, _fill_name),
    "no_name": (_cannot_be_moved, _fill_person),
    "credit": (_is_compensated, _fill_nothing),
    "no_credit": (_is_not_compensated, _fill_nothing),
}


def _draw_booking(customer: dict, rng: random.Random) -> Wish | None:
    """Return a wish for a new booking, on a route that the customer has not booked."""
    origin, destination = rng.sample(AIRPORTS, 2)
    legs = [leg for booking in _bookings(customer) for leg in booking["legs"]]
    if (origin, destination) in {(leg["origin"], leg["destination"]) for leg in legs}:
        return None
    names = rng.sample([name for name in FIRST if name != customer["name"]["first"]], rng.randrange(3))
    people = [{"name": customer["name"], "born": customer["born"]}]
    for name in names:
        born = f"{rng.randrange(1955, 2020)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
        people.append({"name": {"first": name, "last": customer["name"]["last"]}, "born": born})
    terms = {"cabin": rng.choice(CABINS), "fare": rng.choice(FARES), "passengers": people}
    leg = {"origin": origin, "destination": destination}
    wish = _draw_journey(leg, terms, day(rng.randrange(1, LAST_DAY + 1)), 3, rng)
    if wish is None or find_journey(wish, leg, terms) is None:
        return None
    more = {"insurance": rng.random() < 0.5, "payment": _draw_payment(customer, rng)}
    return {"kind": "book", **leg, "journey": wish, **terms, **more}


def _draw_payment(customer: dict, rng: random.Random) -> str:
    return rng.choice(customer["payment_methods"])["kind"]


def _days_from_today(date: str) -> int:
    return (datetime.date.fromisoformat(date) - TODAY).days
