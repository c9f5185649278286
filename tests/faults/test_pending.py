"""A server over a slow tier that has nothing else to do: it rests, and may sleep and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.connector.contract import ReqContext
from kvstore.connector.manager import KVStoreManager
from kvstore.connector.mediums import HostLoadStoreSpec
from tests.faults.conftest import FaultyDisk
from tests.faults.support import CHUNK, HOST, config_of, keys_of, payload_of
from tests.patience import PATIENCE, until_async

DRAIN = 2.0


@contextmanager
def managing(path: Path, **changes: Any) -> Iterator[KVStoreManager]:
    """A manager as vLLM has it."""
    manager = KVStoreManager(config_of(path, io="buffered", **changes), steady=True)
    try:
        yield manager
    finally:
        manager.shutdown()


def store(manager: KVStoreManager, numbers: range) -> None:
    """Store chunks in host memory, in one step."""
    context = ReqContext(f"request {numbers.start}")
    keys = keys_of(numbers)
    out = manager.prepare_store(keys, context)
    assert out is not None
    assert out.keys_to_store == keys
    assert isinstance(out.store_spec, HostLoadStoreSpec)
    for key, row in zip(keys, out.store_spec.block_ids, strict=True):
        manager.region.row(row)[:CHUNK] = payload_of(key)
    manager.complete_store(keys, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()


async def test_copies_to_a_disk_that_hangs_do_not_keep_a_server_from_its_rest(
    faulty: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = range(HOST // 2)
    with managing(faulty.path / "cache") as manager:
        with faulty.hanging("write", path="segment"):
            with monkeypatch.context() as patched:
                # However long the machine takes for these calls.
                patched.setattr("kvstore.connector.manager.PENDING_SECONDS", PATIENCE)
                store(manager, numbers)
                assert manager.has_pending_work()
            await until_async(lambda: not manager.has_pending_work())
            assert manager.stepper.core.unsaved == len(numbers)
        # No step is taken any more.
        await until_async(lambda: manager.stepper.core.unsaved == 0)
        assert not manager.has_pending_work()
    with managing(faulty.path / "cache") as manager:
        context = ReqContext("again")
        found: int | None = None
        end = time.monotonic() + PATIENCE
        while found is None and time.monotonic() < end:
            found = manager.lookup_prefix(keys_of(numbers), context)
            manager.on_schedule_end()
            await asyncio.sleep(0.01)
        assert found == len(numbers)


async def test_a_shutdown_amid_copies_to_a_disk_that_hangs_ends_in_time(
    faulty: FaultyDisk,
) -> None:
    with (
        managing(faulty.path / "cache", shutdown_timeout_s=DRAIN) as manager,
        faulty.hanging("write", path="segment"),
    ):
        store(manager, range(HOST // 2))
        began = time.monotonic()
        while manager.has_pending_work():
            manager.on_schedule_end()
            await asyncio.sleep(0)
        manager.shutdown()
        # What a busy machine adds is not what a disk that hangs would.
        assert time.monotonic() - began < DRAIN + PATIENCE / 4
        assert len(manager.region.row(0)), "what hangs still reads from it"
