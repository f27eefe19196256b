"""The problems of the airline: requests of a customer, the desk's solution, and the facts to tell."""

from __future__ import annotations

from typing import Any

from ..problem import IDENTITY, Problem, Request, Step, ask, call, facts_told, tell
from ..records import cents, money
from .flights import LATE, SCHEDULED, Journey, fare_of, journeys, named, seats_of
from .records import AIRLINE, BAG_PRICE, FLIGHTS_BY_DAY, INSURANCE_PRICE, NAME_PRICE, full, was_flown
from .rules import (
    compensation,
    delay_of,
    free_of,
    is_eligible,
    is_new,
    is_untouched,
    last_bag_day,
    last_free_day,
)
from .tools import NEW_BOOKINGS, AirlineTools

REASONS = {
    "plans changed": "My plans have changed.",
    "illness": "I am ill.",
    "death in the family": "There has been a death in the family.",
    "booked by mistake": "I booked it by mistake.",
    "found cheaper": "I found a cheaper flight.",
    "flight cancelled": "You have cancelled the flight.",
}
OPENINGS = {
    "cancel": ("I would like to cancel {trip}.", "Please cancel {trip}."),
    "flights": ("I would like to move {flight} to another time.", "Please rebook {flight}."),
    "cabin": ("I would like another cabin on {trip}.", "Please change the cabin on {trip}."),
    "bags": ("I would like to add bags to {trip}.", "Please add bags to {trip}."),
    "name": (
        "I need to change the name of a passenger {on_trip}.",
        "The name of a passenger {on_trip} has to be changed.",
    ),
    "credit": (
        "{Flight} was {status}. I would like compensation.",
        "Please compensate me for {flight}, which was {status}.",
    ),
    "book": (
        "I would like to book a flight from {origin} to {destination}.",
        "Please book a flight from {origin} to {destination}.",
    ),
}
"""Openings by the kind of a request, without the prefix ``no_`` of refused requests."""
TOPICS = {
    **IDENTITY,
    "booking": r"(booking|reservation) (number|id|reference|code)|(which|what) (booking|reservation|trip)|"
    r"number of (the|your) (booking|reservation)",
    "reason": r"\breasons?\b|\bwhy\b",
    "journey": r"(which|what|new|other|another|preferred) (new |other )?(flight|day|time)s?\b|"
    r"\bwhen (would|do|should|shall)\b|\bdates?\b(?! of birth)",
    "cabin": r"\bcabins?\b|\bclass(es)?\b|\bfares?\b|\blight\b|\bflex\b",
    "bags": r"\bbags?\b|baggage|luggage",
    "name": r"\bpassengers?\b|\bspel\w+|\bcorrect\w*|\bread\b|new name",
    "passengers": r"\bpassengers?\b|\btravell?ers?\b|\bwho (is|will|would)\b|\bborn\b|birth|how many people",
    "insurance": r"\binsur\w+",
    "payment": r"\bpay(ment|ing)?\b|\bcards?\b|travel credit|\bmethods?\b",
}
"""Topics of a question, as regular expressions."""
INSTRUCTIONS = """\
You are {first} {last}, a customer of an airline. You write to its support desk.
{identity}
Make these requests one after another. Make the next one when the last one is settled or refused:
{requests}
Accept it if the desk refuses a request. After the last request, say goodbye."""
NUMBERS = ("no", "one", "two", "three", "four")


class AirlineProblem(Problem):
    """A problem of the airline."""

    tools = AirlineTools
    topics = TOPICS
    instructions = INSTRUCTIONS

    def request(self, number: int, wish: dict) -> Request:
        kind = wish["kind"]
        booking = AIRLINE["bookings"].get(wish.get("booking", ""), {})
        facts: dict[str, str] = {}
        if booking:
            facts["booking"] = f"I do not know the number. It is {self._leg_name(booking, wish)}."
        steps = self._lookups(number, booking, kind)
        getattr(self, f"_{kind}")(wish, booking, facts, steps)
        told = facts_told(steps)
        if kind == "book":
            told.append(f"B{NEW_BOOKINGS}")
        opening = self._opening(wish, booking)
        if self.level == 1:  # everything at once
            facts["booking"] = f"It is booking {booking['booking_id']}."
            steps = [step for step in steps if step.kind != "ask"]
            rest = " ".join(text for topic, text in facts.items() if topic != "booking")
            opening = f"{opening} {rest} {self.identity}"
        return Request(" ".join(opening.split()), facts, steps, told)

    def _opening(self, wish: dict, booking: dict) -> str:
        words = {"origin": wish.get("origin"), "destination": wish.get("destination")}
        if booking and self.level == 1:
            trip, flight = f"booking {booking['booking_id']}", f"the flight {route(_leg(booking, wish))}"
            flight += f" in booking {booking['booking_id']}"
            words |= {"trip": trip, "on_trip": f"in {trip}", "flight": flight, "Flight": ""}
        elif booking:
            flight, trip = self._leg_name(booking, wish), self._trip_name(booking, wish)
            words |= {"trip": trip, "on_trip": f"on {trip}", "flight": flight}
            words |= {"Flight": flight[0].upper() + flight[1:]}
            words |= {"status": "late" if was_flown(_leg(booking, wish)) else "cancelled"}
        return OPENINGS[wish["kind"].removeprefix("no_")][self.data["style"]].format(**words)

    def _leg_name(self, booking: dict, wish: dict) -> str:
        """Return how the customer names a leg: by the day, unless the day is a fact to be told."""
        leg = _leg(booking, wish)
        if self.data["style"] == 1 and not wish["kind"].endswith(("cancel", "credit")):
            return f"my flight to {leg['destination']} on {leg['flights'][0]['date']}"
        return f"my flight {route(leg)}"

    def _trip_name(self, booking: dict, wish: dict) -> str:
        """Return how the customer names a whole booking."""
        name = self._leg_name(booking, wish)
        if len(booking["legs"]) == 1 or not is_untouched(booking):
            return name
        if " from " in name:
            return f"{name.replace('flight', 'trip', 1)} and back"
        return name.replace("flight", "return trip", 1)

    def _lookups(self, number: int, booking: dict, kind: str) -> list[Step]:
        """Return the calls that find the customer, and the bookings up to the right one."""
        steps = []
        if number == 0:
            steps = self.identify()
            if self.level > 1 or kind in ("flights", "bags"):
                steps.append(call("get_customer", customer_id=self.customer["customer_id"]))
        if booking:
            own = self.customer["bookings"]
            seen = own[: own.index(booking["booking_id"]) + 1] if self.level > 1 else [booking["booking_id"]]
            steps += [call("get_booking", booking_id=one) for one in seen]
        return steps

    def _cancel(self, wish, booking, facts, steps):
        number, prices = booking["booking_id"], booking["prices"]
        back = is_new(booking)
        refund = cents(prices["fares"]) + cents(prices["bags"]) + back * cents(prices["insurance"])
        self._ask_reason(wish, booking, facts, steps)
        steps += [
            call("cancel_booking", booking_id=number, reason=wish["reason"], refund_insurance=back),
            tell(f"Booking {number} has been cancelled. You get back {money(refund)}.", money(refund)),
        ]

    def _no_cancel(self, wish, booking, facts, steps):
        number = booking["booking_id"]
        if is_untouched(booking):
            self._ask_reason(wish, booking, facts, steps, needed=booking["insured"])
            day = last_free_day(booking)
            steps.append(tell(f"I cannot cancel booking {number}. Free cancellation ended on {day}.", day))
        else:
            self._ask_reason(wish, booking, facts, steps, needed=False)
            day = next(leg["flights"][0]["date"] for leg in booking["legs"] if was_flown(leg))
            text = f"I cannot cancel booking {number}, because a leg of it was flown on {day}."
            steps.append(tell(text, day))

    def _flights(self, wish, booking, facts, steps):
        leg, number = _leg(booking, wish), booking["booking_id"]
        self._ask_journey(wish, leg, facts, steps)
        journey = find_journey(wish["journey"], leg, booking)
        assert journey is not None
        waive = leg["status"] != SCHEDULED
        difference = 0 if waive else change_price(booking, leg, journey)
        steps += self._searches(wish["journey"], leg, booking["cabin"])
        payment = self._payment(wish, booking, facts, steps, needed=not waive)
        given = {"booking_id": number, "leg": leg["leg"], "flights": named(journey), "payment_id": payment}
        text = f"Your flight {route(leg)} has been changed. {paid(difference)}"
        steps += [
            call("change_flights", **given, waive_difference=waive),
            tell(text, money(abs(difference))),
        ]

    def _no_flights(self, wish, booking, facts, steps):
        leg, day = _leg(booking, wish), last_free_day(booking)
        facts["journey"] = journey_text(wish["journey"])
        self._payment(wish, booking, facts, steps, needed=False)
        text = f"I cannot change the flight {route(leg)}, because its fare is light. Free cancellation ended"
        steps.append(tell(f"{text} on {day}.", day))

    def _cabin(self, wish, booking, facts, steps):
        number, difference = booking["booking_id"], cabin_price(booking, wish["cabin"])
        self._ask_cabin(wish, booking, facts, steps)
        payment = self._payment(wish, booking, facts, steps)
        text = f"Booking {number} has been moved to {wish['cabin']}. {paid(difference)}"
        steps += [
            call("change_cabin", booking_id=number, cabin=wish["cabin"], payment_id=payment),
            tell(text, money(abs(difference))),
        ]

    def _no_cabin(self, wish, booking, facts, steps):
        number = booking["booking_id"]
        self._ask_cabin(wish, booking, facts, steps)
        self._payment(wish, booking, facts, steps, needed=False)
        if "limit" in wish:
            price = money(cabin_price(booking, wish["cabin"]))
            text = f"I cannot move booking {number} to {wish['cabin']} within your limit: it would cost"
            steps.append(tell(f"{text} {price}.", price))
        else:
            day = last_free_day(booking)
            text = f"I cannot move booking {number} to a lower cabin, because its fare is light. Free"
            steps.append(tell(f"{text} cancellation ended on {day}.", day))

    def _bags(self, wish, booking, facts, steps):
        number = booking["booking_id"]
        people = [(booking["passengers"][place]["name"], count) for place, count in wish["bags"]]
        more = {full(name): count for name, count in people}
        total, free = sum(more.values()), free_of(booking, self.customer, more)
        price = money((total - free) * BAG_PRICE * len(booking["legs"]))
        self._ask_bags(wish, booking, facts, steps)
        payment = self._payment(wish, booking, facts, steps, needed=total > free)
        bags = [{"passenger": name, "bags": count} for name, count in people]
        done = f"{total} bag{'s have' if total > 1 else ' has'} been added to booking {number}."
        steps += [
            call("add_bags", booking_id=number, bags=bags, free=free, payment_id=payment),
            tell(f"{done} You pay {price}.", price),
        ]

    def _no_bags(self, wish, booking, facts, steps):
        number, day = booking["booking_id"], last_bag_day(booking)
        self._ask_bags(wish, booking, facts, steps, needed=False)
        self._payment(wish, booking, facts, steps, needed=False)
        steps.append(tell(f"I cannot add bags to booking {number}: the last day for it was {day}.", day))

    def _name(self, wish, booking, facts, steps):
        number, free = booking["booking_id"], booking["fare"] == "flex"
        price = money(0 if free else NAME_PRICE)
        self._ask_name(wish, booking, facts, steps)
        given = {"passenger": wish["passenger"], "new_name": wish["new_name"], "free": free}
        text = f"The name in booking {number} has been changed to {full(wish['new_name'])}. You pay {price}."
        steps += [call("change_passenger", booking_id=number, **given), tell(text, price)]

    def _no_name(self, wish, booking, facts, steps):
        number, day = booking["booking_id"], last_free_day(booking)
        self._ask_name(wish, booking, facts, steps)
        text = f"I cannot put another person on booking {number}. Free cancellation ended on {day}."
        steps.append(tell(text, day))

    def _credit(self, wish, booking, facts, steps):
        leg, number = _leg(booking, wish), booking["booking_id"]
        amount = compensation(AIRLINE["flights"], booking, leg)
        steps += self._delay(leg)
        steps += [
            call("give_compensation", booking_id=number, leg=leg["leg"], amount=amount / 100),
            tell(
                f"For booking {number}, {money(amount)} has been added to your travel credit.", money(amount)
            ),
        ]

    def _no_credit(self, wish, booking, facts, steps):
        leg = _leg(booking, wish)
        if is_eligible(booking, self.customer):
            steps += self._delay(leg)
            delay = str(delay_of(AIRLINE["flights"], leg))
            text = f"I cannot compensate you for the flight {route(leg)}: it was {delay} minutes late."
            steps.append(tell(text, delay))
        else:
            day = leg["flights"][0]["date"]
            text = f"I cannot compensate you for the flight {route(leg)} on {day}. Booking"
            steps.append(tell(f"{text} {booking['booking_id']} is not insured.", day))

    def _book(self, wish, booking, facts, steps):
        leg = {"origin": wish["origin"], "destination": wish["destination"]}
        terms = {"cabin": wish["cabin"], "fare": wish["fare"], "passengers": wish["passengers"]}
        journey = find_journey(wish["journey"], leg, terms)
        assert journey is not None
        people = [{"name": person["name"], "born": person["born"]} for person in wish["passengers"]]
        insurance = INSURANCE_PRICE * wish["insurance"]
        price = money((fare_of(journey, wish["cabin"], wish["fare"]) + insurance) * len(people))
        facts["journey"] = journey_text(wish["journey"])
        facts["passengers"] = _people_text(self.customer, wish["passengers"])
        facts["cabin"] = f"In {wish['cabin']}, with the {wish['fare']} fare."
        facts["insurance"] = f"With{'' if wish['insurance'] else 'out'} insurance."
        where = route(leg)
        steps += [
            ask("journey", f"When would you like to fly {where}?"),
            ask("passengers", f"Who is going to fly {where}, and when were they born?"),
            ask("cabin", f"Which cabin and which fare would you like {where}, and would you like insurance?"),
            *self._searches(wish["journey"], leg, wish["cabin"]),
        ]
        payment = self._payment(wish, {}, facts, steps, what=f"the flight {where}")
        given = {
            "flights": named(journey),
            "cabin": wish["cabin"],
            "fare": wish["fare"],
            "passengers": people,
        }
        given |= {"insurance": wish["insurance"], "payment_id": payment}
        number = f"B{NEW_BOOKINGS}"
        steps += [
            call("book_flights", customer_id=self.customer["customer_id"], **given),
            tell(f"Your booking {number} has been made. You pay {price}.", price),
        ]

    def _ask_reason(self, wish, booking, facts, steps, needed=True):
        facts["reason"] = REASONS[wish["reason"]]
        if wish["reason"] == "illness" and len(booking["passengers"]) > 1:
            facts["reason"] = "One of us is ill."
        if wish["reason"] == "flight cancelled" and len(booking["legs"]) > 1:
            facts["reason"] = "You have cancelled one of the flights."
        if needed:
            steps.append(ask("reason", f"Why would you like to cancel booking {booking['booking_id']}?"))

    def _ask_journey(self, wish, leg, facts, steps):
        facts["journey"] = journey_text(wish["journey"])
        steps.append(ask("journey", f"When would you like to fly {route(leg)} instead?"))

    def _ask_cabin(self, wish, booking, facts, steps):
        """Ask for the cabin and, if the customer has a price limit, look up the fares."""
        facts["cabin"] = f"{wish['cabin'].capitalize()}, please."
        steps.append(ask("cabin", f"Which cabin would you like for booking {booking['booking_id']}?"))
        if "limit" in wish:
            limit = f"but only if it costs no more than {wish['limit']} in total."
            facts["cabin"] = f"{wish['cabin'].capitalize()}, {limit}"
            flights = [flight for leg in booking["legs"] for flight in named(leg["flights"])]
            steps += [call("get_flight", flight=flight) for flight in flights]

    def _ask_bags(self, wish, booking, facts, steps, needed=True):
        names = [full(passenger["name"]) for passenger in booking["passengers"]]
        first, *rest = [f"{NUMBERS[count]} for {names[place]}" for place, count in wish["bags"]]
        text = listed([first.replace(" ", " more ", 1), *rest])
        facts["bags"] = f"{text[0].upper()}{text[1:]}."
        if needed:
            text = f"How many bags should I add to booking {booking['booking_id']}, and for whom?"
            steps.append(ask("bags", text))

    def _ask_name(self, wish, booking, facts, steps):
        facts["name"] = f"It says {full(wish['passenger'])}, and it should say {full(wish['new_name'])}."
        text = f"Which passenger of booking {booking['booking_id']} is it, and what should be changed?"
        steps.append(ask("name", text))

    def _payment(self, wish, booking, facts, steps, needed=True, what="") -> str:
        """Return the id of the wanted payment method, or of the booking's method if none is needed."""
        facts["payment"] = f"Please use my {wish['payment']}."
        if not needed:
            return booking["payment_id"]
        what = what or f"booking {booking['booking_id']}"
        steps.append(ask("payment", f"Which payment method should I use for {what}?"))
        methods = self.customer["payment_methods"]
        return next(method["payment_id"] for method in methods if method["kind"] == wish["payment"])

    def _searches(self, wish: dict, leg: dict, cabin: str) -> list[Step]:
        """Return the searches for a journey, which level 1 names by its flight."""
        given = {"origin": leg["origin"], "destination": leg["destination"], "date": wish["date"]}
        every = [
            call("search_flights", **given, cabin=cabin, connection=stops > 0) for stops in wish["stops"]
        ]
        return every if self.level > 1 else []

    def _delay(self, leg: dict) -> list[Step]:
        """Return the call that finds the delay of a late leg."""
        return [
            call("get_flight", flight=flight) for flight in named(leg["flights"]) if leg["status"] == LATE
        ]


def _leg(booking: dict, wish: dict) -> dict:
    return booking["legs"][wish["leg"] - 1]


def numbers(journey: Journey) -> list[str]:
    """Return the numbers of the flights of a journey."""
    return [flight["flight"] for flight in journey]


def route(leg: dict) -> str:
    """Return the route of a leg in words."""
    return f"from {leg['origin']} to {leg['destination']}"


def paid(amount: int) -> str:
    """Return the sentence on an amount that the customer pays, or gets back if it is negative."""
    return f"You {'get back' if amount < 0 else 'pay'} {money(abs(amount))}."


def change_price(booking: dict, leg: dict, journey: Journey) -> int:
    """Return the price of other flights of a leg for all passengers, in cents."""
    fare = fare_of(journey, booking["cabin"], booking["fare"])
    return (fare - cents(leg["paid"])) * len(booking["passengers"])


def cabin_price(booking: dict, cabin: str) -> int:
    """Return the price of another cabin for all passengers on all legs, in cents."""
    flights = AIRLINE["flights"]
    legs = [[flights[f"{f['flight']} {f['date']}"] for f in leg["flights"]] for leg in booking["legs"]]
    new = sum(fare_of(journey, cabin, booking["fare"]) for journey in legs)
    old = sum(cents(leg["paid"]) for leg in booking["legs"])
    return (new - old) * len(booking["passengers"])


def find_journey(wish: dict[str, Any], leg: dict, terms: dict) -> Journey | None:
    """Return the journey that a customer wants, or None if there is no such journey or more than one.

    Args:
        wish: The date, the numbers of stops to consider, and conditions.
        leg: Where the journey starts and ends.
        terms: The cabin, the fare and the passengers.
    """
    cabin, people = terms["cabin"], len(terms["passengers"])
    flights = FLIGHTS_BY_DAY.get(wish["date"], [])
    found = [
        journey
        for stops in wish["stops"]
        for journey in journeys(flights, leg["origin"], leg["destination"], stops)
        if seats_of(journey, cabin) >= people and wish.get("flights", numbers(journey)) == numbers(journey)
    ]
    bounds = [(wish.get("after"), journey[0]["departs"]) for journey in found]
    bounds += [(wish.get("before"), journey[-1]["arrives"]) for journey in found]
    if any(bound == time for bound, time in bounds):
        return None
    found = [j for j in found if wish.get("after", "") < j[0]["departs"]]
    found = [j for j in found if j[-1]["arrives"] < wish.get("before", "24")]
    found = [j for j in found if wish.get("departs", j[0]["departs"]) == j[0]["departs"]]
    if wish.get("few"):
        found = [j for j in found if len(j) == min(map(len, found))]
    if wish.get("best") == "first":
        return _only_least([(j[-1]["arrives"], j) for j in found])
    if wish.get("best") == "cheapest":
        return _only_least([(fare_of(j, cabin, terms["fare"]), j) for j in found])
    return found[0] if len(found) == 1 else None


def _only_least(ranked: list[tuple[Any, Journey]]) -> Journey | None:
    least = [journey for rank, journey in ranked if rank == min(rank for rank, _ in ranked)]
    return least[0] if len(least) == 1 else None


def journey_text(wish: dict[str, Any]) -> str:
    """Return the customer's description of the wanted journey."""
    start = f"On {wish['date']}"
    if "flights" in wish:
        subject = "flight" if len(wish["flights"]) == 1 else "flights"
        return f"The new {subject} should be {' and '.join(wish['flights'])} on {wish['date']}."
    if "departs" in wish:
        how = "on the direct flight" if wish["stops"] == [0] else "with the connection that leaves"
        return f"{start}, {how} at {wish['departs']}."
    if wish.get("few"):
        return (
            f"{start}, with as few stops as possible. If there is a choice, take the one that arrives first."
        )
    if wish["stops"] == [0]:
        return f"{start}, on the cheapest direct flight."
    if "after" in wish:
        return f"{start}, on the cheapest flight that leaves after {wish['after']}. A connection is fine."
    return f"{start}, on the cheapest flight that arrives before {wish['before']}. A connection is fine."


def listed(parts: list[str]) -> str:
    """Return parts of a sentence as an enumeration."""
    return " and ".join([part for part in (", ".join(parts[:-1]), parts[-1]) if part])


def _people_text(customer: dict, passengers: list[dict]) -> str:
    """Return the customer's companions, with the dates of birth that the desk does not have."""
    others = [person for person in passengers if person["name"] != customer["name"]]
    if not others:
        return "Just me."
    first, *rest = [f"{person['name']['first']} was born on {person['born']}" for person in others]
    born = listed([first, *(text.replace(" was born", "") for text in rest)])
    return f"{listed([*(full(person['name']) for person in others), 'I'])}. {born}."
