"""The folder of a new environment: ``agentrl-env new NAME``."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from string import Template

_FILES = ("environment.py", "README.md", "test_environment.py")


def create_environment(path: Path) -> tuple[Path, ...]:
    """Write a small working environment into the new folder ``path`` and return its files.

    The folder's name becomes the task's name.

    Raises:
        ValueError: the name is not a lower-case identifier such as ``number_game``.
        FileExistsError: there is something at ``path`` already.
    """
    name = path.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot name a task: use lower-case letters, digits and '_', "
            "starting with a letter, for example 'number_game'."
        )
    if path.exists():
        raise FileExistsError(f"{path} exists already; choose another name or remove it first.")
    words = [word for word in name.split("_") if word]
    values = {
        "name": name,
        "folder": str(path),
        "class_name": "".join(word.capitalize() for word in words),
        "title": " ".join(words).capitalize(),
    }
    path.mkdir(parents=True)
    return tuple(_write(path / file, values) for file in _FILES)


def _write(target: Path, values: dict[str, str]) -> Path:
    template = files(__package__).joinpath("template", f"{target.name}.template")
    text = Template(template.read_text(encoding="utf-8")).substitute(values)
    target.write_text(text, encoding="utf-8")
    return target
