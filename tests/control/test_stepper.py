"""Calls between the steps of a scheduler: never amid one, and soon."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.core import Core
from kvstore.errors import KVStoreError
from tests.patience import until
from tests.store.support import keys_of, small

A = keys_of("a", 4)


@pytest.fixture(params=[True, False], ids=["steady", "by hand"])
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KVStoreManager]:
    config = small(tmp_path / "cache", disk=64, control=str(tmp_path / "ctl.sock"))
    manager = KVStoreManager(config, steady=request.param)
    yield manager
    manager.shutdown()


def act(manager: KVStoreManager, call: Any) -> Future[Any]:
    """Begin a call as the control server does, on the engine's loop."""
    loop = manager.stepper.engine._loop
    return asyncio.run_coroutine_threadsafe(manager.stepper.act(call), loop)


def stored(manager: KVStoreManager) -> None:
    request = ReqContext("w")
    manager.on_new_request(request)
    out = manager.prepare_store(A, request)
    assert out is not None
    manager.complete_store(out.keys_to_store, request)
    manager.on_request_finished(request)
    manager.on_schedule_end()


def test_a_server_without_work_is_not_waited_for(manager: KVStoreManager) -> None:
    stored(manager)
    assert act(manager, lambda core, now: core.remove(A).found).result(60) == 4
    assert manager.lookup(A[0], ReqContext("r")) is False


def test_a_call_waits_for_the_end_of_a_step(manager: KVStoreManager) -> None:
    stored(manager)
    request = ReqContext("r")
    manager.on_new_request(request)
    assert manager.lookup(A[0], request) is True
    if manager.stepper.ends_told:
        asked = act(manager, lambda core, now: core.remove(A).found)
        time.sleep(0.05)
        # Amid the step what was found is there.
        assert not asked.done()
        manager.prepare_load(A[:1], request)
        manager.on_schedule_end()
        assert asked.result(60) == 4
        manager.complete_load(A[:1], request)


def test_a_busy_server_makes_the_call_at_the_begin_of_a_step(manager: KVStoreManager) -> None:
    stored(manager)
    threads: list[int] = []

    def call(core: Core, now: float) -> int:
        threads.append(threading.get_ident())
        return core.remove(A).found

    asked = act(manager, call)
    request = ReqContext("busy")

    def steps() -> bool:
        # It is never between two steps for long enough to be met there.
        with manager.stepper.turn:
            manager.lookup(keys_of("b", 1)[0], request)
            manager.on_schedule_end()
        return asked.done()

    until(steps)
    assert asked.result(60) == 4


def test_what_a_call_raises_is_raised_to_who_asked_alone(manager: KVStoreManager) -> None:
    def call(core: Core, now: float) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        act(manager, call).result(60)
    stored(manager)


def test_after_the_end_calls_are_refused(manager: KVStoreManager) -> None:
    with manager.stepper.turn:
        asked = act(manager, lambda core, now: None)
        manager.shutdown()
    with pytest.raises((KVStoreError, asyncio.CancelledError)):
        asked.result(60)


def test_who_gives_up_is_not_called(manager: KVStoreManager) -> None:
    made = []
    with manager.stepper.turn:
        asked = act(manager, lambda core, now: made.append(1))
        time.sleep(0.02)
        asked.cancel()
        time.sleep(0.02)
    stored(manager)
    manager.on_schedule_end()
    assert not made


def test_transfers_under_way_at_a_reset_by_control_end_as_usual(tmp_path: Path) -> None:
    """Also where a server's own resets end them otherwise, as vLLM's do."""
    config = small(tmp_path / "cache", disk=64, control=str(tmp_path / "ctl.sock"))
    manager = KVStoreManager(config, steady=True, late_completions=False)
    try:
        stored(manager)
        reader, writer = ReqContext("r"), ReqContext("w2")
        for request in (reader, writer):
            manager.on_new_request(request)
        assert [manager.lookup(key, reader) for key in A] == [True] * 4
        manager.prepare_load(A, reader)
        new = keys_of("b", 2)
        assert manager.prepare_store(new, writer) is not None
        manager.on_schedule_end()
        assert act(manager, lambda core, now: manager._reset_in_use()).result(60) is None
        assert manager.lookup(A[0], ReqContext("s")) is False
        # The same key again, before the older transfer has ended.
        again = ReqContext("again")
        manager.on_new_request(again)
        assert manager.prepare_store(new, again) is not None
        manager.on_schedule_end()
        manager.complete_load(A, reader)
        manager.complete_store(new, writer)
        asked = ReqContext("t")
        assert manager.lookup(new[0], asked) is None, "it is still being stored"
        manager.complete_store(new, again)
        manager.on_request_finished(asked)

        def quiet() -> bool:
            manager.on_schedule_end()
            return not (manager.stats().busy_rows or manager._core._pool.held)

        until(quiet)
        stats = manager.stats()
        assert (stats.stray, stats.chunks) == (0, 2)
    finally:
        manager.shutdown()
