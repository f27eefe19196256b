"""The problems of the shop: requests of a customer, the desk's solution, and the facts to tell."""

from __future__ import annotations

import random

from ..problem import IDENTITY, Problem, Problems, Request, Step, ask, call, facts_told, tell
from ..records import TODAY, cents, draw_address, money, written
from .records import COLOURS, DELIVERED, PENDING, SHIPPED, SHOP, SIZES, last_day
from .tools import ShopTools

REASONS = {
    "no longer needed": "I no longer need it.",
    "ordered by mistake": "I ordered it by mistake.",
    "found cheaper elsewhere": "I found it cheaper in another shop.",
    "takes too long": "The delivery takes too long for me.",
}
KINDS = {
    1: ("cancel", "address", "return", "late", "shipped"),
    2: ("cancel", "address", "return", "change", "exchange", "late", "shipped"),
    3: ("cancel", "address", "return", "change", "exchange", "late", "shipped", "default"),
}
STATUS = {"cancel": PENDING, "address": PENDING, "change": PENDING, "shipped": SHIPPED}
OPENINGS = {
    "cancel": ("I would like to cancel {order}.", "Please cancel {order}."),
    "shipped": ("I would like to cancel {order}.", "Please cancel {order}."),
    "address": ("{Order} should go to another address.", "Please send {order} to another address."),
    "return": ("I would like to send back {items}.", "Please take back {items}."),
    "late": ("I would like to send back {items}.", "Please take back {items}."),
    "change": (
        "I would like another variant of the {name} in the order that I am waiting for.",
        "Please change the {name} in my open order to another variant.",
    ),
    "exchange": (
        "I would like to exchange the {name} that I received for another variant.",
        "The {name} that I received is not right. Please exchange it for another variant.",
    ),
    "default": ("I have moved. Please change the address of my account.", "Please update my own address."),
}
ASK = {
    "reason": "Why would you like to cancel the order with the {name}?",
    "address": "What is the new address{suffix}?",
    "variant": "Which colour and size of the {name} would you like instead?",
    "payment": "Should the amount for the {name} go to your card or to your gift card?",
}
TOPICS = {
    **IDENTITY,
    "order": r"order (number|id)|(which|what) order|number of (the|your) order",
    "reason": r"\breasons?\b|\bwhy\b",
    "address": r"(?<!mail )\baddress\b|where (should|shall|do) ",
    "variant": r"\bcolou?rs?\b|\bsizes?\b|\bvariants?\b|instead|prefer|replac",
    "payment": r"\bpay(ment)?\b|\bcards?\b|\brefund\b|\bmethods?\b",
}
"""Topics of a question, as regular expressions."""
INSTRUCTIONS = """\
You are {first} {last}, a customer of an online shop. You write to its support desk.
{identity}
Make these requests one after another. Make the next one when the last one is settled or refused:
{requests}
Accept it if the desk refuses a request. After the last request, say goodbye."""


class ShopProblem(Problem):
    """A problem of the shop."""

    tools = ShopTools
    topics = TOPICS
    instructions = INSTRUCTIONS

    def request(self, number: int, wish: dict) -> Request:
        kind, style = wish["kind"], self.data["style"]
        order = SHOP["orders"].get(wish.get("order", ""), {})
        items = [item for item in order.get("items", ()) if item["item_id"] in wish.get("items", ())]
        name = items[0]["name"] if items else ""
        which = order["order_id"] if order and self.level == 1 else f"with the {name}"
        goods = " and ".join(f"the {item['name']}" for item in items)
        opening = OPENINGS[kind][style % 2].format(
            order=f"order {which}" if self.level == 1 else f"the order {which}",
            Order=f"Order {which}" if self.level == 1 else f"The order {which}",
            items=f"{goods} from order {which}" if self.level == 1 else f"{goods} that I bought",
            name=name,
        )
        facts = {"order": f"I do not know the number. It is the order with the {name}." if name else ""}
        steps = self._lookups(number, order)
        getattr(self, f"_{kind}")(wish, order, items, facts, steps)
        told = facts_told(steps)
        facts = {topic: text for topic, text in facts.items() if text}
        if self.level == 1:  # everything at once
            facts["order"] = f"It is order {order['order_id']}."
            steps = [step for step in steps if step.kind != "ask"]
            rest = " ".join(text for topic, text in facts.items() if topic != "order")
            opening = f"{opening} {rest} {self.identity}"
        return Request(" ".join(opening.split()), facts, steps, told)

    def _lookups(self, number: int, order: dict) -> list[Step]:
        """Return the calls that find the customer, and the orders up to the right one."""
        steps = []
        if number == 0:
            steps = self.identify()
            if self.level > 1 or self.customer_needed(order):
                steps.append(call("get_customer", customer_id=self.customer["customer_id"]))
        if order:
            own = self.customer["orders"]
            seen = own[: own.index(order["order_id"]) + 1] if self.level > 1 else [order["order_id"]]
            steps += [call("get_order", order_id=one) for one in seen]
        return steps

    def customer_needed(self, order: dict) -> bool:
        """Return True if the desk needs more than the customer's id, because a member has more time."""
        return order.get("status") == DELIVERED

    def _cancel(self, wish, order, items, facts, steps):
        facts["reason"] = REASONS[wish["reason"]]
        total = money(sum(cents(item["price"]) for item in order["items"]))
        name = items[0]["name"]
        steps += [
            ask("reason", ASK["reason"].format(name=name)),
            call("cancel_order", order_id=order["order_id"], reason=wish["reason"]),
            tell(f"Order {order['order_id']} has been cancelled. You get back {total}.", total),
        ]

    def _shipped(self, wish, order, items, facts, steps):
        facts["reason"] = REASONS[wish["reason"]]
        when = order["expected_on"]
        text = f"I cannot cancel order {order['order_id']}, because it is on its way. It arrives on {when}."
        steps.append(tell(text, when))

    def _address(self, wish, order, items, facts, steps):
        facts["address"] = f"The new address is {written(wish['address'])}."
        when, suffix = order["expected_on"], f" for the order with the {items[0]['name']}"
        given = {"order_id": order["order_id"], "address": wish["address"]}
        text = f"The address of order {order['order_id']} has been changed. It arrives on {when}."
        steps += [
            ask("address", ASK["address"].format(suffix=suffix)),
            call("change_delivery_address", **given),
            tell(text, when),
        ]

    def _return(self, wish, order, items, facts, steps):
        total = money(sum(cents(item["price"]) for item in items))
        given = {
            "order_id": order["order_id"],
            "item_ids": sorted(item["item_id"] for item in items),
            "refund_to": self._payment(
                wish, order, facts, steps, items[0]["name"], "The refund should go to"
            ),
        }
        steps += [
            call("return_items", **given),
            tell(f"Your return has been registered. You get back {total}.", total),
        ]

    def _late(self, wish, order, items, facts, steps):
        last = last_day(order, self.customer)
        facts["payment"] = "The refund should go to my card."
        steps.append(tell(f"I cannot take that back: the last day for it was {last}.", last))

    def _change(self, wish, order, items, facts, steps):
        self._replaced("change_items", wish, order, items[0], facts, steps)

    def _exchange(self, wish, order, items, facts, steps):
        self._replaced("exchange_items", wish, order, items[0], facts, steps)

    def _replaced(self, tool, wish, order, item, facts, steps):
        product = SHOP["products"][item["product_id"]]
        new = _wanted(product, item, wish["variant"])
        facts["variant"] = _wish_text(wish["variant"])
        difference = cents(new["price"]) - cents(item["price"])
        steps.append(ask("variant", ASK["variant"].format(name=item["name"])))
        steps.append(call("get_product", product_id=product["product_id"]))
        payment = self._payment(wish, order, facts, steps, item["name"], "Please use")
        replacement = {"item_id": item["item_id"], "new_item_id": new["item_id"]}
        given = {"order_id": order["order_id"], "replacements": [replacement], "payment_id": payment}
        amount = money(abs(difference))
        verb = "pay" if difference > 0 else "get back"
        done = "exchange has been registered" if tool == "exchange_items" else "order has been changed"
        steps += [call(tool, **given), tell(f"Your {done}. You {verb} {amount}.", amount)]

    def _default(self, wish, order, items, facts, steps):
        facts["address"] = f"The new address is {written(wish['address'])}."
        given = {"customer_id": self.customer["customer_id"], "address": wish["address"]}
        steps += [
            ask("address", ASK["address"].format(suffix=" of your account")),
            call("change_default_address", **given),
            tell("The address of your account has been changed."),
        ]

    def _payment(self, wish, order, facts, steps, name, words) -> str:
        """Return the id of the wanted payment method."""
        facts["payment"] = f"{words} my {wish['payment']}."
        steps.append(ask("payment", ASK["payment"].format(name=name)))
        methods = self.customer["payment_methods"]
        return next(method["payment_id"] for method in methods if method["kind"] == wish["payment"])


def _wanted(product: dict, item: dict, wish: dict) -> dict | None:
    """Return the variant that a customer wants: the cheapest matching one in stock, if it is unique."""
    fitting = [
        variant
        for variant in product["variants"]
        if variant["in_stock"]
        and variant["item_id"] != item["item_id"]
        and variant["colour"] == wish.get("colour", variant["colour"])
        and variant["colour"] != wish.get("not_colour")
        and variant["size"] == wish.get("size", variant["size"])
    ]
    fitting.sort(key=lambda variant: cents(variant["price"]))
    if not fitting or (len(fitting) > 1 and fitting[0]["price"] == fitting[1]["price"]):
        return None
    return fitting[0]


def _wish_text(wish: dict) -> str:
    if "colour" in wish:
        return f"I would like it in {wish['colour']} and in the size {wish['size']}."
    if "size" in wish:
        return f"In the size {wish['size']}, whichever colour is cheapest and in stock."
    return f"Any size, but not in {wish['not_colour']}. The cheapest that you have in stock."


def problems(split: str, level: int) -> Problems:
    """Return the samples of "train" or "test" at a level."""
    every = enumerate(SHOP["customers"].items())
    return Problems(split, level, {n: name for n, (name, row) in every if _can_ask(row)}, draw)


def _can_ask(customer: dict) -> bool:
    """Return True if a customer has orders for any number of problems: a pending and a delivered one."""
    orders = [SHOP["orders"][name] for name in customer["orders"]]
    clear = {
        order["status"] for order in orders if any(_is_unique(item, customer) for item in order["items"])
    }
    return {PENDING, DELIVERED} <= clear


def draw(customer_id: str, level: int, rng: random.Random) -> list[dict] | None:
    """Return requests about different orders, or None if the customer has no orders for them."""
    customer = SHOP["customers"][customer_id]
    count = 1 if level < 3 else rng.randrange(2, 4)
    orders = [SHOP["orders"][name] for name in customer["orders"]]
    wishes: list[dict] = []
    for kind in rng.sample(KINDS[level], count):
        used = {wish.get("order") for wish in wishes}
        free = [order for order in orders if order["order_id"] not in used and _suits(kind, order, customer)]
        if kind == "default":
            wishes.append({"kind": "default", "address": draw_address(rng)})
            continue
        if not free:
            return None
        wish = _fill(kind, rng.choice(free), customer, level, rng)
        if wish is None:
            return None
        wishes.append(wish)
    if all(wish["kind"] == "default" for wish in wishes):
        return None
    return wishes


def _suits(kind: str, order: dict, customer: dict) -> bool:
    if order["status"] != STATUS.get(kind, DELIVERED):
        return False
    if kind in ("return", "exchange", "late"):
        return (last_day(order, customer) < TODAY.isoformat()) == (kind == "late")
    return True


def _fill(kind: str, order: dict, customer: dict, level: int, rng: random.Random) -> dict | None:
    """Return a request about an order, or None if it would be ambiguous or impossible."""
    items = [item for item in order["items"] if _is_unique(item, customer)]
    if not items:
        return None
    count = 1 if kind not in ("return", "late") else rng.randrange(1, len(items) + 1)
    chosen = [items[n] for n in sorted(rng.sample(range(len(items)), count))]
    wish = {"kind": kind, "order": order["order_id"], "items": [item["item_id"] for item in chosen]}
    if kind in ("cancel", "shipped"):
        return {**wish, "reason": rng.choice(list(REASONS))}
    if kind == "address":
        return {**wish, "address": draw_address(rng)}
    if kind == "return":
        return {**wish, "payment": rng.choice(("card", "gift card"))}
    if kind == "late":
        return wish
    variant = _variant(level, rng)
    new = _wanted(SHOP["products"][chosen[0]["product_id"]], chosen[0], variant)
    if new is None or new["price"] == chosen[0]["price"]:
        return None
    gift = customer["payment_methods"][1]
    covered = cents(new["price"]) - cents(chosen[0]["price"]) <= cents(gift["balance"])
    payment = "gift card" if covered and rng.random() < 0.5 else "card"
    return {**wish, "variant": variant, "payment": payment}


def _is_unique(item: dict, customer: dict) -> bool:
    """Return True if a customer has bought a product only once, so that its name identifies the order."""
    bought = [i["name"] for name in customer["orders"] for i in SHOP["orders"][name]["items"]]
    return bought.count(item["name"]) == 1


def _variant(level: int, rng: random.Random) -> dict:
    """Return the wanted replacement: one variant, or at level 3 a condition."""
    if level < 3:
        return {"colour": rng.choice(COLOURS), "size": rng.choice(SIZES)}
    if rng.random() < 0.5:
        return {"size": rng.choice(SIZES)}
    return {"not_colour": rng.choice(COLOURS)}
