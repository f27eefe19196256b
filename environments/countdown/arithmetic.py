"""Expressions of whole numbers with + - * / and parentheses, read and computed exactly."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 100
"""Maximum length of an expression, which bounds the size of its value."""
TOKEN = re.compile(r" *([0-9]{1,4}|[-+*/()])")


class NotAnExpression(ValueError):
    """The text is not an expression, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Return the value of an expression, and its numbers in order. Raises NotAnExpression."""
    text = text.rstrip(" ")
    if len(text) > MAX_LENGTH:
        raise NotAnExpression(f"an expression has at most {MAX_LENGTH} characters")
    tokens, place = [], 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None or (match[1].isdigit() and tokens and tokens[-1].isdigit()):
            found = text[place : place + 10].strip()
            raise NotAnExpression(f"{found!r} is not expected; use whole numbers, + - * / and parentheses")
        tokens.append(match[1])
        place = match.end()
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.next is not None:
        raise NotAnExpression(f"{parser.next!r} is not expected after a whole expression")
    return value, [int(token) for token in tokens if token.isdigit()]


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    @property
    def next(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def sum(self) -> Fraction:
        value = self.product()
        while self.next in ("+", "-"):
            sign = self.tokens.pop()
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.atom()
        while self.next in ("*", "/"):
            if self.tokens.pop() == "*":
                value *= self.atom()
            elif divisor := self.atom():
                value /= divisor
            else:
                raise NotAnExpression("it divides by zero")
        return value

    def atom(self) -> Fraction:
        token = self.tokens.pop() if self.tokens else None
        if token is not None and token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise NotAnExpression(f"a number or ( is expected instead of {token or 'the end'!r}")
        value = self.sum()
        if self.next != ")":
            raise NotAnExpression("a ) is missing")
        self.tokens.pop()
        return value
