"""Spans of OpenTelemetry, where the variables of its standard name what takes them: a request, its wait, its batch."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotexport_runtime.server.endpoints.plane import Asked

log = logging.getLogger("aotexport_runtime.server")

_EXPORTER, _PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def provider_of(environment: dict[str, str]) -> Any:
    """Return what spans are sent by, as the environment says; None: by nothing."""
    name = environment.get(_EXPORTER, "otlp" if any(map(environment.get, _ENDPOINTS)) else "none")
    if name == "none" or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if name == "otlp":
        name = "otlp_proto_grpc" if environment.get(_PROTOCOL) == "grpc" else "otlp_proto_http"
    found = [*importlib.metadata.entry_points(group="opentelemetry_traces_exporter", name=name)]
    if not found:
        log.error(f"no spans are sent: no package with the exporter `{name}` of OpenTelemetry is installed")
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    return provider


def note_spans(provider: Any, asked: Asked, outcome: str, text: str, seconds: float) -> str:
    """Send the spans of a request that took `seconds`, below the one that asked; return the id of their trace."""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    shift, answer = time.time_ns() - time.monotonic_ns(), asked.answer
    tracer = provider.get_tracer("aotexport")

    def span(name: str, begin: float, context: Any, attributes: dict[str, Any], **more: Any) -> Any:
        return tracer.start_span(name, context, attributes=attributes, start_time=int(begin * 1e9) + shift, **more)

    def end(span: Any, when: float) -> None:
        span.end(int(when * 1e9) + shift)

    parent = TraceContextTextMapPropagator().extract({"traceparent": asked.traceparent})
    attributes = {"model": asked.model, "protocol": asked.protocol, "outcome": outcome, "request.id": asked.id}
    attributes["version"] = asked.served.version if asked.served else ""
    whole = span("infer", asked.began, parent, attributes, kind=SpanKind.SERVER)
    if answer is not None:
        context, ran = set_span_in_context(whole), answer.began + answer.ran_s
        end(span("queue", answer.began - answer.waited_s, context, {}), answer.began)
        end(span("batch", answer.began, context, {"rows": answer.batch_size}), ran)
    if outcome != "ok":
        whole.set_status(Status(StatusCode.ERROR, text or outcome))
    end(whole, asked.began + seconds)
    return f"{whole.get_span_context().trace_id:032x}"
