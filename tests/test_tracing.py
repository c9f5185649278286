"""Waits and moves as OpenTelemetry's spans, in the traces of the server that caused them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.connector.contract import ReqContext as Request
from kvstore.connector.manager import KVStoreManager
from kvstore.core.reports import Outcome, SpanBegin, SpanEnd, SpanKind
from kvstore.errors import ConfigError
from kvstore.observe.tracing import MOST_PARENTS, SpanWriter
from tests.patience import PATIENCE
from tests.store.support import CHUNK, keys_of, payloads, small

trace = pytest.importorskip("opentelemetry.trace")
pytest.importorskip("opentelemetry.sdk")
from tests.exported import Exported  # noqa: E402

KEYS, OTHERS = keys_of("prompt", 4), keys_of("another", 4)


def traced(folder: Path, **more: Any) -> dict[str, Any]:
    """Four rows over a disk."""
    return small(folder, rows=4, disk=32, spans=True, **more)


def about(span: Any) -> dict[str, Any]:
    return dict(span.attributes)


async def fill(store: Any) -> None:
    """What is asked for first has left host memory again."""
    for keys in (KEYS, OTHERS):
        await store.put(keys, payloads(keys))
        await store.flush()


async def test_a_lookup_that_waits_is_a_span_of_who_asked(
    tmp_path: Path, exported: Exported
) -> None:
    before = time.time_ns()
    async with kvstore.open(traced(tmp_path)) as store:
        await fill(store)
        with exported.tracer.start_as_current_span("request") as request:
            assert await store.resolve(KEYS, "r1") == 4
    after = time.time_ns()
    wait, promotion = exported.only("deferral"), exported.only("promotion")
    assert wait.parent.span_id == request.get_span_context().span_id
    assert promotion.parent.span_id == wait.context.span_id
    assert promotion.context.trace_id == request.get_span_context().trace_id
    assert before <= wait.start_time <= promotion.start_time < promotion.end_time
    assert promotion.end_time <= wait.end_time <= after
    assert about(wait) == {
        "kvstore.request": "r1",
        "kvstore.chunks": 4,
        "kvstore.chunks_done": 4,
        "kvstore.outcome": "complete",
    }
    assert about(promotion) == {
        "kvstore.request": "r1",
        "kvstore.tier": "disk",
        "kvstore.chunks": 4,
        "kvstore.chunks_done": 4,
        "kvstore.bytes": 4 * CHUNK,
    }


async def test_copies_to_a_slower_tier_are_traces_of_their_own(
    tmp_path: Path, exported: Exported
) -> None:
    async with kvstore.open(traced(tmp_path)) as store:
        with exported.tracer.start_as_current_span("request"):
            await fill(store)
    copies = exported.of("cascade")
    assert sum(about(each)["kvstore.chunks_done"] for each in copies) == 8
    assert all(each.parent is None for each in copies)
    assert all(about(each)["kvstore.tier"] == "disk" for each in copies)


async def test_a_request_without_a_name_has_none_in_its_spans(
    tmp_path: Path, exported: Exported
) -> None:
    async with kvstore.open(traced(tmp_path)) as store:
        await fill(store)
        assert await store.resolve(KEYS) == 4
    wait = exported.only("deferral")
    assert "kvstore.request" not in about(wait)
    assert wait.parent is None
    assert exported.only("promotion").parent.span_id == wait.context.span_id


def test_the_caller_of_the_synchronous_face_is_the_parent_too(
    tmp_path: Path, exported: Exported
) -> None:
    with kvstore.open_sync(traced(tmp_path)) as store:
        for keys in (KEYS, OTHERS):
            store.put(keys, payloads(keys))
            store.flush()
        with exported.tracer.start_as_current_span("request") as request:
            assert store.resolve(KEYS) == 4
    assert exported.only("deferral").parent.span_id == request.get_span_context().span_id


async def test_a_chunk_that_is_damaged_makes_its_promotion_an_error(
    tmp_path: Path, exported: Exported
) -> None:
    async with kvstore.open(traced(tmp_path)) as store:
        await fill(store)
        (segment,) = tmp_path.rglob("segment-*.safetensors")
        data = segment.read_bytes()
        place = data.index(payloads(KEYS)[1])
        with segment.open("r+b") as file:
            file.seek(place)
            file.write(b"damage")
        assert await store.resolve(KEYS) == 1
    promotion = exported.only("promotion")
    assert promotion.status.status_code is trace.StatusCode.ERROR
    assert promotion.status.description
    assert about(promotion)["kvstore.chunks_done"] == 3
    assert about(exported.only("deferral"))["kvstore.chunks_done"] == 3


def resolved(manager: KVStoreManager, request: Request) -> int:
    """How many keys a server finds that asks again until it is told."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        answers = [manager.lookup(key, request) for key in KEYS]
        if None not in answers:
            return answers.count(True)
        manager.on_schedule_end()
    raise AssertionError("deferred for ever")


@pytest.fixture
def manager(tmp_path: Path, exported: Exported) -> Iterator[KVStoreManager]:
    """One whose disk has `KEYS`."""
    with kvstore.open_sync(small(tmp_path, rows=4, disk=32)) as store:
        store.put(KEYS, payloads(KEYS))
        store.flush()
    manager = KVStoreManager(traced(tmp_path), steady=True)
    yield manager
    manager.shutdown()


def test_a_server_names_the_parent_by_a_header(manager: KVStoreManager, exported: Exported) -> None:
    trace_id, parent = "0123456789abcdef0123456789abcdef", "fedcba9876543210"
    headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
    request = Request("r", trace_headers=headers)
    manager.on_new_request(request)
    assert resolved(manager, request) == 4
    manager.shutdown()
    wait = exported.only("deferral")
    assert f"{wait.context.trace_id:032x}" == trace_id
    assert f"{wait.parent.span_id:016x}" == parent


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": 7}])
def test_without_a_header_that_is_one_a_wait_is_a_trace_of_its_own(
    manager: KVStoreManager, exported: Exported, headers: dict[str, Any] | None
) -> None:
    request = Request("r", trace_headers=headers)
    manager.on_new_request(request)
    assert resolved(manager, request) == 4
    manager.shutdown()
    assert exported.only("deferral").parent is None


# -- the writer alone ------------------------------------------------------------------------------


WAIT = SpanBegin(SpanKind.DEFERRAL, "r", 1.0, 4, "r")


async def test_what_is_open_at_the_end_is_ended(exported: Exported) -> None:
    writer = SpanWriter(["disk"], CHUNK)
    running = asyncio.ensure_future(writer.run())
    writer.write([WAIT])
    await asyncio.sleep(0)
    writer.stop()
    await running
    assert exported.only("deferral").end_time
    writer.write([WAIT])
    assert len(exported.of("deferral")) == 1


def test_an_end_without_a_beginning_is_passed_over(exported: Exported) -> None:
    writer = SpanWriter(["disk"], CHUNK)
    writer.write([SpanEnd(SpanKind.DEFERRAL, "r", 1.0, 4, Outcome.COMPLETE)])
    assert exported.of("deferral") == []


def test_a_span_that_begins_anew_is_ended_first(exported: Exported) -> None:
    """Its end was dropped: the core's buffer was full."""
    writer = SpanWriter(["disk"], CHUNK)
    for at in (1.0, 2.0):
        writer.write([SpanBegin(SpanKind.DEFERRAL, "r", at, 4, request="r")])
    writer.write([SpanEnd(SpanKind.DEFERRAL, "r", 3.0, 4, Outcome.COMPLETE)])
    assert [span.parent for span in exported.of("deferral")] == [None, None]


def test_parents_are_forgotten_when_there_are_many(exported: Exported) -> None:
    writer = SpanWriter(["disk"], CHUNK)
    with exported.tracer.start_as_current_span("request"):
        for number in range(MOST_PARENTS + 10):
            writer.belongs(f"r{number}")
    assert len(writer._parents) == MOST_PARENTS
    # Without a span a later request of that name is not taken for the earlier one's.
    writer.belongs(f"r{MOST_PARENTS}")
    assert len(writer._parents) == MOST_PARENTS - 1


def test_a_tracer_that_raises_costs_nobody_anything(
    exported: Exported, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpanWriter(["disk"], CHUNK)

    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("no exporter")

    monkeypatch.setattr(writer._tracer, "start_span", broken)
    for _ in range(3):
        writer.write([WAIT])
    assert [record.getMessage() for record in caplog.records] == [
        "spans cannot be passed to OpenTelemetry"
    ]


@pytest.mark.parametrize("how", ["as they end", "as the store is closed"])
async def test_a_span_that_cannot_be_ended_leaves_no_other_open(
    exported: Exported, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpanWriter(["disk"], CHUNK)
    waits = [replace(WAIT, id=f"r{number}", request=f"r{number}") for number in range(4)]
    writer.write(waits)
    (broken, _) = writer._open[SpanKind.DEFERRAL, "r1"]
    monkeypatch.setattr(broken, "end", lambda *_: 1 / 0)
    if how == "as they end":
        writer.write([SpanEnd(wait.kind, wait.id, 2.0, 4, Outcome.COMPLETE) for wait in waits])
    else:
        running = asyncio.ensure_future(writer.run())
        await asyncio.sleep(0)
        writer.stop()
        await running
    assert not writer._open
    assert len(exported.of("deferral")) == 3


def test_without_an_sdk_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    SpanWriter(["disk"], CHUNK)
    assert "OpenTelemetry's SDK is not set up" in caplog.text


def test_without_opentelemetry_the_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"spans = true.*'kvstore-offload\[tracing\]'"):
        kvstore.open_sync(traced(tmp_path))


def test_opentelemetry_is_imported_only_where_it_is_wanted(tmp_path: Path) -> None:
    code = """
        import sys, kvstore
        with kvstore.open_sync({"cpu_bytes_to_use": "1MiB", "chunk_bytes": "4KiB"}) as store:
            store.put([b"key"], [bytes(4096)])
        assert not any(name.startswith("opentelemetry") for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)
