"""How a serving process is run: its limits, its log, its traces; the same for servers and controllers."""

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
class Operations:
    """What an operator chose on the command line.

    Args:
        caller_limits: ``NAME=VALUE`` of ``Limits``.
        log_format: of the log on standard error.
        log_level: the least that is written; by default ``info`` as JSON, ``warning`` as text.
        log_messages: whether what models and environments said is written, too.
        traces: whether spans go to the collector that the OTEL_* variables name; None: where they do.
    """

    caller_limits: Sequence[str] = ()
    log_format: LogFormat = "text"
    log_level: str | None = None
    log_messages: bool = False
    traces: bool | None = None

    def arguments(self) -> list[str]:
        """Return the same choice as command-line arguments, for a worker process."""
        arguments = ["--log-format", self.log_format]
        for setting in self.caller_limits:
            arguments += ["--caller-limit", setting]
        arguments += ["--log-level", self.log_level] if self.log_level else []
        arguments += ["--log-messages"] if self.log_messages else []
        return arguments + ([] if self.traces is None else ["--traces" if self.traces else "--no-traces"])

    @contextlib.contextmanager
    def begin(self) -> Iterator[dict[str, Any]]:
        """Begin the log and the traces, and give ``limits`` and ``tracing`` of a server.

        Raises ServeError where a limit is none, or traces are asked for and cannot be made.
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
