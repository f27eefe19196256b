"""The records of the operator: plans, customers, lines and bills, the same in every process."""

from __future__ import annotations

import random
from datetime import date, timedelta

from ..records import cents, day, draw_address, draw_name, money

NUM_CUSTOMERS = 500
SEED = 20260616
ACCESS_POINT = "web.corva"
NEXT_MONTH = "2026-07-01"
ACTIVE, SUSPENDED, PAID, OVERDUE = "active", "suspended", "paid", "overdue"
MONTHS = {"2026-03": "March", "2026-04": "April", "2026-05": "May"}
REFUND_DAYS = 60
"""Number of days after the due date of a bill in which an item can be refunded."""
OWN_PHONE = "own phone"
PHONES = (
    "work phone", "second phone", "daughter's phone", "son's phone", "mother's phone", "father's phone",
)  # fmt: skip
OTHERS = ("tablet", "camera", "watch", "laptop", "e-reader", "router")
PLANS = (
    # name, price, GB, use abroad included, price of a day abroad, of another GB, of a new SIM card
    ("Dot", 690, 1, False, 450, 320, 590),
    ("Mini", 890, 3, False, 420, 290, 590),
    ("Mini Plus", 1090, 3, True, 0, 280, 490),
    ("Basic", 1190, 6, False, 390, 260, 490),
    ("Basic Plus", 1390, 6, True, 0, 240, 490),
    ("Medium", 1490, 12, False, 350, 220, 450),
    ("Medium Plus", 1790, 12, True, 0, 210, 450),
    ("Large", 1890, 25, False, 310, 180, 390),
    ("Large Plus", 2290, 25, True, 0, 170, 390),
    ("Grand", 2490, 50, False, 270, 150, 350),
    ("Grand Plus", 2990, 50, True, 0, 140, 350),
    ("Giant", 3190, 100, False, 240, 120, 290),
    ("Giant Plus", 3890, 100, True, 0, 110, 290),
)
EXTRAS = (
    "calls abroad",
    "service number",
    "text messages",
    "parking ticket",
    "video rental",
    "music service",
)


def last_refund_day(bill: dict) -> str:
    """Return the last day on which an item of a bill can be refunded."""
    return (date.fromisoformat(bill["due_on"]) + timedelta(days=REFUND_DAYS)).isoformat()


def data_left(line: dict) -> int:
    """Return the remaining GB of a line in this month."""
    data = line["data"]
    return data["allowance_gb"] + data["added_gb"] - data["used_gb"]


def double_item(bill: dict) -> dict | None:
    """Return the item that a bill has twice, or None if there is no such item."""
    seen = set()
    for item in bill["items"]:
        if (key := (item["text"], item["amount"])) in seen:
            return item
        seen.add(key)
    return None


def _tables() -> dict[str, dict[str, dict]]:
    rng = random.Random(SEED)
    plans = {plan["plan_id"]: plan for plan in map(_plan, range(len(PLANS)))}
    tables: dict[str, dict[str, dict]] = {"plans": plans, "customers": {}, "lines": {}, "bills": {}}
    numbers = rng.sample(range(1_000_000, 9_999_999), 5 * NUM_CUSTOMERS)
    for number in range(NUM_CUSTOMERS):
        customer = _customer(number, rng)
        tables["customers"][customer["customer_id"]] = customer
        labels = [OWN_PHONE, *rng.sample(PHONES, 2), *rng.sample(OTHERS, 2)]
        states = ["fine", "used up", "owing", "unpaid", rng.choice(("paused", "ended"))]
        rng.shuffle(states)
        for label, state in zip(labels, states, strict=True):
            line = _line(f"070-{numbers.pop()}", label, customer, rng)
            _set_state(line, state, rng)
            tables["lines"][line["number"]] = line
            customer["lines"].append({"number": line["number"], "label": label})
            for bill in _bills(len(tables["bills"]), line, state, plans[line["plan_id"]], rng):
                tables["bills"][bill["bill_id"]] = bill
                line["bills"].append(bill["bill_id"])
    return tables


def _plan(number: int) -> dict:
    name, price, data, included, abroad, gigabyte, sim = PLANS[number]
    return {
        "plan_id": f"PL{number + 1:02d}",
        "name": name,
        "price": money(price),
        "data_gb": data,
        "abroad": {"included": included, "price_per_day": money(abroad)},
        "price_per_gb": money(gigabyte),
        "sim_price": money(sim),
    }


def _customer(number: int, rng: random.Random) -> dict:
    name = draw_name(number)
    return {
        "customer_id": f"C{2000 + number}",
        "name": name,
        "email": f"{name['first']}.{name['last']}{rng.randrange(10, 99)}@example.com".lower(),
        "address": draw_address(rng),
        "payment_methods": [
            {"payment_id": f"card-{rng.randrange(1000, 9999)}", "kind": "card"},
            {"payment_id": f"bank-{rng.randrange(1000, 9999)}", "kind": "bank account"},
        ],
        "lines": [],
    }


def _line(number: str, label: str, customer: dict, rng: random.Random) -> dict:
    plan = _plan(rng.randrange(len(PLANS)))
    minimum = rng.choice((-1, 1)) * rng.randrange(20, 400)
    return {
        "number": number,
        "customer_id": customer["customer_id"],
        "label": label,
        "plan_id": plan["plan_id"],
        "contract": {"minimum_until": day(minimum), "ends_on": None},
        "status": ACTIVE,
        "suspension": None,
        "data": {"allowance_gb": plan["data_gb"], "added_gb": 0, "used_gb": rng.randrange(plan["data_gb"])},
        "roaming": bool(rng.random() < 0.5),
        "sim": {"puk": f"{rng.randrange(10_000_000, 99_999_999)}", "ordered": None},
        "bills": [],
    }


def _set_state(line: dict, state: str, rng: random.Random) -> None:
    if state == "used up":
        line["data"]["used_gb"] = line["data"]["allowance_gb"]
    if state in ("unpaid", "paused", "ended"):
        reason = "unpaid bills" if state == "unpaid" else rng.choice(("lost", "stolen", "travel"))
        line.update(status=SUSPENDED, suspension={"since": day(-rng.randrange(3, 40)), "reason": reason})
    if state == "ended":
        line["contract"] = {
            "minimum_until": day(-rng.randrange(60, 200)),
            "ends_on": day(-rng.randrange(2, 50)),
        }


def _bills(count: int, line: dict, state: str, plan: dict, rng: random.Random) -> list[dict]:
    unpaid = rng.randrange(1, 3) if state in ("owing", "unpaid") else 0
    due = -rng.randrange(3, 12)  # of the bill of May
    bills = []
    for number, month in enumerate(MONTHS):
        older = len(MONTHS) - 1 - number
        items = [{"text": f"plan {plan['name']}", "amount": plan["price"]}]
        for text in rng.sample(EXTRAS, rng.randrange(1, 3)):
            items.append({"text": text, "amount": money(rng.randrange(60, 1500, 5))})
        paid = older >= unpaid
        if paid and rng.random() < 0.6:
            items.append(dict(items[-1]))
        bills.append(
            {
                "bill_id": f"B{40_000 + count + number}",
                "number": line["number"],
                "month": month,
                "due_on": day(due - 31 * older),
                "status": PAID if paid else OVERDUE,
                "items": items,
                "amount": money(sum(cents(item["amount"]) for item in items)),
            }
        )
    return bills


TELECOM = _tables()
"""The tables ``plans``, ``customers``, ``lines`` and ``bills``. No episode changes them."""
