"""Families with calls as Python: ``[move(x=1, to="a")]``."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentrl_env.types import ToolSpec
from agentrl_train.tool_calls.turn import Family, ParsedCall, arguments_of, called, unreadable

_ATTEMPTS = 32
"""Maximum number of possible ends to try for one block."""
_CONSTANTS = {"true": True, "false": False, "null": None}
_MARK = "ᜀ"
"""A letter that hides keywords of Python from its parser."""
_KEYWORDS = "|".join(set(keyword.kwlist) - {"True", "False", "None"})
_STRING = re.compile(r"(?<=[(\s,])[A-Za-z_]\w*=(['\"])")
_STRING_END = {
    quote: re.compile(rf"{quote}(?=\s*,\s*[A-Za-z_]\w*=|\)[\s,]*(?:[A-Za-z_][\w.]*\(|\]?\s*\Z))")
    for quote in "'\""
}
"""The quote before the next argument, the next call or the end."""
_KEYWORD = re.compile(rf"([(,]\s*(?:{_KEYWORDS})(?=\s*=(?!=))|(?:\A|[\[,.\n])\s*(?:{_KEYWORDS})(?=\s*\())")
"""A keyword as the name of an argument or of a tool."""


@dataclass(frozen=True, kw_only=True)
class PythonFamily(Family):
    """Calls in a list, or in separate lines."""

    closing: str
    """Pattern of the text after the calls."""
    form: str
    """Form of the block, with ``{}`` for the calls."""
    separator: str = ", "
    gap: str = ""

    def read(
        self, text: str, opening: re.Match[str], tools: Sequence[ToolSpec]
    ) -> tuple[list[ParsedCall], int]:
        """Read the calls of a block up to the first end that gives valid Python. Strings can contain ends."""
        start = opening.end()
        found = islice(re.finditer(self.closing, text[start:]), _ATTEMPTS)
        ends = [(start + end.start(), start + end.end()) for end in found] or [(len(text), len(text))]
        for end, position in ends:
            if calls := python_calls(text[start:end]):
                return calls, position
        return [unreadable(text[start : ends[0][0]])], ends[0][1]

    def write(self, calls: Sequence[ParsedCall]) -> str:
        """Return the calls in a block."""
        return self.form.replace("{}", self.separator.join(map(_python_call, calls)), 1)


def python_calls(source: str) -> list[ParsedCall] | None:
    """Return the calls in Python source, or None if it does not consist of calls.

    The source is parsed, never run. Arguments are literals of Python or JSON. Tools and parameters can have
    names that are keywords of Python. A call with other arguments is unreadable. Some templates put quotes
    around a string without escaping its content. Such strings are read if nothing else fits.
    """
    source = source.strip()
    escaped = source.replace("\n", "\\n")  # strings of several lines in ordinary quotes
    hidden = _KEYWORD.sub(rf"\1{_MARK}", source) if _MARK not in source else source
    for attempt in dict.fromkeys(
        (source, escaped, hidden, hidden.replace("\n", "\\n"), _escape_strings(source))
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unknown escapes in strings
                module = ast.parse(attempt)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        nodes: list[ast.AST] = []
        for statement in module.body:
            value = statement.value if isinstance(statement, ast.Expr) else statement
            nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        if nodes and isinstance(nodes[0], ast.Call) and all(isinstance(node, ast.expr) for node in nodes):
            return [_call(node, attempt) for node in nodes]
    return None


def python_value(text: str) -> Any:
    """Return the JSON value of a Python literal, such as ``{'a': None}``.

    Raises:
        ValueError: the text is not a literal.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {error}") from error


def _escape_strings(source: str) -> str:
    """Return the source with escaped strings. Strings extend to the quote before the next part."""
    parts, position = [], 0
    while start := _STRING.search(source, position):
        end = _STRING_END[start[1]].search(source, start.end())
        if end is None:
            break
        parts += [source[position : start.start(1)], repr(source[start.end() : end.start()])]
        position = end.end()
    return "".join([*parts, source[position:]])


def _call(node: ast.AST, source: str) -> ParsedCall:
    text = (ast.get_source_segment(source, node) or source).replace(_MARK, "")
    try:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("no call by keywords")
        arguments: dict[str, Any] = {}
        for argument in node.keywords:
            value = _literal(argument.value)
            arguments |= value if argument.arg is None else {_without_marks(argument.arg): value}
        return called(_name(node.func), arguments, text)
    except (ValueError, TypeError, RecursionError):
        return unreadable(text)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{_without_marks(node.attr)}"
    if isinstance(node, ast.Name):
        return _without_marks(node.id)
    raise ValueError("no name")


def _literal(node: ast.expr) -> Any:
    """Return the JSON value of a literal.

    Raises:
        ValueError: the node is not a literal.
    """
    match node:
        case ast.Constant(value=str() as text):
            return _without_marks(text)
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    key = _literal(node) if node else None
    if not isinstance(key, str):
        raise ValueError("a key is a string")
    return key


def _without_marks(text: str) -> str:
    return text.replace(_MARK, "")


def _python_call(call: ParsedCall) -> str:
    arguments = arguments_of(call)
    # Names that are not valid in Python go into a dictionary.
    named = {key for key in arguments if key.isascii() and key.isidentifier() and not keyword.iskeyword(key)}
    parts = [f"{key}={arguments[key]!r}" for key in arguments if key in named]
    if others := {key: value for key, value in arguments.items() if key not in named}:
        parts.append(f"**{others!r}")
    return f"{call.name}({', '.join(parts)})"
