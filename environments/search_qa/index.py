"""The pages in SQLite, found by title or by full-text search."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

MAX_RESULTS = 50
MAX_WORDS = 30
"""Maximum number of used words of a search."""
MAX_TITLE = 500
"""Maximum number of characters of a title, and of a word of a search."""
RARE = 40
"""A word is rare if at most one page in this many has it."""
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about an and are as at be by did do does find for from had has have how i in is it its name of on "
        "or that the there this to was were what when where which who whom whose why with",
    )
)
SCHEMA = """
CREATE TABLE pages (id INTEGER PRIMARY KEY, title TEXT UNIQUE COLLATE NOCASE, about TEXT, text TEXT);
CREATE TABLE questions (split TEXT, number INTEGER, data TEXT, PRIMARY KEY (split, number)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(title, text, content='', tokenize='porter unicode61');
"""
SEARCH = """
SELECT title, about FROM pages JOIN (
    SELECT rowid AS number, bm25(words, 4.0, 1.0) AS score FROM words WHERE words MATCH ?
    ORDER BY score, rowid LIMIT ?
) ON id = number ORDER BY score, id
"""
KEPT_SEARCHES, KEPT_PAGES = 4096, 16384
"""Number of cached results. Sessions of one problem and the expert repeat searches."""


class Page(NamedTuple):
    """A page of the encyclopedia."""

    title: str
    text: str


class Index:
    """The pages, and the questions of a folder's data. Can be shared by threads."""

    def __init__(self, path: str = ":memory:") -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._lock = threading.Lock()
        self._found = lru_cache(KEPT_SEARCHES)(self._search)
        self._count = lru_cache(KEPT_PAGES)(self._count_word)
        self._read = lru_cache(KEPT_PAGES)(self._page)

    @classmethod
    def build(cls, pages: Iterable[tuple[str, str, str]], path: str = ":memory:") -> Index:
        """Create the tables, and fill them with the title, short description and text of pages.

        If several pages have the same title, the second gets the title "... (2)", and so on.
        """
        index = cls(path)
        index._db.executescript(SCHEMA)
        add = "INSERT OR IGNORE INTO pages (title, about, text) VALUES (?, ?, ?)"
        with index._db as db:
            for title, about, text in pages:
                title = title[: MAX_TITLE - 20]
                number, unique = 1, title
                while not (added := db.execute(add, (unique, about, text))).rowcount:
                    number += 1
                    unique = f"{title} ({number})"
                row = (added.lastrowid, title, text)
                db.execute("INSERT INTO words (rowid, title, text) VALUES (?, ?, ?)", row)
        return index

    def add_questions(self, split: str, questions: Iterable[dict[str, Any]]) -> None:
        """Store the questions of a split in this order."""
        rows = ((split, number, json.dumps(data)) for number, data in enumerate(questions))
        with self._db as db:
            db.executemany("INSERT INTO questions VALUES (?, ?, ?)", rows)

    def splits(self) -> dict[str, int]:
        """Return the splits and their numbers of questions."""
        return dict(self._fetch("SELECT split, COUNT(*) FROM questions GROUP BY split ORDER BY split"))

    def question(self, split: str, number: int) -> dict[str, Any]:
        """Return one question. Raises IndexError."""
        rows = self._fetch("SELECT data FROM questions WHERE split = ? AND number = ?", split, number)
        if not rows:
            raise IndexError(number)
        return json.loads(rows[0][0])

    def search(self, query: str) -> tuple[tuple[str, str], ...]:
        """Return title and short description of the pages that best match the words, 50 at most.

        Each result has at least one of the rare words. The order is that of BM25. Words in the title count
        four times, and rare words double. The many pages with only common words are therefore never scored.
        """
        return self._found(tuple(word[:MAX_TITLE] for word in content_words(query)[:MAX_WORDS]))

    def page(self, title: str) -> Page | None:
        """Return the page with this title, ignoring case."""
        title = title.strip()
        return self._read(title) if len(title) <= MAX_TITLE else None

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _page(self, title: str) -> Page | None:
        rows = self._fetch("SELECT title, text FROM pages WHERE title = ?", title)
        return Page(*rows[0]) if rows else None

    def _search(self, words: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        counts = {f'"{word}"': self._count(word) for word in words}
        known = sorted((word for word in counts if counts[word]), key=lambda word: (counts[word], word))
        if not known:
            return ()
        rare = [word for word in known if counts[word] * RARE <= self._size] or known[:1]
        query = f"({' OR '.join(rare)}) AND ({' OR '.join(known)})"
        return tuple(self._fetch(SEARCH, query, MAX_RESULTS))

    @cached_property
    def _size(self) -> int:
        return int(self._fetch("SELECT COUNT(*) FROM pages")[0][0])

    def _count_word(self, word: str) -> int:
        """Return the number of pages with a word."""
        return int(self._fetch("SELECT COUNT(*) FROM words WHERE words MATCH ?", f'"{word}"')[0][0])

    def _fetch(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()


def content_words(text: str) -> list[str]:
    """Return the content words of a text, each once, in lower case."""
    words = list(dict.fromkeys(re.findall(r"[^\W_]+", text.lower())))
    return [word for word in words if word not in STOP_WORDS] or words
