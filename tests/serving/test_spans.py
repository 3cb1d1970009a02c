"""Spans of requests, as a collector of OpenTelemetry receives them."""

from __future__ import annotations

import http.server
import threading

import pytest

from tests.serving.server import serving, wait_for
from tests.serving.test_workers import BODY

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `serve`")
traces = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra `serve`"
)


@pytest.fixture
def collector(monkeypatch):
    """Return the spans that a collector has received, to which the environment points."""
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in traces.ExportTraceServiceRequest.FromString(body).resource_spans:
                received.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listening.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield received
        listening.shutdown()
        thread.join()


def test_request_goes_on_with_the_trace_that_it_names(repository, collector):
    infer = "/v2/models/digits/infer"
    with serving(repository / "digits", "--name", "digits") as server:
        server.wait_until_ready()
        server.ask(infer, BODY, {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
        whole = wait_for(lambda: {span.name: span for span in collector if span.trace_id.hex() == "ab" * 16}, server)
        assert whole.keys() == {"infer", "queue", "batch", "engine"}
        first = whole["infer"]
        assert first.parent_span_id.hex() == "cd" * 8
        for name, outer in (("queue", "infer"), ("batch", "infer"), ("engine", "batch")):
            assert whole[name].parent_span_id == whole[outer].span_id
        times = {name: (span.start_time_unix_nano, span.end_time_unix_nano) for name, span in whole.items()}
        (begin, end), (waits, runs), (ran_from, ran), engine = (times[n] for n in ("infer", "queue", "batch", "engine"))
        assert begin <= waits <= runs == ran_from <= engine[0] < engine[1] <= ran <= end
        assert server.ask(infer, {"inputs": []})[0] == 400
        failed = server.wait_for_log("request", outcome="invalid")
        # What was not sent when the server ends is sent then.
    (span,) = [span for span in collector if span.trace_id.hex() == failed["trace_id"]]
    assert (span.name, span.status.message, span.parent_span_id) == ("infer", failed["error"], b"")
