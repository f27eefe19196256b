"""OpenTelemetry spans of calls and tools, if tracing is on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl_env.errors import ServeError, install_extra
from agentrl_env.server.telemetry.logs import outline, type_name

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")
Span = AbstractContextManager[Any]
_NOTHING: Span = nullcontext()
_active: ContextVar[Tracing | None] = ContextVar("agentrl_tracing", default=None)


def span(name: str, /, **attributes: str) -> Span:
    """Return a child of the current span, or an empty context if tracing is off.

    Args:
        name: name of the span.
        attributes: attributes, recorded as ``agentrl.NAME``.
    """
    tracing = _active.get()
    return _NOTHING if tracing is None else tracing.span(name, None, **attributes)


def spanned(name: str, work: Coroutine[Any, Any, T], /, **attributes: str) -> Coroutine[Any, Any, T]:
    """Return ``work`` wrapped in a span, or ``work`` itself if tracing is off."""
    return work if _active.get() is None else _under(span(name, **attributes), work)


async def _under(entered: Span, work: Coroutine[Any, Any, T]) -> T:
    with entered:
        return await work


async def under_caller(traceparent: str, work: Callable[[], Awaitable[T]]) -> T:
    """Run a WebSocket call. If tracing is on, run it in a child of the caller's span."""
    tracing = _active.get()
    if tracing is None:
        return await work()
    with tracing.span("call", {"traceparent": traceparent}):
        return await work()


def traceparent() -> str | None:
    """Return the W3C trace context of the current span, or None if tracing is off."""
    tracing = _active.get()
    return None if tracing is None else tracing.traceparent()


def annotate(**attributes: str) -> None:
    """Add attributes to the current span, if there is one."""
    tracing = _active.get()
    if tracing is not None:
        tracing.annotate(attributes)


class Tracing:
    """Makes the spans of one application.

    Args:
        provider: tracer provider of the OpenTelemetry SDK.

    Raises ServeError if OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider) -> None:
        try:
            from opentelemetry import propagate, trace
        except ModuleNotFoundError as error:
            raise ServeError(_MISSING) from error
        self._tracer = provider.get_tracer("agentrl_env")
        self._extract, self._inject = propagate.extract, propagate.inject
        self._current = trace.get_current_span
        self._failed = trace.StatusCode.ERROR

    def activate(self) -> None:
        """Switch tracing on for the running task and the tasks that it starts."""
        _active.set(self)

    def span(self, name: str, carrier: Mapping[str, str] | None, /, **attributes: str) -> Span:
        """Return a child of the current span, or of the span in W3C headers."""
        return self._span(name, carrier, {f"agentrl.{key}": value for key, value in attributes.items()})

    @contextmanager
    def _span(
        self, name: str, carrier: Mapping[str, str] | None, attributes: Mapping[str, str]
    ) -> Iterator[Any]:
        """Return a span's context. Exceptions are recorded without texts, which might quote an agent."""
        options: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}
        options["context"] = None if carrier is None else self._extract(carrier)
        with self._tracer.start_as_current_span(name, attributes=attributes, **options) as span:
            try:
                yield span
            except Exception as error:
                kind, lines = type_name(type(error)), "\n".join(outline(error))
                span.add_event("exception", {"exception.type": kind, "exception.stacktrace": lines})
                span.set_status(self._failed, kind)
                raise

    def traceparent(self) -> str | None:
        """Return the current span as a W3C header, or None outside a span."""
        carrier: dict[str, str] = {}
        self._inject(carrier)
        return carrier.get("traceparent")

    def annotate(self, attributes: Mapping[str, str]) -> None:
        """Add attributes to the current span."""
        self._current().set_attributes({f"agentrl.{key}": value for key, value in attributes.items()})


def export_traces() -> tuple[Tracing, Any]:
    """Return tracing to the collector in the standard OTEL_* variables, and its provider.

    Raises ServeError if the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ServeError(_MISSING) from error
    resource = Resource.create({"service.name": "agentrl-env"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider), provider


_MISSING = f"traces need OpenTelemetry: {install_extra('otel')}"
