"""Loads the Environment class of a TARGET."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from agentrl_env.environment import Environment
from agentrl_env.errors import DefinitionError, TargetError
from agentrl_env.tools import toolset

TARGET_PACKAGE = "agentrl_target_"
"""Prefix of the package that stands for a task's folder; a hash of its path follows."""


def load_target(target: str | type[Environment]) -> type[Environment]:
    """Return the Environment class of a target. It has at least one tool, or ``respond``.

    Args:
        target: a folder with an ``environment.py``, a ``file.py:Class``, a ``module:Class``, or
            the class itself.

    Raises TargetError.
    """
    environment = _find(target) if isinstance(target, str) else target
    try:
        tools = toolset(environment).tools
    except DefinitionError as error:
        raise TargetError(f"{target}: {error}") from error
    if not tools and not environment.overrides("respond"):
        raise TargetError(f"{environment.__name__} has no tools; mark at least one method with @tool")
    return environment


def load_targets(targets: Iterable[str | type[Environment]]) -> list[type[Environment]]:
    """Return the Environment classes of several targets. Raises TargetError."""
    environments = [load_target(target) for target in targets]
    if not environments:
        raise TargetError("nothing to serve; name at least one target")
    return environments


def _find(target: str) -> type[Environment]:
    place, _, name = target.rpartition(":")
    if not place:
        place, name = target, ""
    path = Path(place)
    if path.is_dir():
        path = path / "environment.py"
        if not path.is_file():
            raise TargetError(f"{target}: the folder has no environment.py")
    if path.suffix == ".py":
        if not path.is_file():
            raise TargetError(f"{target}: no such file")
        return _pick(_load_file(path, target), name, target)
    if not name:
        raise TargetError(
            f"{target}: no such folder; a target is a folder with an environment.py, "
            "file.py:Class or module:Class"
        )
    return _pick(_load_module(place, target), name, target)


def _load_file(path: Path, target: str) -> ModuleType:
    """Import a file as a module of a package made of its folder, so that ``from .x import y`` works."""
    path = path.resolve()
    digest = hashlib.blake2b(str(path.parent).encode(), digest_size=4).hexdigest()
    package = f"{TARGET_PACKAGE}{digest}"
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(path.parent)]
        sys.modules[package] = folder
    return _load_module(f"{package}.{path.stem}", target)


def _load_module(name: str, target: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise TargetError(f"{target}: there is no module {name!r}") from error
        raise TargetError(f"{target}: it needs the module {error.name!r}; install it") from error
    except Exception as error:
        raise TargetError(f"{target}: importing it failed: {type(error).__name__}: {error}") from error


def _pick(module: ModuleType, name: str, target: str) -> type[Environment]:
    if name:
        found = getattr(module, name, None)
        if not _is_environment(found):
            raise TargetError(f"{target}: no Environment class named {name!r} there")
        return found
    own = [
        value
        for value in vars(module).values()
        if _is_environment(value) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(value.__name__ for value in own) or "none"
        raise TargetError(
            f"{target}: needs exactly one Environment class (found: {names}); name it as file.py:Class"
        )
    return own[0]


def _is_environment(value: object) -> TypeGuard[type[Environment]]:
    return isinstance(value, type) and issubclass(value, Environment) and not inspect.isabstract(value)
