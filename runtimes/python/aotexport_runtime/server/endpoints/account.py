"""The account of a request: what is counted, logged and, by OpenTelemetry, traced of it."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

from aotexport_runtime.server.endpoints import metrics
from aotexport_runtime.server.repository import Served
from aotexport_runtime.serving.batcher import Answer

log = logging.getLogger("aotexport_runtime.server")
access = logging.getLogger("aotexport_runtime.server.access")

_EXPORTER, _PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(kw_only=True)
class Asked:
    """A request while it is answered, for its line of the log."""

    model: str
    protocol: str
    began: float = field(default_factory=time.monotonic)
    id: str = ""
    traceparent: str = ""
    served: Served | None = None
    answer: Answer | None = None


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


def note(asked: Asked, outcome: str, text: str, seconds: float, *, spans: Any, is_logged: bool) -> None:
    """Count, trace and log a request that took `seconds`; `spans` is of `provider_of`, `text` says what went wrong."""
    model, answer, version = asked.model, asked.answer, asked.served.version if asked.served else ""
    # Names that a client invents are no labels.
    label = "" if outcome == "not_found" else model
    metrics.REQUESTS.labels(label, version, asked.protocol, outcome).inc()
    fields: dict[str, Any] = {"id": asked.id, "model": model[:100]}
    fields |= {"protocol": asked.protocol, "outcome": outcome, "version": version, "ms": round(seconds * 1e3, 3)}
    if answer is not None:
        whole, queue, compute, batch = metrics.of_answers(model, version)
        whole.observe(seconds)
        queue.observe(answer.waited_s)
        compute.observe(answer.ran_s)
        if answer.is_first:
            batch.observe(answer.batch_size)
        took_ms = {"queue_ms": round(answer.waited_s * 1e3, 3), "compute_ms": round(answer.ran_s * 1e3, 3)}
        fields |= took_ms | {"batch": answer.batch_size}
    trace = _trace_of(asked.traceparent)
    if spans is not None:
        trace = _note_spans(spans, asked, outcome, text, seconds)
    if trace:
        fields["trace_id"] = trace
    if text:
        fields["error"] = text[:500]
    if is_logged:
        access.info("request", extra={"fields": fields})


def _trace_of(traceparent: str) -> str:
    """Return the id of the trace that a request belongs to, by the header of W3C; empty: it names none."""
    found = re.fullmatch(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", traceparent)
    return found[1] if found else ""


def _note_spans(provider: Any, asked: Asked, outcome: str, text: str, seconds: float) -> str:
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
        batch = span("batch", answer.began, context, {"rows": answer.batch_size})
        if answer.engine_ran is not None and asked.served is not None:
            begin, ended = answer.engine_ran
            end(span("engine", begin, set_span_in_context(batch), {"engine": asked.served.servable.engine}), ended)
        end(batch, ran)
    if outcome != "ok":
        whole.set_status(Status(StatusCode.ERROR, text or outcome))
    end(whole, asked.began + seconds)
    return f"{whole.get_span_context().trace_id:032x}"
