"""Prometheus hears of a store, whatever thread asks, with vLLM's metrics under names of its own."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

import kvstore
from kvstore.config import Config, DiskConfig
from kvstore.observe.metrics import METRICS, Collector
from kvstore.observe.metrics.collector import PREFIX
from tests.store.support import keys_of, payloads, small

prometheus = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families as parsed  # noqa: E402

KEYS, OTHERS = keys_of("prompt", 6), keys_of("another", 4)


def scraped(registry: Any) -> dict[str, float]:
    """Every sample of a scrape, as Prometheus reads it: name and labels, value."""
    text = prometheus.generate_latest(registry).decode()
    return {
        sample.name.removeprefix(PREFIX) + "".join(f",{each}" for each in sample.labels.values()): (
            sample.value
        )
        for family in parsed(text)
        for sample in family.samples
    }


def registered(store: Any) -> Any:
    registry = prometheus.CollectorRegistry()
    registry.register(Collector(store))
    return registry


async def test_a_scrape_tells_what_has_happened(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path, rows=4, disk=32)) as store:
        registry = registered(store)
        for keys in (KEYS[:4], OTHERS):
            # The second prompt takes all rows.
            await store.put(keys, payloads(keys))
            await store.flush()
        async with store.get(KEYS[:2]) as chunks:
            assert len(chunks) == 2
        told, stats = scraped(registry), store.stats()
        assert told["stored_chunks_total"] == stats.stored == 8
        assert told["tier_written_chunks_total,disk"] == stats.tiers[0].written == 8
        assert told["wait_seconds_count"] == stats.waits.count == 1
        assert told["wait_seconds_bucket,+Inf"] == 1
        assert told["wait_seconds_sum"] == pytest.approx(stats.waits.seconds)
        assert told["host_used_ratio"] == 1.0


def test_a_path_that_is_no_text_costs_no_metrics(tmp_path: Path) -> None:
    class Odd:
        chunk_bytes = 1
        description = "disk /kv\udcff"

    collector = Collector(Odd())  # type: ignore[arg-type]
    registry = prometheus.CollectorRegistry()
    collector.collect = lambda: iter([collector._info()])  # type: ignore[method-assign]
    registry.register(collector)
    assert b"disk /kv\\\\udcff" in prometheus.generate_latest(registry)


async def test_every_metric_is_named_and_explained(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path, disk=32)) as store:
        text = prometheus.generate_latest(registered(store)).decode()
    for metric in METRICS:
        suffix = "_total" * (metric.kind == "counter")
        assert f"# TYPE {PREFIX}{metric.name}{suffix} {metric.kind}" in text
        assert f"# HELP {PREFIX}{metric.name}{suffix} {metric.text}" in text


async def test_buckets_count_all_that_took_no_longer(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path, disk=32)) as store:
        registry = registered(store)
        for seconds in (0.0004, 0.0015, 0.0015, 100.0):
            store._core._queue.waits.add(seconds)
        told = scraped(registry)
    counts = [told[f"wait_seconds_bucket,{bound}"] for bound in ("0.0005", "0.001", "0.002")]
    assert counts == [1, 1, 3]
    assert told["wait_seconds_bucket,50.0"] == 3
    assert told["wait_seconds_bucket,+Inf"] == told["wait_seconds_count"] == 4


def test_where_a_collector_is_made_does_not_matter(tmp_path: Path) -> None:
    """A server may do it in a hook at its start, on a loop that ends."""

    async def hook(store: Any) -> Any:
        return registered(store)

    with kvstore.open_sync(small(tmp_path / "a", disk=32)) as store:
        assert scraped(asyncio.run(hook(store)))["host_used_ratio"] == 0.0

    async def serve() -> None:
        async with kvstore.open(small(tmp_path / "b", disk=32)) as store:
            registry = await asyncio.to_thread(registered, store)
            assert (await asyncio.to_thread(scraped, registry))["host_used_ratio"] == 0.0

    asyncio.run(serve())


async def test_an_asyncio_store_is_scraped_from_a_thread_over_http(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path, disk=32)) as store:
        await store.put(KEYS, payloads(KEYS))
        server, thread = prometheus.start_http_server(
            0, addr="127.0.0.1", registry=registered(store)
        )
        try:
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=30)
            assert "kvstore_stored_chunks_total 6.0" in answer.read().decode()
        finally:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()


def test_a_store_without_asyncio_is_scraped_from_any_thread(tmp_path: Path) -> None:
    found: list[dict[str, float]] = []
    with kvstore.open_sync(small(tmp_path, disk=32)) as store:
        registry = registered(store)
        store.put(KEYS, payloads(KEYS))
        thread = threading.Thread(target=lambda: found.append(scraped(registry)))
        thread.start()
        thread.join()
    assert found[0]["stored_chunks_total"] == 6


def test_a_store_that_is_gone_is_left_out_of_a_scrape_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvstore.open_sync(small(tmp_path, disk=32)) as store:
        registry = registered(store)
    assert scraped(registry) == {}
    assert "metrics are not available" in caplog.text

    async def opened() -> Any:
        async with kvstore.open(small(tmp_path, disk=32)) as other:
            return registered(other)

    caplog.clear()
    registry = asyncio.run(opened())
    for _ in range(3):
        assert scraped(registry) == {}
    assert caplog.text.count("metrics are not available") == 1


def test_a_loop_that_ends_amid_a_scrape_leaves_the_store_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = threading.Event()

    async def never(self: Collector) -> Any:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Collector, "_asked", never)
    found: list[dict[str, float]] = []

    async def scrape() -> threading.Thread:
        async with kvstore.open(small(tmp_path, disk=32)) as store:
            registry = registered(store)
            thread = threading.Thread(target=lambda: found.append(scraped(registry)))
            thread.start()
            await asyncio.to_thread(asked.wait)
        return thread

    asyncio.run(scrape()).join()
    assert found == [{}]
    assert "metrics are not available" in caplog.text


def test_scrapes_that_come_first_at_the_same_time_find_each_series_once(tmp_path: Path) -> None:
    def lines(registry: Any) -> int:
        return int(prometheus.generate_latest(registry).count(b"\n"))

    interval = sys.getswitchinterval()
    with kvstore.open_sync(small(tmp_path, disk=32)) as store, ThreadPoolExecutor(4) as threads:
        right = lines(registered(store))
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(50):
                registry = registered(store)
                each = list(threads.map(lines, [registry] * 4))
                assert [*each, lines(registry)] == [right] * 5
        finally:
            sys.setswitchinterval(interval)


def test_stores_of_one_registry_have_prefixes_of_their_own(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    with (
        kvstore.open_sync(small(tmp_path / "a", disk=32)) as one,
        kvstore.open_sync(small(tmp_path / "b", disk=32)) as other,
    ):
        registry.register(Collector(one))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(Collector(other))
        registry.register(Collector(other, prefix="second_"))
        text = prometheus.generate_latest(registry).decode()
    assert "kvstore_host_used_ratio " in text
    assert "second_host_used_ratio " in text
    (told,) = re.findall(r"^kvstore_info\{(.*)\} 1\.0$", text, re.MULTILINE)
    for label in (f'version="{kvstore.__version__}"', f'chunk_bytes="{one.chunk_bytes}"'):
        assert label in told
    assert f'description="{one.description}"' in told
    assert "second_info{" in text


def test_the_store_says_which_folder_has_which_name_in_metrics(tmp_path: Path) -> None:
    config = small(tmp_path / "a", disk=32)
    second = {**config["tiers"][0], "path": str(tmp_path / "b")}
    with kvstore.open_sync({**config, "tiers": [*config["tiers"], second]}) as store:
        registry = prometheus.CollectorRegistry()
        registry.register(Collector(store))
        labels = re.findall(
            r'^kvstore_tier_free_bytes{tier="(.*)"}',
            prometheus.generate_latest(registry).decode(),
            re.MULTILINE,
        )
        assert labels == ["disk", "disk-2"]
        for label, folder in zip(labels, ("a", "b"), strict=True):
            assert re.search(rf"; {label}: [^;]*{tmp_path}/{folder}", store.description)


def test_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with (
        kvstore.open_sync(small(tmp_path, disk=32)) as store,
        pytest.raises(ImportError, match=r"pip install 'kvstore-offload\[metrics\]'"),
    ):
        Collector(store)


def test_the_docs_name_no_metric_that_there_is_not() -> None:
    known = {metric.name for metric in METRICS}
    told = {
        name
        for page in (Path(__file__).parents[1] / "docs").rglob("*.md")
        for name in re.findall(
            r"`((?:tier|disk|host|loaded|saved|queued)_[a-z_]+)`", page.read_text()
        )
    }
    options = {field.name for cls in (Config, DiskConfig) for field in attrs.fields(cls)}
    assert len(told & known) > 20
    others = {"disk_bytes", "tier_only", "loaded_bytes"}
    assert told - known - {f"{name}_total" for name in known} - options == others
