"""The policy as functions: permissions, and the dates and amounts that customers must be told."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

from ..records import TODAY
from .flights import CANCELLED, LATE, SCHEDULED, key_of
from .records import MINUTE, NOW, free_bags, was_flown

FREE_HOURS = 24
"""Any booking can be cancelled within this many hours."""
BAG_DAYS = 3
"""Bags can be added until this many days before the first departure."""
LONG_DELAY = 180
"""Minimum delay for a compensation, in minutes."""
COMPENSATION = {CANCELLED: 120_00, LATE: 60_00}
"""Compensation in cents for each passenger, by the status of the leg."""
COVERED = ("illness", "death in the family")
"""Reasons for which an insured booking can be cancelled."""
_A_DAY_AGO = (NOW - timedelta(hours=FREE_HOURS)).strftime(MINUTE)


def is_new(booking: dict) -> bool:
    """Return True if a booking was made less than 24 hours ago."""
    return booking["booked_at"] > _A_DAY_AGO


def last_free_day(booking: dict) -> str:
    """Return the day on which the time for cancelling any booking ends."""
    return _moved(booking["booked_at"][:10], 1)


def last_bag_day(booking: dict) -> str:
    """Return the last day on which bags can be added."""
    return _moved(booking["legs"][0]["flights"][0]["date"], -BAG_DAYS)


def has_time_for_bags(booking: dict) -> bool:
    """Return True if bags can still be added."""
    return last_bag_day(booking) >= TODAY.isoformat()


def is_untouched(booking: dict) -> bool:
    """Return True if no leg has been flown."""
    return not any(was_flown(leg) for leg in booking["legs"])


def is_ahead(booking: dict) -> bool:
    """Return True if all legs are still to be flown."""
    return all(leg["status"] == SCHEDULED for leg in booking["legs"])


def was_called_off(booking: dict) -> bool:
    """Return True if the airline has cancelled a leg."""
    return any(leg["status"] == CANCELLED for leg in booking["legs"])


def can_cancel(booking: dict, reason: str) -> bool:
    """Return True if a booking can be cancelled for this reason."""
    allowed = is_new(booking) or booking["fare"] == "flex" or was_called_off(booking)
    return is_untouched(booking) and (allowed or (booking["insured"] and reason in COVERED))


def can_move(booking: dict, leg: dict) -> bool:
    """Return True if a leg can be moved to other flights."""
    return leg["status"] == CANCELLED or (leg["status"] == SCHEDULED and booking["fare"] == "flex")


def free_of(booking: dict, customer: dict, more: Mapping[str, int]) -> int:
    """Return the number of a booking's new bags that are free.

    Args:
        booking: The booking, before the bags are added.
        customer: The customer who made it.
        more: The new bags of each passenger, by the full name.
    """
    free = free_bags(customer["tier"], booking["cabin"])
    total = 0
    for passenger in booking["passengers"]:
        new = more.get(f"{passenger['name']['first']} {passenger['name']['last']}", 0)
        total += min(new, max(0, free - passenger["bags"]))
    return total


def delay_of(flights: Mapping[str, Any], leg: dict) -> int:
    """Return the delay of a leg in minutes."""
    return max(flights[key_of(flight)].get("delay_minutes", 0) for flight in leg["flights"])


def is_eligible(booking: dict, customer: dict) -> bool:
    """Return True if a booking is eligible for compensation."""
    return customer["tier"] != "basic" or booking["insured"]


def compensation(flights: Mapping[str, Any], booking: dict, leg: dict) -> int:
    """Return the compensation for a leg of an eligible booking, in cents: 0 for a short delay."""
    if leg["status"] == LATE and delay_of(flights, leg) < LONG_DELAY:
        return 0
    return COMPENSATION.get(leg["status"], 0) * len(booking["passengers"])


def _moved(day: str, days: int) -> str:
    return (date.fromisoformat(day) + timedelta(days=days)).isoformat()
