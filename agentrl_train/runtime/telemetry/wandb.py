"""Weights & Biases, for those who want it: the numbers of every step (extra ``[wandb]``).

Where nothing may leave the machine, ``WANDB_MODE=offline`` keeps everything in the run folder.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_train.errors import ConfigError
from agentrl_train.runtime.disk import run_folder_errors, write_file

logger = logging.getLogger(__name__)


class WandbWriter:
    """Sends each step's numbers to a W&B run; a resumed run goes on in the same one. Satisfies ``Sink``.

    Args:
        folder: the run folder, which keeps W&B's own files and the run's id.
        project: of W&B.
        name: of the run.
        config: shown with the run.

    Raises:
        ConfigError: the package is missing, or W&B takes no run, such as without a login.
    """

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "metrics.wandb needs the package wandb: pip install 'agentrl-kit[wandb]', or leave it out"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                id=_run_id(folder / "wandb-id"),
                dir=folder,
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"W&B takes no run ({error}): run `wandb login`, set WANDB_MODE=offline, or leave out "
                "metrics.wandb"
            ) from error
        self._refused: type[Exception] = wandb.errors.Error

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Log one step's values; those that are not finite are left out."""
        if self._run is None:
            return
        try:
            self._run.log({key: v for key, v in scalars.items() if math.isfinite(v)}, step=step)
        except self._refused as error:
            logger.warning("step %d was not logged to W&B: %s", step, error)

    def close(self) -> None:
        """Finish the run; idempotent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _run_id(path: Path) -> str:
    """Return the id that W&B knows this run folder by."""
    with run_folder_errors(path.parent):
        if not path.exists():
            write_file(path, secrets.token_hex(8).encode())
        return path.read_text().strip()
