"""Writes the spans of recorded episodes to a file, or sends them to a collector, by OpenTelemetry's OTLP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from agentrl_train.errors import ConfigError
from agentrl_train.report.spans import EpisodeSpan, episode_spans
from agentrl_train.report.transcript import Recorded

TRACES_PATH = "/v1/traces"
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


def export_spans(episodes: Iterable[Recorded], target: str, *, run: str, messages: bool = False) -> None:
    """Export each episode as one trace.

    A file gets one OTLP request per line as JSON. A collector gets the same requests in binary form. The
    variables ``OTEL_EXPORTER_OTLP_*`` set headers, certificates, compression and timeout.

    Args:
        episodes: the episodes.
        target: path of the file, which is overwritten, or the address of a collector: ``http://HOST:4318``.
        run: name of the run.
        messages: include messages, and the arguments and results of calls.

    Raises:
        ConfigError: the file cannot be written, or the collector did not accept the spans.
    """
    traces = ((one, episode_spans(one, run=run, messages=messages)) for one in episodes)
    tracer = _Tracer(run)
    if not target.startswith(("http://", "https://")):
        try:
            with open(target, "w", encoding="utf-8") as file:
                file.writelines(_line(tracer.record(spans)) for _, spans in traces)
        except OSError as error:
            raise ConfigError(f"spans cannot be written to {target}: {error.strerror}") from error
        return
    address = target.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
    exporter = OTLPSpanExporter(endpoint=address)
    try:
        for one, spans in traces:
            if exporter.export(tracer.record(spans)) is not SpanExportResult.SUCCESS:
                raise ConfigError(
                    f"{address} did not accept the spans of episode {one.line} of {one.path}, as logged "
                    "above: check the address, and the headers in OTEL_EXPORTER_OTLP_HEADERS"
                )
    finally:
        exporter.shutdown()


class _Ids(IdGenerator):
    """Returns the ids of the next span."""

    def __init__(self) -> None:
        self.next = (0, 0)

    def generate_trace_id(self) -> int:
        return self.next[0]

    def generate_span_id(self) -> int:
        return self.next[1]


class _Tracer:
    """Makes spans of the SDK."""

    def __init__(self, run: str) -> None:
        self._ids = _Ids()
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            # The SDK would otherwise draw another instance id for every export.
            resource=Resource.create({"service.name": "agentrl-train", "service.instance.id": run}),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self._tracer = provider.get_tracer("agentrl_train", version("agentrl-kit"))

    def record(self, spans: Iterable[EpisodeSpan]) -> Sequence[ReadableSpan]:
        """Return spans with the same ids and times."""
        self._memory.clear()
        for one in spans:
            self._ids.next = one.trace_id, one.span_id
            span = self._tracer.start_span(
                one.name,
                context=_parent(one),
                kind=SpanKind.CLIENT if one.calls_model else SpanKind.INTERNAL,
                attributes=dict(one.attributes),
                start_time=one.start_ns,
            )
            if one.error is not None:
                span.set_status(StatusCode.ERROR, one.error)
            span.end(one.end_ns)
        return self._memory.get_finished_spans()


def _parent(span: EpisodeSpan) -> Context:
    if span.parent_id is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED)
    parent = SpanContext(span.trace_id, span.parent_id, is_remote=False, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _line(spans: Sequence[ReadableSpan]) -> str:
    """Return a request as JSON. Ids are hexadecimal in OTLP, unlike in the JSON of other messages."""
    request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for span in _spans(request):
        span.update({name: base64.b64decode(span[name]).hex() for name in _ID_FIELDS if name in span})
    return json.dumps(request, ensure_ascii=False, separators=(",", ":")) + "\n"


def _spans(request: dict[str, Any]) -> Iterable[dict[str, Any]]:
    return (
        span
        for resource in request["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    )
