"""Tracing: waits and moves as OpenTelemetry spans.

The core reports what has begun and ended: see `kvstore.core.reports`. Each becomes a span here, on
the engine's loop, so that no step of a scheduler pays for it. Only OpenTelemetry's API is used; the
server sets up the SDK, which decides which spans are kept and where they go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore._version import __version__
from kvstore.core.reports import SpanBegin, SpanEnd, SpanKind
from kvstore.errors import ConfigError
from kvstore.types import about

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

__all__ = ["MOST_PARENTS", "SpanWriter"]

MOST_PARENTS = 2**14
"""Requests whose parent spans are remembered."""

logger = logging.getLogger("kvstore")


class SpanWriter:
    """Writes spans to OpenTelemetry, as children of the server's spans.

    The parent of a deferral is the span in which its request first asked, if the server set one.
    The parent of a promotion or a question for a request is its deferral. Copies to slower tiers
    belong to no request: each is the root of a trace of its own.

    The owner of the core calls `belongs` and `belongs_to`; all else is called on the engine's loop.

    Args:
        tiers: their names, in the core's order. chunk_bytes: size of a chunk.

    Raises:
        ConfigError: if OpenTelemetry is not installed.
    """

    def __init__(self, tiers: Sequence[str], chunk_bytes: int) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "spans = true: needs OpenTelemetry, "
                f"pip install 'kvstore-offload[tracing]' ({error})"
            ) from error
        self._trace = trace
        self._nothing = Context()
        self._headers = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("kvstore", __version__)
        self._tiers = list(tiers)
        self._chunk_bytes = chunk_bytes
        self._parents: OrderedDict[str, Context] = OrderedDict()
        # Each with the nanoseconds by which wall time was ahead of the core's clock.
        self._open: dict[tuple[SpanKind, str | int], tuple[Span, int]] = {}
        self._stopped = asyncio.Event()
        self._failed = self._closed = False
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            logger.warning(
                "spans = true, but OpenTelemetry's SDK is not set up in this process: "
                "spans are dropped until it is",
                extra=about("spans.no_sdk"),
            )

    # -- parents ---------------------------------------------------------------------------

    def belongs(self, request: str) -> None:
        """Make the current span, if any, the parent of this request's spans."""
        span = self._trace.get_current_span()
        found = span.get_span_context().is_valid
        self._remember(request, self._trace.set_span_in_context(span) if found else None)

    def belongs_to(self, request: str, traceparent: object) -> None:
        """Make the span of this W3C Trace Context header the parent of this request's spans.

        An invalid header is ignored.
        """
        found = None
        if isinstance(traceparent, str):
            context = self._headers.extract({"traceparent": traceparent}, self._nothing)
            if self._trace.get_current_span(context).get_span_context().is_valid:
                found = context
        self._remember(request, found)

    def _remember(self, request: str, context: Context | None) -> None:
        self._parents.pop(request, None)
        if context is not None:
            self._parents[request] = context
            if len(self._parents) > MOST_PARENTS:
                self._parents.popitem(last=False)

    # -- spans -----------------------------------------------------------------------------

    def write(self, spans: Sequence[SpanBegin | SpanEnd]) -> None:
        """Begin and end these spans, in this order. Never raises."""
        if self._closed:
            return
        for one in spans:
            with self._tried():
                if isinstance(one, SpanBegin):
                    self._begin(one)
                else:
                    self._end(one)

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """Log the first error: tracing must not affect serving."""
        try:
            yield
        except Exception:
            if not self._failed:
                logger.exception(
                    "spans cannot be passed to OpenTelemetry", extra=about("spans.failed")
                )
            self._failed = True

    async def run(self) -> None:
        """Wait for `stop`, then end the open spans."""
        await self._stopped.wait()
        self._closed = True
        for span, _ in self._open.values():
            with self._tried():
                span.end()
        self._open.clear()

    def stop(self) -> None:
        """Let `run` end. Called on its loop."""
        self._stopped.set()

    def _begin(self, begin: SpanBegin) -> None:
        self._end_left((begin.kind, begin.id))
        context, ahead = self._context_of(begin)
        attributes: dict[str, str | int] = {"kvstore.chunks": begin.chunks}
        if begin.request is not None and not begin.request.startswith("\0"):
            attributes["kvstore.request"] = begin.request
        if begin.tier >= 0:
            attributes["kvstore.tier"] = self._tiers[begin.tier]
        span = self._tracer.start_span(
            f"kvstore.{begin.kind.value}",
            context,
            attributes=attributes,
            start_time=int(begin.at * 1e9) + ahead,
        )
        self._open[begin.kind, begin.id] = span, ahead
        if len(self._open) > MOST_PARENTS:
            self._end_left(next(iter(self._open)))

    def _end_left(self, which: tuple[SpanKind, int | str]) -> None:
        """End a span whose end the core has dropped, as its buffer was full; others are none."""
        if (left := self._open.pop(which, None)) is not None:
            left[0].end()

    def _context_of(self, begin: SpanBegin) -> tuple[Context, int]:
        """Return the parent context, and how far wall time is ahead of the core's clock, in ns."""
        context = self._nothing
        if begin.request is not None:
            waits = self._open.get((SpanKind.DEFERRAL, begin.request))
            if waits is not None:
                # Compare the clocks once for each trace, so that its times agree.
                span, ahead = waits
                return self._trace.set_span_in_context(span, context), ahead
            context = self._parents.get(begin.request, context)
        return context, time.time_ns() - time.monotonic_ns()

    def _end(self, end: SpanEnd) -> None:
        found = self._open.pop((end.kind, end.id), None)
        if found is None:
            # The core dropped its beginning because its buffer of spans was full.
            return
        span, ahead = found
        attributes: dict[str, str | int] = {"kvstore.chunks_done": end.chunks}
        if end.kind in (SpanKind.PROMOTION, SpanKind.CASCADE):
            attributes["kvstore.bytes"] = end.chunks * self._chunk_bytes
        if end.outcome is not None:
            attributes["kvstore.outcome"] = end.outcome.value
        span.set_attributes(attributes)
        if end.error is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, end.error))
        span.end(int(end.at * 1e9) + ahead)
