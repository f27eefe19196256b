"""The folder of a run: creation, locking, and changes of the configuration on resume."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl_train.config.algorithm import BY_CRITIC
from agentrl_train.config.run_config import CRITIC, FIXED
from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.storage.checkpoint import steps

CONFIG = "config.toml"
NOT_SHOWN = ("run.name", "run.folder")
"""Settings that are not reported as changed on resume."""
Changes = Mapping[str, tuple[Any, Any]]
"""Setting -> its value in a file, and its current value."""


@contextmanager
def claim_run_dir(
    folder: Path, changes_since: Callable[[Path], Changes], *, resume: bool
) -> Iterator[list[str]]:
    """Create or reopen the run folder and lock it.

    A run without trained steps starts from the beginning, with and without ``resume``. A new folder is
    deleted if the start fails before its configuration is written. ``changes_since`` returns the settings
    that differ from those in a file.

    Yields:
        The settings that changed since the start of the run, one sentence each.

    Raises:
        ConfigError: the folder is in use, holds nothing to resume, lacks its checkpoints, or a fixed setting
            changed.
        RunFolderError: the folder is not writable.
    """
    started = bool(steps(folder / "checkpoints"))
    if started and not resume:
        raise ConfigError(
            f"{folder} already contains a run: continue it with --resume (in Python, resume=True), or start "
            "another with --set run.name=NAME"
        )
    metrics = folder / "metrics.jsonl"
    if not started and metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            f"{metrics} has the steps of a run, but {folder / 'checkpoints'} has no checkpoint: restore it, "
            "or start another run with --set run.name=NAME"
        )
    if resume and not folder.exists():
        raise ConfigError(f"{folder} contains no run to resume: start it without --resume")
    new = not folder.exists()
    with run_folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until the run ends)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is running in {folder}: wait for it, or stop it") from None
        if not started:  # the groups of an earlier start can be of another model
            shutil.rmtree(folder / "journal", ignore_errors=True)
        changed = changes_since(folder / CONFIG) if started else {}
        for name, (old, now) in changed.items():
            if name.startswith(FIXED) or (name == CRITIC and now in BY_CRITIC):
                moved = f"; if the model has only moved, correct {folder / CONFIG}" * (name == "model.path")
                raise ConfigError(
                    f"{name} was {old} when the run in {folder} began, and is {now} now, which does not fit "
                    f"its checkpoints: restore it, or start another run with --set run.name=NAME{moved}"
                )
        shown = [
            f"{name} = {now} (was {old})" for name, (old, now) in changed.items() if name not in NOT_SHOWN
        ]
        try:
            yield shown
        except BaseException:
            if new and not (folder / CONFIG).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise


def write_config(folder: Path, text: str) -> None:
    """Write the full configuration to the run folder; raises ``RunFolderError``."""
    with run_folder_errors(folder):
        write_file(folder / CONFIG, text.encode())
