"""The products in SQLite, found by identifier or by full-text search."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from .catalogue import Product

MAX_RESULTS = 50
MAX_WORDS = 30
"""Maximum number of used words of a search."""
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be buy by dollars find for from get i im in is it like looking lower me my need "
        "of on or please price than that the this to want which with would",
    )
)
SCHEMA = """
CREATE TABLE products (id INTEGER PRIMARY KEY, asin TEXT UNIQUE, record TEXT);
CREATE TABLE goals (id INTEGER PRIMARY KEY, data TEXT);
CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='porter unicode61');
"""
SEARCH = """
SELECT asin FROM products JOIN (
    SELECT rowid AS number, bm25(words, 2.0, 1.0) AS score FROM words WHERE words MATCH ?
    ORDER BY score, rowid LIMIT ?
) ON id = number ORDER BY score, id
"""
KEPT_SEARCHES, KEPT_PRODUCTS = 4096, 16384
"""Number of cached results. Sessions of one problem and the expert repeat searches."""
MAX_LETTERS = 128
"""Maximum number of letters of a word or identifier in a search, because they are cached with the results."""


class Store:
    """The products of the shop. Can be shared by threads."""

    def __init__(self, path: str = ":memory:") -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._lock = threading.Lock()
        self._found = lru_cache(KEPT_SEARCHES)(self._search)
        self._read = lru_cache(KEPT_PRODUCTS)(self._get)
        self._count = lru_cache(KEPT_PRODUCTS)(self._count_word)

    @classmethod
    def build(cls, products: Iterable[Product], path: str = ":memory:") -> Store:
        """Create the tables of a new store and fill them. If products share an asin, the first is kept."""
        store = cls(path)
        store._db.executescript(SCHEMA)
        with store._db as db:
            for product in products:
                record = json.dumps(vars(product), ensure_ascii=False)
                added = db.execute(
                    "INSERT OR IGNORE INTO products (asin, record) VALUES (?, ?)", (product.asin, record)
                )
                if added.rowcount:
                    row = (added.lastrowid, product.title, _searched(product))
                    db.execute("INSERT INTO words (rowid, title, text) VALUES (?, ?, ?)", row)
        return store

    def add_goals(self, goals: Iterable[dict[str, Any]]) -> None:
        """Store goals in this order."""
        with self._db as db:
            db.executemany("INSERT INTO goals (data) VALUES (?)", ((json.dumps(goal),) for goal in goals))

    def goals(self, places: range) -> list[dict[str, Any]]:
        """Return the goals at these places, from 0."""
        rows = self._fetch(
            "SELECT data FROM goals WHERE id > ? ORDER BY id LIMIT ?", places.start, len(places)
        )
        return [json.loads(data) for (data,) in rows]

    def count(self, table: str) -> int:
        """Return the number of "products" or "goals"."""
        return int(self._fetch(f"SELECT COUNT(*) FROM {table}")[0][0])

    def get(self, asin: str) -> Product | None:
        """Return the product with this identifier, ignoring case."""
        asin = asin.strip().upper()
        return self._read(asin) if len(asin) <= MAX_LETTERS else None

    def search(self, keywords: str) -> tuple[str, ...]:
        """Return the identifiers of the products that best match any of the words, 50 at most.

        Products with the rarest word come first, then products with the next word. Equal products have the
        order of BM25, in which words in the title count double. The many products with a common word are
        rarely scored.
        """
        words = [word for word in content_words(keywords) if len(word) <= MAX_LETTERS]
        return self._found(tuple(words[:MAX_WORDS]))

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _get(self, asin: str) -> Product | None:
        rows = self._fetch("SELECT record FROM products WHERE asin = ?", asin)
        return _product(rows[0][0]) if rows else None

    def _search(self, words: tuple[str, ...]) -> tuple[str, ...]:
        counts = {f'"{word}"': self._count(word) for word in words}
        rarest = sorted((word for word in counts if counts[word]), key=lambda word: (counts[word], word))
        found: list[str] = []
        for place, word in enumerate(rarest):
            query = f"({word} AND ({' OR '.join(rarest)}))"
            if place:
                query += f" NOT ({' OR '.join(rarest[:place])})"
            found += (asin for (asin,) in self._fetch(SEARCH, query, MAX_RESULTS - len(found)))
            if len(found) == MAX_RESULTS:
                break
        return tuple(found)

    def _count_word(self, word: str) -> int:
        """Return the number of products with a word."""
        return int(self._fetch("SELECT COUNT(*) FROM words WHERE words MATCH ?", f'"{word}"')[0][0])

    def _fetch(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def content_words(text: str) -> list[str]:
    """Return the content words of a text, each once, in lower case."""
    words = re.findall(r"[^\W_]+", text.lower())
    return list(dict.fromkeys(word for word in words if word not in STOP_WORDS))


def _searched(product: Product) -> str:
    """Return the searchable text of a product in addition to its title."""
    values = [value for values in product.options.values() for value in values]
    return " ".join((product.query, *product.features, product.description, *values))


def _product(record: str) -> Product:
    fields = json.loads(record)
    options = {name: tuple(values) for name, values in fields.pop("options").items()}
    features, attributes = tuple(fields.pop("features")), tuple(fields.pop("attributes"))
    return Product(**fields, features=features, attributes=attributes, options=options)
