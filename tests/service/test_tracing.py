"""Tracing: a span a call with children for shell work, under the caller's span; and nothing when it is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.service.observability.tracing import NullTracer, OtelTracer, Tracer, is_enabled, open_tracer
from holdfast.service.problems import Denied, Invalid, Problem, Unavailable

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed (the extra `tracing`)")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = OtelTracer(provider)
    yield tracer
    tracer.close()


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_a_call_has_a_span_and_shell_work_is_below_it(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    with tracer.call("CreateSession", "grpc", {}) as call:
        call.set("session_id", "s1")
        with tracer.work("open_terminal", sandbox="local"):
            pass
        with tracer.work("run") as run:
            await asyncio.sleep(0)
            run.set("exit_code", 0)
    found = spans(exporter)
    top = found["SessionService/CreateSession"]
    assert top.parent is None
    assert dict(top.attributes or {}) == {"rpc.system": "grpc", "rpc.method": "CreateSession", "session_id": "s1"}
    for name in ("shell.open_terminal", "shell.run"):
        parent = found[name].parent
        assert parent is not None
        assert (parent.trace_id, parent.span_id) == ids(top)
    assert dict(found["shell.run"].attributes or {}) == {"exit_code": 0}


@pytest.mark.parametrize("header", ["traceparent", "Traceparent"], ids=["gRPC metadata", "HTTP header"])
def test_the_caller_s_span_is_the_parent(tracer: Tracer, exporter: InMemorySpanExporter, header: str) -> None:
    headers = {header: f"00-{TRACE}-{PARENT}-01", "authorization": "Bearer secret"}
    with tracer.call("SendInput", "http", headers), tracer.work("send"):
        pass
    found = spans(exporter)
    parent = found["SessionService/SendInput"].parent
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert ids(found["shell.send"])[0] == int(TRACE, 16)


@pytest.mark.parametrize("value", ["", "00-zz", "00-0-0-01", "x" * 10_000])
def test_a_broken_traceparent_begins_a_trace(tracer: Tracer, exporter: InMemorySpanExporter, value: str) -> None:
    with tracer.call("SendInput", "http", {"traceparent": value}):
        pass
    assert spans(exporter)["SessionService/SendInput"].parent is None


async def test_calls_at_the_same_time_keep_their_children_apart(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    async def call(method: str) -> None:
        with tracer.call(method, "grpc", {}):
            await asyncio.sleep(0)
            with tracer.work("send", of=method):
                await asyncio.sleep(0)

    await asyncio.gather(*(call(f"Method{number}") for number in range(5)))
    by_id = {ids(span)[1]: span for span in exporter.get_finished_spans()}
    children = [span for span in by_id.values() if span.name == "shell.send"]
    assert len(children) == 5
    for child in children:
        assert child.parent is not None
        of = (child.attributes or {})["of"]
        assert isinstance(of, str)
        assert by_id[child.parent.span_id].name == f"SessionService/{of}"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Denied("rm is denied", reason="POLICY_DENIED"), "UNSET"),
        (Unavailable("no database", reason="STORE"), "ERROR"),
        (RuntimeError("a bug"), "ERROR"),
    ],
    ids=["caller's fault", "ours", "bug"],
)
def test_only_our_own_failures_are_errors(
    tracer: Tracer, exporter: InMemorySpanExporter, error: Exception, status: str
) -> None:
    with pytest.raises(type(error)), tracer.call("RunCommand", "grpc", {}):
        raise error
    span = spans(exporter)["SessionService/RunCommand"]
    assert span.status.status_code.name == status
    if isinstance(error, Problem):
        assert (span.attributes or {})["holdfast.reason"] == error.reason
    assert "a bug" not in span.to_json()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_environment_says_whether_spans_are_wanted(environ: dict[str, str], expected: bool) -> None:
    assert is_enabled(environ) is expected


def test_off_is_a_tracer_that_does_nothing_and_imports_nothing() -> None:
    assert isinstance(open_tracer({}), NullTracer)
    code = """if True:
        import sys
        from holdfast.service.observability.tracing import open_tracer
        tracer = open_tracer({})
        with tracer.call("SendInput", "grpc", {"traceparent": "x"}) as span, tracer.work("send") as work:
            span.set("a", 1)
            work.set("b", 2)
        tracer.close()
        print([name for name in sys.modules if name.startswith("opentelemetry")])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_exporter_that_nobody_knows_is_refused() -> None:
    with pytest.raises(Invalid, match="OTEL_TRACES_EXPORTER=zipkin"):
        open_tracer({"OTEL_TRACES_EXPORTER": "zipkin"})


def test_spans_reach_the_exporter_that_the_environment_names() -> None:
    code = """if True:
        from holdfast.service.observability.tracing import open_tracer
        tracer = open_tracer({"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "sessions"})
        with tracer.call("GetSession", "http", {}):
            pass
        tracer.close()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert '"name": "SessionService/GetSession"' in done.stdout
    assert '"service.name": "sessions"' in done.stdout
