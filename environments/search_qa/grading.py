"""Compares answers as in SQuAD and HotpotQA: without case, punctuation, articles and spaces between words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MAX_CHARS = 2_000
"""Maximum number of compared characters of an answer."""


def words(text: str) -> list[str]:
    """Return the words of an answer for the comparison."""
    plain = re.sub(r"[^\w\s]|_", "", text[:MAX_CHARS].lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def exact(given: str, gold: Iterable[str]) -> bool:
    """Return True if an answer is one of the right answers. An answer without words must be the same text."""
    if not words(given):
        return any(given.strip() == right.strip() != "" for right in gold)
    return any(words(given) == words(right) for right in gold)


def f1(given: str, gold: Iterable[str]) -> float:
    """Return the best F1 score of the words over the right answers."""
    return max((_f1(words(given), words(right)) for right in gold), default=0.0)


def _f1(given: list[str], right: list[str]) -> float:
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right)) if shared else 0.0
