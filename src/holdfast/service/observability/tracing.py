"""Spans of API calls with children for shell work, through OpenTelemetry where enabled; otherwise no-ops.

OpenTelemetry is an extra: only `open_tracer` imports it, and only if the usual variables (OTEL_*) name an exporter.
Spans are sent to that exporter from a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Literal, Protocol

from holdfast.service.problems import Invalid, Problem

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan, SpanKind

#: Types of span attributes.
Attribute = str | bool | int | float
#: Spans of work in a sandbox; a call has one for each operation there.
ShellWork = Literal["open_terminal", "open_shell", "send", "read", "run", "signal", "close", "usage"]
#: Each of these configures an exporter.
_EXPORTER_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
)
#: W3C trace context headers.
_CARRIER: Final = ("traceparent", "tracestate")


class Span(Protocol):
    """A running span."""

    def set(self, name: str, value: Attribute) -> None: ...


class Tracer(Protocol):
    """Creates spans. Both methods return context managers; a span is the parent of those that begin inside it."""

    def call(self, method: str, front: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """Span of one API call, a child of the caller's span if `traceparent` names one."""
        ...

    def work(self, name: ShellWork, **attributes: Attribute) -> AbstractContextManager[Span]:
        """Span of one operation in a sandbox."""
        ...

    def close(self) -> None:
        """Send pending spans."""
        ...


class NullSpan:
    """A no-op span."""

    def set(self, name: str, value: Attribute) -> None:
        return


class NullTracer:
    """A no-op tracer: costs an attribute and a call."""

    def __init__(self) -> None:
        self._nothing = contextlib.nullcontext(NullSpan())

    def call(self, method: str, front: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        return self._nothing

    def work(self, name: ShellWork, **attributes: Attribute) -> AbstractContextManager[Span]:
        return self._nothing

    def close(self) -> None:
        return


def is_enabled(environ: Mapping[str, str]) -> bool:
    """True if the environment enables spans, by OpenTelemetry's rules."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(environ.get(name) for name in _EXPORTER_VARIABLES)


def open_tracer(environ: Mapping[str, str]) -> Tracer:
    """Return a tracer that exports as configured in the environment, or a no-op."""
    if not is_enabled(environ):
        return NullTracer()
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter not in ("otlp", "console"):
        raise Invalid(f"OTEL_TRACES_EXPORTER={exporter}: must be otlp, console or none", reason="TRACING_EXPORTER")
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        if exporter == "console":
            spans: SpanExporter = ConsoleSpanExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            spans = OTLPSpanExporter()
    except ImportError as error:
        raise Invalid(
            f"OTEL_* enables spans, but OpenTelemetry is not installed ({error}): pip install 'holdfast[tracing]'",
            reason="TRACING_NOT_INSTALLED",
        ) from None
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: environ.get("OTEL_SERVICE_NAME") or "holdfast"})
    )
    provider.add_span_processor(BatchSpanProcessor(spans))
    return OtelTracer(provider)


class ExportedSpan:
    """A span of OpenTelemetry."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    def set(self, name: str, value: Attribute) -> None:
        self._span.set_attribute(name, value)


class OtelTracer:
    """Spans through a provider of our own: the process's global one is unchanged."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("holdfast.service")
        self._propagator = TraceContextTextMapPropagator()

    def call(self, method: str, front: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Attribute] = {"rpc.system": front, "rpc.method": method}
        return self._span(f"SessionService/{method}", SpanKind.SERVER, attributes, headers)

    def work(self, name: ShellWork, **attributes: Attribute) -> AbstractContextManager[Span]:
        from opentelemetry.trace import SpanKind

        return self._span(f"shell.{name}", SpanKind.CLIENT, attributes, None)

    @contextlib.contextmanager
    def _span(
        self, name: str, kind: SpanKind, attributes: Mapping[str, Attribute], headers: Mapping[str, str] | None
    ) -> Iterator[Span]:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode

        parent = None
        if headers is not None:
            # Header names have any case. Without a caller's span a call begins a trace of its own, even where
            # another span is current.
            carrier = {key: value for key, value in _lower(headers) if key in _CARRIER}
            parent = self._propagator.extract(carrier, Context())
        with self._tracer.start_as_current_span(
            name,
            context=parent,
            kind=kind,
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield ExportedSpan(span)
            except Problem as problem:
                span.set_attribute("holdfast.reason", problem.reason)
                span.set_attribute("rpc.code", problem.status)
                # A caller's error is not a failure of the service.
                if problem.status in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED"):
                    span.set_status(Status(StatusCode.ERROR, problem.reason))
                raise
            except Exception as error:
                # The class name only: a message may contain output of a program.
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise

    def close(self) -> None:
        self._provider.shutdown()


def _lower(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in headers.items():
        yield key.lower(), value
