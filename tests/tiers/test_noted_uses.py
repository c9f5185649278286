"""Uses that are written into the records as they happen."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.extents import Extent, Writing
from kvstore.tiers.disk.format import RECORD_BYTES, Geometry
from kvstore.tiers.disk.index import IndexFile, read_index
from kvstore.tiers.disk.io.buffered import BufferedIO
from kvstore.tiers.disk.segment import Segment
from tests.patience import TOO_LONG
from tests.tiers.conftest import OpenBench
from tests.tiers.support import GEOMETRY, NAMESPACE, SLOT, SLOTS, lane_of, segment_of

KEYS = [key_of(n) for n in range(SLOTS)]
ALL = list(range(SLOTS))


@pytest.mark.parametrize("paths", [1, 2])
async def test_chunks_that_were_used_are_the_hottest_when_nobody_has_closed_the_tier(
    tmp_path: Path, open_bench: OpenBench, paths: int
) -> None:
    places = [tmp_path / str(number) for number in range(paths)]
    bench = open_bench(places, segments=paths)
    await bench.store(KEYS, ALL)
    used = [KEYS[5], KEYS[1], KEYS[3]]
    assert await bench.tier.note_uses(used, [5, 1, 3]) is None
    bench.abandon()
    again = open_bench(places, segments=paths)
    cold = [key for key in KEYS if key not in used]
    assert [key for key, _ in again.opening.entries] == [*cold, *used]
    assert await again.fetch(KEYS, ALL) == [True] * SLOTS


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "one fails"])
async def test_chunks_of_one_write_have_the_order_of_their_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also when they are written by several threads, or one by one after a call that failed."""
    size, calls = 2**19, iter([fails])
    if fails:
        write = BufferedIO.write

        def failing(self: BufferedIO, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
            if len(buffers) > 1 and next(calls, False):
                raise OSError(errno.EIO, "injected")
            write(self, fd, buffers, offset)

        monkeypatch.setattr(BufferedIO, "write", failing)
    geometry = Geometry(SLOTS, size, size)
    tier = DiskTier(
        folder, NAMESPACE, size, geometry.file_bytes, segment_bytes=geometry.file_bytes,
        io="buffered", io_threads=3,
    )  # fmt: skip
    bench = TierBench(tier, SLOTS, size, size)
    try:
        done = await bench.store(KEYS, ALL)
        assert done.ok == [True] * SLOTS
    finally:
        bench.abandon()
    _, live, _ = read_index(segment_of(folder))
    assert live.keys() == KEYS
    assert live.records["sequence"].tolist() == ALL


async def test_reads_are_counted_once_whether_they_are_noted_or_saved_at_the_end(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, ALL)
    before = segment_of(folder).stat().st_mtime_ns, (lane_of(folder) / "lock").stat().st_mtime_ns
    for _ in range(3):
        assert await bench.fetch(KEYS[:2], [0, 1]) == [True, True]
    assert await bench.tier.note_uses(KEYS[:1], [0]) is None
    assert await bench.fetch(KEYS[:1], [0]) == [True]
    assert (lane_of(folder) / "lock").stat().st_mtime_ns == before[1], "no news for others"
    await bench.close([(key, slot) for slot, key in enumerate(KEYS)])
    _, live, _ = read_index(segment_of(folder))
    assert live.records["reads"].tolist()[:3] == [4, 3, 0]
    assert (live.records["read_ms"] >= live.records["stored_ms"]).all()


async def test_a_slot_that_holds_another_chunk_or_none_is_left_alone(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS[:3], ALL[:3])
    assert await bench.tier.erase(KEYS[:1]) is None
    raw = segment_of(folder).read_bytes()
    slots = [0, 1, 5, 99 * SLOTS]
    assert await bench.tier.note_uses([KEYS[0], KEYS[2], KEYS[5], KEYS[6]], slots) is None
    assert segment_of(folder).read_bytes() == raw


async def test_a_record_that_is_read_while_it_is_being_written_costs_no_chunk(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench()
    await bench.store(KEYS, ALL)
    works, torn = IndexFile.read, [0]

    def half_written(index: IndexFile, first: int, count: int) -> bytes:
        raw = works(index, first, count)
        if torn:
            at = torn.pop() * RECORD_BYTES
            raw = raw[: at + 8] + b"\xff" * 8 + raw[at + 16 :]
        return raw

    monkeypatch.setattr(IndexFile, "read", half_written)
    assert await bench.fetch(KEYS[:4], ALL[:4]) == [True] * 4
    assert not torn
    bench.abandon()
    assert [key for key, _ in open_bench().opening.entries] == KEYS


async def test_the_record_of_a_slot_is_gone_before_its_bytes_are_written(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, ALL)
    bench.abandon()
    backend = BufferedIO()
    segment = Segment.open(segment_of(folder), NAMESPACE.digest, GEOMETRY, backend)
    try:
        rows = [memoryview(bytearray(SLOT)) for _ in range(3)]
        writing = Writing(backend, [Extent(segment, 2, KEYS[:3], rows)], 100)
        assert segment.index.live().slots == [0, 1, 5, 6, 7]
        (outcome,) = writing.end()
        assert outcome.ok == [True] * 3
        assert segment.index.live().slots == ALL
    finally:
        segment.close()


async def test_a_slot_that_is_rewritten_meanwhile_counts_no_reads_of_the_chunk_before(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(io="buffered")
    await bench.store(KEYS[:1], [0])
    assert await bench.fetch(KEYS[:1] * 5, [0] * 5) == [True] * 5
    note, loop = IndexFile.note_use, asyncio.get_running_loop()

    def slow(self: IndexFile, *given: Any) -> bool:
        done = note(self, *given)
        storing = asyncio.run_coroutine_threadsafe(bench.store(KEYS[1:2], [0]), loop)
        assert storing.result(TOO_LONG).ok == [True]
        return done

    monkeypatch.setattr(IndexFile, "note_use", slow)
    assert await bench.tier.note_uses(KEYS[:1], [0]) is None
    await bench.close([(KEYS[1], 0)])
    assert read_index(segment_of(folder))[1].records["reads"].tolist() == [0]
