"""Settings that servers and controllers share: limits of a caller, logging and tracing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_env.server.limits import Limits
from agentrl_env.server.telemetry.logs import LogFormat, configure_logs
from agentrl_env.server.telemetry.tracing import export_traces

_OTEL = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Options of the command line.

    Args:
        caller_limits: ``NAME=VALUE`` of ``Limits``.
        log_format: format of the log on standard error.
        log_level: lowest level. The default is ``info`` for JSON and ``warning`` for text.
        log_messages: also log the messages of models and environments.
        traces: send spans to the collector in the OTEL_* variables. None sends them if these are set.
    """

    caller_limits: Sequence[str] = ()
    log_format: LogFormat = "text"
    log_level: str | None = None
    log_messages: bool = False
    traces: bool | None = None

    def arguments(self) -> list[str]:
        """Return the options as command-line arguments, for a worker process."""
        arguments = ["--log-format", self.log_format]
        for setting in self.caller_limits:
            arguments += ["--caller-limit", setting]
        arguments += ["--log-level", self.log_level] if self.log_level else []
        arguments += ["--log-messages"] if self.log_messages else []
        return arguments + ([] if self.traces is None else ["--traces" if self.traces else "--no-traces"])

    @contextlib.contextmanager
    def apply(self) -> Iterator[dict[str, Any]]:
        """Configure logging and tracing, and yield ``limits`` and ``tracing`` for a server.

        Raises ServeError if a limit is unknown, or traces are requested and OpenTelemetry is missing.
        """
        configure_logs(self.log_format, level=self.log_level, messages=self.log_messages)
        limits = Limits.parse(self.caller_limits)
        wanted = any(os.environ.get(name) for name in _OTEL) if self.traces is None else self.traces
        if not wanted:
            yield {"limits": limits, "tracing": None}
            return
        tracing, provider = export_traces()
        try:
            yield {"limits": limits, "tracing": tracing}
        finally:
            provider.shutdown()
