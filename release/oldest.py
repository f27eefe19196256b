"""Print the oldest releases that ``pyproject.toml`` allows, as constraints for pip.

``python release/oldest.py EXTRA,EXTRA`` covers the dependencies of the package and of some extras.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(requirement: Requirement) -> Version:
    """Return the oldest release that a requirement allows.

    Raises:
        ValueError: the requirement has no lower bound.
    """
    for one in requirement.specifier:
        if one.operator in (">=", "=="):
            return Version(one.version)
    raise ValueError(f"{requirement} has no lower bound: add one")


def constraints(project: dict[str, Any], extras: Sequence[str]) -> list[str]:
    """Return the constraints for the dependencies of a project and of some of its extras."""
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    found: dict[str, Version] = {}
    for requirement in map(Requirement, listed):
        version = oldest(requirement)
        found[requirement.name] = max(version, found.get(requirement.name, version))
    return [f"{name}=={version}" for name, version in found.items()]


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(PROJECT.read_text())["project"], sys.argv[1].split(","))))
