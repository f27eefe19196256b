"""The command ``agentrl-train quickstart``: the run of the README, from installed packages."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import count
from pathlib import Path

from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors

PACKAGE = "agentrl_tasks"
"""Package with the tasks, the starter policy and the configuration."""
NAME = "quickstart"


def write_config(folder: Path) -> Path:
    """Write the configuration of the quick start into ``folder`` and return its path. Keep an existing file.

    Raises:
        ConfigError: the package with the tasks is not installed, or the file cannot be written.
    """
    path = folder / f"{NAME}.toml"
    if path.exists():
        return path
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the quick start needs the package agentrl-tasks: install its wheel with pip, or run "
            "`agentrl-train run examples/quickstart/train.toml` in a checkout"
        )
    source = Path(next(iter(spec.submodule_search_locations)), NAME, "train.toml")
    with run_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def free_name(folder: Path) -> str:
    """Return the first of quickstart, quickstart-2, quickstart-3 ... that is not the name of a folder."""
    names = (NAME if number == 1 else f"{NAME}-{number}" for number in count(1))
    return next(name for name in names if not (folder / name).exists())
