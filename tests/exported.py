"""What OpenTelemetry's SDK would export, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

__all__ = ["Exported", "exporting"]


class Exported:
    """Spans that have ended, as an exporter gets them."""

    def __init__(self, exporter: InMemorySpanExporter, tracer: Any) -> None:
        self._exporter = exporter
        self.tracer = tracer

    def of(self, kind: str) -> list[Any]:
        return [s for s in self._exporter.get_finished_spans() if s.name == f"kvstore.{kind}"]

    def only(self, kind: str) -> Any:
        (span,) = self.of(kind)
        return span


def exporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    """An SDK that keeps what is exported, for this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield Exported(exporter, provider.get_tracer("server"))
    provider.shutdown()
