"""The airline's flights: a timetable, the flights of each day, and journeys of several flights."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, Literal

from ..records import cents, day, money

Cabin = Literal["economy", "premium", "business"]
Fare = Literal["light", "flex"]
CABINS = ("economy", "premium", "business")
FARES = ("light", "flex")
AIRPORTS = ("Athens", "Dublin", "Helsinki", "Lisbon", "Oslo", "Prague", "Vienna", "Zurich")
HUBS = ("Prague", "Zurich")
DIRECT = {("Athens", "Vienna"), ("Dublin", "Lisbon"), ("Helsinki", "Oslo"), ("Dublin", "Oslo")}
"""Pairs of airports with direct flights, in addition to routes with a hub."""
SCHEDULED, FLOWN, LATE, CANCELLED = "scheduled", "flown", "flown late", "cancelled"
FIRST_DAY, LAST_DAY = -26, 32
"""Days of the timetable, from today. No flight departs today."""
STOPOVER = (45, 300)
"""Minimum and maximum number of minutes between two flights of a journey."""
DEPARTURES = {False: ((360, 600), (900, 1180)), True: ((360, 590), (630, 890), (920, 1180))}
"""Range of departure times in minutes of the day, on routes of a hub and on other routes."""
CAPACITY = {"economy": 40, "premium": 14, "business": 9}
LEVEL = {"economy": 1.0, "premium": 1.7, "business": 2.8}
"""Prices of the cabins, relative to each other."""

Journey = list[dict[str, Any]]
"""The flights of a journey in one direction: one, or two with a connection."""


def draw_flights(rng: random.Random) -> dict[str, dict]:
    """Return the flights of all days, by number and date."""
    timetable = [row for pair in combinations(AIRPORTS, 2) for row in _route(pair, rng)]
    flights = {}
    for number in range(FIRST_DAY, LAST_DAY + 1):
        for index, row in enumerate(timetable):
            if number != 0:
                flight = {"flight": f"K{101 + index}", "date": day(number), **_flight(number, row, rng)}
                flights[key_of(flight)] = flight
    return flights


def _route(pair: tuple[str, str], rng: random.Random) -> list[tuple[str, str, int, int]]:
    """Return origin, destination, departure and duration of the daily flights between two airports."""
    hub = not set(pair).isdisjoint(HUBS)
    if not hub and pair not in DIRECT:
        return []
    minutes = rng.randrange(65, 205, 5)
    return [
        (origin, destination, rng.randrange(*window, 5), minutes)
        for origin, destination in (pair, pair[::-1])
        for window in DEPARTURES[hub]
    ]


def _flight(number: int, row: tuple[str, str, int, int], rng: random.Random) -> dict:
    origin, destination, departs, minutes = row
    flight = {
        "origin": origin,
        "destination": destination,
        "departs": _clock(departs),
        "arrives": _clock(departs + minutes),
        "status": SCHEDULED,
    }
    chance = rng.random()
    if number > 0:
        cabins = {cabin: _prices(cabin, minutes, rng) for cabin in CABINS}
        return {**flight, "status": CANCELLED if chance < 0.1 else SCHEDULED, "cabins": cabins}
    if chance < 0.15:
        return {**flight, "status": CANCELLED}
    if chance < 0.75:
        return {**flight, "status": LATE, "delay_minutes": rng.randrange(25, 420, 5)}
    return {**flight, "status": FLOWN}


def _prices(cabin: Cabin, minutes: int, rng: random.Random) -> dict[str, Any]:
    """Return today's fares of a passenger in a cabin, and the remaining seats."""
    light = round((20 + minutes / 2) * LEVEL[cabin] * rng.uniform(0.75, 1.4)) * 100
    seats = 0 if rng.random() < 0.12 else rng.randrange(1, CAPACITY[cabin])
    return {"light": money(light), "flex": money(light + rng.randrange(2500, 7000, 50)), "seats": seats}


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def minutes_of(clock: str) -> int:
    """Return the minutes of a time since midnight."""
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def key_of(flight: Mapping[str, Any]) -> str:
    """Return the id of a flight in its table."""
    return f"{flight['flight']} {flight['date']}"


def connects(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return True if passengers can change from one flight to another."""
    low, high = STOPOVER
    same = first["destination"] == second["origin"] and first["date"] == second["date"]
    return same and low <= minutes_of(second["departs"]) - minutes_of(first["arrives"]) <= high


def journeys(flights: Iterable[dict], origin: str, destination: str, stops: int) -> list[Journey]:
    """Return the journeys of a day without cancelled flights, by departure: direct or with a connection.

    Args:
        flights: The flights of the day.
        origin: The first airport.
        destination: The last airport.
        stops: 0 for direct flights, 1 for journeys with one connection.
    """
    open_flights = [flight for flight in flights if flight["status"] == SCHEDULED]
    starts = [f for f in open_flights if f["origin"] == origin]
    ends = [f for f in open_flights if f["destination"] == destination]
    if stops == 0:
        found = [[flight] for flight in starts if flight["destination"] == destination]
    else:
        found = [[first, second] for first in starts for second in ends if connects(first, second)]
    return sorted(found, key=lambda journey: [flight["departs"] for flight in journey])


def fare_of(journey: Journey, cabin: str, fare: str) -> int:
    """Return today's fare of a passenger, in cents."""
    return sum(cents(flight["cabins"][cabin][fare]) for flight in journey)


def seats_of(journey: Journey, cabin: str) -> int:
    """Return the seats that are free on all flights of a journey."""
    return min(flight["cabins"][cabin]["seats"] for flight in journey)


def named(journey: Iterable[Any]) -> list[dict[str, str]]:
    """Return the numbers and dates of a journey's flights in the form of the tools."""
    return [{"flight": flight["flight"], "date": flight["date"]} for flight in journey]
