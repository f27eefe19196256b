"""Families of small libraries: templates of source code with variable rules and names.

A line of a template that ends in ``  #: closed !strict`` is kept if the option ``closed`` is on and
``strict`` is off. ``$name`` is replaced by a drawn name or number.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Template

TAG = re.compile(r"\s+#: ([!a-z_ ]+)$")
Case = tuple[str, str]
"""What a test tries, in words after "when", and its code."""


@dataclass(frozen=True)
class Family:
    """Libraries of one kind."""

    name: str
    summary: str
    options: tuple[str, ...]
    names: Mapping[str, tuple[str | int, ...]]
    """Placeholder -> its alternatives. ``pkg`` is the package's name."""
    modules: Mapping[str, str]
    """Module name -> template. A module imports names only from earlier modules."""
    rules: str
    """Template of the rules in the repository's README, one on each line."""
    case: Callable[[random.Random, frozenset[str], Mapping[str, str]], Case]
    """Draws a case, given the options that are on and the names."""


@dataclass(frozen=True)
class Library:
    """The sources of one library: module name -> text, in the order of their imports."""

    package: str
    modules: Mapping[str, str]
    rules: str
    summary: str

    def files(self, *, merged: bool) -> dict[str, str]:
        """Return the files, path -> text: one module, or a package."""
        if merged:
            return {f"{self.package}.py": self.merged()}
        names = {name: public(text) for name, text in self.modules.items()}
        imports = [f"from .{name} import {', '.join(found)}" for name, found in names.items() if found]
        exported = ", ".join(f'"{one}"' for found in names.values() for one in found)
        start = "\n".join([f'"""{self.summary}"""', "", *imports, "", f"__all__ = [{exported}]", ""])
        files = {f"{self.package}/{name}.py": text for name, text in self.modules.items()}
        return {f"{self.package}/__init__.py": start, **files}

    def merged(self) -> str:
        """Return all modules as one."""
        imports, bodies = [], []
        for text in self.modules.values():
            _, _, rest = text.partition('"""\n')
            lines = rest.splitlines()
            imports += [line for line in lines if re.match(r"(import|from [a-z])", line)]
            bodies.append("\n".join(line for line in lines if not re.match(r"(import|from) ", line)).strip())
        head = "\n".join(sorted(set(imports)))
        return "\n\n\n".join(part for part in (f'"""{self.summary}"""', head, *bodies) if part) + "\n"


def public(text: str) -> list[str]:
    """Return the public classes, functions and exceptions that a module defines."""
    return [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
    ]


def fill(template: str, options: frozenset[str], names: Mapping[str, str]) -> str:
    """Return a template's text for options that are on and names."""
    kept = []
    for line in template.strip("\n").splitlines():
        tag = TAG.search(line)
        wanted = tag[1].split() if tag else []
        if all((one.lstrip("!") in options) != one.startswith("!") for one in wanted):
            kept.append(line[: tag.start()] if tag else line)
    return Template("\n".join(kept)).substitute(names)


def build(family: Family, options: frozenset[str], names: Mapping[str, str]) -> Library:
    """Return the library of a family with the given options and names."""
    modules = {name: fill(text, options, names) + "\n" for name, text in family.modules.items()}
    return Library(names["pkg"], modules, fill(family.rules, options, names), family.summary)
