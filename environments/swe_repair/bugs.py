"""Bugs: small changes of source code at positions from its syntax tree. The rest of the code is unchanged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
COMPUTED = {"+": "-", "-": "+", "*": "+", "//": "*"}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNWRAPPED = {"abs", "sorted", "list", "set", "dict", "reversed", "strip", "lower", "lstrip", "rstrip"}
"""Functions of one argument, and methods, that a bug can remove."""
Edit = tuple[int, int, str]
"""Position of the first character, position after the last, new text."""


@dataclass(frozen=True)
class Bug:
    """A change of one module."""

    module: str
    start: int
    end: int
    text: str

    def plant(self, source: str) -> str:
        """Return the source with the bug."""
        return source[: self.start] + self.text + source[self.end :]


def bugs(module: str, source: str) -> list[Bug]:
    """Return all changes of a module's source in a fixed order. Some of them have invalid syntax."""
    return [Bug(module, *edit) for edit in dict.fromkeys(_Sites(source).edits)]


class _Sites(ast.NodeVisitor):
    """Collects the edits of a source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[Edit] = []
        self.arguments: list[str] = []
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        for edit in self._changes(node):
            self.edits.append(edit)
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                self.edits += self._deletions(block)
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        if isinstance(node, ast.FunctionDef):
            before, self.arguments = self.arguments, [one.arg for one in node.args.args if one.arg != "self"]
            for child in (*node.args.defaults, *node.body):
                self.visit(child)
            self.arguments = before
            return
        self.generic_visit(node)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _gap(self, left: ast.AST, right: ast.AST, swaps: dict[str, str]) -> Iterator[Edit]:
        """Replace the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        sign = self.source[start:end].strip("() \n")
        if sign in swaps:
            place = start + self.source[start:end].index(sign)
            yield place, place + len(sign), swaps[sign]

    def _changes(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._gap(node.left, node.comparators[0], COMPARED)
        elif isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from self._gap(left, right, COMPARED)
        elif isinstance(node, ast.BinOp):
            yield from self._gap(node.left, node.right, COMPUTED)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._gap(left, right, {"and": "or", "or": "and"})
                yield self._span(left)[1], self._span(right)[1], ""
                yield self._span(left)[0], self._span(right)[0], ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
            yield from self._constant(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield self._span(node)[0], self._span(node.operand)[0], ""
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.AugAssign):
            start, end = self._span(node.target)[1], self._span(node.value)[0]
            for old, new in (("+=", "="), ("+=", "-="), ("-=", "+=")):
                if old in self.source[start:end]:
                    yield start, end, self.source[start:end].replace(old, new)
        elif isinstance(node, ast.Name) and node.id in self.arguments and isinstance(node.ctx, ast.Load):
            other = self.arguments[(self.arguments.index(node.id) + 1) % len(self.arguments)]
            if other != node.id:
                yield *self._span(node), other

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        if isinstance(node.value, bool):
            yield *self._span(node), str(not node.value)
        else:
            yield *self._span(node), str(node.value + 1)
            if node.value > 0:
                yield *self._span(node), str(node.value - 1)

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        start, end = self._span(node)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for before, keyword in zip(values, node.keywords, strict=False):
            if len(node.args) == 1 and keyword.arg in ("key", "reverse", "default"):
                yield self._span(before)[1], self._span(keyword.value)[1], ""
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in CALLED and isinstance(node.func, ast.Name):
            yield *self._span(node.func), CALLED[name]
        if name in UNWRAPPED and isinstance(node.func, ast.Attribute):
            yield self._span(node.func.value)[1], end, ""
        elif name in UNWRAPPED and len(node.args) == 1:
            yield start, end, self._text(node.args[0])
        if len(node.args) == 2 and not any(isinstance(one, ast.Constant) for one in node.args):
            first, second = map(self._span, node.args)
            between = self.source[first[1] : second[0]]
            yield first[0], second[1], self._text(node.args[1]) + between + self._text(node.args[0])

    def _deletions(self, block: list[ast.stmt]) -> Iterator[Edit]:
        """Delete a statement, or a guard of two lines, from a block that has others."""
        for node in block if len(block) > 1 else []:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            stored = isinstance(target, (ast.Attribute, ast.Subscript))
            called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            guard = isinstance(node, ast.If) and len(node.body) == 1 and not node.orelse
            ends = guard and isinstance(node.body[0], (ast.Raise, ast.Return, ast.Continue))
            if stored or called or ends or isinstance(node, (ast.AugAssign, ast.Continue)):
                yield self.starts[node.lineno - 1], self.starts[node.end_lineno], ""


def repair(planted: str, original: str) -> tuple[str, str]:
    """Return a text that occurs once in a source, and its replacement that restores the original."""
    old, new = planted.splitlines(keepends=True), original.splitlines(keepends=True)
    same = next(i for i, pair in enumerate(zip([*old, ""], [*new, ""], strict=False)) if pair[0] != pair[1])
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    first, last, shift = same, len(old) - tail, len(new) - len(old)
    while not (text := "".join(old[first:last])) or planted.count(text) != 1:
        first, last = max(first - 1, 0), min(last + 1, len(old))
    return text, "".join(new[first : last + shift])
