"""The tools of the airline's support desk, and the changes that they make."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any, ClassVar, Literal

from typing_extensions import TypedDict

from agentrl_env import ToolError, tool

from ..records import cents, money
from ..tools import DeskTools, Name
from .flights import (
    AIRPORTS,
    CANCELLED,
    SCHEDULED,
    Cabin,
    Fare,
    Journey,
    connects,
    fare_of,
    journeys,
    key_of,
    named,
    seats_of,
)
from .records import (
    AIRLINE,
    BAG_PRICE,
    CALLED_OFF,
    CONFIRMED,
    CREDIT,
    FLIGHTS_BY_DAY,
    INSURANCE_PRICE,
    MINUTE,
    NAME_PRICE,
    NOW,
    full,
    new_leg,
    was_flown,
)

Reason = Literal[
    "plans changed",
    "illness",
    "death in the family",
    "booked by mistake",
    "found cheaper",
    "flight cancelled",
]
NEW_BOOKINGS = 90_001
"""The number of the first booking of an episode."""
MOST_CREDIT = 1000
"""The most that a compensation can be."""


class FlightOnDay(TypedDict):
    """A flight: its number and its date, such as "K107" and "2026-06-20"."""

    flight: str
    date: str


class Traveller(TypedDict):
    """A passenger of a new booking, and the date of birth."""

    name: Name
    born: str


class MoreBags(TypedDict):
    """A passenger of a booking, and how many bags are added."""

    passenger: Name
    bags: int


class AirlineTools(DeskTools):
    """The tools of the desk."""

    tables = AIRLINE
    flights_by_day: ClassVar[dict[str, list[dict]]] = FLIGHTS_BY_DAY

    @tool
    def get_customer(self, customer_id: str):
        """Return a customer: name, date of birth, address, tier, payment methods and ids of the bookings.

        Args:
            customer_id: The id, such as "T1007".
        """
        return self._answer("get_customer", {"customer_id": customer_id}, self._customer(customer_id))

    @tool
    def get_booking(self, booking_id: str):
        """Return a booking: time, cabin, fare, insurance, passengers with their bags, legs and prices.

        "paid" is the fare of a passenger on a leg. "prices" are those of the whole booking.

        Args:
            booking_id: The id, such as "B20007".
        """
        return self._answer("get_booking", {"booking_id": booking_id}, self._booking(booking_id))

    @tool
    def get_flight(self, flight: FlightOnDay):
        """Return a flight: times, status, delay, and for each cabin today's fares and the seats left.

        Args:
            flight: The number and the date of the flight.
        """
        return self._answer("get_flight", {"flight": dict(flight)}, self._flight(flight))

    @tool
    def search_flights(self, origin: str, destination: str, date: str, cabin: Cabin, connection: bool):
        """Find journeys that are not cancelled, with today's fares of a passenger and the seats left.

        Args:
            origin: The city of departure.
            destination: The city of arrival.
            date: The day, such as "2026-06-20".
            cabin: The cabin.
            connection: True for journeys with one connection, False for direct flights.
        """
        places = {name.lower(): name for name in AIRPORTS}
        start, end = (places.get(name.strip().lower(), "") for name in (origin, destination))
        if not start or not end:
            raise ToolError(f"The airline flies only to {', '.join(AIRPORTS)}.")
        found = [
            {
                "flights": [{k: v for k, v in f.items() if k not in ("cabins", "status")} for f in journey],
                "light": money(fare_of(journey, cabin, "light")),
                "flex": money(fare_of(journey, cabin, "flex")),
                "seats": seats_of(journey, cabin),
            }
            for journey in journeys(self.flights_by_day.get(date.strip(), ()), start, end, int(connection))
            if "cabins" in journey[0]
        ]
        given = {"origin": origin, "destination": destination, "date": date, "cabin": cabin}
        return self._answer("search_flights", {**given, "connection": connection}, found)

    @tool
    def book_flights(
        self,
        customer_id: str,
        flights: list[FlightOnDay],
        cabin: Cabin,
        fare: Fare,
        passengers: list[Traveller],
        insurance: bool,
        payment_id: str,
    ):
        """Book a journey in one direction. Bags can be added afterwards.

        Args:
            customer_id: The customer who books.
            flights: The flight, or the two flights of a journey with a connection, in their order.
            cabin: The cabin.
            fare: The kind of the fare.
            passengers: All who travel, the customer too if it is one of them.
            insurance: Whether the passengers are insured.
            payment_id: The payment method.
        """
        customer = copy.deepcopy(self._customer(customer_id))
        names = sorted({full(dict(row["name"])) for row in passengers})
        if not passengers or len(names) < len(passengers):
            raise ToolError("Name each passenger once.")
        if any(not re.fullmatch(r"\d{4}-\d\d-\d\d", row["born"]) for row in passengers):
            raise ToolError("Give dates of birth like 1985-03-28.")
        journey = self._journey(flights, cabin, len(passengers))
        price = fare_of(journey, cabin, fare)
        prices = {
            "fares": money(price * len(passengers)),
            "bags": money(0),
            "insurance": money(INSURANCE_PRICE * len(passengers) * insurance),
        }
        made = sum(
            "booking_id" in row and key not in self.tables["bookings"] for key, row in self.changes.items()
        )
        booking: dict[str, Any] = {
            "booking_id": f"B{NEW_BOOKINGS + made}",
            "customer_id": customer_id,
            "status": CONFIRMED,
            "booked_at": NOW.strftime(MINUTE),
            "cabin": cabin,
            "fare": fare,
            "insured": insurance,
            "passengers": sorted(
                ({"name": dict(row["name"]), "born": row["born"], "bags": 0} for row in passengers),
                key=lambda row: full(row["name"]),
            ),
            "legs": [{**new_leg(1, journey), "paid": money(price)}],
            "prices": prices,
            "payment_id": payment_id,
            "payments": {},
        }
        customer["bookings"].append(booking["booking_id"])
        self._pay(booking, customer, payment_id, sum(map(cents, prices.values())))
        given = {
            "customer_id": customer_id,
            "flights": named(flights),
            "cabin": cabin,
            "fare": fare,
            "passengers": [{"name": dict(row["name"]), "born": row["born"]} for row in passengers],
            "insurance": insurance,
            "payment_id": payment_id,
        }
        return self._saved("book_flights", given, booking, customer)

    @tool
    def change_flights(
        self, booking_id: str, leg: int, flights: list[FlightOnDay], payment_id: str, waive_difference: bool
    ):
        """Move a leg of a booking to other flights. The answer has the difference in price.

        Args:
            booking_id: The id of the booking.
            leg: The number of the leg.
            flights: The new flight, or the two flights of a journey with a connection, in their order.
            payment_id: The payment method that pays or receives the difference between today's fare and the
                fare that was paid.
            waive_difference: Whether the customer neither pays nor receives a difference.
        """
        booking, customer = self._edited(booking_id)
        rows, people = booking["legs"], len(booking["passengers"])
        old = next((row for row in rows if row["leg"] == leg), None)
        if old is None or was_flown(old):
            raise ToolError(f"Booking {booking_id} has no leg {leg} that is still to be flown.")
        journey = self._journey(flights, booking["cabin"], people)
        new = new_leg(leg, journey)
        if (new["origin"], new["destination"]) != (old["origin"], old["destination"]):
            raise ToolError(f"Leg {leg} goes from {old['origin']} to {old['destination']}.")
        if named(new["flights"]) == named(old["flights"]):
            raise ToolError("The booking has these flights already.")
        rows[leg - 1] = new
        if any(_end(one) >= _start(two) for one, two in pairwise(rows)):
            raise ToolError("The legs of the booking would overlap.")
        fare = fare_of(journey, booking["cabin"], booking["fare"])
        difference = 0 if waive_difference else (fare - cents(old["paid"])) * people
        new["paid"] = old["paid"] if waive_difference else money(fare)
        self._charge(booking, customer, payment_id, "fares", difference)
        given = {
            "booking_id": booking_id,
            "leg": leg,
            "flights": named(flights),
            "payment_id": payment_id,
            "waive_difference": waive_difference,
        }
        return self._saved("change_flights", given, booking, customer, difference=_signed(difference))

    @tool
    def change_cabin(self, booking_id: str, cabin: Cabin, payment_id: str):
        """Move all passengers to another cabin on all legs. The answer has the difference in price.

        Args:
            booking_id: The id of the booking.
            cabin: The new cabin.
            payment_id: The payment method that pays or receives the difference between today's fares and the
                fares that were paid.
        """
        booking, customer = self._edited(booking_id)
        people, difference = len(booking["passengers"]), 0
        if booking["cabin"] == cabin:
            raise ToolError(f"The booking is in {cabin} already.")
        for leg in booking["legs"]:
            if leg["status"] != SCHEDULED:
                raise ToolError(f"Leg {leg['leg']} is not {SCHEDULED} but {leg['status']}.")
            fare = fare_of(self._journey(leg["flights"], cabin, people), cabin, booking["fare"])
            difference += (fare - cents(leg["paid"])) * people
            leg["paid"] = money(fare)
        booking["cabin"] = cabin
        self._charge(booking, customer, payment_id, "fares", difference)
        given = {"booking_id": booking_id, "cabin": cabin, "payment_id": payment_id}
        return self._saved("change_cabin", given, booking, customer, difference=_signed(difference))

    @tool
    def add_bags(self, booking_id: str, bags: list[MoreBags], free: int, payment_id: str):
        """Add bags to a booking, on all its legs. The answer has the price of those that are not free.

        Args:
            booking_id: The id of the booking.
            bags: The passengers who take more bags, and how many more.
            free: How many of the new bags are free.
            payment_id: The payment method that pays.
        """
        booking, customer = self._edited(booking_id)
        total = sum(row["bags"] for row in bags)
        if any(row["bags"] < 1 for row in bags) or not 0 <= free <= total or not 1 <= total <= 20:
            raise ToolError("Add one to twenty bags, of which none to all are free.")
        for row in bags:
            self._passenger(booking, row["passenger"])["bags"] += row["bags"]
        price = (total - free) * BAG_PRICE * len(booking["legs"])
        self._charge(booking, customer, payment_id, "bags", price)
        rows = [{"passenger": dict(row["passenger"]), "bags": row["bags"]} for row in bags]
        given = {"booking_id": booking_id, "bags": rows, "free": free, "payment_id": payment_id}
        return self._saved("add_bags", given, booking, customer, price=money(price))

    @tool
    def change_passenger(self, booking_id: str, passenger: Name, new_name: Name, free: bool):
        """Change the name of a passenger. If it is not free, the payment method of the booking pays.

        Args:
            booking_id: The id of the booking.
            passenger: The name as it is in the booking.
            new_name: The new name.
            free: Whether the customer pays nothing for it.
        """
        booking, customer = self._edited(booking_id)
        row = self._passenger(booking, passenger)
        row["name"] = {part: text.strip() for part, text in new_name.items()}
        price = 0 if free else NAME_PRICE
        booking["prices"]["names"] = money(cents(booking["prices"].get("names", "0")) + price)
        self._pay(booking, customer, booking["payment_id"], price)
        names = {"passenger": dict(passenger), "new_name": dict(new_name)}
        given = {"booking_id": booking_id, **names, "free": free}
        return self._saved("change_passenger", given, booking, customer, price=money(price))

    @tool
    def cancel_booking(self, booking_id: str, reason: Reason, refund_insurance: bool):
        """Cancel a booking. The payment method of the booking gets the refund. The answer has its amount.

        Fares of legs that have not been flown and bags are always part of the refund.

        Args:
            booking_id: The id of the booking.
            reason: The customer's reason.
            refund_insurance: Whether the price of the insurance is part of the refund.
        """
        booking, customer = self._edited(booking_id)
        legs = [leg for leg in booking["legs"] if not was_flown(leg)]
        refund = sum(cents(leg["paid"]) for leg in legs) * len(booking["passengers"])
        refund += cents(booking["prices"]["bags"])
        refund += cents(booking["prices"]["insurance"]) * refund_insurance
        booking.update(status=CALLED_OFF, reason=reason)
        self._pay(booking, customer, booking["payment_id"], -refund)
        given = {"booking_id": booking_id, "reason": reason, "refund_insurance": refund_insurance}
        return self._saved("cancel_booking", given, booking, customer, refund=money(refund))

    @tool
    def give_compensation(self, booking_id: str, leg: int, amount: float):
        """Add an amount to the customer's travel credit, as compensation for a leg of a booking.

        Args:
            booking_id: The id of the booking.
            leg: The number of the leg that was cancelled or late.
            amount: The amount for all passengers.
        """
        booking, customer = self._edited(booking_id)
        row = next((row for row in booking["legs"] if row["leg"] == leg), None)
        if row is None or (row["status"] != CANCELLED and not was_flown(row)):
            raise ToolError(f"Booking {booking_id} has no leg {leg} that was cancelled or late.")
        if "compensation" in row:
            raise ToolError("The customer has been compensated for this leg.")
        if not 0 < amount <= MOST_CREDIT:
            raise ToolError(f"A compensation is above 0 and at most {MOST_CREDIT}.")
        row["compensation"] = money(round(amount * 100))
        _credit(customer)["balance"] = money(cents(_credit(customer)["balance"]) + round(amount * 100))
        given = {"booking_id": booking_id, "leg": leg, "amount": amount}
        return self._saved("give_compensation", given, booking, customer)

    def _booking(self, booking_id: str) -> dict:
        return self._existing("bookings", booking_id)

    def _flight(self, flight: FlightOnDay) -> dict:
        if (row := self.tables["flights"].get(key_of(flight))) is None:
            raise ToolError(f"There is no flight {flight['flight']} on {flight['date']}.")
        return row

    def _edited(self, booking_id: str) -> tuple[dict, dict]:
        """Return copies of a booking and its customer. Raises ToolError if the booking has been cancelled."""
        booking = self._booking(booking_id)
        if booking["status"] != CONFIRMED:
            raise ToolError(f"Booking {booking_id} is not {CONFIRMED} but {booking['status']}.")
        return copy.deepcopy(booking), copy.deepcopy(self._customer(booking["customer_id"]))

    def _passenger(self, booking: dict, name: Name) -> dict:
        for passenger in booking["passengers"]:
            if full(passenger["name"]).lower() == full(dict(name)).strip().lower():
                return passenger
        own = ", ".join(full(passenger["name"]) for passenger in booking["passengers"])
        raise ToolError(f"The booking has no passenger {full(dict(name))}, but {own}.")

    def _journey(self, flights: list[FlightOnDay], cabin: str, passengers: int) -> Journey:
        """Return the flights of a journey. Raises ToolError if they do not connect or have no seats."""
        journey = [self._flight(flight) for flight in flights]
        if not 1 <= len(journey) <= 2:
            raise ToolError("A journey has one flight, or two with a connection.")
        for flight in journey:
            if "cabins" not in flight or flight["status"] != SCHEDULED:
                raise ToolError(f"Flight {key_of(flight)} is not on sale.")
        if len(journey) == 2 and not connects(*journey):
            raise ToolError("These flights do not connect.")
        if (seats := seats_of(journey, cabin)) < passengers:
            raise ToolError(f"There are {seats} seats left in {cabin}.")
        return journey

    def _charge(self, booking: dict, customer: dict, payment_id: str, what: str, amount: int) -> None:
        """Add an amount to a price of a booking, and let the customer pay it."""
        booking["prices"][what] = money(cents(booking["prices"][what]) + amount)
        self._pay(booking, customer, payment_id, amount)

    def _pay(self, booking: dict, customer: dict, payment_id: str, amount: int) -> None:
        """Let a payment method pay an amount, or receive it if it is negative."""
        methods = {method["payment_id"]: method for method in customer["payment_methods"]}
        if (method := methods.get(payment_id)) is None:
            raise ToolError(f"The customer has no payment method {payment_id}, but {', '.join(methods)}.")
        if "balance" in method:
            if (balance := cents(method["balance"])) < amount:
                raise ToolError(f"The balance of {payment_id} does not cover {money(amount)}.")
            method["balance"] = money(balance - amount)
        if amount:
            paid = cents(booking["payments"].get(payment_id, "0")) + amount
            booking["payments"][payment_id] = _signed(paid)

    def _saved(self, name: str, given: dict[str, Any], booking: dict, customer: dict, **more: str) -> str:
        """Keep the changed records and return the answer of a tool."""
        self._keep(customer["customer_id"], customer)
        self._keep(booking["booking_id"], booking)
        balance = _credit(customer)["balance"]
        return self._answer(name, given, {**more, "travel_credit": balance, "booking": booking})


def _credit(customer: dict) -> dict:
    return next(method for method in customer["payment_methods"] if method["kind"] == CREDIT)


def _signed(amount: int) -> str:
    return f"{'-' * (amount < 0)}{money(abs(amount))}"


def _start(leg: dict) -> tuple[str, str]:
    return leg["flights"][0]["date"], leg["flights"][0]["departs"]


def _end(leg: dict) -> tuple[str, str]:
    return leg["flights"][-1]["date"], leg["flights"][-1]["arrives"]
