"""Loads the Environment class of a target."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import linecache
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from agentrl_env.author_code import author_traceback, describe, innermost, place, search_working_directory
from agentrl_env.environment import Environment, check_class
from agentrl_env.errors import AUTHOR_ERRORS, DefinitionError, TargetError
from agentrl_env.launch.installed import installed_task, unknown_target
from agentrl_env.tools import is_tool, toolset

TARGET_PACKAGE = "agentrl_target_"
"""Prefix of the package that is made for a task's folder. A hash of the folder's path follows."""


def load_target(target: str | type[Environment]) -> type[Environment]:
    """Return the Environment class of a target. It has at least one tool, or ``respond``.

    Args:
        target: a folder with an ``environment.py``, a ``file.py:Class``, a ``module:Class``, the name of an
            installed task, the class itself, or a target of a bridge: ``gym:ID``, ``harbor:DIR``,
            ``mcp:COMMAND``, ``openenv+http://host:8000``, ``openenv+docker:IMAGE``, ``tau2:DOMAIN``.

    Raises TargetError.
    """
    try:
        environment = check_class(_find(target) if isinstance(target, str) else target)
        tools = toolset(environment)
        if not tools.tools and not tools.answers and not environment.overrides("respond"):
            raise DefinitionError(
                f"{environment.__name__} has no tools; mark at least one method with @tool, or define "
                "respond(self, text) for a task of text alone",
                environment,
            )
    except DefinitionError as error:
        raise TargetError(f"{target}: {error}" if isinstance(target, str) else str(error)) from error
    return environment


def load_targets(targets: Iterable[str | type[Environment]]) -> list[type[Environment]]:
    """Return the Environment classes of several targets. Raises TargetError."""
    environments = [load_target(target) for target in targets]
    if not environments:
        raise TargetError("nothing to serve; name at least one target")
    return environments


def _find(target: str) -> type[Environment]:
    foreign = re.match(r"(\w+)[:+](.+)", target)
    if foreign and (bridged := _bridge_class(foreign[1], foreign[2])) is not None:
        return bridged
    if (task := installed_task(target)) is not None:
        module, _, name = task.target.partition(":")
        return _pick(_load_module(module, target), name, target)
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
        raise unknown_target(target)
    return _pick(_load_module(place, target), name, target)


def _bridge_class(scheme: str, address: str) -> type[Environment] | None:
    """Return the class that the bridge of a scheme makes, or None if no bridge has this scheme."""
    match scheme:
        case "gym":
            from agentrl_env.bridges.gymnasium import task

            return task.load(address)
        case "harbor":
            from agentrl_env.bridges.harbor import tasks

            return tasks.load(address)
        case "mcp":
            from agentrl_env.bridges.mcp import client as mcp

            return mcp.load(address)
        case "openenv":
            from agentrl_env.bridges.openenv import client as openenv

            return openenv.load(address)
        case "tau2":
            from agentrl_env.bridges import tau2

            return tau2.load(address)
    return None


def _load_file(path: Path, target: str) -> ModuleType:
    """Import a file as a module of a package made of its folder, so that ``from .x import y`` works.

    If the parent folder is a task too, the package is made of the parent folder. So tasks that share code
    with ``from ..x import y`` are in the folder of one of them.
    """
    path = path.resolve()
    root = path.parent
    while (root.parent / "environment.py").is_file():
        root = root.parent
    digest = hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
    package = f"{TARGET_PACKAGE}{digest}"
    if package not in sys.modules:
        folder = ModuleType(package)
        folder.__path__ = [str(root)]
        sys.modules[package] = folder
    return _load_module(".".join((package, *path.relative_to(root).with_suffix("").parts)), target)


def _load_module(name: str, target: str) -> ModuleType:
    search_working_directory()
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except DefinitionError as error:
        raise TargetError(f"{target}: {error}") from error
    except AUTHOR_ERRORS as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(f"{target}: there is no module {name!r}") from error
        error.with_traceback(author_traceback(error))
        text = f"importing it failed: {describe(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            text = _missing_module(error, error.name)
        text = re.sub(rf"{TARGET_PACKAGE}\w+\.", "", text)
        raise TargetError(f"{target}: {text}") from error


def _missing_module(error: ModuleNotFoundError, name: str) -> str:
    """Return advice about an import of a module that is not installed."""
    frame = innermost(error)
    if frame is None:
        return f"it needs the module {name!r}; install it"
    file, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
    folder, where = Path(file).parent, f"({place(frame)})"
    if name.startswith(TARGET_PACKAGE):
        own = name.partition(".")[2]
        known = sorted(path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir())
        similar = difflib.get_close_matches(own, known, n=1)
        hint = f"; did you mean {'.' + similar[0]!r}?" if similar else ""
        return f"there is no {own}.py beside {Path(file).name}{hint} {where}"
    own, top = folder.name, name.partition(".")[0]
    if top != own and not (folder / f"{top}.py").exists() and not (folder / top).is_dir():
        return f"it needs the module {name!r}; install it {where}"
    written = linecache.getline(file, line).partition("#")[0].strip()
    found = re.match(r"(?:from\s+([\w.]+)\s+)?import\s+([\w.]+)(.*)", written)
    module, names = (found[1], found[2] + found[3]) if found else (name, "...")
    if not module:  # import a.b
        module, _, names = names.rpartition(".")
    module = f"{module}.".removeprefix(f"{own}.").rstrip(".")
    fix = f"from .{module} import {names if ')' in names or '(' not in names else '...'}"
    return f"{written!r} finds no installed module; for the file beside it write {fix!r} {where}"


def _pick(module: ModuleType, name: str, target: str) -> type[Environment]:
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, type) or not issubclass(found, Environment):
            similar = difflib.get_close_matches(name, [own.__name__ for own in _environments(module)], n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise TargetError(f"{target}: no Environment class named {name!r} there{hint}")
        return found
    own = [value for value in _environments(module) if value.__module__ == module.__name__]
    concrete = [value for value in own if not inspect.isabstract(value)] or own
    if len(concrete) != 1:
        names = ", ".join(value.__name__ for value in concrete) or "none"
        advice = _stray_class(module) or "name it as file.py:Class"
        raise TargetError(f"{target}: needs exactly one Environment class (found: {names}); {advice}")
    return concrete[0]


def _environments(module: ModuleType) -> list[type[Environment]]:
    values = [value for value in vars(module).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, Environment) and value is not Environment]


def _stray_class(module: ModuleType) -> str:
    """Return advice if a class has tools but does not derive from Environment, else ""."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for own in classes:
        if not issubclass(own, Environment) and any(map(is_tool, vars(own).values())):
            return f"write class {own.__name__}(Environment) ({place(own)})"
    return ""
