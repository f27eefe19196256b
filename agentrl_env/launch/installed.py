"""Tasks of installed packages by short names, such as ``household`` instead of ``module:Class``.

A package publishes its tasks as entry points of the group ``agentrl_env.tasks``, with values
of the form ``module:Class``.
"""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from agentrl_env.errors import TargetError

GROUP = "agentrl_env.tasks"
"""Group of the entry points."""
TARGETS = (
    "a target is a folder with an environment.py, file.py:Class, module:Class or a task of agentrl-env list"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledTask:
    """A task of an installed package."""

    name: str
    target: str
    """The task as ``module:Class``."""
    package: str
    """Name and version of the distribution."""

    def file(self) -> Path | None:
        """Return the file of the task's module without importing it, or None if it does not exist."""
        try:
            spec = find_spec(self.target.partition(":")[0])
        except ImportError:
            return None
        return Path(spec.origin) if spec is not None and spec.origin else None

    def summary(self) -> str:
        """Return the first line of the class's docstring, without importing the module."""
        file, name = self.file(), self.target.partition(":")[2]
        if file is None:
            return ""
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            return ""
        found = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        return next(((ast.get_docstring(node) or "").partition("\n")[0] for node in found), "")


def installed_tasks() -> list[InstalledTask]:
    """Return the tasks of all installed packages, sorted by name."""
    tasks = {
        (point.name, point.value): InstalledTask(name=point.name, target=point.value, package=_package(point))
        for point in entry_points(group=GROUP)
    }
    return [tasks[key] for key in sorted(tasks)]


def installed_task(target: str, folder: Path | None = None) -> InstalledTask | None:
    """Return the task that a short name stands for.

    Args:
        target: a target of any kind.
        folder: folder for relative paths. By default the working directory.

    Returns:
        The task, or None if no package publishes this name or the name is a task's folder.

    Raises:
        TargetError: the target is empty, or several packages publish different tasks under this name.
    """
    if not target.strip():
        raise TargetError(f"the target is empty; {TARGETS}")
    if not _NAME.fullmatch(target) or ((folder or Path()) / target / "environment.py").is_file():
        return None
    found = [task for task in installed_tasks() if task.name == target]
    if len(found) > 1:
        choices = " or ".join(f"{task.target} ({task.package})" for task in found)
        raise TargetError(f"{target}: several packages have a task of this name: write {choices}")
    return found[0] if found else None


def unknown_target(target: str) -> TargetError:
    """Return the error for a target that is neither a folder nor the name of an installed task."""
    names = [task.name for task in installed_tasks()]
    similar = difflib.get_close_matches(target, names, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return TargetError(f"{target}: no such folder; {hint}{TARGETS}")


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown package"
