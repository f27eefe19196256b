"""Types of settings that are paths, relative to the folder of the configuration file.

``model_validate(table, context=base_folder(path))`` makes them absolute and rejects missing input. Without a
context, as from Python, paths stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

FUNCTION = re.compile(r"\S+:[A-Za-z_][\w.]*")
"""A function as ``file.py:function`` or ``module:function``."""


def base_folder(folder: Path) -> dict[str, Any]:
    """Return the validation context with the folder that paths are relative to."""
    return {"base": folder}


def absolute(path: str, base: Path) -> Path:
    """Return a path relative to ``base`` as an absolute one."""
    return (base / Path(path).expanduser()).absolute()


def target(value: str, base: Path) -> str:
    """Make the path of a folder or of ``file.py:name`` absolute; ``module:name`` stays unchanged."""
    source, colon, name = value.rpartition(":") if ":" in value else (value, "", "")
    if colon and not source.endswith(".py") and "/" not in source:
        return value
    path = absolute(source, base).resolve()
    if not path.exists():
        raise ValueError(f"there is no {path}")
    return f"{path}{colon}{name}"


def _model(value: str, base: Path) -> str:
    folder = absolute(value, base)
    if folder.exists():
        return str(folder.resolve())
    if value.count("/") == 1 and not value.startswith((".", "/", "~")):
        return value  # a name on the hub
    raise ValueError(f"there is no folder {folder}; give a Hugging Face model folder")


def _file(value: str, base: Path) -> str:
    path = absolute(value, base)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return str(path)


def _program(value: str, base: Path) -> str:
    return target(value, base) if FUNCTION.fullmatch(value) else value


def _resolved(resolve: Callable[[str, Path], str]) -> AfterValidator:
    def check(value: str, info: ValidationInfo) -> str:
        return resolve(value, info.context["base"]) if info.context else value

    return AfterValidator(check)


AnyPath = Annotated[str, _resolved(lambda value, base: str(absolute(value, base)))]
FilePath = Annotated[str, _resolved(_file)]
ModelPath = Annotated[str, _resolved(_model)]
"""A model folder, or the name of a model on the hub (``org/name``)."""
TargetPath = Annotated[str, _resolved(target)]
"""A folder, ``file.py:Class`` or ``module:Class``."""
ProgramPath = Annotated[str, _resolved(_program)]
"""A command, ``file.py:function`` or ``module:function``."""
OutputPath = Annotated[str, _resolved(lambda value, _: str(Path(value).expanduser().absolute()))]
"""A path relative to the working directory."""
