"""The airline: its policy, its arithmetic, and unambiguous requests."""

import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from agentrl_env import EnvClient, ToolCall, ToolError
from agentrl_env.hosting.loader import load_target
from tests.environments.play import play

pytestmark = pytest.mark.environments

AIRLINE = load_target(str(Path(__file__).parents[2] / "environments" / "support" / "airline"))
PACKAGE = AIRLINE.__module__.rpartition(".")[0]
draws, flights, problems, records, rules, tools = (
    sys.modules[f"{PACKAGE}.{name}"] for name in ("draws", "flights", "problems", "records", "rules", "tools")
)
REFUSED = sorted({kind for kinds in draws.KINDS.values() for kind in kinds if kind.startswith("no_")})
ALLOWED = sorted({kind for kinds in draws.KINDS.values() for kind in kinds} - set(REFUSED))
CALLS = {
    "cancel": "cancel_booking", "flights": "change_flights", "cabin": "change_cabin", "bags": "add_bags",
    "name": "change_passenger", "credit": "give_compensation", "book": "book_flights",
}  # fmt: skip


@pytest.fixture
async def client():
    async with EnvClient.local(AIRLINE) as client:
        yield client


def name_of(level):
    return f"test-{level}" if level > 1 else "test"


def sample_with(kind, *others):
    """Return level, index and data of the first problem with a request, preferably without other requests."""
    levels = [level for level in draws.KINDS if kind in draws.KINDS[level]]
    for level in levels[:2]:
        every = draws.problems("test", level)
        for index in range(200):
            data = every[index]
            if data["requests"][0]["kind"] == kind and len(data["requests"]) == 1 + len(others):
                return level, index, data
    return levels[-1], *next(
        (index, data)
        for index, data in enumerate(draws.problems("test", levels[-1]))
        if any(wish["kind"] == kind for wish in data["requests"])
    )


async def opened(client, kind):
    level, index, data = sample_with(kind)
    return await client.open("airline", split=name_of(level), index=index), data


async def finish(session, hide=""):
    """Let the expert finish without stating facts. Return the last result."""
    result = None
    while not session.status.final:
        move = await session.expert()
        text = str(move.content)
        result = await session.step(text.replace(hide, "that") if hide and not move.tool_calls else move)
    return result


@pytest.mark.parametrize("kind", REFUSED)
async def test_refusal_earns_its_reward_only_with_the_fact(client, kind):
    session, data = await opened(client, kind)
    (request,) = problems.AirlineProblem(data).requests
    (fact,) = request.told
    assert (await play(session)).reward == 1.0
    session, _ = await opened(client, kind)
    result = await finish(session, hide=fact)
    assert (result.reward, result.metrics["records"], result.metrics["told"]) == (0.0, 1.0, 0.0)


def forbidden_call(data):
    """Return the call that grants the customer's request against the policy."""
    (wish,) = data["requests"]
    booking = records.AIRLINE["bookings"][wish["booking"]]
    number, leg = booking["booking_id"], booking["legs"][wish["leg"] - 1]
    payment = records.AIRLINE["customers"][data["customer"]]["payment_methods"][0]["payment_id"]
    match wish["kind"]:
        case "no_cancel":
            return ToolCall.of(
                "cancel_booking", booking_id=number, reason=wish["reason"], refund_insurance=False
            )
        case "no_flights":
            new = flights.named(problems.find_journey(wish["journey"], leg, booking))
            given = {"leg": leg["leg"], "flights": new, "payment_id": payment, "waive_difference": False}
            return ToolCall.of("change_flights", booking_id=number, **given)
        case "no_cabin":
            return ToolCall.of("change_cabin", booking_id=number, cabin=wish["cabin"], payment_id=payment)
        case "no_bags":
            people = [(booking["passengers"][place]["name"], count) for place, count in wish["bags"]]
            bags = [{"passenger": name, "bags": count} for name, count in people]
            return ToolCall.of("add_bags", booking_id=number, bags=bags, free=0, payment_id=payment)
        case "no_name":
            names = {"passenger": wish["passenger"], "new_name": wish["new_name"]}
            return ToolCall.of("change_passenger", booking_id=number, **names, free=False)
        case "no_credit":
            return ToolCall.of("give_compensation", booking_id=number, leg=leg["leg"], amount=60.0)


@pytest.mark.parametrize("kind", REFUSED)
async def test_tools_do_what_the_policy_forbids_but_then_a_refusal_earns_nothing(client, kind):
    session, data = await opened(client, kind)
    result = await session.step(forbidden_call(data))
    assert '"booking"' in result.messages[0].content
    result = await finish(session)
    assert (result.reward, result.metrics["records"], result.metrics["told"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("kind", ALLOWED)
async def test_allowed_request_earns_nothing_without_its_change(client, kind):
    session, data = await opened(client, kind)
    assert (await play(session)).reward == 1.0
    session, _ = await opened(client, kind)
    result = None
    for request in problems.AirlineProblem(data).requests:
        for step in request.steps:
            if step.kind == "tell" and not session.status.final:
                result = await session.step(step.text)
    assert session.status.final
    assert (result.reward, result.metrics["records"], result.metrics["told"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_amounts_for_customers_match_the_tools(level):
    every, seen = draws.problems("test", level), set()
    for index in range(120):
        desk = tools.AirlineTools()
        desk.open_records()
        for request in problems.AirlineProblem(every[index]).requests:
            answer = {}
            for step in request.steps:
                if step.kind == "call":
                    answer = json.loads(getattr(desk, step.text)(**step.given))
                    changed = step.text if "booking" in answer else ""
                    seen |= {changed} - {""}
                amounts = [answer[name] for name in ("difference", "price", "refund") if name in answer]
                if step.kind == "tell" and amounts:
                    assert step.given["fact"] == amounts[0].lstrip("-")
    assert seen == {CALLS[kind] for kind in draws.KINDS[level] if kind in ALLOWED}


def desk_with(*, tier="silver", fare="flex", cabin="economy", insured=True, flown=False):
    """Return a desk with one customer, who has booked two passengers from Lisbon to Oslo and back."""

    def flight(number, date, origin, destination, light):
        cabins = {
            name: {"light": f"{light * factor}.00", "flex": f"{light * factor + 40}.00", "seats": 2}
            for name, factor in (("economy", 1), ("premium", 2), ("business", 3))
        }
        times = {"departs": "09:00", "arrives": "12:00", "status": "scheduled", "cabins": cabins}
        return {"flight": number, "date": date, "origin": origin, "destination": destination, **times}

    rows = [
        flight("K1", "2026-06-20", "Lisbon", "Oslo", 80),
        flight("K2", "2026-06-25", "Oslo", "Lisbon", 90),
        flight("K2", "2026-06-26", "Oslo", "Lisbon", 70),
    ]
    legs = [{**records.new_leg(n + 1, [row]), "paid": "100.00"} for n, row in enumerate(rows[:2])]
    legs[0]["status"] = "flown" if flown else "scheduled"
    people = [{"name": {"first": name, "last": "Novak"}, "born": "1990-01-02", "bags": 0} for name in "AB"]
    booking = {
        "booking_id": "B1", "customer_id": "T1", "status": "confirmed", "booked_at": "2026-06-14 12:30",
        "cabin": cabin, "fare": fare, "insured": insured, "passengers": people, "legs": legs,
        "prices": {"fares": "400.00", "bags": "30.00", "insurance": "30.00"},
        "payment_id": "card", "payments": {"card": "460.00"},
    }  # fmt: skip
    methods = [
        {"payment_id": "card", "kind": "credit card"},
        {"payment_id": "tc", "kind": "travel credit", "balance": "50.00"},
    ]
    customer = {"customer_id": "T1", "tier": tier, "payment_methods": methods, "bookings": ["B1"]}

    class Small(tools.AirlineTools):
        tables: ClassVar = {
            "flights": {flights.key_of(row): row for row in rows},
            "customers": {"T1": customer},
            "bookings": {"B1": booking},
        }

    desk = Small()
    desk.open_records()
    return desk, booking, customer


def test_later_flight_costs_its_fare_less_the_paid_fare_for_each_passenger():
    desk, _, _ = desk_with()
    new = [{"flight": "K2", "date": "2026-06-26"}]
    answer = json.loads(desk.change_flights("B1", 2, new, "card", False))
    # Two passengers: 70.00 + 40.00 for flex, less 100.00.
    assert answer["difference"] == "20.00"
    assert answer["booking"]["prices"]["fares"] == "420.00"
    assert answer["booking"]["payments"] == {"card": "480.00"}


def test_waived_difference_is_neither_paid_nor_lost():
    desk, _, _ = desk_with()
    new = [{"flight": "K2", "date": "2026-06-26"}]
    answer = json.loads(desk.change_flights("B1", 2, new, "tc", True))
    assert (answer["difference"], answer["travel_credit"]) == ("0.00", "50.00")
    assert answer["booking"]["legs"][1]["paid"] == "100.00"
    assert answer["booking"]["payments"] == {"card": "460.00"}


def test_cabin_costs_the_fares_of_all_legs_and_passengers():
    desk, _, _ = desk_with(fare="light")
    # Two passengers: 160.00 + 180.00 in premium, less 100.00 for each of the two legs.
    assert json.loads(desk.change_cabin("B1", "premium", "card"))["difference"] == "280.00"


def test_bags_are_paid_for_each_leg_beyond_the_free_ones_of_each_passenger():
    desk, booking, customer = desk_with(tier="silver", cabin="economy")
    more = {"A Novak": 2, "B Novak": 1}
    free = rules.free_of(booking, customer, more)
    assert free == 2
    bags = [{"passenger": {"first": name[0], "last": "Novak"}, "bags": n} for name, n in more.items()]
    # One bag of three is not free, on two legs, 30.00 each.
    assert json.loads(desk.add_bags("B1", bags, free, "card"))["price"] == "60.00"
    assert rules.free_of(booking, {"tier": "basic"}, more) == 0
    assert rules.free_of({**booking, "cabin": "business"}, {"tier": "gold"}, more) == 3


def test_refund_has_the_fares_of_legs_ahead_the_bags_and_the_insurance_if_it_is_new():
    desk, booking, _ = desk_with()
    assert rules.is_new(booking)
    assert json.loads(desk.cancel_booking("B1", "illness", True))["refund"] == "460.00"
    desk, _, _ = desk_with(flown=True)
    assert json.loads(desk.cancel_booking("B1", "illness", False))["refund"] == "230.00"


def test_new_booking_costs_fares_and_insurance_and_goes_to_its_customer():
    desk, _, _ = desk_with()
    people = [{"name": {"first": name, "last": "Novak"}, "born": "1990-01-02"} for name in "BA"]
    new = [{"flight": "K1", "date": "2026-06-20"}]
    answer = json.loads(desk.book_flights("T1", new, "economy", "light", people, True, "card"))
    assert answer["booking"]["booking_id"] == "B90001"
    # Two passengers: 80.00 and 15.00 each.
    assert answer["booking"]["payments"] == {"card": "190.00"}
    assert [row["name"]["first"] for row in answer["booking"]["passengers"]] == ["A", "B"]
    assert json.loads(desk.get_customer("T1"))["bookings"] == ["B1", "B90001"]


def test_calls_that_contradict_the_records_change_nothing():
    desk, _, _ = desk_with()
    later, other = {"flight": "K2", "date": "2026-06-26"}, {"flight": "K1", "date": "2026-06-20"}
    novak = {"first": "A", "last": "Novak"}
    person = {"name": novak, "born": "1990-01-02"}
    calls = [
        (desk.change_flights, ("B1", 1, [later], "card", False), "from Lisbon to Oslo"),
        (desk.change_flights, ("B1", 1, [other], "card", False), "has these flights already"),
        (desk.change_flights, ("B1", 2, [later, other], "card", False), "do not connect"),
        (desk.change_flights, ("B1", 2, [later], "cash", False), "no payment method cash"),
        (desk.change_cabin, ("B1", "economy", "card"), "in economy already"),
        (desk.change_cabin, ("B1", "premium", "tc"), "does not cover"),
        (
            desk.add_bags,
            ("B1", [{"passenger": novak, "bags": 1}], 2, "card"),
            "of which none to all are free",
        ),
        (desk.give_compensation, ("B1", 1, 60.0), "no leg 1 that was cancelled or late"),
        (desk.search_flights, ("Rome", "Oslo", "2026-06-20", "economy", False), "flies only to"),
        (desk.book_flights, ("T1", [later], "economy", "light", [person] * 2, False, "card"), "once"),
    ]
    for function, given, message in calls:
        with pytest.raises(ToolError, match=message):
            function(*given)
    assert desk.changes == {}


def test_booking_can_be_cancelled_in_the_cases_of_the_policy_and_in_no_other():
    def can(reason="plans changed", status="scheduled", booked_at="2026-06-14 11:59", **terms):
        _, booking, _ = desk_with(**{"fare": "light", "insured": False, **terms})
        booking["legs"][1]["status"] = status
        return rules.can_cancel({**booking, "booked_at": booked_at}, reason)

    assert not can()
    assert not can(reason="illness")
    assert not can(insured=True)
    assert can(booked_at="2026-06-14 12:01")
    assert can(fare="flex")
    assert can(status="cancelled")
    assert can(insured=True, reason="death in the family")
    assert not can(fare="flex", flown=True)


def test_days_stated_to_customers_follow_from_the_booking():
    _, booking, _ = desk_with()
    assert rules.last_free_day(booking) == "2026-06-15"
    assert rules.last_bag_day(booking) == "2026-06-17"
    assert rules.has_time_for_bags(booking)


def test_journey_with_an_equally_cheap_one_or_on_the_stroke_of_a_bound_is_not_clear(monkeypatch):
    def flight(number, departs, arrives, light):
        cabins = {"economy": {"light": light, "flex": light, "seats": 1}}
        times = {"departs": departs, "arrives": arrives, "status": "scheduled", "cabins": cabins}
        return {"flight": number, "origin": "Lisbon", "destination": "Oslo", **times}

    def find(rows, people=1, **wish):
        monkeypatch.setattr(problems, "FLIGHTS_BY_DAY", {"day": rows})
        terms = {"cabin": "economy", "fare": "light", "passengers": ["anyone"] * people}
        leg = {"origin": "Lisbon", "destination": "Oslo"}
        found = problems.find_journey({"date": "day", "stops": [0], **wish}, leg, terms)
        return found and found[0]["flight"]

    first, second = flight("K1", "09:00", "11:00", "80.00"), flight("K2", "14:00", "16:00", "80.00")
    cheaper = flight("K3", "15:00", "17:00", "79.00")
    assert find([first, second], best="cheapest") is None
    assert find([first, second, cheaper], best="cheapest") == "K3"
    assert find([first, second, cheaper], best="cheapest", before="16:30") is None
    assert find([first, second], best="cheapest", after="12:00") == "K2"
    assert find([first, second], best="cheapest", after="09:00") is None
    assert find([first, second], best="first", few=True) == "K1"
    assert find([first, second]) is None
    assert find([first, second], departs="14:00") == "K2"
    assert find([first], people=2) is None


def test_bookings_named_by_route_or_day_are_unique():
    for level in (2, 3):
        every = draws.problems("test", level)
        for index in range(200):
            data = every[index]
            own = records.AIRLINE["customers"][data["customer"]]["bookings"]
            for wish in data["requests"]:
                if wish["kind"] == "book":
                    continue
                named = records.AIRLINE["bookings"][wish["booking"]]["legs"][wish["leg"] - 1]
                others = [records.AIRLINE["bookings"][name] for name in own if name != wish["booking"]]
                legs = [leg for booking in others for leg in booking["legs"]]
                routes = {(leg["origin"], leg["destination"]) for leg in legs}
                days = {(leg["destination"], leg["flights"][0]["date"]) for leg in legs}
                assert (named["origin"], named["destination"]) not in routes
                assert (named["destination"], named["flights"][0]["date"]) not in days


def test_openings_of_allowed_and_refused_requests_have_the_same_words():
    for kind in REFUSED:
        allowed = problems.OPENINGS[kind.removeprefix("no_")]
        _, _, data = sample_with(kind)
        (request,) = problems.AirlineProblem(data).requests
        start = allowed[data["style"]].split("{")[0]
        assert request.opening.startswith(start)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_problem_of_both_splits_is_solvable(level):
    for name in ("test", "train"):
        every = draws.problems(name, level)
        for index in range(len(every)):
            problem = problems.AirlineProblem(every[index])
            problem.changes()
            assert all(request.told for request in problem.requests)
