"""Steps of a manager over the store: told by the server, or not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import HostLoadStoreSpec
from kvstore.core import recency
from kvstore.errors import BlockKeyError, ConfigError, KVStoreError
from kvstore.maintenance.survey import survey
from kvstore.testing.manager import keys_from
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, TOO_LONG, answered, until
from tests.store.support import CHUNK, hold, small


def open_manager(folder: Path | None = None, rows: int = 16, **more: Any) -> KVStoreManager:
    # A few chunks at a time: what waits goes on only when somebody goes on.
    config = small(folder or Path(), rows, 512 if folder else 0, write_queue_bytes=8 * CHUNK)
    return KVStoreManager(config, **more)


def store(manager: KVStoreManager, keys: list[bytes], *who: Any) -> list[bytes]:
    out = manager.prepare_store(keys, *who)
    assert out is not None
    manager.complete_store(out.keys_to_store, *who)
    return out.keys_to_store


def on_disk(manager: KVStoreManager, count: int) -> None:
    until(lambda: manager.stats().tiers[0].chunks >= count, manager.stats)


def disk_rests(manager: KVStoreManager) -> bool:
    disk = manager.stats().tiers[0]
    return not (disk.queued or disk.writing)


def room_for(manager: KVStoreManager, keys: list[bytes]) -> list[bytes]:
    """Wait until some of `keys` may be stored; returns which."""

    def granted() -> list[bytes]:
        out = manager.prepare_store(keys)
        return [] if out is None else out.keys_to_store

    return until(granted, "what nobody asks for again is in the way", 0.01)


def leave_on_disk(folder: Path, keys: list[bytes]) -> None:
    first = open_manager(folder)
    store(first, keys)
    on_disk(first, len(keys))
    first.shutdown()


@pytest.mark.parametrize("told", [True, False])
def test_copies_to_disk_go_on_while_the_server_is_idle(tmp_path: Path, told: bool) -> None:
    manager = open_manager(tmp_path, rows=256)
    who = ReqContext("r")
    manager.on_new_request(who)
    store(manager, keys_from(0, 200), who)
    if told:
        manager.on_schedule_end()
    on_disk(manager, 200)
    manager.shutdown()


@pytest.mark.parametrize("fails", [False, True], ids=["well", "fails once"])
@pytest.mark.parametrize("ends", [False, True], ids=["serves", "ends"])
def test_a_reset_amid_copies_reaches_the_disk_though_no_step_follows(
    tmp_path: Path, ends: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.core.residency.base.RETRY_PAUSE", 0.1)
    clear, failed = DiskTier.clear, threading.Event()

    async def fails_once(self: DiskTier) -> Any:
        if fails and not failed.is_set():
            failed.set()
            return None
        return await clear(self)

    monkeypatch.setattr(DiskTier, "clear", fails_once)
    keys = keys_from(0, 8)
    leave_on_disk(tmp_path, keys)
    manager = open_manager(tmp_path, steady=True)
    who = ReqContext("r")
    manager.on_new_request(who)
    gate = hold(monkeypatch, "write")
    store(manager, keys_from(100, 8), who)
    manager.on_schedule_end()
    assert manager.stats().tiers[0].writing
    manager.reset()
    gate.set()
    if fails:
        until(failed.is_set)
    if not ends:
        until(lambda: [*tmp_path.glob("*/epoch")], manager.stats)
    manager.shutdown()
    again = open_manager(tmp_path)
    assert answered(lambda: again.lookup(keys)) == 0
    again.shutdown()


def test_uses_are_recorded_while_the_server_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recency, "NOTE_SECONDS", 0.1)
    keys = keys_from(0, 4)
    leave_on_disk(tmp_path, keys)
    manager = open_manager(tmp_path, steady=True)
    who = ReqContext("r")
    manager.on_new_request(who)

    def found() -> bool:
        answers = [manager.lookup(key, who) for key in keys]
        manager.on_schedule_end()
        return answers == [True] * 4

    until(found, manager.stats)
    manager.prepare_load(keys, who)
    manager.complete_load(keys, who)
    manager.on_request_finished(who)
    manager.on_schedule_end()

    def reads() -> int:
        (found,) = survey(tmp_path)
        return sum(segment.reads for lane in found.lanes for segment in lane.segments)

    until(lambda: reads() == 4, manager.stats)
    manager.shutdown()


def test_what_was_found_stays_while_other_prompts_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long the machine takes for these calls, they are one step.
    monkeypatch.setattr("kvstore.connector.manager.STEP_SECONDS", TOO_LONG)
    monkeypatch.setattr("kvstore.engine.scheduler_steps.IDLE_SECONDS", TOO_LONG)
    manager = open_manager(rows=16)
    prompts = [keys_from(100 * n, 4) for n in range(4)]
    for keys in prompts:
        store(manager, keys)
    assert [manager.lookup(keys) for keys in prompts] == [4] * 4
    out = manager.prepare_store(keys_from(900, 16))
    assert out is None or not out.keys_to_store, "what was found has left before it was loaded"
    for keys in prompts:
        manager.prepare_load(keys)
    for keys in prompts:
        manager.complete_load(keys)
    # Once all of it was loaded it is in nobody's way.
    assert len(store(manager, keys_from(900, 16))) == 16
    manager.shutdown()


@pytest.mark.parametrize("disk", [False, True])
def test_what_was_found_and_never_loaded_is_in_the_way_for_a_moment_only(
    tmp_path: Path, disk: bool
) -> None:
    keys, new = keys_from(0, 16), keys_from(100, 16)
    if disk:
        leave_on_disk(tmp_path, keys)
    manager = open_manager(tmp_path if disk else None, rows=16)
    if not disk:
        store(manager, keys)
    assert answered(lambda: manager.lookup(keys)) == 16
    granted = room_for(manager, new)
    assert granted == new or disk
    manager.complete_store(granted)
    manager.shutdown()


def test_two_servers_worth_of_requests_with_one_prompt_are_told_apart_by_name(
    tmp_path: Path,
) -> None:
    keys = keys_from(0, 8)
    leave_on_disk(tmp_path, keys)
    manager = open_manager(tmp_path, rows=8)
    one, other = ReqContext("one"), ReqContext("other")
    end = time.monotonic() + PATIENCE
    for who in (one, other):
        manager.on_new_request(who)
        while None in (answers := [manager.lookup(key, who) for key in keys]):
            assert time.monotonic() < end, "deferred for ever"
            manager.on_schedule_end()
        assert answers == [True] * 8
        manager.prepare_load(keys, who)
    for who in (other, one):
        assert manager.stats().busy_rows == 8
        manager.complete_load(keys, who)
        manager.on_request_finished(who)
    assert manager.stats().busy_rows == 0
    manager.shutdown()


def test_a_second_request_with_a_prompt_that_is_fetched_takes_nothing_from_others(
    tmp_path: Path,
) -> None:
    here, there = keys_from(0, 10), keys_from(100, 12)
    leave_on_disk(tmp_path, there)
    manager = open_manager(tmp_path)
    store(manager, here)
    assert manager.lookup(here) == 10
    assert manager.lookup(there) is None
    assert manager.lookup(there) is None
    time.sleep(0.05)
    assert manager.lookup(there) is None
    manager.prepare_load(here)
    manager.complete_load(here)
    answered(lambda: manager.lookup(there))
    manager.shutdown()


def test_completions_after_the_end_are_ignored_and_it_ends_once(tmp_path: Path) -> None:
    manager, who = open_manager(tmp_path), ReqContext("r")
    manager.on_new_request(who)
    assert manager.prepare_store(keys_from(0, 2)) is not None
    assert manager.prepare_store(keys_from(10, 2), who) is not None
    manager.shutdown()
    manager.complete_store(keys_from(0, 2))
    manager.complete_store(keys_from(10, 2), who)
    manager.complete_load(keys_from(0, 2))
    manager.shutdown()
    open_manager(tmp_path).shutdown()


def test_success_may_be_any_truth() -> None:
    manager = open_manager()
    for ok in (np.bool_(False), np.bool_(True)):
        assert manager.prepare_store(keys_from(0, 2)) is not None
        manager.complete_store(keys_from(0, 2), ok)  # type: ignore[arg-type]
    assert manager.lookup(keys_from(0, 2)) == 2
    manager.shutdown()


def test_what_is_no_key_is_refused_by_name() -> None:
    manager = open_manager()
    with pytest.raises(BlockKeyError, match="56 bytes; this one has 57"):
        manager.prepare_store([b"x" * 57])
    with pytest.raises(BlockKeyError, match="must be bytes, not str"):
        manager.lookup(["a"])  # type: ignore[list-item]
    with pytest.raises(KVStoreError, match="needs req_context"):
        manager.lookup(b"a")
    with pytest.raises(KVStoreError, match="takes no req_context"):
        manager.lookup([b"a"], ReqContext("r"))
    manager.shutdown()


def test_a_configuration_without_a_chunk_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="missing key chunk_bytes"):
        KVStoreManager({"cpu_bytes_to_use": "1MiB"})


def test_transfers_that_are_abandoned_keep_their_rows_until_all_have_ended_and_the_rest_stays(
    tmp_path: Path,
) -> None:
    manager = open_manager(tmp_path, rows=16, steady=True, late_completions=False)
    who = ReqContext("r")
    manager.on_new_request(who)
    kept, loading, storing = keys_from(0, 4), keys_from(100, 4), keys_from(200, 8)
    store(manager, kept, who)
    store(manager, loading, who)
    while manager.has_pending_work():
        manager.on_schedule_end()
    on_disk(manager, 8)
    assert manager.lookup_prefix(loading, who) == 4
    manager.prepare_load(loading, who)
    assert manager.prepare_store(storing, who) is not None
    manager.on_schedule_end()
    manager.on_request_finished(who)
    manager.abandon_transfers()

    late = ReqContext("late")
    manager.on_new_request(late)
    out = manager.prepare_store(keys_from(300, 12), late)
    taken = [] if out is None else out.keys_to_store
    assert len(taken) <= 4, "rows that the device may still use were given away"
    manager.complete_store(taken, late, success=False)
    manager.on_schedule_end()
    manager.transfers_ended()
    assert manager.stats().busy_rows == 0
    assert manager.lookup_prefix(loading, late) == 4
    manager.on_schedule_end()
    assert manager.lookup_prefix(storing, late) == 0, "nobody knows what was written there"
    manager.shutdown()


def test_a_reset_by_the_operator_ends_no_transfer_that_the_server_will_report(
    tmp_path: Path,
) -> None:
    manager = open_manager(tmp_path, rows=16, steady=True, late_completions=False)
    one, two, three = (ReqContext(name) for name in ("one", "two", "three"))
    before, since, other = keys_from(0, 2), keys_from(100, 2), keys_from(200, 12)
    assert manager.prepare_store(before, one) is not None
    manager.on_schedule_end()
    manager.reset()
    written = manager.prepare_store(since, two)
    manager.on_schedule_end()
    manager._reset_in_use()
    # Of what was under way at its own reset the server reports nothing more.
    manager.transfers_ended()
    given = manager.prepare_store(other, three)
    assert written is not None
    assert given is not None
    spec, other_spec = written.store_spec, given.store_spec
    assert isinstance(spec, HostLoadStoreSpec)
    assert isinstance(other_spec, HostLoadStoreSpec)
    assert not {*spec.block_ids} & {*other_spec.block_ids}
    manager.complete_store(given.keys_to_store, three)
    manager.complete_store(written.keys_to_store, two)
    manager.on_schedule_end()
    # The disk copies the chunks if it has ended the reset by now.
    until(lambda: manager.stats().busy_rows == 0, manager.stats)
    manager.shutdown()


@pytest.mark.parametrize("again", [False, True])
def test_what_an_operators_reset_overtook_is_abandoned_with_all_else(
    tmp_path: Path, again: bool
) -> None:
    manager = open_manager(tmp_path, rows=16, steady=True, late_completions=False)
    one, two, three = (ReqContext(name) for name in ("one", "two", "three"))
    assert manager.prepare_store(keys_from(0, 6), one) is not None
    manager.on_schedule_end()
    if not again:
        manager._reset_in_use()
    manager.abandon_transfers()
    written = manager.prepare_store(keys_from(50, 4), two)
    assert written is not None
    assert isinstance(written.store_spec, HostLoadStoreSpec)
    manager.on_schedule_end()
    if again:
        manager._reset_in_use()
    manager.transfers_ended()
    # The server reports what was begun since, and nothing else.
    given = manager.prepare_store(keys_from(200, 12), three)
    assert given is not None
    assert isinstance(given.store_spec, HostLoadStoreSpec)
    assert not {*written.store_spec.block_ids} & {*given.store_spec.block_ids}
    manager.complete_store(given.keys_to_store, three)
    manager.complete_store(written.keys_to_store, two)
    manager.on_schedule_end()
    # The disk takes the chunks if it has ended the reset by now.
    until(lambda: disk_rests(manager), manager.stats)
    out = manager.prepare_store(keys_from(300, 16), three)
    assert out is not None
    assert len(out.keys_to_store) == 16
    manager.shutdown()


def test_transfers_that_are_abandoned_twice_are_ended_once(tmp_path: Path) -> None:
    manager = open_manager(tmp_path, rows=16, steady=True, late_completions=False)
    who, again = ReqContext("r"), keys_from(0, 4)
    manager.on_new_request(who)
    store(manager, again, who)
    while manager.has_pending_work():
        manager.on_schedule_end()
    on_disk(manager, 4)
    assert manager.lookup_prefix(again, who) == 4
    manager.prepare_load(again, who)
    manager.on_schedule_end()
    manager.abandon_transfers()
    manager.abandon_transfers()
    assert manager.lookup_prefix(again, who) == 4
    manager.prepare_load(again, who)
    manager.on_schedule_end()
    manager.transfers_ended()
    assert manager.stats().busy_rows == 4, "the load that was begun since is under way"
    manager.complete_load(again, who)
    assert manager.stats().busy_rows == 0
    manager.shutdown()


def test_tiers_that_are_closed_are_not_used_and_keep_what_they_have_for_the_next_process(
    tmp_path: Path,
) -> None:
    manager = open_manager(tmp_path, rows=64)
    who = ReqContext("r")
    manager.on_new_request(who)
    before, after = keys_from(0, 8), keys_from(100, 8)
    store(manager, before, who)
    manager.on_schedule_end()
    on_disk(manager, 8)
    manager.reset(close_tiers=True)
    assert manager.lookup_prefix(before, who) == 0
    store(manager, after, who)
    manager.on_schedule_end()
    assert manager.lookup_prefix(after, who) == 8
    manager.on_request_finished(who)
    manager.on_schedule_end()
    assert not manager.has_pending_work()
    assert manager.stats().tiers[0].closed
    manager.shutdown()
    again = open_manager(tmp_path, rows=64)
    assert again.stats().tiers[0].chunks == 8
    again.on_new_request(who)
    while (found := again.lookup_prefix(before, who)) is None:
        again.on_schedule_end()
    assert found == 8
    assert again.lookup_prefix(after, ReqContext("other")) == 0
    again.shutdown()
