"""Draws of requests for the problems of the operator."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..records import TODAY, cents, draw_address
from .phone import RIGHT, TROUBLES, State
from .records import ACTIVE, OVERDUE, OWN_PHONE, PHONES, TELECOM, data_left, double_item, last_refund_day

PLACES = ("Spain", "Norway", "Japan", "Canada", "Kenya", "Chile", "Greece", "Vietnam")
PAYMENTS = ("card", "bank account")
ON_PHONE = ("phone", "trouble", "both")
"""Kinds of requests about the phone that the customer has at hand."""
PHONE_SHARE = {1: 0.25, 2: 0.5, 3: 0.7}
"""Share of draws with such a request, by level. Some of them are impossible and drawn again."""
ACCOUNT_FAULTS = ("calls", "abroad", "slow")
"""Complaints that an account can cause: a suspended line, disabled roaming, used-up data."""


def overdue(line: dict) -> list[dict]:
    """Return the overdue bills of a line, the oldest first."""
    bills = [TELECOM["bills"][name] for name in line["bills"]]
    return [bill for bill in bills if bill["status"] == OVERDUE]


def state_of(line: dict) -> str:
    """Return "fine", "used up", "owing", "unpaid", "paused" or "ended"."""
    if line["status"] == ACTIVE:
        return "owing" if overdue(line) else "fine" if data_left(line) else "used up"
    if overdue(line):
        return "unpaid"
    return "ended" if line["contract"]["ends_on"] else "paused"


def new_plan(wish: dict, line: dict) -> dict | None:
    """Return the plan that a customer wants, or None if the line already has it or no plan fits."""
    if "plan_id" in wish:
        fitting = [TELECOM["plans"][wish["plan_id"]]]
    else:
        fitting = [
            plan
            for plan in TELECOM["plans"].values()
            if plan["data_gb"] >= wish["at_least"] and plan["abroad"]["included"] >= wish["abroad"]
        ]
    best = min(fitting, key=lambda plan: cents(plan["price"]), default=None)
    return None if best is None or best["plan_id"] == line["plan_id"] else best


def wanted_gb(wish: dict, line: dict) -> int:
    """Return the missing GB for a customer's wish."""
    return wish["gb"] if "gb" in wish else wish["left"] - data_left(line)


def draw(customer_id: str, kinds: Sequence[str], level: int, rng: random.Random) -> list[dict] | None:
    """Return requests about different lines, or None if the customer has no lines for them."""
    customer = TELECOM["customers"][customer_id]
    lines = [TELECOM["lines"][line["number"]] for line in customer["lines"]]
    wishes: list[dict] = []
    for kind in _choose(kinds, level, rng):
        used = {wish["line"] for wish in wishes}
        free = [line for line in lines if line["number"] not in used]
        rng.shuffle(free)
        make = _on_phone if kind in ON_PHONE else _MAKERS[kind]
        wish = next((wish for line in free if (wish := make(kind, line, level, rng))), None)
        if wish is None:
            return None
        wishes.append({"kind": kind, "line": wish.pop("line"), **wish})
    if any("place" in wish for wish in wishes) and any("roaming" in wish.values() for wish in wishes):
        return None  # a customer who is abroad does not announce a journey abroad
    return wishes


def _choose(kinds: Sequence[str], level: int, rng: random.Random) -> list[str]:
    """Return kinds of requests, at most one of them about the phone."""
    phone = [kind for kind in kinds if kind in ON_PHONE]
    others = [kind for kind in kinds if kind not in ON_PHONE]
    about_phone = [rng.choice(phone)] if rng.random() < PHONE_SHARE[level] else []
    count = 1 if level < 3 else rng.randrange(2, 4)
    chosen = [*about_phone, *rng.sample(others, count - len(about_phone))]
    return rng.sample(chosen, len(chosen))


def _plan(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) not in ("fine", "used up"):
        return None
    wishes: list[dict] = [{"plan_id": name} for name in TELECOM["plans"]]
    if level == 3:
        sizes = sorted(
            {plan["data_gb"] - less for plan in TELECOM["plans"].values() for less in (0, 1)} - {0}
        )
        wishes = [{"at_least": size, "abroad": abroad} for size in sizes for abroad in (False, True)]
    rng.shuffle(wishes)
    wish = next((wish for wish in wishes if _is_too_cheap(wish, line) == (kind == "cheaper")), None)
    return {"line": line["number"], "plan": wish} if wish else None


def _is_too_cheap(wish: dict, line: dict) -> bool | None:
    """Return True if the line has a costlier plan until the end of a minimum term, or None for its own."""
    if (plan := new_plan(wish, line)) is None:
        return None
    price = TELECOM["plans"][line["plan_id"]]["price"]
    bound = line["contract"]["minimum_until"] >= TODAY.isoformat()
    return bound and cents(plan["price"]) < cents(price)


def _data(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) not in ("fine", "used up"):
        return None
    return {"line": line["number"], **_amount(line, level, rng)}


def _amount(line: dict, level: int, rng: random.Random) -> dict:
    if level == 3:
        return {"left": data_left(line) + rng.randrange(2, 21)}
    return {"gb": rng.randrange(1, 21)}


def _pay(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if not overdue(line):
        return None
    oldest = level == 3 and len(overdue(line)) > 1 and rng.random() < 0.6
    return {"line": line["number"], "payment": rng.choice(PAYMENTS), "oldest": oldest}


def _suspend(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) not in ("fine", "used up"):
        return None
    return {"line": line["number"], "reason": rng.choice(("lost", "stolen", "travel"))}


def _sim(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) not in ("fine", "used up"):
        return None
    return {"line": line["number"], **_card(rng)}


def _card(rng: random.Random) -> dict:
    return {"reason": rng.choice(("lost", "damaged")), "address": draw_address(rng)}


def _roaming(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    return {"line": line["number"]} if state_of(line) in ("fine", "used up") and _costs_abroad(line) else None


def _costs_abroad(line: dict) -> bool:
    return not line["roaming"] and not TELECOM["plans"][line["plan_id"]]["abroad"]["included"]


def _refund(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    bills = [TELECOM["bills"][name] for name in line["bills"]]
    late = kind == "late"
    fitting = [b for b in bills if double_item(b) and (last_refund_day(b) < TODAY.isoformat()) == late]
    if not fitting:
        return None
    return {"line": line["number"], "bill": rng.choice(fitting)["bill_id"], "payment": rng.choice(PAYMENTS)}


def _resume(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) == "unpaid":
        return {"line": line["number"], "payment": rng.choice(PAYMENTS)}
    return {"line": line["number"]} if state_of(line) == "paused" else None


def _ended(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    return {"line": line["number"]} if state_of(line) == "ended" else None


def _owing(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    if state_of(line) == "unpaid":
        return {"line": line["number"], "wish": "resume"}
    if state_of(line) != "owing":
        return None
    wish = rng.choice(("data", "sim", *(["roaming"] if _costs_abroad(line) else [])))
    more = _card(rng) if wish == "sim" else _amount(line, level, rng) if wish == "data" else {}
    return {"line": line["number"], "wish": wish, **more}


_MAKERS = {
    "plan": _plan,
    "cheaper": _plan,
    "data": _data,
    "pay": _pay,
    "suspend": _suspend,
    "sim": _sim,
    "roaming": _roaming,
    "refund": _refund,
    "late": _refund,
    "resume": _resume,
    "ended": _ended,
    "owing": _owing,
}


def _on_phone(kind: str, line: dict, level: int, rng: random.Random) -> dict | None:
    """Return a complaint about a phone, with faults of the account, of the phone, or of both."""
    if line["label"] != OWN_PHONE and line["label"] not in PHONES:
        return None
    every = TROUBLES if kind == "phone" else ACCOUNT_FAULTS
    fitting = [complaint for complaint in every if _account_fault(complaint, line) == (kind != "phone")]
    if not fitting:
        return None
    count = 0 if kind == "trouble" else 2 if kind == "phone" and level == 3 and rng.random() < 0.5 else 1
    # Each setting is wrong equally often, so that no answer is right more often than others.
    setting = rng.choice(
        list({setting: None for complaint in fitting for setting in TROUBLES[complaint].wrong})
    )
    complaint = rng.choice([complaint for complaint in fitting if setting in TROUBLES[complaint].wrong])
    others = [other for other in TROUBLES[complaint].wrong if other != setting]
    faults = [setting, *rng.sample(others, 1)][:count]
    wish = {"line": line["number"], "complaint": complaint, "phone": _state(complaint, faults, rng)}
    if complaint == "abroad":
        wish["place"] = rng.choice(PLACES)
    if kind != "phone" and complaint == "calls":
        wish["payment"] = rng.choice(PAYMENTS)
    if kind != "phone" and complaint == "slow":
        wish |= _amount(line, level, rng)
    return wish


def _account_fault(complaint: str, line: dict) -> bool | None:
    """Return True if the account causes a complaint, False if it does not, or None if it is ambiguous."""
    state = state_of(line)
    if complaint == "calls" and state == "unpaid":
        return True
    if state not in ("fine", "used up"):
        return None
    if complaint == "abroad":
        return True if _costs_abroad(line) else False if line["roaming"] else None
    return complaint == "slow" and state == "used up"


def _state(complaint: str, faults: Sequence[str], rng: random.Random) -> State:
    """Return the settings of a phone: faults, and personal settings of the customer."""
    trouble = TROUBLES[complaint]
    state = {**RIGHT, **trouble.settings, "Wi-Fi calling": rng.choice(("on", "off"))}
    tastes = {"data saver": ("on",), "VPN": ("on",), "network mode": ("3G", "4G")}
    free = [setting for setting in tastes if setting not in trouble.settings]
    # An agent that changes all settings in the policy damages one of these, or turns on roaming at home.
    for setting in rng.sample(free, rng.randrange(1, len(free) + 1) if free else 0):
        state[setting] = rng.choice(tastes[setting])
    for setting in faults:
        state[setting] = rng.choice(trouble.wrong[setting])
    return state
