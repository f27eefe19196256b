"""Converts regular expressions of ECMAScript, which JSON Schemas use, to Python's syntax."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

Spans = tuple[tuple[int, int], ...]
"""Ranges of characters, each as first and last code point, in ascending order."""
_CLASSES: dict[str, Spans] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ),
}
"""The characters of ``\\d``, ``\\w`` and ``\\s``, which differ from Python's."""
_LINE_ENDS = r"\n\r\u2028\u2029"
_CATEGORIES = {
    "Letter": "L",
    "Uppercase_Letter": "Lu",
    "Lowercase_Letter": "Ll",
    "Titlecase_Letter": "Lt",
    "Cased_Letter": "LC",
    "Modifier_Letter": "Lm",
    "Other_Letter": "Lo",
    "Mark": "M",
    "Nonspacing_Mark": "Mn",
    "Spacing_Mark": "Mc",
    "Number": "N",
    "Decimal_Number": "Nd",
    "Letter_Number": "Nl",
    "Other_Number": "No",
    "Punctuation": "P",
    "Symbol": "S",
    "Math_Symbol": "Sm",
    "Currency_Symbol": "Sc",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Other": "C",
    "Control": "Cc",
}
"""Long names of general categories."""
_TOKEN = re.compile(
    r"\\[pP]\{(?:(?:General_Category|gc)=)?(?P<category>\w+)\}"
    r"|\\u\{(?P<code>[0-9A-Fa-f]{1,6})\}"
    r"|\\u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|\\k<(?P<back>\w+)>"
    r"|\(\?<(?P<group>[^\W\d]\w*)>"
    r"|\\c(?P<control>[A-Za-z])"
    r"|\\[\s\S]|\[\^?\]?|[\s\S]"
)


@cache
def python_pattern(pattern: str) -> str | None:
    r"""Return a pattern for ``re.search``, or None if Python's regular expressions cannot express it.

    Syntax that only Python has, such as ``\A`` and ``(?P<name>...)``, is kept, because Python servers use it.
    """
    parts: list[str] = []
    in_class = False
    for token in _TOKEN.finditer(pattern):
        part = _part(token, in_class)
        if part is None:
            return None
        if token[0].startswith("[") and not in_class:
            in_class = not token[0].endswith("]")
        elif token[0] == "]":
            in_class = False
        parts.append(part)
    try:
        re.compile("".join(parts))
    except (re.error, OverflowError, RecursionError):
        return None
    return "".join(parts)


def _part(token: re.Match[str], in_class: bool) -> str | None:
    text = token[0]
    if category := token["category"]:
        return _category(category, text[1] == "P", in_class)
    if code := token["code"]:
        return _character(int(code, 16))
    if token["high"]:
        pair = bytes.fromhex(token["high"] + token["low"])
        return _character(ord(pair.decode("utf-16-be")))
    if name := token["back"]:
        return f"(?P={name})"
    if name := token["group"]:
        return text if in_class else f"(?P<{name}>"
    if letter := token["control"]:
        return _character(ord(letter) % 32)
    if in_class:
        return _in_class(text)
    fixed = {
        "$": r"\Z",
        ".": f"[^{_LINE_ENDS}]",
        "[]": "(?!)",
        "[^]": "(?s:.)",
        r"\b": r"(?a:\b)",
        r"\B": r"(?a:\B)",
        r"\0": r"\x00",
    }
    if text[0] == "\\" and text[1].lower() in _CLASSES:
        return f"[{'^' if text[1].isupper() else ''}{_inside(_CLASSES[text[1].lower()])}]"
    return fixed.get(text, text)


def _in_class(text: str) -> str:
    if text[0] == "[":  # in a class, only the bracket that ends it has a meaning
        return "".join(f"\\{character}" if character in "[^" else character for character in text)
    if text[1:] in _CLASSES:
        return _inside(_CLASSES[text[1:]])
    if text[1:].lower() in _CLASSES:
        return _inside(complement(_CLASSES[text[1:].lower()]))
    return {r"\0": r"\x00"}.get(text, f"\\{text}" if text in "&|~" else text)


def _category(name: str, negated: bool, in_class: bool) -> str | None:
    """Return the characters of a Unicode property as a class, or None if it is not a general category."""
    if name == "Any" or name == "ASCII":
        spans: Spans = ((0, sys.maxunicode if name == "Any" else 127),)
    else:
        short = _CATEGORIES.get(name, name)
        names = {"LC": ("Lu", "Ll", "Lt")}.get(short, (short,))
        found = [spans for category, spans in _by_category().items() if category.startswith(names)]
        if not found:
            return None
        spans = tuple(sorted(span for spans in found for span in spans))
    inside = _inside(complement(spans) if negated else spans)
    return inside if in_class else f"[{inside}]"


@cache
def _by_category() -> dict[str, list[tuple[int, int]]]:
    """Return the characters of each general category, such as "Lu"."""
    found: dict[str, list[tuple[int, int]]] = {}
    first, last = 0, unicodedata.category("\0")
    for code in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(code)) if code <= sys.maxunicode else ""
        if category != last:
            found.setdefault(last, []).append((first, code - 1))
            first, last = code, category
    return found


def complement(spans: Spans) -> Spans:
    """Return the characters outside the spans, which must be sorted by their first characters."""
    gaps, low = [], 0
    for first, last in spans:
        if first > low:
            gaps.append((low, first - 1))
        low = max(low, last + 1)
    return (*gaps, (low, sys.maxunicode)) if low <= sys.maxunicode else tuple(gaps)


def _inside(spans: Spans) -> str:
    """Return spans as the content of a character class."""
    return "".join(f"{_character(first)}-{_character(last)}" for first, last in spans)


def _character(code: int) -> str | None:
    return f"\\U{code:08x}" if code <= sys.maxunicode else None
