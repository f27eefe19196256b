"""Print the oldest releases that ``pyproject.toml`` allows, as constraints for pip.

``python release/oldest.py EXTRA,EXTRA`` covers the dependencies of the package and of some extras.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(requirement: Requirement) -> str:
    """Return the constraint with the oldest release that a requirement allows.

    Raises:
        ValueError: the requirement has no lower bound.
    """
    bounds = [one.version for one in requirement.specifier if one.operator in (">=", "==")]
    if not bounds:
        raise ValueError(f"{requirement} has no lower bound: add one")
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={bounds[0]}{marker}"


def constraints(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the constraints for the dependencies of a project and of some of its extras."""
    optional = project["optional-dependencies"]
    listed = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    return [oldest(Requirement(one)) for one in listed]


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(PROJECT.read_text())["project"], sys.argv[1].split(","))))
