"""Faults of the disk under our tier in vLLM's own tiering: misses, and never a call that waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvstore.errors import KVStoreError
from tests.faults.conftest import EIO, FaultyDisk
from tests.vllm.tiering import SLOTS, Server, key_of, keys_of, options, segment_bytes

STILL_SECONDS = 0.5
"""A call that waits for a disk which hangs takes longer."""


@pytest.fixture(autouse=True)
def own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines stay where the test can see them."""
    monkeypatch.setattr("kvstore.vllm.secondary_tier.join_server_log", lambda: None)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each call of the tier took."""
    from kvstore.vllm.secondary_tier import KVStoreTier

    took: list[float] = []

    def timing(call: Any) -> Any:
        def timed_call(*arguments: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*arguments)
            finally:
                took.append(time.monotonic() - began)

        return timed_call

    for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "on_schedule_end"):
        monkeypatch.setattr(KVStoreTier, name, timing(getattr(KVStoreTier, name)))
    return took


def test_a_disk_that_cannot_be_read_is_a_miss_with_a_line_and_a_counter(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(options(faulty.path, io="buffered")) as server:
        server.put(keys_of(range(8)))
        server.forget_host()
        faulty.obey({"op": "read", "path": "segment", **EIO})
        assert server.get(keys_of(range(8))) == 0
        assert server.counters["tier_failed_reads"] >= 8
        faulty.obey()
        # It is asked a few times before a chunk is given up.
        server.put(keys_of(range(20, 24)))
        server.forget_host()
        assert server.get(keys_of(range(20, 24))) == 4
    assert "promote" in caplog.text


def test_a_disk_that_cannot_be_written_stores_nothing_and_says_so_once(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(options(faulty.path, io="buffered")) as server:
        server.put(keys_of(range(4)))
        faulty.obey({"op": "write", "path": "segment", **EIO})
        for first in range(100, 140, 4):
            # vLLM's host memory takes them all the same.
            assert len(server.put(keys_of(range(first, first + 4)))) == 4
        assert server.counters["tier_failed_writes"] >= 1
        assert server.counters["tier_refused_chunks"] >= 1
        faulty.obey()
        time.sleep(0.5)
        server.put(keys_of(range(200, 204)))
        server.forget_host()
        assert server.get(keys_of(range(200, 204))) >= 1
    assert caplog.text.count("cannot store now:") == 1


def test_a_disk_that_hangs_holds_up_no_call_and_what_has_begun_is_waited_for(
    faulty: FaultyDisk, timed: list[float]
) -> None:
    tier = options(faulty.path, io="buffered", deadline_s=0.4, max_wait_s=2)
    with Server(tier, rows=24) as server:
        server.put(keys_of(range(8)))
        server.forget_host()
        with faulty.hanging("read", path="segment"):
            context = server.request()
            assert server._ask(keys_of(range(4)), context) is None
            end = time.monotonic() + 3
            while time.monotonic() < end:
                server.step()
                time.sleep(0.01)
            # Its rows are in use: the request waits. All others miss.
            assert server._ask(keys_of(range(4)), context) is None
            assert server._ask(keys_of(range(4, 8)), server.request()) == 0
            assert server.counters["tier_stalled"] == 1
        server.settle()
        assert server.counters["tier_stalled"] == 0
        assert server.get(keys_of(range(8))) == 8
    assert max(timed) < STILL_SECONDS


def test_a_shutdown_over_a_disk_that_hangs_ends_in_time_and_keeps_the_memory(
    faulty: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    tier = options(faulty.path, io="buffered", shutdown_timeout_s=1)
    server = Server(tier, rows=24)
    server.put(keys_of(range(4)))
    with faulty.hanging("write", path="segment"):
        server.put(keys_of(range(10, 14)), settle=False)
        server.step()
        began = time.monotonic()
        with pytest.raises(KVStoreError, match="still in use"):
            server.close()
        assert time.monotonic() - began < 10
    # vLLM tells it as an error, and keeps its memory.
    assert "Failed to shut down secondary tier" in caplog.text
    region = Path(server.spec._scheduler_mmap.mmap_path)
    assert region.exists()
    region.unlink()
    caplog.clear()


def test_a_full_disk_displaces_and_never_fails(tmp_path: Path, mount: Any) -> None:
    place = mount("-t", "tmpfs", "-o", f"size={2 * segment_bytes() + 2**19}", "none")
    with Server(options(place, capacity_bytes=8 * segment_bytes())) as server:
        for first in range(0, 96, 8):
            server.put(keys_of(range(first, first + 8)))
        assert server.counters["tier_evicted_chunks"] >= 96 - 2 * SLOTS
        assert 95 in server.each([94, 95])
        assert not server.each([0])
        assert server.get([key_of(0)]) == 0
