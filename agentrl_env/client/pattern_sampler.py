"""Draws random strings that match a regular expression."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

# The parse tree has no public interface. Its operations are the same in all supported versions of Python.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from agentrl_env.ecma_pattern import Spans, complement

MAX_CHARACTERS = 100_000
"""Maximum number of characters of a drawn string."""
SPARE_REPEATS = 3
"""Maximum number of repetitions above a quantifier's minimum, unless a longer string is needed."""
_PRINTABLE = (0x20, 0x7E)
_SURROGATES = (0xD800, 0xDFFF)

_parse = lru_cache(maxsize=256)(parser.parse)


class PatternNotDrawn(ValueError):
    """No string can be drawn for a pattern."""


def draw_match(pattern: str, rng: np.random.Generator, *, min_length: int = 0) -> str:
    """Draw a string that is likely to match a pattern of ``python_pattern``. The caller verifies it.

    Lookaround and word boundaries are ignored.

    Args:
        pattern: The regular expression, in Python's syntax.
        rng: The random generator.
        min_length: Length to aim for.

    Raises PatternNotDrawn if the pattern has an unknown operation or a match would be too long.
    """
    return _Draw(rng, max(SPARE_REPEATS, min_length)).sequence(_parse(pattern))


class _Draw:
    """The drawing of one string. It remembers the texts of groups for back references."""

    def __init__(self, rng: np.random.Generator, spare: int) -> None:
        self._rng = rng
        self._spare = spare
        self._room = MAX_CHARACTERS
        self._groups: dict[int, str] = {}
        repeat, ignore = self._repeat, lambda _: ""
        self._by_operation: dict[Any, Callable[[Any], str]] = {
            ops.LITERAL: chr,
            ops.NOT_LITERAL: lambda code: self._character(complement(((code, code),))),
            ops.ANY: lambda _: self._character((_PRINTABLE,)),
            ops.IN: lambda items: self._character(_spans(items)),
            ops.BRANCH: lambda branch: self.sequence(branch[1][self._below(len(branch[1]))]),
            ops.SUBPATTERN: self._group,
            ops.ATOMIC_GROUP: self.sequence,
            ops.MAX_REPEAT: repeat,
            ops.MIN_REPEAT: repeat,
            ops.POSSESSIVE_REPEAT: repeat,
            ops.GROUPREF: lambda group: self._groups.get(group, ""),
            ops.GROUPREF_EXISTS: lambda c: self.sequence((c[1] if c[0] in self._groups else c[2]) or ()),
            ops.AT: ignore,
            ops.ASSERT: ignore,
            ops.ASSERT_NOT: ignore,
        }

    def sequence(self, nodes: Any) -> str:
        """Return the text of a sequence of nodes of the parse tree."""
        text = ""
        for operation, argument in nodes:
            if operation not in self._by_operation:
                raise PatternNotDrawn(f"{operation} is not supported")
            text += self._by_operation[operation](argument)
        return text

    def _group(self, group: Any) -> str:
        number, _, _, nodes = group
        text = self.sequence(nodes)
        if number is not None:
            self._groups[number] = text
        return text

    def _repeat(self, repeat: Any) -> str:
        low, high, nodes = repeat
        count = low + self._below(min(int(high) - low, self._spare) + 1)
        text = ""
        for _ in range(count):
            part = self.sequence(nodes)
            self._room -= max(len(part), 1)
            if self._room < 0:
                raise PatternNotDrawn(f"a match has more than {MAX_CHARACTERS:,} characters")
            text += part
        return text

    def _character(self, spans: Spans) -> str:
        """Draw a character from ranges. If possible, it is printable ASCII."""
        first, last = _PRINTABLE
        plain = [(max(low, first), min(high, last)) for low, high in spans if low <= last and high >= first]
        ranges = plain or [span for span in spans if not _SURROGATES[0] <= span[0] <= _SURROGATES[1]]
        if not ranges:
            raise PatternNotDrawn("a class has no characters")
        low, high = ranges[self._below(len(ranges))]
        code = low + self._below(high - low + 1)
        return chr(low if _SURROGATES[0] <= code <= _SURROGATES[1] else code)

    def _below(self, bound: int) -> int:
        return int(self._rng.integers(bound))


def _spans(items: Any) -> Spans:
    """Return the characters of a character class in the parse tree."""
    spans: list[tuple[int, int]] = []
    negated = False
    for operation, argument in items:
        if operation is ops.NEGATE:
            negated = True
        elif operation is ops.LITERAL:
            spans.append((argument, argument))
        elif operation is ops.RANGE:
            spans.append(argument)
        else:
            raise PatternNotDrawn(f"{operation} {argument} is not supported")
    return complement(tuple(sorted(spans))) if negated else tuple(spans)
