"""Grading: answers are compared by type, and tables by content. No answer is ever evaluated as code."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal

from .problems import Contents, Rows

MAX_ANSWERS = 1000
MAX_LISTING = 20_000
"""Maximum length of an answer that is a list written as text."""
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?([eE][+-]?\d{1,3})?\s*%?", re.ASCII)
NULLS = frozenset({"", "none", "null", "nan", "n/a"})
ROUNDING = 0.005 + 1e-9
"""Numbers with decimals are compared to two decimals."""
_GROUP_CONCAT = 1024
"""MySQL truncates the list of row hashes after this many characters."""


def same_answers(
    given: Sequence[object], right: Sequence[object], *, ordered: bool = False, as_set: bool = False
) -> bool:
    """Return True if the given answers are the right answers.

    "1,234", "1234.0" and 1234 are the same number, and "45%" is 45. Text is compared without case and
    repeated spaces. "", "none", "NULL" and an empty list are no value. A single answer can be a list written
    as text.
    """
    ours, theirs = _values(right), _values(given)
    if len(theirs) > MAX_ANSWERS:
        return False
    if as_set:
        covers = all(any(_same(a, b) for a in ours) for b in theirs)
        return covers and all(any(_same(a, b) for b in theirs) for a in ours)
    if not ordered:
        ours, theirs = sorted(ours, key=_rank), sorted(theirs, key=_rank)
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def same_contents(ours: Contents, theirs: Contents) -> bool:
    """Return True if tables hold the same rows in any order. Text is not a number, and NULL is not ''."""
    return ours.keys() == theirs.keys() and all(_sorted(ours[name]) == _sorted(theirs[name]) for name in ours)


def table_hash(rows: Rows) -> str:
    """Return AgentBench's hash of a table, computed from the sorted hashes of its rows."""
    hashes = sorted(_md5(",".join(str(value) for value in row if value is not None))[:5] for row in rows)
    return _md5(",".join(hashes)[:_GROUP_CONCAT])


def flat(value: object) -> list[object]:
    """Return the values of nested lists as one list."""
    return [v for item in value for v in flat(item)] if isinstance(value, (list, tuple)) else [value]


def _values(answers: Sequence[object]) -> list[object]:
    answers = flat(list(answers))
    if len(answers) == 1 and isinstance(answers[0], str):
        answers = _listed(answers[0])
    return [_plain(value) for value in answers] or [None]


def _listed(text: str) -> list[object]:
    """Return the values of a list written as text, in JSON or in Python's syntax, or else the text."""
    text = text.strip()
    if not (text.startswith(("[", "(")) and len(text) <= MAX_LISTING):
        return [text]
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, (list, tuple)):
            return flat(found)
    return [text]


def _plain(value: object) -> object:
    """Return None, a number or a normalized text."""
    if isinstance(value, (int, float, Decimal)):
        value = str(value)
    if value is None:
        return None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = " ".join(unicodedata.normalize("NFC", str(value)).split())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    if NUMBER.fullmatch(text) and any(c.isdigit() for c in text):
        number = float(text.rstrip("% ").replace(",", ""))
        if math.isfinite(number):
            return number
    text = text.casefold()
    return None if text in NULLS else text


def _same(right: object, given: object) -> bool:
    if not (isinstance(right, float) and isinstance(given, float)):
        return type(right) is type(given) and right == given
    tolerance = 1e-9 * max(1.0, abs(right))
    if not right.is_integer():
        tolerance = ROUNDING if abs(right) >= 0.1 else ROUNDING * abs(right)
    return abs(right - given) <= tolerance


def _rank(value: object) -> tuple[object, ...]:
    return (type(value).__name__, 0 if value is None else value)


def _sorted(rows: Rows) -> list[str]:
    return sorted(json.dumps([_cell(value) for value in row]) for row in rows)


def _cell(value: object) -> list[object]:
    """Return a cell with its type. Numbers are compared to nine significant digits."""
    if isinstance(value, (int, float, Decimal)):
        return ["number", f"{float(value):.9g}"]
    return ["null"] if value is None else [type(value).__name__, str(value)]


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
