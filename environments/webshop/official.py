"""Reads WebShop's official files into a store on disk, once: products, attributes, instructions of people."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl_env.dataset import derived_file

from .catalogue import PRICE_STEPS, Product
from .store import Store

logger = logging.getLogger("agentrl_env")

STORE = "catalogue.sqlite"
PRODUCTS = ("items_shuffle.json", "items_shuffle_1000.json")
ATTRIBUTES = ("items_ins_v2.json", "items_ins_v2_1000.json")
INSTRUCTIONS = ("items_human_ins.json",)
SHUFFLE = 233
"""Seed of the order of the goals, as in WebShop, so that indices agree."""
NUM_TEST, NUM_VALIDATION = 500, 1000
"""The first goals are in test, the next in validation, and the others in train."""
CHUNK = 1 << 20


class DataError(ValueError):
    """A file of the folder is missing or invalid."""


def open_official(folder: str | os.PathLike[str]) -> Store:
    """Return the store of a folder, ``catalogue.sqlite``. It is written if it is missing or outdated.

    Raises DataError.
    """
    names = (*PRODUCTS, *ATTRIBUTES, *INSTRUCTIONS)

    def write(path: Path) -> None:
        products, goals = _file(folder, PRODUCTS), []
        described = _load(_file(folder, ATTRIBUTES))
        people = next((file for name in INSTRUCTIONS if (file := Path(folder) / name).exists()), None)
        instructions = _load(people) if people else described
        store = Store.build(_products(products, described, instructions, goals), str(path))
        random.Random(SHUFFLE).shuffle(goals)
        store.add_goals(goals)
        store.close()

    sources = [file for name in names if (file := Path(folder) / name).exists()]
    return Store(str(derived_file(Path(folder) / STORE, sources=sources, write=write)))


def read_array(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yield the objects of a JSON array, without holding the whole file. Raises DataError."""
    decoder, text, begun, number = json.JSONDecoder(), "", False, 1
    with open(path, encoding="utf-8", errors="replace") as file:
        while True:
            chunk = file.read(CHUNK)
            text += chunk
            while True:
                text = text.lstrip(" \t\r\n," if begun else " \t\r\n\ufeff")
                if not begun:
                    if text and text[0] != "[":
                        raise DataError(f"{path}: a JSON array is expected, found {text[:20]!r}")
                    begun, text = bool(text), text[1:]
                    if not begun:
                        break
                    continue
                if text.startswith("]"):
                    return
                try:
                    element, end = decoder.raw_decode(text)
                except json.JSONDecodeError as error:
                    if not chunk:
                        raise DataError(
                            f"{path}: the file ends within element {number}, or it is no JSON: {error}"
                        ) from error
                    break
                yield element
                number += 1
                text = text[end:]
            if not chunk:
                raise DataError(f"{path}: the file ends before the array does")


def split_goals(count: int, split: str) -> range:
    """Return the indices of a split's goals among ``count`` goals."""
    bounds = {
        "test": (0, NUM_TEST),
        "validation": (NUM_TEST, NUM_TEST + NUM_VALIDATION),
        "train": (NUM_TEST + NUM_VALIDATION, math.inf),
    }
    first, last = bounds[split]
    return range(min(first, count), int(min(last, count)))


def _products(
    path: Path, described: dict[str, Any], instructions: dict[str, Any], goals: list[dict[str, Any]]
) -> Iterator[Product]:
    """Yield the products of a file. Append the goals that are generated for them to ``goals``."""
    skipped = count = wishes = 0
    seen = set()
    for record in read_array(path):
        count += 1
        product = _product(record, described)
        if product is None or product.asin in seen:
            skipped += 1
            continue
        seen.add(product.asin)
        given = _of(instructions, product.asin) or []
        for number, instruction in enumerate(given if isinstance(given, list) else [given]):
            wishes += 1
            if goal := _goal(product, instruction, number):
                goals.append(goal)
        yield product
    if skipped:
        logger.warning(
            "%s: %d of %d products were left out, without a name or twice there", path, skipped, count
        )
    if len(goals) < wishes:
        left_out = wishes - len(goals)
        logger.warning("%s: %d instructions were left out, without a text or attributes", path, left_out)


def _of(records: dict[str, Any], asin: str) -> Any:
    """Return the data of a product in a file, which can have its identifier in lower case."""
    return records.get(asin) or records.get(asin.lower())


def _product(record: Any, described: dict[str, Any]) -> Product | None:
    if not isinstance(record, dict):
        return None
    asin, title = _text(record.get("asin")).upper(), _text(record.get("name"))
    if not asin or asin == "NAN" or len(asin) > 10 or not title:
        return None
    about = _of(described, asin)
    return Product(
        asin=asin,
        title=title,
        category=_text(record.get("product_category")),
        query=_text(record.get("query")).lower(),
        price=_price(record.get("pricing"), asin),
        description=_text(record.get("full_description")),
        features=_texts(record.get("small_description")),
        attributes=_texts(about.get("attributes") if isinstance(about, dict) else ()),
        options=_options(record.get("customization_options")),
        rating=_rating(record.get("average_rating")),
    )


def _goal(product: Product, given: Any, number: int) -> dict[str, Any] | None:
    """Return a person's request, or None if the instruction or its attributes are missing."""
    if not isinstance(given, dict):
        return None
    text = _text(given.get("instruction")).strip(".")
    attributes = _texts(given.get("instruction_attributes"))
    if not text or not attributes:
        return None
    rng = random.Random(f"{product.asin} {number}")
    steps = [step for step in PRICE_STEPS if step > product.price][:4]
    limit = float(max(rng.sample(steps, 2))) if len(steps) >= 2 else None
    return {
        "asin": product.asin,
        "kind": product.query,
        "instruction": text if limit is None else f"{text}, and price lower than {limit:.2f} dollars",
        "attributes": list(attributes),
        "options": {str(i): value for i, value in enumerate(_texts(given.get("instruction_options")))},
        "price_upper": limit,
    }


def _options(given: Any) -> dict[str, tuple[str, ...]]:
    options = {}
    for name, contents in given.items() if isinstance(given, dict) else ():
        listed = contents if isinstance(contents, list) else [contents]
        values = [content.get("value") if isinstance(content, dict) else content for content in listed]
        if cleaned := tuple(dict.fromkeys(value.replace("/", " | ").lower() for value in _texts(values))):
            options[_text(name).lower()] = cleaned
    return options


def _price(given: Any, asin: str) -> float:
    """Return the price in dollars. As in WebShop, a range gives a drawn price, and a missing price is 100."""
    texts = given if isinstance(given, list) else _text(given).split("$")
    matches = (_NUMBER.search(str(text).replace(",", "")) for text in texts)
    found = [price for match in matches if match and math.isfinite(price := float(match.group()))]
    if len(found) > 1:
        return round(random.Random(asin).uniform(min(found[:2]), max(found[:2])), 2)
    return found[0] if found else 100.0


_NUMBER = re.compile(r"\d+(\.\d+)?|\.\d+")


def _rating(given: Any) -> float | None:
    match = _NUMBER.search(_text(given))
    return min(float(match.group()), 5.0) if match else None


def _text(given: Any) -> str:
    """Return text or a number as text. NaN becomes "", and a lone surrogate becomes a question mark."""
    if not isinstance(given, str | int | float) or given != given:
        return ""
    return " ".join(str(given).encode("utf-8", "replace").decode().split())


def _texts(given: Any) -> tuple[str, ...]:
    """Return the texts of a list, an object, or a single text. Of a pair with an image, return the first."""
    items = list(given.values()) if isinstance(given, dict) else given if isinstance(given, list) else [given]
    firsts = (item[0] if isinstance(item, list) and item else item for item in items)
    return tuple(text for item in firsts if (text := _text(item)))


def _file(folder: str | os.PathLike[str], names: tuple[str, ...]) -> Path:
    for name in names:
        if (path := Path(folder) / name).exists():
            return path
    raise DataError(
        f"{folder}: there is no {' or '.join(names)}; WEBSHOP_DATA names the folder of WebShop's files"
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: a JSON object by asin is expected")
    return loaded
