"""Who is told the numbers of a run, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from agentrl_train.runtime.config import RunConfig
from agentrl_train.runtime.telemetry.metrics import Sink
from agentrl_train.runtime.telemetry.prometheus import Exposition
from agentrl_train.runtime.telemetry.tensorboard import ScalarWriter
from agentrl_train.runtime.telemetry.trace import TraceFile
from agentrl_train.runtime.telemetry.wandb import WandbWriter
from agentrl_train.types import UNTRACED, Trace


@contextmanager
def traced(config: RunConfig) -> Iterator[Trace]:
    """Keep the trace of a run, or nothing if that is off; raises ``RunFolderError``."""
    if not config.metrics.trace:
        yield UNTRACED
        return
    path = config.run_folder / "trace.json"
    trace = TraceFile(path, max_bytes=round(config.metrics.trace_megabytes * 1e6))
    try:
        yield trace
    finally:
        trace.close()


def open_sinks(config: RunConfig, trace: Trace, *, tell: Callable[[str], None]) -> list[Sink]:
    """Return whom a run tells its numbers; all that are open are closed again if one cannot be.

    ``tell`` hears where metrics are served.

    Raises:
        ConfigError: a port is taken, a package is missing.
        RunFolderError: the run folder cannot be written.
    """
    metrics, folder = config.metrics, config.run_folder
    sinks: list[Sink] = [trace] if isinstance(trace, TraceFile) else []
    with ExitStack() as opened:

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        if metrics.tensorboard:
            add(ScalarWriter(folder / "tensorboard"))
        if metrics.prometheus_port is not None:
            exposition = Exposition(host=metrics.prometheus_host, port=metrics.prometheus_port)
            add(exposition)
            tell(f"metrics are served at {exposition.url}")
        if metrics.wandb is not None:
            told = config.model_dump(mode="json")
            add(WandbWriter(folder, project=metrics.wandb, name=config.run.name, config=told))
        opened.pop_all()
    return sinks
