"""The folder of a run: creation, locking, and changes of the configuration on resume."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_train.config import RunConfig
from agentrl_train.config.toml import flat, problems, read_toml
from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.storage.checkpoint import steps

CONFIG = "config.toml"
FIXED = ("train.lora", "model.path", "model.revision")
"""Settings that must not change on resume: they define the parameters of a checkpoint and its reference."""
NOT_SHOWN = ("run.name", "run.folder")
"""Settings not reported as changed on resume."""


@contextmanager
def claim_run_dir(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[list[str]]:
    """Create or reopen the run folder and lock it.

    A folder in which no step was trained starts from the beginning, with ``resume`` or without.

    Yields:
        The settings that changed since the run began, one sentence each.

    Raises:
        ConfigError: the folder is in use, holds nothing to resume, lacks its checkpoints, or a fixed setting
            changed.
        RunFolderError: the folder is not writable.
    """
    started = bool(steps(folder / "checkpoints"))
    if started and not resume:
        raise ConfigError(
            f"{folder} already contains a run: continue it with --resume, or start another with "
            "--set run.name=NAME"
        )
    metrics = folder / "metrics.jsonl"
    if not started and metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"{metrics} has the steps of a run, but {folder / 'checkpoints'} has no checkpoint: restore it, "
            "or start another run with --set run.name=NAME"
        )
    if resume and not folder.exists():
        raise ConfigError(f"{folder} contains no run to resume: start it without --resume")
    with run_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until the run ends)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is running in {folder}: wait for it, or stop it") from None
        changed = changed_settings(folder / CONFIG, config) if started else {}
        for name, (old, new) in changed.items():
            if name.startswith(FIXED):
                moved = f"; if the model has only moved, correct {folder / CONFIG}" * (name == "model.path")
                raise ConfigError(
                    f"{name} was {old} when the run in {folder} began, and is {new} now, which does not fit "
                    f"its checkpoints: restore it, or start another run with --set run.name=NAME{moved}"
                )
        yield [f"{name} = {new} (was {old})" for name, (old, new) in changed.items() if name not in NOT_SHOWN]


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the full configuration to the run folder; raises ``RunFolderError``."""
    with run_folder_errors(folder):
        write_file(folder / CONFIG, config.to_toml().encode())


def changed_settings(path: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return setting -> (old, new) for settings that differ from the configuration in the run folder.

    Settings that did not exist yet when the run began had their defaults. If the folder has former spellings,
    only settings that both have are compared, and those that must not change.
    """
    table = read_toml(path) if path.exists() else {}
    former = problems(table, RunConfig)
    if not former:
        table = RunConfig.model_validate(table).model_dump(mode="json", exclude_none=True)
    before, now = flat(table), flat(config.model_dump(mode="json", exclude_none=True))
    compared = before.keys() & now.keys() if former else before.keys() | now.keys()
    compared |= {name for name in before.keys() | now.keys() if name.startswith(FIXED)}
    differing = [name for name in before | now if name in compared and before.get(name) != now.get(name)]
    if not before:
        return {}
    return {name: (before.get(name, "not set"), now.get(name, "not set")) for name in differing}
