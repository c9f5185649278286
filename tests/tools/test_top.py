"""`kvstore top`: over a server's real metrics, and over a real cache on disk."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.errors import KVStoreError
from kvstore.observe.metrics import Collector
from kvstore.tools.cli import main
from kvstore.tools.top import Snapshot, _looks, scrape, tables
from tests.store.support import keys_of, payloads, small
from tests.tools.support import error_of, run

prometheus = pytest.importorskip("prometheus_client")
rich = pytest.importorskip("rich")

KEYS, OTHERS = keys_of("prompt", 6), keys_of("another", 4)


@contextlib.asynccontextmanager
async def served(store: Any) -> AsyncIterator[str]:
    """The URL of the store's metrics."""
    registry = prometheus.CollectorRegistry()
    registry.register(Collector(store))
    server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def shown(table: Any) -> str:
    console = rich.get_console().__class__(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return str(captured.get())


async def test_it_tells_what_has_happened_between_two_looks(tmp_path: Path) -> None:
    async with (
        kvstore.open(small(tmp_path, rows=4, disk=32)) as store,
        served(store) as url,
    ):
        before = await asyncio.to_thread(scrape, url)
        for keys in (KEYS[:4], OTHERS):
            # The second prompt takes all rows.
            await store.put(keys, payloads(keys))
            await store.flush()
        async with store.get(KEYS[:4]) as chunks:
            assert len(chunks) == 4
        now = await asyncio.to_thread(scrape, url)
        tier = store.stats().tiers[0]
    now.at = before.at + 2.0
    assert now.tiers == ["disk", "disk:others"]
    assert now.rate(before, "stored_chunks") == 4.0
    assert now.rate(before, "tier_written_bytes", "disk") == tier.written_bytes / 2
    assert 0 < now.quantile(before, "wait_seconds", 0.99) <= 50
    assert math.isnan(now.quantile(now, "wait_seconds", 0.99)), "nothing since"
    text = shown(tables(before, now))
    assert "hits 100%" in text
    assert "4 stored" in text
    assert "well" in text


async def test_the_command_shows_a_server_so_many_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with kvstore.open(small(tmp_path, disk=32)) as store, served(store) as url:
        arguments = ["top", url, "--interval", "0.1", "--times", "2"]
        assert await asyncio.to_thread(main, arguments) == 0
    assert "disk" in capsys.readouterr().out


async def test_the_command_shows_what_a_cache_on_disk_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path, disk=32)
    async with kvstore.open(config) as store:
        await store.put(KEYS, payloads(KEYS))
        await store.flush()
        arguments = ["top", str(config["tiers"][0]["path"]), "--interval", "0.1", "--times", "1"]
        assert await asyncio.to_thread(main, arguments) == 0
    told = capsys.readouterr().out
    assert "lane-0" in told
    assert " 6 " in told
    (namespace,) = Path(str(config["tiers"][0]["path"])).iterdir()
    (namespace / "namespace.json").write_text("{")
    assert await asyncio.to_thread(main, arguments) == 1
    assert "WRONG" in capsys.readouterr().out


def test_engines_are_summed_and_other_metrics_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics").write_text(
        "# TYPE vllm:kvstore_stored_chunks counter\n"
        'vllm:kvstore_stored_chunks_total{engine="0"} 3\n'
        'vllm:kvstore_stored_chunks_total{engine="1"} 4\n'
        'vllm:kvstore_tier_read_bytes_total{engine="0",tier="disk"} 5\n'
        "other_total 9\n"
    )
    snapshot = scrape((tmp_path / "metrics").as_uri())
    assert snapshot.values == {("stored_chunks", ""): 7, ("tier_read_bytes", "disk"): 5}


def test_a_server_that_starts_again_does_not_count_backwards() -> None:
    before = Snapshot(0.0, {("stored_chunks", ""): 100.0})
    assert Snapshot(1.0, {("stored_chunks", ""): 5.0}).rate(before, "stored_chunks") == 0.0


def test_quantiles_after_a_start_are_of_what_came_since() -> None:
    before = Snapshot(0.0, {}, {("wait_seconds", ""): {0.1: 50.0, math.inf: 100.0}})
    now = Snapshot(1.0, {}, {("wait_seconds", ""): {0.1: 4.0, math.inf: 4.0}})
    assert now.quantile(before, "wait_seconds", 0.99) == 0.1


async def test_it_goes_on_when_the_server_starts_again(tmp_path: Path) -> None:
    async with kvstore.open(small(tmp_path, disk=32)) as store:
        await store.put(KEYS, payloads(KEYS))
        registry = prometheus.CollectorRegistry()
        registry.register(Collector(store))

        def start(port: int) -> tuple[Any, Any]:
            server, thread = prometheus.start_http_server(port, addr="127.0.0.1", registry=registry)
            return server, thread

        def stop(server: Any, thread: Any) -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        first = start(0)
        port = first[0].server_port
        server, waited = [first], [0]

        def restart(_: float) -> None:
            # Between two looks: the second one finds nobody, the fourth somebody else.
            waited[0] += 1
            if waited[0] == 2:
                stop(*server.pop())
            if waited[0] == 4:
                server.append(start(port))

        url = f"http://127.0.0.1:{port}/metrics"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstore.tools.top.time.sleep", restart)
            looks = await asyncio.to_thread(
                lambda: list(_looks(lambda: scrape(url), 0.1, 5, tables))
            )
        await asyncio.to_thread(stop, *server.pop())
    lines = [shown(look).strip() for look in looks]
    assert "stored" in lines[0]
    assert all(
        re.match(r"not reachable since \d\d:\d\d:\d\d, trying again: http", lines[n])
        for n in (1, 2)
    )
    assert lines[1][:29] == lines[2][:29], "since when"
    assert lines[3].startswith("reachable again")
    assert "stored" in lines[4]


def test_a_server_that_is_gone_in_the_end_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Snapshot(at=1.0, values={("stored_chunks", ""): 1.0})])

    def scrapes(url: str) -> Snapshot:
        for one in looks:
            return one
        raise KVStoreError(f"{url}: gone")

    monkeypatch.setattr("kvstore.tools.top.scrape", scrapes)
    assert "not reachable" in run(
        "top", "http://127.0.0.1:1", "--times", "1", "--interval", "0.1", status=2
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("other_total 9\n", "no metrics of kvstore"),
        ("kvstore_stored_chunks_total NaN\n", "no metrics of kvstore"),
        ("{{{\n", "not in Prometheus"),
        ('kvstore_wait_seconds_bucket{le="abc"} 1\n', "not in Prometheus"),
        ('others_bucket{le="abc"} 1\n', "no metrics of kvstore"),
    ],
)
def test_what_is_no_server_of_ours_is_told_by_its_address(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "metrics").write_text(text)
    with pytest.raises(kvstore.KVStoreError, match=said):
        scrape((tmp_path / "metrics").as_uri())
    error_of("top", "http://[x/metrics")
    assert "http://127.0.0.1:9/metrics: " in error_of("top", "http://127.0.0.1:9/metrics")
    error_of("top", tmp_path / "nowhere")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client.parser", None)
    assert "pip install 'kvstore-offload[top]'" in error_of("top", "http://127.0.0.1:1/metrics")
