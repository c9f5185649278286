"""A durable put returns when a later process would find what it says."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from pathlib import Path

import pytest

import kvstore
from kvstore.api.store import Store
from kvstore.errors import KVStoreError
from kvstore.tiers.base import Transfer
from kvstore.tiers.disk import DiskTier
from tests.patience import PATIENCE, until_async
from tests.store.support import Open, busy, cancel, hold, keys_of, payloads, program, small, waits

A, B, WIDE = keys_of("a", 6), keys_of("b", 4), keys_of("wide", 40)


def on_disk(store: Store) -> set[bytes]:
    return set(store._core.tiers[0].entries)


@pytest.mark.parametrize("flow", ["write-through", "demote", "exclusive"])
async def test_what_it_counts_is_on_disk_when_it_returns(
    open_store: Open, tmp_path: Path, flow: str
) -> None:
    (tier,) = small(tmp_path / "cache", disk=128)["tiers"]
    async with open_store(rows=8, tiers=[{**tier, "flow": flow}]) as store:
        assert await store.put(B, payloads(B)) == 4
        assert await store.put(A, payloads(A), durable=True, timeout=PATIENCE) == 6
        assert on_disk(store) >= {*A}
        # What it has already is written too, if it is not on disk.
        assert await store.put(B, payloads(B), durable=True, timeout=PATIENCE) == 4
        assert on_disk(store) >= {*B}
        assert await store.put([], [], durable=True) == 0
    async with open_store(rows=8, disk=128) as store:
        assert await store.resolve(A) == 6


@pytest.mark.parametrize("flow", ["write-through", "demote", "exclusive"])
async def test_more_than_host_memory_holds_is_written_though_a_neighbour_has_it(
    tmp_path: Path, flow: str
) -> None:
    config = small(tmp_path / "cache", rows=8, disk=128)
    config["tiers"][0]["flow"] = flow
    async with kvstore.open(config) as one, kvstore.open(config) as other:
        assert await one.put(WIDE, payloads(WIDE), durable=True) == len(WIDE)
        await until_async(lambda: all(other.contains(WIDE)))
        assert await other.put(WIDE, payloads(WIDE), durable=True, timeout=PATIENCE) == len(WIDE)
        assert on_disk(other) >= {*WIDE}


async def test_it_waits_for_its_own_chunks_alone(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = hold(monkeypatch, "write", B)
    async with open_store(rows=16, disk=64) as store:
        assert await store.put(B, payloads(B)) == 4
        await asyncio.sleep(0.01)
        assert await store.put(A, payloads(A), durable=True, timeout=PATIENCE) == 6
        assert not on_disk(store) & {*B}
        waiting = await waits(store.put(B, payloads(B), durable=True))
        gate.set()
        assert await waiting == 4


async def test_without_a_tier_it_is_an_error_and_nothing_is_stored(open_store: Open) -> None:
    async with open_store(rows=8) as store:
        with pytest.raises(KVStoreError, match="no tier"):
            await store.put(A, payloads(A), durable=True)
        assert store.stats().chunks == 0
        assert await store.put(A, payloads(A)) == 6


async def test_what_cannot_be_written_does_not_count_nor_what_follows_it(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DiskTier.write

    async def third_fails(self: DiskTier, keys: list[bytes], *rest: list[int]) -> Transfer:
        done = await write(self, keys, *rest)
        done.ok = [ok and key != A[3] for key, ok in zip(keys, done.ok, strict=True)]
        done.error = None if all(done.ok) else "no"
        return done

    monkeypatch.setattr(DiskTier, "write", third_fails)
    async with open_store(rows=8, disk=64) as store:
        assert await store.put(A, payloads(A), durable=True, timeout=PATIENCE) == 3
        assert store.contains_prefix(A) == 6
        # The disk is left alone for a while after that.
        assert await store.put(A, payloads(A), durable=True, timeout=PATIENCE) == 3


@pytest.mark.parametrize("how", ["timeout", "cancelled", "closed"])
async def test_a_wait_that_ends_early_holds_nothing_and_keeps_what_is_stored(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with open_store(rows=8, disk=64) as store:
        gate = hold(monkeypatch, "write")
        seconds = 0.1 if how == "timeout" else None
        putting = asyncio.create_task(store.put(A, payloads(A), durable=True, timeout=seconds))
        await until_async(lambda: store.contains_prefix(A) == 6)
        if how == "timeout":
            with pytest.raises(TimeoutError, match="put took longer"):
                await putting
        elif how == "cancelled":
            await cancel(putting)
        else:
            closing = asyncio.create_task(store.close(0.1))
            with pytest.raises(KVStoreError, match="closed"):
                await putting
            gate.set()
            with pytest.raises(TimeoutError, match="close took longer"):
                await closing
            return
        assert store.contains_prefix(A) == 6
        gate.set()
        assert await store.flush(PATIENCE)
        assert busy(store) == 0
        assert on_disk(store) == {*A}


async def test_a_reset_and_a_removal_leave_nothing_to_count(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(rows=16, disk=64) as store:
        gate = hold(monkeypatch, "write")
        one = asyncio.create_task(store.put(A, payloads(A), durable=True))
        await until_async(lambda: store.contains_prefix(A) == 6)
        removing = asyncio.create_task(store.remove(A[2:3]))
        await asyncio.sleep(0.01)
        gate.set()
        assert await one == 2
        assert await removing == 1
        gate.clear()
        other = asyncio.create_task(store.put(B, payloads(B), durable=True))
        await until_async(lambda: store.contains_prefix(B) == 4)
        resetting = asyncio.create_task(store.reset())
        await asyncio.sleep(0.01)
        gate.set()
        assert await other == 0
        await resetting


@pytest.mark.parametrize("removed", [False, True])
def test_what_it_counts_is_found_after_kill_9(tmp_path: Path, removed: bool) -> None:
    """And what was removed is not."""
    config = (
        "{'cpu_bytes_to_use': '32KiB', 'chunk_bytes': 4096, 'identity': {}, "
        "'tiers': [{'type': 'disk', "
        f"'path': {str(tmp_path)!r}, 'capacity_bytes': '2MiB', 'segment_bytes': '128KiB'}}]}}"
    )
    code = textwrap.dedent(
        f"""
        import os, signal, sys, kvstore
        keys = [b"key-%d" % n + bytes(4) for n in range(40)]
        with kvstore.open_sync({config}) as store:
            if sys.argv[1] == "kill":
                assert store.put(keys, [bytes(4096)] * 40, durable=True, timeout=20) == 40
                assert not {removed} or store.remove(keys[::2]) == 20
                os.kill(os.getpid(), signal.SIGKILL)
            print(store.contains(keys) == [not {removed}, True] * 20)
        """
    )
    assert program(code, "kill")[0] == -signal.SIGKILL
    assert program(code, "look")[:2] == (0, "True\n")


async def test_segments_are_read_whole_by_calls_that_return_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, config = keys_of("whole", 20), small(tmp_path, disk=64)
    async with kvstore.open(config) as store:
        assert await store.put(keys, payloads(keys), durable=True) == len(keys)
    pread = os.pread
    # As network file systems may, and calls that a signal interrupts.
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 100), at))
    async with kvstore.open(config) as store:
        assert store.contains(keys) == [True] * len(keys)


async def test_a_budget_for_writes_counts_what_is_written(tmp_path: Path) -> None:
    """A chunk takes whole pages on disk."""
    config = small(tmp_path, rows=64, disk=64, chunk_bytes=5000)
    config["tiers"][0]["admission"] = {
        "name": "endurance",
        "bytes_per_day": 86_400,
        "burst_s": 10 * 8192,
    }
    keys = keys_of("a", 30)
    async with kvstore.open(config) as store:
        await store.put(keys, [bytes(5000)] * 30)
        await store.flush()
        assert store.stats().tiers[0].chunks == 10
