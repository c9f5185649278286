"""A real vLLM server, and what its operator sees: `/metrics`, KV events of both media, spans."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import json

import aiohttp
import zmq
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from benchmarks.serving.clients import Talk, ask, hold, said
from benchmarks.serving.servers import BLOCK, Server, offload
from examples.tiny_model import kv_bytes_per_token, write_model
from kvstore.observe.metrics.table import METRICS
from kvstore.tools.top import Snapshot, scrape, tables
from kvstore.vllm.metrics_report import full_name
from tests.vllm.engines import ForkedServer
from tests.vllm.spans import SpanSink

CHUNK = BLOCK * kv_bytes_per_token()
HOST_CHUNKS, DISK_CHUNKS = 24, 96
NAME = "vllm:kvstore_"
LOADED = (f"{NAME}loaded_host_chunks_total", "")
TALK = Talk(2, conversations=8, turns=2, first=256, grows=128)
"""As much as the disk holds: conversations of 12 chunks."""

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}
"""Of OpenTelemetry's SDK: how spans are sent, and after how many milliseconds."""

TRACE, PARENT = "0123456789abcdef0123456789abcdef", "fedcba9876543210"
"""The trace and the span of a client that traces one of its requests."""


@dataclass
class Seen:
    """What a client, a scraper and a subscriber have seen of one server.

    Attributes:
        first, last: samples of `/metrics` before the first request and at the end: by name, and
            labels without those of vLLM.
        stored, removed: keys by medium, in the order of their events.
        payloads: the messages with these events, as they came.
        hinted: samples after each request with hints, by what it asked for.
        returned: tokens of the retained conversation that were found when it went on.
        looks: those of `kvstore top`, before the first request and at the end.
        spans: those that an OpenTelemetry collector has got.
        log: of the server.
    """

    log: Path
    first: dict[tuple[str, str], float] = field(default_factory=dict)
    last: dict[tuple[str, str], float] = field(default_factory=dict)
    stored: dict[str | None, list[Any]] = field(default_factory=lambda: defaultdict(list))
    removed: dict[str | None, list[Any]] = field(default_factory=lambda: defaultdict(list))
    payloads: list[bytes] = field(default_factory=list)
    hinted: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)
    returned: int = 0
    looks: list[Snapshot] = field(default_factory=list)
    spans: SpanSink = field(default_factory=SpanSink)

    def total(self, name: str, label: str = "") -> float:
        return self.last[f"vllm:kvstore_{name}", label]


def samples(text: str) -> dict[tuple[str, str], float]:
    """By name and the tier or the bound; without the engine and the model."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels.get("tier"), sample.labels.get("le")]
            found[sample.name, " ".join(filter(None, labels))] = sample.value
    return found


def take(subscriber: zmq.Socket[bytes], seen: Seen, seconds: float) -> None:
    """Take in events until none has come for so long."""
    import msgspec

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    while subscriber.poll(int(seconds * 1000)):
        _, _, payload = subscriber.recv_multipart()
        seen.payloads.append(payload)
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                seen.stored[event.medium] += event.block_hashes
            elif isinstance(event, BlockRemoved):
                seen.removed[event.medium] += event.block_hashes


async def again(
    url: str, ids: list[int], *, headers: dict[str, str] | None = None, **hints: Any
) -> int:
    async with aiohttp.ClientSession(url, headers=headers) as session:
        return (await ask(session, ids, 4, hints or None)).cached


def told(server: Server, name: str, least: float) -> dict[tuple[str, str], float]:
    """Samples once a counter has come so far; what a step has brought is told in the next."""
    end = time.monotonic() + 60
    while True:
        asyncio.run(again(server.url, said(91, 0, 0, 64)))
        found = samples(server.metrics())
        if sum(value for (each, _), value in found.items() if each == NAME + name) >= least:
            return found
        assert time.monotonic() < end, f"{name} does not come to {least}"
        time.sleep(0.2)


def hint(server: Server, seen: Seen) -> None:
    """Conversations whose clients tell what becomes of them."""
    kept, paused = said(93, 0, 0, 256), said(94, 0, 0, 256)
    asyncio.run(
        again(server.url, kept, retain_s=600, retain_host=True, release="perhaps", levitate=1)
    )
    told(server, "host_pinned_ratio", 8 / HOST_CHUNKS)
    # A disk has them once they are copied.
    seen.hinted["retain"] = told(server, "tier_pinned_chunks", 8)
    asyncio.run(hold(server.url, replace(TALK, conversations=4), 3))
    before = told(server, "hints_total", 2)
    seen.returned = asyncio.run(again(server.url, kept))
    seen.hinted["return"] = told(server, "loaded_host_chunks_total", before[LOADED] + 7)
    asyncio.run(again(server.url, kept, release=True))
    seen.hinted["release"] = told(server, "hints_total", 3)
    asyncio.run(again(server.url, paused, demote=True, prefetch_after_s=3.0))
    seen.hinted["prefetch"] = told(server, "prefetched_chunks_total", 8)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A server with room for two conversations in host memory and for eight on disk."""
    folder = tmp_path_factory.mktemp("observed")
    model = folder / "model"
    model.mkdir()
    write_model(model)
    extra = offload("kvstore", HOST_CHUNKS * CHUNK, DISK_CHUNKS * CHUNK, folder / "cache")
    assert extra is not None
    extra["deadline_s"] = 30
    # On a busy machine the disk may be slower than computing with this tiny model.
    extra["recompute_s"] = 10
    extra["spans"] = True
    extra["tiers"][0]["segment_bytes"] = DISK_CHUNKS // 4 * CHUNK
    endpoint = f"ipc://{folder}/events"
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "topic": "kv",
    }
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe("kv")
    subscriber.connect(endpoint)
    seen = Seen(folder / "server.log")
    server = ForkedServer(
        "kvstore",
        model,
        seen.log,
        extra,
        device_blocks=40,
        max_tokens=640,
        environment=ENVIRONMENT,
        more=["--kv-events-config", json.dumps(events), "--otlp-traces-endpoint", seen.spans.url],
    )
    try:
        server.wait_until_up()
        asyncio.run(again(server.url, said(91, 0, 0, 64)))
        seen.first = samples(server.metrics())
        seen.looks.append(scrape(f"{server.url}/metrics"))
        early = said(92, 0, 0, 384)
        asyncio.run(again(server.url, early))
        # On a busy machine the disk may be so late that others take its place in host memory.
        told(server, "tier_written_chunks_total", 12)
        asyncio.run(hold(server.url, replace(TALK, conversations=4), 1))
        # Host memory has given it up: it comes from disk.
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert asyncio.run(again(server.url, early, headers=traced)) >= 352
        asyncio.run(hold(server.url, TALK, 2))
        server.wait_until_idle()
        # What the last step has brought is told in the next.
        for _ in range(3):
            asyncio.run(again(server.url, said(91, 0, 0, 64)))
            time.sleep(0.3)
        take(subscriber, seen, 1.0)
        seen.last = samples(server.metrics())
        seen.looks.append(scrape(f"{server.url}/metrics"))
        hint(server, seen)
        yield seen
    finally:
        server.stop()
        seen.spans.close()
        subscriber.close(linger=0)
        context.term()


def test_every_counter_and_gauge_is_there_from_the_first_request_on(seen: Seen) -> None:
    names = {name for name, _ in seen.first}
    for metric in METRICS:
        # A store that is not there has none, nor have tenants.
        if metric.kind != "histogram" and metric.of not in ("store", "tenant"):
            suffix = "_total" if metric.kind == "counter" else ""
            assert full_name(metric) + suffix in names, metric.name
    assert seen.first["vllm:kvstore_timeouts_total", ""] == 0


def test_kvstore_top_shows_the_same(seen: Seen) -> None:
    first, last = seen.looks
    assert last.get("tier_read_chunks", "disk") == seen.total("tier_read_chunks_total", "disk")
    assert last.rate(first, "tier_written_bytes", "disk") > 0
    assert 0 < last.quantile(first, "wait_seconds", 0.99) <= 50
    table = tables(first, last)
    assert table.row_count == 2, "the disk, and lanes of others"
    assert "stored" in str(table.title)


def test_a_request_that_waits_for_the_disk_is_a_span_in_its_clients_trace(seen: Seen) -> None:
    spans = seen.spans.until(lambda spans: any(s.name == "llm_request" for s in spans.of(TRACE)))
    its = spans.of(TRACE)
    (wait,) = [span for span in its if span.name == "kvstore.deferral"]
    reads = [span for span in its if span.name == "kvstore.promotion"]
    (whole,) = [span for span in its if span.name == "llm_request"]
    assert wait.parent == whole.parent == PARENT
    assert wait.about["kvstore.chunks_done"] == wait.about["kvstore.chunks"] >= 11
    assert wait.about["kvstore.outcome"] == "complete"
    assert wait.about["kvstore.request"].startswith(whole.about["gen_ai.request.id"])
    assert whole.start <= wait.start < wait.end <= whole.end
    # Some were begun when the request arrived, before it waited.
    assert {read.parent for read in reads} <= {wait.id, PARENT}
    assert {read.about["kvstore.tier"] for read in reads} == {"disk"}
    assert sum(read.about["kvstore.bytes"] for read in reads) >= 11 * CHUNK
    copies = [span for span in spans.all() if span.name == "kvstore.cascade"]
    assert sum(copy.about["kvstore.chunks_done"] for copy in copies) >= DISK_CHUNKS


def test_hits_waits_reads_and_writes_are_told_with_their_tier(seen: Seen) -> None:
    read = seen.total("tier_read_chunks_total", "disk")
    assert read >= 11
    assert seen.total("loaded_tier_chunks_total", "disk") == pytest.approx(read, abs=24)
    assert seen.total("tier_read_bytes_total", "disk") == read * CHUNK
    written = seen.total("tier_written_chunks_total", "disk")
    assert written >= DISK_CHUNKS
    assert seen.total("tier_written_bytes_total", "disk") == written * CHUNK
    assert seen.total("loaded_tier_chunks_total", "disk:others") == 0
    deferrals = seen.total("deferrals_total")
    assert deferrals >= 1
    assert seen.total("wait_seconds_count") >= 1
    assert seen.total("wait_seconds_bucket", "+Inf") == seen.total("wait_seconds_count")
    assert 0 < seen.total("wait_seconds_sum") < 30 * deferrals
    assert seen.total("saved_tier_seconds_total", "disk") > 0
    assert seen.total("tier_read_seconds_count", "disk") >= 1
    assert seen.total("tier_write_seconds_count", "disk") >= 1
    assert seen.total("tier_write_seconds_sum", "disk") > 0


def test_room_and_what_left_for_others_are_told(seen: Seen) -> None:
    host = seen.total("host_used_bytes") + seen.total("host_free_bytes")
    assert host == HOST_CHUNKS * CHUNK
    assert seen.total("host_used_ratio") == seen.total("host_used_bytes") / host
    used, free = (seen.total(f"tier_{what}_bytes", "disk") for what in ("used", "free"))
    assert used == seen.total("tier_chunks", "disk") * CHUNK
    said_of_disk = [line for line in seen.log.read_text().splitlines() if "tier disk" in line]
    assert 0.9 * DISK_CHUNKS * CHUNK <= used + free <= DISK_CHUNKS * CHUNK, said_of_disk
    assert seen.total("host_evicted_chunks_total") >= 64
    assert seen.total("tier_evicted_chunks_total", "disk") >= 32
    for name in ("host_eviction_age_seconds", "tier_eviction_age_seconds"):
        label = "disk" if name.startswith("tier") else ""
        assert seen.total(f"{name}_count", label) >= 1
        assert 0 < seen.total(f"{name}_sum", label) < 600 * seen.total(f"{name}_count", label)


def test_hints_that_clients_send_over_http_are_followed_and_counted(seen: Seen) -> None:
    def of(what: str, name: str, label: str = "") -> float:
        return seen.hinted[what][NAME + name, label]

    assert of("retain", "host_pinned_ratio") == pytest.approx(8 / HOST_CHUNKS)
    assert of("retain", "tier_pinned_chunks", "disk") == 8
    assert (of("retain", "hints_total"), of("retain", "hints_ignored_total")) == (2, 2)
    # Although others have asked for more than host memory has room for.
    assert seen.returned >= 224
    assert of("return", "host_pinned_ratio") == pytest.approx(8 / HOST_CHUNKS)
    assert of("release", "host_pinned_ratio") == 0
    assert of("release", "tier_pinned_chunks", "disk") == 0
    assert of("prefetch", "demoted_chunks_total") == 8
    assert of("prefetch", "prefetched_chunks_total") == 8
    assert of("prefetch", "hints_total") == 5
    for name in ("timeouts_total", "internal_errors_total", "hints_refused_chunks_total"):
        assert of("prefetch", name) == 0, name


def test_nothing_failed(seen: Seen) -> None:
    for name in ("timeouts", "events_lost", "internal_errors", "hints_ignored"):
        assert seen.total(f"{name}_total") == 0, name
    for name in ("failed_reads", "corrupt_chunks", "failed_writes", "errors"):
        assert seen.total(f"tier_{name}_total", "disk") == 0, name


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_kv_events_of_both_media_reach_a_subscriber(seen: Seen, medium: str) -> None:
    stored, removed = seen.stored[medium], seen.removed[medium]
    assert stored
    assert removed
    assert set(removed) <= set(stored), "nothing leaves that never came"
    # What the events leave over is what the metrics say is there.
    left = len(stored) - len(removed)
    if medium == "CPU":
        told = seen.total("host_used_bytes") / CHUNK
    else:
        told = seen.total("tier_chunks", "disk")
    assert left == pytest.approx(told, abs=2)


def test_indexers_of_other_projects_join_the_events_of_all_media(seen: Seen) -> None:
    """Those of llm-d and Dynamo read arrays or maps without vLLM, and know a block by 64 bits."""
    import msgspec

    hashes: dict[str, set[int]] = defaultdict(set)
    for payload in seen.payloads:
        at, events, *_ = msgspec.msgpack.decode(payload)
        assert isinstance(at, float)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                continue
            for each in event["block_hashes"]:
                # A hash in bytes is known by its last eight.
                number = int.from_bytes(each[-8:], "big") if isinstance(each, bytes) else each
                hashes[event["medium"]].add(number % 2**64)
    assert hashes.keys() == {"GPU", "CPU", "STORAGE"}
    assert hashes["CPU"] <= hashes["GPU"]
    assert hashes["STORAGE"] <= hashes["GPU"]
