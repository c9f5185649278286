"""Hints through the manager and the scheduler's half: done when a request ends, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from tests.patience import until
from tests.store.support import CHUNK, keys_of, small

A, B, C = keys_of("a", 4), keys_of("b", 8), keys_of("c", 8)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[KVStoreManager]:
    config = small(tmp_path / "cache", rows=8, disk=64, eviction_policy="lru")
    manager = KVStoreManager(config, steady=True)
    yield manager
    manager.shutdown()


def request(name: str, **hints: Any) -> ReqContext:
    return ReqContext(name, kv_transfer_params={"kvstore": hints} if hints else None)


def store(manager: KVStoreManager, keys: list[bytes], context: ReqContext) -> None:
    """A whole request that computes `keys`; the steps after it are taken."""
    manager.on_new_request(context)
    out = manager.prepare_store(keys, context)
    assert out is not None
    manager.on_request_finished(context)
    manager.complete_store(out.keys_to_store, context)
    steps(manager)


def steps(manager: KVStoreManager) -> None:
    def ended() -> bool:
        manager.on_schedule_end()
        # Pending work is that of the first quarter of a second only.
        return not manager.stepper.core.unsaved

    until(ended)


def host_of(manager: KVStoreManager, keys: list[bytes]) -> int:
    return sum(key in manager.stepper.core._pool.chunks for key in keys)


def test_what_is_retained_in_host_memory_stays_there(manager: KVStoreManager) -> None:
    store(manager, A, request("r", retain_s=60.0, retain_host=True))
    for name in ("s", "t"):
        store(manager, keys_of(name, 8), request(name))
    assert host_of(manager, A) == 4
    stats = manager.stats()
    assert (stats.hints, stats.hints_ignored, stats.pinned_rows) == (2, 0, 4)
    store(manager, A, request("last", release=True))
    store(manager, B, request("u"))
    assert host_of(manager, A) == 0


def test_what_is_released_leaves_before_what_was_used_longer_ago(manager: KVStoreManager) -> None:
    store(manager, B[:4], request("before"))
    store(manager, A, request("over", release=True))
    store(manager, keys_of("other", 3), request("after"))
    assert (host_of(manager, A), host_of(manager, B)) == (1, 4)


def test_what_is_retained_below_leaves_host_memory_and_not_the_disk(
    manager: KVStoreManager,
) -> None:
    store(manager, A, request("r", retain_s=60.0, demote=True))
    steps(manager)
    assert host_of(manager, A) == 0
    tier = manager.stats().tiers[0]
    assert (tier.pinned, tier.chunks) == (4, 4)
    assert manager.stats().pinned_rows == 0


def test_what_is_loaded_counts_as_a_part_of_the_prompt(manager: KVStoreManager) -> None:
    store(manager, A, request("first"))
    context = request("second", retain_s=60.0)
    manager.on_new_request(context)
    for key in A:
        assert manager.lookup(key, context)
    manager.prepare_load(A, context)
    out = manager.prepare_store(B[:2], context)
    assert out is not None
    manager.on_request_finished(context)
    manager.complete_load(A, context)
    manager.complete_store(out.keys_to_store, context)
    steps(manager)
    assert manager.stats().pins == 6


def test_more_than_may_be_retained_is_refused_and_counted(manager: KVStoreManager) -> None:
    capacity = manager.stepper.core.tiers[0].index.policy.capacity
    keys = keys_of("many", capacity)
    context = request("r", retain_s=60.0)
    manager.on_new_request(context)
    # What finds no room is a part of the prompt, too.
    manager.prepare_store(keys, context)
    manager.on_request_finished(context)
    assert manager.stats().pins == capacity // 2
    assert manager.stats().hints_refused == capacity - capacity // 2


def test_what_a_request_must_not_store_is_not_reserved(manager: KVStoreManager) -> None:
    context = request("secret", store=False)
    manager.on_new_request(context)
    out = manager.prepare_store(A, context)
    assert out is not None
    assert out.keys_to_store == []
    manager.on_request_finished(context)
    assert manager.stats().chunks == 0


def test_what_is_to_be_fetched_later_comes_while_the_server_is_idle(
    manager: KVStoreManager,
) -> None:
    store(manager, A, request("r", demote=True, prefetch_after_s=0.3))
    steps(manager)
    assert host_of(manager, A) == 0
    until(lambda: host_of(manager, A) == 4, "nobody fetched it")
    assert manager.stats().prefetched == 4


def test_hints_hold_over_a_reset(manager: KVStoreManager) -> None:
    private, kept = request("private", store=False), request("kept", retain_s=60.0)
    for context in (private, kept):
        manager.on_new_request(context)
    manager.reset()
    steps(manager)
    out = manager.prepare_store(A, private)
    assert out is not None
    assert out.keys_to_store == []
    out = manager.prepare_store(A, kept)
    assert out is not None
    manager.complete_store(out.keys_to_store, kept)
    manager.on_request_finished(kept)
    assert manager.stats().pins == 4


def test_hints_hold_while_requests_that_never_end_are_forgotten(
    manager: KVStoreManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.core.step.MOST_REQUESTS", 4)
    monkeypatch.setattr("kvstore.core.core.MOST_HINTED", 3)
    private = request("private", store=False)
    manager.on_new_request(private)
    for number in range(6):
        manager.on_new_request(request(f"r{number}", retain_s=5.0))
    assert manager.stats().hints_ignored == 4
    for number in range(20):
        manager.prepare_store(keys_of(f"other {number}", 2), request(f"other {number}"))
        steps(manager)
    out = manager.prepare_store(A, private)
    assert out is not None
    assert out.keys_to_store == []


@pytest.mark.parametrize(("first", "hint", "pins"), [(0.0, "retain", 0), (60.0, "release", 4)])
def test_hints_do_not_speak_of_what_was_only_looked_up(
    manager: KVStoreManager, first: float, hint: str, pins: int
) -> None:
    store(manager, A, request("w", **({"retain_s": first} if first else {})))
    store(manager, B, request("others"))
    aborted = request("r", **({"retain_s": 60.0} if hint == "retain" else {"release": True}))
    manager.on_new_request(aborted)
    assert [manager.lookup(key, aborted) for key in A] == [None] * 4
    manager.on_schedule_end()
    manager.on_request_finished(aborted)
    assert manager.stats().pins == pins


def test_host_memory_is_the_place_where_there_is_no_other() -> None:
    manager = KVStoreManager({"cpu_bytes_to_use": 8 * CHUNK, "chunk_bytes": CHUNK}, steady=True)
    store(manager, A, request("r", retain_s=60.0, demote=True))
    assert manager.stats().pinned_rows == 4
    manager.shutdown()
