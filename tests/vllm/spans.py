"""An OpenTelemetry collector for tests: takes spans over HTTP, as protobuf, and keeps them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.patience import PATIENCE

__all__ = ["Span", "SpanSink"]


@dataclass(frozen=True)
class Span:
    """One that has ended. Ids are hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    about: dict[str, Any]


class SpanSink:
    """Listens on loopback until `close`.

    Attributes:
        url: where spans are to be sent.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        spans = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                spans.extend(_read(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def all(self) -> list[Span]:
        """All that have come."""
        return list(self._spans)

    def of(self, trace: str) -> list[Span]:
        """Those of one trace."""
        return [span for span in self._spans if span.trace == trace]

    def until(self, there: Callable[[SpanSink], bool]) -> SpanSink:
        """Wait until what is looked for has come."""
        end = time.monotonic() + PATIENCE
        while not there(self):
            assert time.monotonic() < end, sorted({span.name for span in self._spans})
            time.sleep(0.05)
        return self

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def _read(body: bytes) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {each.key: _value(each.value) for each in span.attributes},
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
