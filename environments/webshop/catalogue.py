"""Generates products and goals. Number i of each depends only on i and the catalogue's seed."""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split(","))


KINDS: dict[str, tuple[str, tuple[tuple[str, int, int, str], ...]]] = {
    "Beauty & Personal Care": (
        "beauty",
        (
            ("shampoo", 6, 30, "size scent"),
            ("hair conditioner", 6, 30, "size scent"),
            ("face moisturizer", 8, 60, "size"),
            ("body lotion", 5, 35, "size scent"),
            ("lip balm", 3, 15, "flavor"),
            ("nail polish", 3, 14, "color"),
            ("makeup brush set", 9, 45, "color"),
            ("electric toothbrush", 18, 120, "color"),
            ("hair dryer", 20, 150, "color"),
            ("perfume spray", 15, 110, "size scent"),
            ("eyeshadow palette", 8, 50, "color"),
            ("bath bomb set", 8, 35, "scent"),
            ("false eyelashes", 4, 20, "style"),
            ("beard oil", 7, 30, "scent"),
        ),
    ),
    "Electronics": (
        "electronics",
        (
            ("bluetooth headphones", 15, 220, "color"),
            ("bluetooth speaker", 15, 180, "color"),
            ("phone case", 6, 35, "color model"),
            ("screen protector", 5, 25, "model"),
            ("charging cable", 5, 28, "color length"),
            ("power bank", 14, 80, "color"),
            ("computer keyboard", 12, 140, "color"),
            ("computer mouse", 8, 90, "color"),
            ("tablet stand", 9, 50, "color"),
            ("hdmi adapter", 7, 40, "length"),
            ("security camera", 25, 200, "color"),
            ("smart watch band", 7, 45, "color model"),
            ("camera tripod", 18, 130, "color"),
            ("memory card", 8, 90, "capacity"),
        ),
    ),
    "Clothing, Shoes & Jewelry": (
        "fashion",
        (
            ("t shirt", 9, 35, "color fit"),
            ("hooded sweatshirt", 18, 70, "color fit"),
            ("denim jeans", 20, 90, "color fit"),
            ("running shoes", 28, 150, "color shoe"),
            ("ankle boots", 30, 140, "color shoe"),
            ("summer dress", 16, 80, "color fit"),
            ("winter coat", 45, 220, "color fit"),
            ("yoga leggings", 14, 60, "color fit"),
            ("swim trunks", 14, 50, "color fit"),
            ("slippers", 12, 45, "color shoe"),
            ("polo shirt", 15, 60, "color fit"),
            ("sports bra", 13, 50, "color fit"),
            ("cardigan sweater", 20, 85, "color fit"),
            ("sandals", 15, 90, "color shoe"),
        ),
    ),
    "Grocery & Gourmet Food": (
        "grocery",
        (
            ("granola bars", 5, 30, "flavor pack"),
            ("ground coffee", 7, 40, "flavor pack"),
            ("green tea bags", 4, 25, "flavor pack"),
            ("beef jerky", 6, 45, "flavor pack"),
            ("protein powder", 18, 80, "flavor size"),
            ("trail mix", 6, 35, "flavor pack"),
            ("chocolate cookies", 4, 28, "flavor pack"),
            ("potato chips", 4, 26, "flavor pack"),
            ("pasta sauce", 4, 24, "flavor pack"),
            ("fruit snacks", 5, 25, "flavor pack"),
            ("peanut butter", 5, 28, "flavor pack"),
            ("hot sauce", 4, 22, "flavor pack"),
            ("breakfast cereal", 5, 30, "flavor pack"),
            ("energy drink", 8, 45, "flavor pack"),
        ),
    ),
    "Home & Kitchen": (
        "garden",
        (
            ("office chair", 60, 320, "color"),
            ("coffee table", 55, 300, "color"),
            ("bed frame", 90, 500, "color bed"),
            ("throw pillow cover", 7, 35, "color square"),
            ("area rug", 25, 260, "color rug"),
            ("window curtain", 14, 90, "color drop"),
            ("floor lamp", 30, 170, "color"),
            ("bar stool", 45, 250, "color"),
            ("storage ottoman", 30, 160, "color"),
            ("bookshelf", 45, 280, "color"),
            ("wall mirror", 25, 190, "color"),
            ("memory foam mattress", 110, 700, "bed"),
            ("shower curtain", 10, 45, "color drop"),
            ("dining table", 90, 600, "color"),
        ),
    ),
}
"""Department -> the category of its attributes, and its kinds: name, lowest and highest price, options."""

_PRICES = {kind: (low, high) for _, kinds in KINDS.values() for kind, low, high, _ in kinds}

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "beauty": _phrases(
        """
        cruelty free, paraben free, sulfate free, fragrance free, alcohol free, long lasting,
        dermatologist tested, easy to use, travel size, for sensitive skin, for dry skin, vegan,
        hypoallergenic, with argan oil, with hyaluronic acid, with tea tree oil, with coconut oil, water
        resistant
        """
    ),
    "electronics": _phrases(
        """
        noise cancelling, fast charging, water resistant, hands free, easy to install, plug and play,
        heavy duty, lightweight, with carrying case, wireless, high resolution, high speed, non slip,
        dust proof, long battery life, gold plated, foldable, with led lights
        """
    ),
    "fashion": _phrases(
        """
        machine washable, hand wash only, quick drying, moisture wicking, long sleeve, short sleeve,
        slim fit, relaxed fit, elastic waist, rubber sole, arch support, polyester spandex, cotton
        blend, faux leather, button closure, drawstring closure, fleece lined, tummy control
        """
    ),
    "grocery": _phrases(
        """
        gluten free, sugar free, dairy free, non gmo, low sodium, low carb, keto friendly, usda organic,
        kosher certified, plant based, soy free, nut free, high protein, high fiber, no artificial
        colors, ready to eat, individually wrapped, fair trade
        """
    ),
    "garden": _phrases(
        """
        easy assembly, solid wood, space saving, stain resistant, machine washable, mid century, faux
        leather, stainless steel, adjustable height, eco friendly, heavy duty, non slip, tempered glass,
        with storage, engineered wood, scratch resistant, double sided, wall mounted
        """
    ),
}
"""Category -> attributes of its products."""

OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "color": (
        "color",
        _phrases("black, white, navy, crimson, olive, beige, teal, lavender, charcoal, mustard, coral, mint"),
    ),
    "size": ("size", _phrases("2 ounce, 4 ounce, 8 ounce, 12 ounce, 16 ounce, 32 ounce")),
    "scent": ("scent", _phrases("rose, vanilla, eucalyptus, citrus, jasmine, sandalwood, unscented")),
    "flavor": (
        "flavor",
        _phrases("honey, maple, cinnamon, mango, raspberry, hazelnut, lemon, smoky, original, ginger"),
    ),
    "pack": ("pack", _phrases("pack of 1, pack of 3, pack of 6, pack of 12, pack of 24")),
    "fit": ("size", _phrases("x-small, small, medium, large, x-large, xx-large")),
    "shoe": ("size", _phrases("5, 6, 7, 8, 9, 10, 11, 12")),
    "style": ("style", _phrases("natural, dramatic, wispy, volume")),
    "model": ("model", _phrases("for model a1, for model a2, for model b5, for model b7, for model c9")),
    "length": ("length", _phrases("3 feet, 6 feet, 10 feet, 15 feet")),
    "capacity": ("capacity", _phrases("32 gb, 64 gb, 128 gb, 256 gb, 512 gb")),
    "bed": ("size", _phrases("twin, full, queen, king, crib")),
    "square": ("size", _phrases("16 x 16 inch, 18 x 18 inch, 20 x 20 inch, 24 x 24 inch")),
    "rug": ("size", _phrases("2 x 3 feet, 4 x 6 feet, 5 x 8 feet, 8 x 10 feet, 9 x 12 feet")),
    "drop": ("size", _phrases("63 inch, 72 inch, 84 inch, 96 inch, 108 inch")),
}
"""Option of a kind -> its name on the page, and its values."""

SYLLABLES = _phrases(
    "al, bri, cor, dex, el, fen, gar, hul, ix, jo, kan, lum, mo, nor, pri, quo, ril, sa, tov, vel, wyn, zen"
)
AUDIENCES = _phrases(
    "for women, for men, for kids, for travel, for home, for office, for gifts, for daily use"
)
PRAISE = (
    "Popular choice of our customers.",
    "Made with care.",
    "Comes with friendly customer service.",
    "A thoughtful gift.",
    "New in our range.",
    "Refund within 30 days.",
)
REQUESTS = ("I need {}", "I am looking for {}", "Find me {}", "I want to buy {}", "Please get me {}")
UNCOUNTED = _phrases(
    "shampoo, hair conditioner, body lotion, nail polish, beard oil, ground coffee, beef jerky, "
    "protein powder, trail mix, pasta sauce, peanut butter, hot sauce, breakfast cereal"
)
"""Kinds without an article, in addition to plurals."""
PRICE_STEPS = tuple(range(10, 1000, 10))
"""Prices, in dollars, that customers of official goals name as their limit."""
CHEAP = (0.06, 0.08, 0.1)
"""Shares of a kind's articles below a customer's price limit. Most results of a search cost too much."""
WISHES = {1: (1, 1), 2: (2, 2), 3: (3, 3)}
"""Level -> maximum number of requested attributes and options."""


@dataclass(frozen=True)
class Product:
    """One article of the shop."""

    asin: str
    title: str
    category: str
    """Path of departments, separated by ``›``."""
    query: str
    """Kind of article in the shop."""
    price: float
    description: str = ""
    features: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    """Properties that goals name and the reward compares. The pages have them only in words."""
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of an option, such as "color" -> its values."""
    rating: float | None = None


def generate_product(number: int, seed: int = 0) -> Product:
    """Return product ``number`` of the catalogue with this seed."""
    rng = random.Random(f"product {seed} {number}")
    department, (category, kinds) = rng.choice(list(KINDS.items()))
    kind, low, high, option_keys = rng.choice(kinds)
    attributes = rng.sample(ATTRIBUTES[category], rng.randint(3, 5))
    shown = rng.randint(1, 2)
    brand = "".join(rng.sample(SYLLABLES, rng.randint(2, 3))).capitalize()
    audience = rng.choice(AUDIENCES)
    options = {}
    for key in option_keys.split():
        name, values = OPTIONS[key]
        chosen = sorted(rng.sample(range(len(values)), rng.randint(2, min(6, len(values)))))
        options[name] = tuple(values[i] for i in chosen)
    price = round(low * (high / low) ** rng.random()) - rng.choice((0.01, 0.05, 0.5))
    title = f"{brand} {kind.title()}, {', '.join(attributes[:shown])}"
    features = [f"{attribute.capitalize()}: {_claim(rng, kind)}" for attribute in attributes]
    rng.shuffle(features)
    return Product(
        asin=_asin(number, seed),
        title=title,
        category=f"{department} › {kind.title()}",
        query=kind,
        price=round(price, 2),
        description=f"The {brand} {kind} {audience}. {rng.choice(PRAISE)}",
        features=tuple(features),
        attributes=tuple(sorted(attributes)),
        options=options,
        rating=round(rng.uniform(2.5, 5.0), 1),
    )


def generate_goal(number: int, level: int, seed: int = 0) -> dict[str, Any] | None:
    """Return a customer's request at this level: a sample's data, which product ``number`` meets.

    The price limit is so low that few articles of the kind meet it. Level 1 also names one attribute that is
    in the title, and one option. Level 2 adds a second attribute and a second option. Level 3 asks for every
    option and for three attributes, at least one of which is only on the page of features.

    Return None if the product itself costs more than such a limit.
    """
    product = generate_product(number, seed)
    rng = random.Random(f"goal {seed} {level} {number}")
    limit = _limit(product.query, rng.choice(CHEAP))
    if product.price > limit:
        return None
    in_title = product.title.split(", ")[1:]
    hidden = [attribute for attribute in product.attributes if attribute not in in_title]
    pool = {1: in_title, 2: rng.sample(product.attributes, 2), 3: hidden + in_title}[level]
    num_attributes, num_options = WISHES[level]
    attributes = sorted(pool[:num_attributes])
    names = sorted(rng.sample(sorted(product.options), min(num_options, len(product.options))))
    options = {name: rng.choice(product.options[name]) for name in names}
    wishes = [
        _with_article(product.query),
        *attributes,
        *(f"{name}: {value}" for name, value in options.items()),
    ]
    wishes.append(f"and a price lower than {limit:.2f} dollars")
    return {
        "level": level,
        "asin": product.asin,
        "kind": product.query,
        "instruction": rng.choice(REQUESTS).format(", ".join(wishes)),
        "attributes": attributes,
        "options": options,
        "price_upper": limit,
    }


def generate_goals(level: int, count: int, seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """Return the goals of a level by split. The request determines the split and occurs only once."""
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    seen = set()
    for number in _cheap_products(count, seed):
        goal = generate_goal(number, level, seed)
        if goal is None:
            continue
        wish = json.dumps([goal[key] for key in ("kind", "attributes", "options", "price_upper")])
        if wish not in seen:
            seen.add(wish)
            drawn = zlib.crc32(wish.encode()) % 20
            splits["test" if drawn < 3 else "validation" if drawn < 6 else "train"].append(goal)
    return splits


def generate_products(count: int, seed: int = 0) -> Iterator[Product]:
    """Yield the products of a catalogue."""
    return (generate_product(number, seed) for number in range(count))


@cache
def _cheap_products(count: int, seed: int) -> list[int]:
    """Return the numbers of the products that are below some price limit."""
    products = enumerate(generate_products(count, seed))
    return [number for number, product in products if product.price <= _limit(product.query, max(CHEAP))]


def _limit(kind: str, share: float) -> float:
    """Return the price, in half dollars, below which about this share of a kind's articles is."""
    low, high = _PRICES[kind]
    return math.ceil(2 * low * (high / low) ** share) / 2


def _with_article(kind: str) -> str:
    """Return a kind of article in the words of a customer."""
    if kind in UNCOUNTED or (kind.endswith("s") and not kind.endswith("ss")):
        return kind
    return f"an {kind}" if kind[0] in "aeiou" or kind.startswith("hdmi") else f"a {kind}"


def _claim(rng: random.Random, kind: str) -> str:
    return rng.choice(
        (
            f"made to last, as {_with_article(kind)} should",
            f"what you expect of {_with_article(kind)}",
            "tested by our team",
        )
    )


def _asin(number: int, seed: int) -> str:
    """Return an identifier of ten characters. Numbers and identifiers correspond one to one."""
    scrambled = (number * 2_654_435_761 + seed * 40_503) % 2**32
    digits = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
    text = ""
    for _ in range(8):
        scrambled, digit = divmod(scrambled, len(digits))
        text = digits[digit] + text
    return f"B0{text}"
