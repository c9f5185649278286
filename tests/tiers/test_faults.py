"""Disks that fail: a block that failed fails alone, nothing raises, nothing hangs.

Faults come from an I/O backend that fails where it is told, and, where this
machine allows it, from real file systems that are full or go down.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import key_of
from kvstore.tiers.disk.index import IndexFile, read_index
from kvstore.tiers.disk.io import IO_BACKENDS, IOBackend, IORequest, Moved, UnderWay
from kvstore.tiers.disk.io.buffered import BufferedIO
from tests.faults.conftest import Device
from tests.patience import PATIENCE, until_async
from tests.tiers.conftest import OpenBench
from tests.tiers.support import (
    GEOMETRY,
    SEGMENT,
    SLOT,
    SLOTS,
    disk_of,
    lane_bytes,
    lane_of,
    segment_of,
)

KEYS = [key_of(n) for n in range(SLOTS)]
ALL = list(range(SLOTS))


class FaultyIO(BufferedIO):
    """Moves bytes as it should, but for the slots that it was told about."""

    name = "faulty"

    def __init__(self) -> None:
        self.fail_reads: dict[int, Exception] = {}
        self.fail_writes: dict[int, Exception] = {}
        self.short_after: int | None = None
        self.lost_writes: set[int] = set()
        self.torn_writes: set[int] = set()
        self.flipped_reads: set[int] = set()
        self.gate: threading.Event | None = None
        self.begun = threading.Event()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass()
        for slot, _ in self._slots(buffers, offset):
            if slot in self.fail_reads:
                raise self.fail_reads[slot]
        got = super().read(fd, buffers, offset)
        for slot, buffer in self._slots(buffers, offset):
            if slot in self.flipped_reads:
                buffer[100] ^= 1
        if self.short_after is not None:
            got = min(got, max(0, GEOMETRY.blocks_offset + self.short_after - offset))
        return got

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        self._pass()
        for slot, buffer in self._slots(buffers, offset):
            place = GEOMETRY.blocks_offset + slot * SLOT
            if slot in self.fail_writes:
                raise self.fail_writes[slot]
            if slot in self.lost_writes:
                continue
            if slot in self.torn_writes:
                super().write(fd, [buffer[: SLOT // 2]], place)
            else:
                super().write(fd, [buffer], place)

    def _pass(self) -> None:
        self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)

    @staticmethod
    def _slots(buffers: Sequence[memoryview], offset: int) -> list[tuple[int, memoryview]]:
        first = (offset - GEOMETRY.blocks_offset) // SLOT
        return [(first + index, buffer) for index, buffer in enumerate(buffers)]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, open_bench: OpenBench) -> FaultyIO:
    """The backend of every tier that is opened with ``io="faulty"``; sound until told otherwise."""
    backend = FaultyIO()
    monkeypatch.setitem(IO_BACKENDS, "faulty", lambda: backend)
    return backend


def io_error(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


def but(*slots: int) -> list[bool]:
    return [slot not in slots for slot in ALL]


# -- reading -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(0,), (3,), (SLOTS - 1,), (1, 2, 6), tuple(ALL)], ids=str)
async def test_blocks_that_cannot_be_read_fail_alone(
    folder: Path, open_bench: OpenBench, faulty: FaultyIO, bad: tuple[int, ...]
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    faulty.fail_reads = dict.fromkeys(bad, io_error())
    assert await bench.fetch(KEYS, ALL) == but(*bad)
    done = await bench.tier.read(KEYS, ALL, ALL)
    for told in (str(segment_of(folder)), f"slot {bad[0]}", "Input/output error"):
        assert told in (done.error or "")


async def test_scattered_blocks_whose_records_cannot_be_read_fail_alone(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(io="buffered")
    await bench.store(KEYS, ALL)
    works, calls = IndexFile.read, 0

    def fail_at_slot_3(index: IndexFile, first: int, count: int) -> bytes:
        nonlocal calls
        calls += 1
        if first <= 3 < first + count:
            raise io_error()
        return works(index, first, count)

    monkeypatch.setattr(IndexFile, "read", fail_at_slot_3)
    # Slot 3 lies between two of them: their records do not depend on its.
    scattered = [0, 2, 4, 6]
    assert await bench.fetch([KEYS[slot] for slot in scattered], scattered) == [True] * 4
    odd = [1, 3, 5, 7]
    assert await bench.fetch([KEYS[slot] for slot in odd], odd) == [True, False, True, True]
    monkeypatch.setattr(IndexFile, "read", works)
    assert await bench.fetch(KEYS, ALL) == but()
    assert calls


async def test_the_records_of_scattered_blocks_are_read_in_one_call(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(io="buffered", io_threads=1)
    await bench.store(KEYS, ALL)
    works, calls = IndexFile.read, []

    def count(index: IndexFile, first: int, count: int) -> bytes:
        calls.append((first, count))
        return works(index, first, count)

    monkeypatch.setattr(IndexFile, "read", count)
    assert await bench.fetch([KEYS[slot] for slot in (1, 4, 6)], [1, 4, 6]) == [True] * 3
    assert calls == [(1, 6)]


@pytest.mark.parametrize("got", [0, 1, SLOT - 1, 2 * SLOT, 4 * SLOT + 500, SLOTS * SLOT - SLOT])
async def test_after_a_short_read_what_arrived_is_good_and_the_rest_is_missed(
    open_bench: OpenBench, faulty: FaultyIO, got: int
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    faulty.short_after = got
    whole = [slot * SLOT + bench.chunk_bytes <= got for slot in ALL]
    assert await bench.fetch(KEYS, ALL) == whole


async def test_bytes_that_changed_on_their_way_are_a_miss(
    open_bench: OpenBench, faulty: FaultyIO
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    faulty.flipped_reads = {2, 5}
    assert await bench.fetch(KEYS, ALL) == but(2, 5)


# -- writing -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(0,), (3,), (SLOTS - 1,), (1, 2, 6), tuple(ALL)], ids=str)
async def test_blocks_that_cannot_be_written_fail_alone(
    open_bench: OpenBench, faulty: FaultyIO, bad: tuple[int, ...]
) -> None:
    bench = open_bench(io="faulty")
    faulty.fail_writes = dict.fromkeys(bad, io_error(errno.ENOSPC))
    done = await bench.store(KEYS, ALL)
    assert done.ok == but(*bad)
    assert done.error is not None
    assert "No space left on device" in done.error
    assert await bench.fetch(KEYS, ALL) == but(*bad)
    bench.abandon()
    again = open_bench(io="faulty")
    assert dict(again.opening.entries) == {KEYS[s]: s for s in ALL if s not in bad}
    # They can be written later.
    faulty.fail_writes = {}
    assert (await again.store([KEYS[bad[0]]], bad[:1])).ok == [True]
    assert await again.fetch(KEYS, ALL) == but(*bad[1:])


async def test_a_failed_rewrite_leaves_neither_the_old_chunk_nor_the_new(
    open_bench: OpenBench, faulty: FaultyIO
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    faulty.fail_writes = {3: io_error()}
    new = [key_of(100 + n) for n in ALL]
    assert (await bench.store(new, ALL)).ok == but(3)
    assert await bench.fetch([KEYS[3]], [3]) == [False]
    bench.abandon()
    again = open_bench(io="faulty")
    assert dict(again.opening.entries) == {new[s]: s for s in ALL if s != 3}


@pytest.mark.parametrize("fault", ["lost_writes", "torn_writes"])
async def test_a_write_that_a_disk_lost_or_tore_is_a_miss_later(
    open_bench: OpenBench, faulty: FaultyIO, fault: str
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    setattr(faulty, fault, {1, 4})
    new = [key_of(100 + n) for n in ALL]
    # The disk said that all was well.
    assert (await bench.store(new, ALL)).ok == but()
    bench.abandon()
    again = open_bench(io="faulty")
    assert await again.fetch(new, ALL) == but(1, 4)


# -- both ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        *map(
            io_error,
            (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.EBADF),
        ),
        OSError("an error without a number"),
    ],
    ids=str,
)
async def test_whatever_the_system_says_the_tier_answers(
    open_bench: OpenBench, faulty: FaultyIO, fault: OSError
) -> None:
    bench = open_bench(io="faulty")
    faulty.fail_writes = {2: fault}
    faulty.fail_reads = {5: fault}
    written = await bench.store(KEYS, ALL)
    assert written.ok == but(2)
    read = await bench.tier.read(KEYS, ALL, ALL)
    assert read.ok == but(2, 5)
    for error in (written.error, read.error):
        assert (fault.strerror or str(fault)) in str(error)


async def test_a_backend_that_raises_something_else_does_not_hang_its_caller(
    open_bench: OpenBench, faulty: FaultyIO
) -> None:
    bench = open_bench(io="faulty")
    await bench.store(KEYS, ALL)
    faulty.fail_reads = {3: ZeroDivisionError("a fault in the backend")}
    for _ in range(6):
        reading = asyncio.ensure_future(bench.fetch(KEYS, ALL))
        done, _ = await asyncio.wait({reading}, timeout=PATIENCE)
        assert done, "the read never ends"
        assert reading.exception() is not None or not reading.result()[3]
    # No thread was lost by it.
    faulty.fail_reads = {}
    assert await bench.fetch(KEYS, ALL) == but()


async def test_a_disk_that_does_not_answer_never_blocks_the_loop(
    open_bench: OpenBench, faulty: FaultyIO
) -> None:
    bench = open_bench(io="faulty", io_threads=2)
    await bench.store(KEYS, ALL)
    faulty.gate = threading.Event()
    faulty.begun.clear()
    read = asyncio.ensure_future(bench.tier.read(KEYS[:4], ALL[:4], ALL[:4]))
    rows = bench.fill(KEYS[4:], first_row=4)
    write = asyncio.ensure_future(bench.tier.write(KEYS[4:], ALL[4:], rows))
    grow = asyncio.ensure_future(bench.tier.grow())
    await asyncio.to_thread(faulty.begun.wait, PATIENCE)
    close = asyncio.ensure_future(bench.close())
    # Only this loop opens the gate: if it waited for the disk, it would wait in vain.
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not any(call.done() for call in (read, write, close))
    faulty.gate.set()
    await asyncio.gather(read, write, grow, close)
    assert read.result().ok == write.result().ok == [True] * 4


async def test_close_ignores_the_recency_of_slots_that_are_not_there(open_bench: OpenBench) -> None:
    bench = open_bench()
    await bench.store(KEYS, ALL)
    await bench.close([(KEYS[1], 1), (b"nowhere", 99 * SLOTS), (KEYS[0], 0)])
    again = open_bench(lane=0)
    assert list(again.opening.entries)[-2:] == [(KEYS[1], 1), (KEYS[0], 0)]
    assert await again.fetch(KEYS, ALL) == but()


async def test_growth_that_fails_at_its_last_step_leaves_nothing_behind(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench()
    descriptors = len(os.listdir("/proc/self/fd"))

    def fail(folder: Path) -> None:
        raise io_error()

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.tiers.disk.segment.sync_folder", fail)
        segment, error = await bench.tier.grow()
    assert segment is None
    assert "Input/output error" in str(error)
    assert lane_bytes(folder) == SEGMENT
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert await bench.tier.grow() == (1, None)


# -- real file systems ---------------------------------------------------------------------


async def test_a_full_disk_stops_growth_with_a_reason_and_nothing_else(
    small_disk: Callable[[int], Path], open_bench: OpenBench
) -> None:
    path = small_disk(SEGMENT * 5 // 2)
    bench = open_bench(path, segments=4)
    assert (await bench.tier.grow())[0] == 1
    keys = [key_of(n) for n in range(2 * SLOTS)]
    slots = list(range(2 * SLOTS))
    assert all((await bench.store(keys, slots)).ok)
    for _ in range(3):
        segment, error = await bench.tier.grow()
        assert segment is None
        assert error is not None
        assert "No space left on device" in error
    assert lane_bytes(path) == 2 * SEGMENT, "part of a segment was left behind"
    assert await bench.fetch(keys, slots) == [True] * len(keys)
    assert (await bench.store([key_of(99)], [5])).ok == [True]
    await bench.close([(key_of(99), 5)])
    again = open_bench(path, segments=4)
    assert len(again.opening.entries) == len(keys)


async def test_a_file_system_that_goes_down_is_a_miss_and_never_an_exception(
    ext4: Device, open_bench: OpenBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = open_bench(ext4.place / "cache", io="direct")
    assert all((await bench.store(KEYS, ALL)).ok)
    ext4.cut_power()
    assert await bench.fetch(KEYS, ALL) == [False] * SLOTS
    done = await bench.store(KEYS, ALL)
    assert done.ok == [False] * SLOTS
    assert done.error is not None
    assert "Input/output error" in done.error
    segment, error = await bench.tier.grow()
    assert segment is None
    assert error is not None
    assert "Input/output error" in error
    assert isinstance(await bench.tier.clear(), str)
    await asyncio.wait_for(bench.close([(KEYS[0], 0)]), PATIENCE)
    assert [r.levelno for r in caplog.records if r.levelno > logging.WARNING] == []


async def test_one_path_that_goes_down_leaves_what_lies_on_the_other(
    ext4: Device, tmp_path: Path, open_bench: OpenBench
) -> None:
    bench = open_bench([ext4.place / "cache", tmp_path / "other"], segments=2)
    slots = [*range(SLOTS), *range(SLOTS, 2 * SLOTS)]
    keys = [key_of(n) for n in slots]
    assert all((await bench.store(keys, slots)).ok)
    ext4.cut_power()
    assert await bench.fetch(keys, slots) == [False] * SLOTS + [True] * SLOTS
    done = await bench.store(keys, slots)
    assert done.ok == [False] * SLOTS + [True] * SLOTS
    assert done.error is not None
    assert f"(and {SLOTS - 1} more chunks)" in done.error
    await asyncio.wait_for(bench.close([]), PATIENCE)


# -- whose rows and files they are ---------------------------------------------------------


class Held(UnderWay):
    """The reads of a backend, waiting until they may go on."""

    def __init__(self, backend: IOBackend, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self._works = partial(IOBackend.move_all, backend, load=True)
        patch.setattr(backend, "begin", self._begin)

    def _begin(self, runs: Sequence[IORequest], hashed: int, *, load: bool) -> UnderWay:
        assert load
        self._asked = (runs, hashed)
        return self

    def waits(self) -> bool:
        return False

    def end(self) -> list[Moved | OSError]:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        try:
            return self._works(*self._asked)
        finally:
            self.ended.set()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_read_that_breaks_on_one_path_ends_when_the_other_has_let_go_of_its_rows(
    tmp_path: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    bench = open_bench([tmp_path / "one", tmp_path / "other"], segments=2)
    slots = list(range(2 * SLOTS))
    keys = [key_of(n) for n in slots]
    assert all((await bench.store(keys, slots)).ok)
    one, other = bench.tier.volumes  # type: ignore[attr-defined]

    def breaks(runs: Sequence[IORequest], hashed: int, *, load: bool) -> UnderWay:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(one.backend, "begin", breaks)
    held = Held(other.backend, monkeypatch)
    reading = asyncio.ensure_future(bench.tier.read(keys, slots, slots))
    assert await asyncio.to_thread(held.begun.wait, PATIENCE)
    for _ in range(3):
        if cancelled:
            reading.cancel()
        await asyncio.wait({reading}, timeout=0.05)
        assert not reading.done(), "rows are given back while a thread fills them"
    held.go_on.set()
    with pytest.raises((RuntimeError, asyncio.CancelledError)):
        await reading
    assert held.ended.is_set()


async def test_files_of_a_tier_that_is_abandoned_stay_open_for_a_call_that_uses_them(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench()
    assert (await bench.store(KEYS, ALL)).ok == [True] * SLOTS
    (volume,) = bench.tier.volumes  # type: ignore[attr-defined]
    held = Held(volume.backend, monkeypatch)
    reading = asyncio.ensure_future(bench.tier.read(KEYS, ALL, ALL))
    assert await asyncio.to_thread(held.begun.wait, PATIENCE)
    bench.tier.abandon()
    held.go_on.set()
    assert (await reading).ok == [True] * SLOTS
    # The thread that made the call closes the files after it.
    await until_async(lambda: volume.lane._lock is None)
    again = open_bench()
    assert len(again.opening.entries) == SLOTS


async def test_a_file_whose_end_tells_of_an_error_is_gone_all_the_same(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system tells at the close what went wrong with writes before."""
    bench = open_bench(segments=3)
    for _ in range(2):
        assert (await bench.tier.grow())[0] is not None
    backend = disk_of(bench).volumes[0].backend
    close = type(backend).close

    def fails(self: Any, fd: int) -> None:
        close(self, fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(type(backend), "close", fails)
        for _ in range(2):
            assert await bench.tier.remove_segment(1) is None
        bench.abandon()
        # The surplus of a smaller one.
        again = open_bench(segments=1)
        assert len(disk_of(again).volumes[0].segments) == 1
    assert len(list(lane_of(folder).glob("segment-*"))) == 1


async def test_reads_of_a_chunk_are_not_those_of_the_next_one_in_its_slot(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    first, second = key_of(1), key_of(2)
    assert (await bench.store([first], [0])).ok == [True]
    for _ in range(5):
        assert await bench.fetch([first], [0]) == [True]
    assert (await bench.store([second], [0])).ok == [True]
    await bench.close([(second, 0)])
    _, live, _ = read_index(segment_of(folder))
    assert (live.keys(), live.records["reads"].tolist()) == ([second], [0])


async def test_a_disk_that_cannot_grow_is_told_of_though_others_are_full_on_purpose(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench([folder / "a", folder / "b"], segments=4)
    first, second = disk_of(bench).volumes
    for told in ((None, "no room"), ("no room", None)):
        for volume, its in zip((first, second), told, strict=True):
            monkeypatch.setattr(volume, "grow", lambda its=its: its)
        assert await bench.tier.grow() == (None, "no room")
