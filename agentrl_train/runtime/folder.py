"""The folder of a run: made once, taken up again, and kept from other processes meanwhile."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.checkpoint import steps
from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.config.toml import read_toml
from agentrl_train.runtime.disk import run_folder_errors, write_file

CONFIG = "config.toml"
KEPT = "train.lora"
"""Section that says which parameters a checkpoint has."""
UNTOLD = ("run.name", "run.folder")
"""Settings of no interest to who goes on with a run: they are where it was found."""


@contextmanager
def claimed(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[list[str]]:
    """Make the run folder, or take it up again, and keep other processes out of it.

    One without a checkpoint is of a run that never began: with ``resume`` or without, it begins.

    Yields:
        What a resumed run has set otherwise than before, a sentence each.

    Raises:
        ConfigError: it is taken, there is nothing to resume, or a setting has changed that must not.
        RunFolderError: it cannot be written.
    """
    begun = bool(steps(folder / "checkpoints"))
    if begun and not resume:
        raise ConfigError(
            f"{folder} holds a run already: continue it with --resume, or name another with "
            "--set run.name=NAME"
        )
    if resume and not folder.exists():
        raise ConfigError(f"{folder} holds no run to resume: start it without --resume")
    with run_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until the run ends)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is running in {folder}: wait for it, or stop it") from None
        changed = _changed(folder / CONFIG, config) if begun else {}
        for name, (old, new) in changed.items():
            if name.startswith(KEPT):
                raise ConfigError(
                    f"{name} was {old} when the run in {folder} began, and is {new} now: its checkpoints fit "
                    "the former alone; set it back, or start another run with --set run.name=NAME"
                )
        yield [f"{name} = {new} (was {old})" for name, (old, new) in changed.items() if name not in UNTOLD]


def write_config(folder: Path, config: RunConfig) -> None:
    """Keep a run's whole configuration in its folder; raises ``RunFolderError``."""
    with run_folder_errors(folder):
        write_file(folder / CONFIG, config.to_toml().encode())


def _changed(path: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (before, now) of those that differ from the configuration in a run folder."""
    before = _flat(read_toml(path)) if path.exists() else {}
    now = _flat(config.model_dump(mode="json", exclude_none=True))
    differing = [name for name in before | now if before.get(name) != now.get(name)] if before else []
    return {name: (before.get(name, "not set"), now.get(name, "not set")) for name in differing}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table's values by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
