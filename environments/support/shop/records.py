"""The shop's records: products, customers and orders, the same in every process."""

from __future__ import annotations

import random
from datetime import date, timedelta

from ..records import day, draw_address, draw_name, money

NUM_CUSTOMERS = 500
SEED = 20260615
COLOURS = ("black", "white", "blue", "green", "red", "grey", "yellow", "orange")
SIZES = ("small", "medium", "large")
PRODUCTS = (
    "kettle", "desk lamp", "backpack", "rain jacket", "wool blanket", "water bottle", "office chair",
    "bookshelf", "frying pan", "alarm clock", "yoga mat", "travel mug", "wall mirror", "teapot", "umbrella",
    "tent", "sleeping bag", "toaster", "coffee grinder", "picnic basket", "scarf", "cushion", "floor lamp",
    "suitcase", "bath towel", "garden chair", "tool box", "bread knife", "fruit bowl", "door mat",
)  # fmt: skip
PENDING, SHIPPED, DELIVERED = "pending", "shipped", "delivered"
RETURN_DAYS = {False: 30, True: 60}
"""Number of days after the delivery for returns, by membership."""


def last_day(order: dict, customer: dict) -> str:
    """Return the last day for returning the items of a delivered order."""
    delivered = date.fromisoformat(order["delivered_on"])
    return (delivered + timedelta(days=RETURN_DAYS[customer["member"]])).isoformat()


def _tables() -> dict[str, dict[str, dict]]:
    rng = random.Random(SEED)
    products = {f"P{100 + n}": _product(n, name, rng) for n, name in enumerate(PRODUCTS)}
    customers, orders = {}, {}
    for number in range(NUM_CUSTOMERS):
        customer = _customer(number, rng)
        names = rng.sample(list(products), len(products))
        for _ in range(rng.randrange(4, 7)):
            bought, names = names[: rng.randrange(1, 4)], names[3:]
            order = _order(10_000 + len(orders), customer, [products[name] for name in bought], rng)
            orders[order["order_id"]] = order
            customer["orders"].append(order["order_id"])
        customers[customer["customer_id"]] = customer
    return {"products": products, "customers": customers, "orders": orders}


def _product(number: int, name: str, rng: random.Random) -> dict:
    base = rng.randrange(9, 120) * 100
    variants = []
    for colour in rng.sample(COLOURS, 4):
        for size in SIZES:
            price = base + rng.randrange(0, 3000, 5)
            stock = rng.randrange(1, 40) if rng.random() < 0.75 else 0
            variants.append(
                {
                    "item_id": f"{100 + number}-{len(variants) + 1:02d}",
                    "colour": colour,
                    "size": size,
                    "price": money(price),
                    "in_stock": stock,
                }
            )
    return {"product_id": f"P{100 + number}", "name": name, "variants": variants}


def _customer(number: int, rng: random.Random) -> dict:
    name = draw_name(number)
    balance = rng.randrange(60) * 100
    return {
        "customer_id": f"C{1000 + number}",
        "name": name,
        "email": f"{name['first']}.{name['last']}{rng.randrange(10, 99)}@example.com".lower(),
        "address": draw_address(rng),
        "member": bool(rng.random() < 0.4),
        "payment_methods": [
            {"payment_id": f"card-{rng.randrange(1000, 9999)}", "kind": "card"},
            {
                "payment_id": f"gift-{rng.randrange(1000, 9999)}",
                "kind": "gift card",
                "balance": money(balance),
            },
        ],
        "orders": [],
    }


def _order(number: int, customer: dict, products: list[dict], rng: random.Random) -> dict:
    status = rng.choice((PENDING, SHIPPED, DELIVERED, DELIVERED))
    items = []
    for product in products:
        variant = rng.choice(product["variants"])
        kept = {name: variant[name] for name in ("item_id", "colour", "size", "price")}
        items.append({"product_id": product["product_id"], "name": product["name"], **kept})
    order = {
        "order_id": f"W{number}",
        "customer_id": customer["customer_id"],
        "status": status,
        "address": dict(customer["address"]),
        "items": items,
        "payment_id": customer["payment_methods"][int(rng.random() < 0.2)]["payment_id"],
    }
    if status == DELIVERED:
        return {**order, "delivered_on": day(-rng.randrange(2, 90))}
    return {**order, "expected_on": day(rng.randrange(2, 15))}


SHOP = _tables()
"""The tables ``products``, ``customers`` and ``orders``. No episode changes them."""
