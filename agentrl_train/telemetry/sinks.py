"""Sinks that receive the metrics of each step: TensorBoard, Weights & Biases, Prometheus and the trace."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.summary import scalar

from agentrl_env.errors import install_extra
from agentrl_train.config.sections import MetricsSection, RunSection
from agentrl_train.errors import ConfigError
from agentrl_train.storage.atomic_io import run_folder_errors, write_file
from agentrl_train.telemetry.metrics import Sink
from agentrl_train.telemetry.prometheus import PrometheusExporter
from agentrl_train.telemetry.trace import TraceFile
from agentrl_train.types import UNTRACED, Trace

GROUPS = {
    "staleness": r"staleness_|token_staleness_|tokens_of_age_",
    "speed": r"(\w+_)?seconds$|\w+_per_s(_ceiling)?$|\w+_idle$",
    "tokens": r"(\w+_)?tokens$|slots$|sequences$|publish_bytes$",
    "critic": r"critic_|explained_variance$|value_mean$|return_mean$",
    "drift": r"\w+_drift(_mean)?$",
}
"""Group of a metric in TensorBoard and W&B -> pattern of the names. The others are in ``train``."""


def grouped(name: str) -> str:
    """Return the name of a metric with its group in front. Task metrics already have one: ``reward/shop``."""
    if "/" in name:
        return name
    group = next((group for group, pattern in GROUPS.items() if re.match(pattern, name)), "train")
    return f"{group}/{name}"


class ScalarWriter:
    """Writes scalars to a TensorBoard event file in ``folder``. Implements ``Sink``.

    Raises:
        RunFolderError: the disk is full or not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with run_folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer: EventsWriter | None = EventsWriter(str(folder / "events"))

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Write the finite values of one step."""
        if self._writer is None:
            return
        with run_folder_errors(self._folder):
            for name, value in scalars.items():
                if math.isfinite(value):
                    event = Event(step=step, wall_time=time.time(), summary=scalar(grouped(name), value))
                    self._writer.write_event(event)
            self._writer.flush()

    def close(self) -> None:
        """Close the file; idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with run_folder_errors(self._folder):
                writer.close()


logger = logging.getLogger(__name__)


class WandbWriter:
    """Sends metrics to a W&B run, and continues it after a resume. Implements ``Sink``.

    Args:
        folder: run folder, which holds the files of W&B and the run id.
        project: W&B project.
        name: name of the run.
        config: configuration stored with the run.

    Raises:
        ConfigError: the package is missing, or W&B rejects the run, for example without a login.
    """

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"metrics.wandb needs the package wandb: {install_extra('wandb')}; or leave it out"
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
                f"W&B rejected the run ({error}): run `wandb login`, set WANDB_MODE=offline, or leave out "
                "metrics.wandb"
            ) from error
        # W&B ignores values of earlier steps, such as those of an evaluation alongside training.
        self._run.define_metric("*", step_metric="step")
        self._error: type[Exception] = wandb.errors.Error

    def write(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Log the finite values of one step."""
        if self._run is None:
            return
        try:
            finite = {grouped(key): value for key, value in scalars.items() if math.isfinite(value)}
            self._run.log(finite | {"step": step})
        except self._error as error:
            logger.warning("step %d was not logged to W&B: %s", step, error)

    def close(self) -> None:
        """Finish the run; idempotent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _run_id(path: Path) -> str:
    """Return the W&B id of this run folder, created on first use."""
    with run_folder_errors(path.parent):
        if not path.exists():
            write_file(path, secrets.token_hex(8).encode())
        return path.read_text().strip()


@contextmanager
def traced(metrics: MetricsSection, folder: Path) -> Iterator[Trace]:
    """Yield the trace of a run, or an inactive one if it is disabled. Raises ``RunFolderError``."""
    if not metrics.trace:
        yield UNTRACED
        return
    trace = TraceFile(folder / "trace.json")
    try:
        yield trace
    finally:
        trace.close()


def open_sinks(
    metrics: MetricsSection,
    run: RunSection,
    trace: Trace,
    *,
    settings: Mapping[str, Any],
    notify: Callable[[str], None],
) -> list[Sink]:
    """Return the configured sinks. If one fails to open, the others are closed.

    ``settings`` are all settings of the run, which W&B shows. ``notify`` is called with a message about the
    address of the metrics endpoint.

    Raises:
        ConfigError: a port is in use or a package is missing.
        RunFolderError: the run folder cannot be written.
    """
    folder = run.path
    sinks: list[Sink] = [trace] if isinstance(trace, TraceFile) else []
    with ExitStack() as opened:

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        if metrics.tensorboard:
            add(ScalarWriter(folder / "tensorboard"))
        if metrics.prometheus is not None:
            exporter = PrometheusExporter(host=metrics.prometheus.host, port=metrics.prometheus.port)
            add(exporter)
            notify(f"metrics are served at {exporter.url}")
        if metrics.wandb is not None:
            add(WandbWriter(folder, project=metrics.wandb, name=run.name, config=settings))
        opened.pop_all()
    return sinks
