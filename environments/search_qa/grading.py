"""Compares answers as SQuAD and HotpotQA do: without case, punctuation, articles and spaces between words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MAX_CHARS = 2_000
"""Characters of an answer that count."""


def words(text: str) -> list[str]:
    """Return the words of an answer that are compared."""
    plain = re.sub(r"[^\w\s]|_", "", text[:MAX_CHARS].lower())
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def exact(given: str, gold: Iterable[str]) -> bool:
    """Return whether an answer is one of the right ones; one without words has to be the same text."""
    if not words(given):
        return any(given.strip() == right.strip() != "" for right in gold)
    return any(words(given) == words(right) for right in gold)


def f1(given: str, gold: Iterable[str]) -> float:
    """Return the F1 score of the words, the best over the answers that are right."""
    return max((_f1(words(given), words(right)) for right in gold), default=0.0)


def _f1(given: list[str], right: list[str]) -> float:
    shared = (Counter(given) & Counter(right)).total()
    return 2 * shared / (len(given) + len(right)) if shared else 0.0
