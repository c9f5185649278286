"""A server written for the published names works once its imports are changed."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvstore.connector import published
from kvstore.connector.backend import PinnedBackend
from kvstore.connector.contract import (
    OffloadingEvent,
    PrepareStoreOutput,
    ReqContext,
    knows_requests,
)
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.connector.queued import QueuedKeys
from kvstore.connector.tracked_request import key_of
from kvstore.errors import ConfigError
from tests.connector.published_server import (
    Copier,
    Recent,
    Request,
    Server,
    Slots,
    SlotStatus,
)
from tests.patience import until

SLOTS = 12


def open_server(kind: str, factor: int, folder: Path) -> Server:
    if kind == "own":
        return Server(
            factor,
            slots=SLOTS,
            spec_name="OwnSpec",
            spec_module_path="tests.connector.published_server",
        )
    more: dict[str, Any] = {}
    if kind == "disk":
        disk = {"type": "disk", "path": str(folder / "disk"), "capacity_bytes": "8MiB"}
        more = {
            "identity": {"model": "m"},
            "deadline_s": 60,
            "tiers": [{**disk, "segment_bytes": "1MiB"}],
        }
    return Server(factor, cpu_bytes_to_use=SLOTS * 4096, eviction_policy="lru", **more)


@pytest.mark.parametrize("hash_bytes", [32, 64])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("kind", ["own", "host", "disk"])
def test_a_server_of_the_published_names_stores_loads_evicts_and_is_told(
    kind: str, factor: int, hash_bytes: int, tmp_path: Path
) -> None:
    server = open_server(kind, factor, tmp_path)
    hot = list(range(24))
    found = 0
    for number in range(10):
        request = Request(f"hot {number}", hot, hash_bytes)
        found += server.serve(request)
        server.finish(request)
        cold = Request(f"cold {number}", [100 + number] * 24, hash_bytes)
        assert server.serve(cold) == 0
        server.finish(cold)
        # Host memory may be full of what is on its way to the disk.
        assert kind == "disk" or cold.request_id in server.kept
        for _ in range(3):
            server.step()
    assert found == 9 * 24

    def removed() -> set[Any]:
        server.serve(cold)
        server.finish(cold)
        server.step()
        return set(server.removed)

    if kind == "disk":
        until(removed, "nothing leaves host memory")
    assert server.removed
    assert not server.kept
    assert len(server.free) == 39
    if kind != "disk":
        assert len(server.stored) <= SLOTS
    named = request.block_hashes[factor - 1 :: factor]
    names = named if hash_bytes == 32 else [hashlib.sha256(one).digest() for one in named]
    assert set(names) <= {name for _, name in server.stored}
    server.worker.shutdown()
    server.scheduler.shutdown()


def preempted(server: Server) -> tuple[Request, Request]:
    """A request that has lost its blocks to another, which was computed in the same step."""
    first, second = Request("first", list(range(16))), Request("second", [7] * 16)
    server.serve(first)
    server.preempt(first)
    assert server.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    server.allocate(second)
    server.step(second, preempted=["first"])
    second.num_computed_tokens = 16
    return first, second


@pytest.mark.parametrize("kind", ["own", "host"])
def test_blocks_of_who_was_preempted_are_copied_before_they_are_written(
    kind: str, tmp_path: Path
) -> None:
    server = open_server(kind, 1, tmp_path)
    first, second = preempted(server)
    server.finish(second)
    assert server.serve(first) == 16
    server.finish(first)
    for _ in range(3):
        server.step()
    assert not server.kept
    assert len(server.free) == 39


@pytest.mark.parametrize("reports", ["every step", "what has ended"])
def test_a_tier_gets_the_blocks_of_who_was_preempted_once_workers_have_copied_them(
    reports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = open_server("disk", 1, tmp_path)
    build, update = server.scheduler.build_connector_meta, server.scheduler.update_connector_output

    def slow(output: Any) -> Any:
        """As where the way to the workers is long, or they still compute the step before."""
        orders = build(output)
        if orders.reqs_to_flush:
            time.sleep(0.2)
        return orders

    def seldom(output: Any) -> Any:
        ended = output.finished_sending or output.finished_recving
        return update(output) if ended or reports == "every step" else None

    monkeypatch.setattr(server.scheduler, "build_connector_meta", slow)
    monkeypatch.setattr(server.scheduler, "update_connector_output", seldom)
    first, second = preempted(server)
    assert server.serve(first) == 16
    for request in (first, second):
        server.finish(request)
    while server.kept:
        server.step()
    server.worker.shutdown()
    server.scheduler.shutdown()
    monkeypatch.undo()
    server = open_server("disk", 1, tmp_path)
    for name, tokens in [("first", list(range(16))), ("second", [7] * 16)]:
        assert server.serve(Request(name, tokens)) == 16
    server.worker.shutdown()
    server.scheduler.shutdown()


def test_steps_that_are_not_reported_delay_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = open_server("own", 1, tmp_path)
    with monkeypatch.context() as silent:
        silent.setattr(server.scheduler, "update_connector_output", lambda output: None)
        for _ in range(published.MOST_STEPS):
            server.step()
    first = Request("first", list(range(16)))
    server.serve(first)
    server.preempt(first)
    for number in range(2):
        other = Request(f"other {number}", [7 + number] * 16)
        assert server.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        server.allocate(other)
        server.step(other, preempted=["first"] if not number else [])
        other.num_computed_tokens = 16
        server.finish(other)
        # Of what it has stored a report tells which steps are computed.
        server.step()
        server.step()
    assert server.scheduler.get_num_new_matched_tokens(first, 0)[0] == 16


def test_blocks_of_who_was_aborted_while_loading_are_written_after_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = open_server("own", 1, tmp_path)
    first = Request("first", list(range(16)))
    server.serve(first)
    server.finish(first)
    while server.kept:
        server.step()
    again = Request("again", list(range(16)))
    assert server.scheduler.get_num_new_matched_tokens(again, 0) == (16, True)
    server.allocate(again)
    server.scheduler.update_state_after_alloc(again, SimpleNamespace(blocks=[again.blocks]), 16)
    with monkeypatch.context() as slow:
        # A copy that has begun and does not end by itself.
        slow.setattr(Copier, "get_finished", lambda self: [])
        server.step()
        server.finish(again)
        assert not server.kept
        server.free = [block.block_id for block in again.blocks] + server.free
        second = Request("second", [7] * 16)
        assert server.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
        server.allocate(second)
        server.step(second)
    server.step()
    server.check(second, len(second.blocks))


def test_a_published_manager_takes_long_hashes_in_all_of_its_calls(tmp_path: Path) -> None:
    manager: Any = open_server("disk", 1, tmp_path).scheduler.manager
    hashes, context = [bytes([number]) * 64 for number in range(4)], ReqContext("r")
    out = manager.prepare_store(hashes, context)
    assert out.keys_to_store == hashes
    manager.complete_store(hashes, context)
    assert manager.lookup_prefix(hashes, context) == 4
    assert all(manager.lookup(each, context) for each in hashes)
    assert all(map(manager.is_coming, hashes))
    assert manager.most_tokens(((4, None), (4, 1)), hashes)
    manager.on_request_queued(ReqContext("q"), [QueuedKeys(hashes, 4)])
    manager.shutdown()


def test_a_reuse_filter_over_a_published_manager_is_asked_by_lists(tmp_path: Path) -> None:
    backing = Recent(Slots(4, 8))
    manager: Any = published.FilterReusedOffloadingManager(
        backing=backing, store_threshold=2, max_tracker_size=100
    )
    assert not knows_requests(backing)
    assert not knows_requests(manager)
    assert knows_requests(published.LRUOffloadingManager(Slots(4, 8)))
    assert manager.lookup(block_hashes=[b"a", b"b"]) == 0
    assert manager.counts == {b"a": 1, b"b": 1}
    out = manager.prepare_store(block_hashes=[b"a"])
    assert out is not None
    assert out.block_hashes_to_store == []
    manager.lookup([b"a"])
    out = manager.prepare_store(block_hashes=iter([b"a", b"b"]))
    assert out is not None
    assert out.block_hashes_to_store == [b"a"]


@pytest.mark.parametrize("kind", ["LRU", "ARC", "kvstore"])
@pytest.mark.parametrize("size", [8, 32, 64])
def test_calls_take_block_hashes(kind: str, size: int) -> None:
    manager: Any
    if kind == "kvstore":
        manager = published.KVStoreManager({"cpu_bytes_to_use": 8 * 4096, "chunk_bytes": 4096})
    else:
        backend = PinnedBackend(4, 8, 4096) if kind == "LRU" else Slots(4, 8)
        manager = getattr(published, f"{kind}OffloadingManager")(
            backend=backend, enable_events=True
        )
    hashes = [bytes([number]) * size for number in range(3)]
    assert manager.lookup(block_hashes=hashes) == 0
    out = manager.prepare_store(block_hashes=hashes)
    assert out.block_hashes_to_store == hashes
    assert out.block_hashes_evicted == []
    manager.complete_store(block_hashes=hashes, success=True)
    assert manager.lookup(block_hashes=iter(hashes)) == 3
    places = manager.prepare_load(block_hashes=hashes).block_ids.tolist()
    assert places == out.store_spec.block_ids.tolist()
    manager.touch(block_hashes=hashes)
    manager.complete_load(block_hashes=hashes)
    if kind != "kvstore":
        (event,) = manager.take_events()
        assert event.block_hashes == hashes
    manager.shutdown()


def test_outputs_and_events_have_both_names() -> None:
    spec = HostLoadStoreSpec([1])
    ours = PrepareStoreOutput([b"a"], spec, [b"b"])
    theirs = PrepareStoreOutput(
        block_hashes_to_store=[b"a"], store_spec=spec, block_hashes_evicted=[b"b"]
    )
    assert ours == theirs
    assert (theirs.keys_to_store, theirs.evicted_keys) == ([b"a"], [b"b"])
    assert (ours.block_hashes_to_store, ours.block_hashes_evicted) == ([b"a"], [b"b"])
    assert PrepareStoreOutput(keys_to_store=[], store_spec=spec).evicted_keys == []
    event = OffloadingEvent(block_hashes=[b"a"], block_size=4, medium="m", removed=True)
    assert event == OffloadingEvent([b"a"], 4, "m", True)
    assert event.block_hashes == event.keys
    with pytest.raises(TypeError, match="keys_to_store is missing"):
        PrepareStoreOutput(store_spec=spec)


def test_a_backend_extends_the_status_and_need_not_say_where_blocks_lie() -> None:
    status = SlotStatus(7)
    assert (status.ref_cnt, status.slot, status.is_ready) == (-1, 7, False)
    status.ref_cnt += 1
    assert status.is_ready

    class Silent(published.CPUBackend):
        get_load_store_spec = published.Backend.get_load_store_spec  # type: ignore[assignment]

    backend = Silent(4, 3)
    (block,) = backend.allocate_blocks([b"a"])
    with pytest.raises(NotImplementedError, match="Silent"):
        backend.get_load_store_spec([b"a"], [block])


def test_a_spec_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="spec_name = 'Unknown'"):
        Server(spec_name="Unknown")
    with pytest.raises(ValueError, match="registered"):
        published.OffloadingSpecFactory.register_spec("KVStoreSpec", "m", "c")


def test_hashes_that_fit_a_key_are_part_of_it() -> None:
    assert key_of(b"h" * 52, 1) == b"h" * 52 + b"\0\0\0\1"
    assert key_of(b"h" * 53, 1) == hashlib.sha256(b"h" * 53).digest() + b"\0\0\0\1"


def test_nothing_is_stored_of_who_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks were given back, as it had stored nothing."""
    server = open_server("own", 1, tmp_path)
    manager = server.scheduler.manager.inner  # type: ignore[attr-defined]
    request = Request("r", list(range(16)))
    with monkeypatch.context() as refusing:
        refusing.setattr(manager, "prepare_store", lambda block_hashes: None)
        server.serve(request)
    server.finish(request)
    assert not server.kept
    server.step()
    server.step()
    assert not manager.blocks


@pytest.mark.parametrize("module", ["tests.connector.published_server", "no.such.module"])
def test_a_spec_that_is_not_there_is_refused_by_name(module: str) -> None:
    with pytest.raises(ConfigError, match="spec_name = 'Nobody'"):
        Server(spec_name="Nobody", spec_module_path=module)
