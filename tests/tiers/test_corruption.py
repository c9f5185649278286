"""Whatever happened to the files: opening works, wrong bytes are never served, the rest is.

`TierBench.fetch` fails a test by itself when a block is called good that does
not hold the payload of its key.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kvstore.errors import PathUnusableError
from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk.format import (
    ALIGN,
    RECORD_BYTES,
    Geometry,
    Header,
    encode_header,
    parse_header,
)
from kvstore.tiers.disk.index import IndexFile
from kvstore.tiers.disk.namespace import Namespace
from tests.patience import PATIENCE
from tests.tiers.conftest import OpenBench
from tests.tiers.support import (
    CHUNK,
    GEOMETRY,
    NAMESPACE,
    SEGMENT,
    SLOT,
    SLOTS,
    disk_bytes,
    disk_of,
    flip,
    lane_bytes,
    lane_of,
    segment_of,
)

KEYS = [key_of(n) for n in range(2 * SLOTS)]
"""The chunks of `stored`: key n lies in slot n, of segments 0 and 1."""


@pytest.fixture
async def stored(folder: Path, open_bench: OpenBench) -> Path:
    """A cache of two full segments that was closed in order; there is room for a third."""
    bench = open_bench()
    assert (await bench.tier.grow())[0] == 1
    done = await bench.store(KEYS, range(len(KEYS)))
    assert all(done.ok)
    await bench.close([(key, slot) for slot, key in enumerate(KEYS)])
    return folder


async def served(bench: TierBench) -> set[int]:
    """Which of KEYS are reported, at their place, and served."""
    entries = dict(bench.opening.entries)
    numbers = [n for n, key in enumerate(KEYS) if key in entries]
    assert len(entries) == len(numbers), "something was reported that was never stored"
    ok = await bench.fetch([KEYS[n] for n in numbers], [entries[KEYS[n]] for n in numbers])
    return {n for n, one in zip(numbers, ok, strict=True) if one}


def slot_offset(slot: int) -> int:
    return GEOMETRY.blocks_offset + slot * SLOT


def record_offset(slot: int) -> int:
    return GEOMETRY.index_offset + slot * RECORD_BYTES


ALL = set(range(2 * SLOTS))
SEGMENT_0 = set(range(SLOTS))
SEGMENT_1 = set(range(SLOTS, 2 * SLOTS))


# -- flipped bits --------------------------------------------------------------------------


async def test_a_flipped_bit_in_a_payload_is_a_miss_of_that_chunk(
    stored: Path, open_bench: OpenBench
) -> None:
    places = {0: 0, 1: 1, 2: 4095, 3: 4096, 5: CHUNK // 2, SLOTS - 1: CHUNK - 1}
    for slot, at in places.items():
        flip(segment_of(stored), slot_offset(slot) + at, 1 << at % 8)
    bench = open_bench()
    assert len(bench.opening.entries) == len(ALL)
    assert await served(bench) == ALL - places.keys()


async def test_bytes_after_the_payload_do_not_matter(stored: Path, open_bench: OpenBench) -> None:
    for slot in range(SLOTS):
        flip(segment_of(stored), slot_offset(slot) + CHUNK)
    assert await served(open_bench()) == ALL


async def test_a_chunk_that_proved_wrong_is_not_reported_again(
    stored: Path, open_bench: OpenBench
) -> None:
    flip(segment_of(stored), slot_offset(2))
    bench = open_bench()
    assert await served(bench) == ALL - {2}
    bench.abandon()
    assert KEYS[2] not in dict(open_bench().opening.entries)


async def test_payloads_that_changed_places_are_misses(stored: Path, open_bench: OpenBench) -> None:
    with open(segment_of(stored), "r+b") as file:
        file.seek(slot_offset(0))
        first, second = file.read(SLOT), file.read(SLOT)
        file.seek(slot_offset(0))
        file.write(second + first)
    assert await served(open_bench()) == ALL - {0, 1}


@pytest.mark.parametrize("first", [0, RECORD_BYTES // 2])
async def test_a_flipped_bit_in_a_record_loses_that_chunk_alone(
    stored: Path, open_bench: OpenBench, first: int
) -> None:
    """Every tenth byte, each in the record of another slot."""
    slots = range(1, SLOTS)
    for slot, byte in zip(slots, range(first, RECORD_BYTES, 10), strict=False):
        flip(segment_of(stored), record_offset(slot) + byte, 0x10)
    assert await served(open_bench()) == ALL - set(slots)


async def test_a_damaged_slot_can_be_used_again(stored: Path, open_bench: OpenBench) -> None:
    flip(segment_of(stored), record_offset(4) + 20)
    bench = open_bench()
    assert (await bench.store([KEYS[4]], [4])).ok == [True]
    bench.abandon()
    assert await served(open_bench()) == ALL


@pytest.mark.parametrize("byte", range(0, 700, 83))
async def test_a_flipped_bit_in_a_header_loses_that_segment_at_most(
    stored: Path, open_bench: OpenBench, byte: int
) -> None:
    flip(segment_of(stored), byte, 0x02)
    bench = open_bench()
    assert await served(bench) >= SEGMENT_1
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT


async def fill_up(bench: TierBench) -> None:
    """Grow until the tier's capacity is used up."""
    for _ in range(10):
        segment, error = await bench.tier.grow()
        if segment is None:
            assert error is None
            return
    raise AssertionError("the tier grows without end")


# -- damaged files -------------------------------------------------------------------------

LENGTHS = {
    "nothing": 0,
    "one byte": 1,
    "less than a header": ALIGN - 1,
    "the header": ALIGN,
    "half a record": ALIGN + 5 * RECORD_BYTES + 64,
    "no blocks": GEOMETRY.blocks_offset,
    "half a slot": slot_offset(5) + 4097,
    "one byte short": SEGMENT - 1,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
async def test_a_segment_that_was_cut_short_serves_what_it_still_has(
    stored: Path, open_bench: OpenBench, length: int
) -> None:
    os.truncate(segment_of(stored), length)
    bench = open_bench()
    if length >= ALIGN:
        assert segment_of(stored).stat().st_size == SEGMENT, "its space must be there again"
    whole = {slot for slot in SEGMENT_0 if slot_offset(slot) + CHUNK <= length}
    assert await served(bench) == SEGMENT_1 | whole
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
async def test_a_segment_that_is_cut_short_while_it_is_open_serves_what_it_still_has(
    stored: Path, open_bench: OpenBench, length: int
) -> None:
    bench = open_bench()
    os.truncate(segment_of(stored), length)
    whole = {slot for slot in SEGMENT_0 if slot_offset(slot) + CHUNK <= length}
    reading = asyncio.ensure_future(served(bench))
    done, _ = await asyncio.wait({reading}, timeout=PATIENCE)
    assert done, "the read never ends"
    assert reading.result() == SEGMENT_1 | whole
    # It can be written and closed all the same.
    assert (await bench.store([KEYS[1]], [1])).ok == [True]
    assert await bench.fetch([KEYS[1]], [1]) == [True]
    await bench.close([(KEYS[1], 1)])
    again = await served(open_bench())
    assert again >= SEGMENT_1
    if length >= ALIGN:
        assert 1 in again


async def test_a_segment_with_bytes_after_its_end_gets_its_size_back(
    stored: Path, open_bench: OpenBench
) -> None:
    with open(segment_of(stored), "ab") as file:
        file.write(bytes(5 * SEGMENT))
    bench = open_bench()
    assert await served(bench) == ALL
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT


async def test_a_segment_whose_blocks_were_lost_serves_nothing_and_can_be_used_again(
    stored: Path, open_bench: OpenBench
) -> None:
    with open(segment_of(stored), "r+b") as file:
        file.seek(GEOMETRY.blocks_offset)
        file.write(bytes(SLOTS * SLOT))
    bench = open_bench()
    assert await served(bench) == SEGMENT_1
    assert all((await bench.store(KEYS[:SLOTS], range(SLOTS))).ok)
    assert await served(bench) == ALL


@pytest.mark.parametrize("seed", range(4))
async def test_random_damage_anywhere_never_serves_wrong_bytes(
    stored: Path, open_bench: OpenBench, seed: int
) -> None:
    chance = random.Random(seed)
    for number in (0, 1):
        with open(segment_of(stored, number), "r+b") as file:
            for _ in range(chance.randrange(1, 6)):
                size = chance.choice([1, 16, 4096, 20000])
                file.seek(chance.randrange(0, SEGMENT - size))
                file.write(chance.randbytes(size))
            if chance.random() < 0.3:
                file.truncate(chance.randrange(SEGMENT))
    bench = open_bench()
    await served(bench)
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT
    # And it is a tier like any other: opened again, all of what it says is right.
    bench.abandon()
    again = open_bench()
    assert len(await served(again)) == len(again.opening.entries)


def fail_in_segment_0(monkeypatch: pytest.MonkeyPatch, stored: Path, method: str) -> None:
    works = getattr(IndexFile, method)

    def fail(index: IndexFile, first: int, count: int) -> Any:
        if os.readlink(f"/proc/self/fd/{index._fd}") == str(segment_of(stored)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return works(index, first, count)

    monkeypatch.setattr(IndexFile, method, fail)


async def test_a_damaged_record_that_cannot_be_erased_costs_its_chunk_alone(
    stored: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(segment_of(stored), record_offset(4) + 20)
    fail_in_segment_0(monkeypatch, stored, "erase")
    for _ in range(2):
        bench = open_bench()
        assert await served(bench) == (SEGMENT_0 | SEGMENT_1) - {4}
        bench.abandon()


async def test_a_segment_whose_index_cannot_be_reached_is_left_alone_and_counted(
    stored: Path,
    open_bench: OpenBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_in_segment_0(monkeypatch, stored, "read")
    descriptors = len(os.listdir("/proc/self/fd"))
    bench = open_bench()
    assert str(segment_of(stored)) in caplog.text
    assert await served(bench) == SEGMENT_1
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT
    bench.abandon()
    assert len(os.listdir("/proc/self/fd")) == descriptors


# -- files that are something else ---------------------------------------------------------


def random_bytes(file: Path) -> None:
    file.write_bytes(random.Random(1).randbytes(SEGMENT))


def zeros(file: Path) -> None:
    file.write_bytes(bytes(SEGMENT))


def other_tensors(file: Path) -> None:
    safetensors.numpy.save_file({"weights": np.zeros((100, 100), np.float32)}, file)


def newer_version(file: Path) -> None:
    told = json.loads(encode_header(Header("ab" * 32, "00" * 16, GEOMETRY))[8:])
    told["__metadata__"]["version"] = "2"
    text = json.dumps(told).encode().ljust(ALIGN - 8)
    file.write_bytes((ALIGN - 8).to_bytes(8, "little") + text + bytes(SEGMENT - ALIGN))


def other_namespace(file: Path) -> None:
    other = Namespace.of("other", {"model": "other"}).digest
    file.write_bytes(encode_header(Header(other, "00" * 16, GEOMETRY)) + bytes(SEGMENT - ALIGN))


def other_geometry(file: Path) -> None:
    header = parse_header(file.read_bytes()[:ALIGN], "own")
    geometry = Geometry(SLOTS - 1, SLOT, CHUNK)
    page = encode_header(Header(header.namespace, header.segment_id, geometry))
    file.write_bytes(page + bytes(SEGMENT - ALIGN))


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("somebody's")


def pipe_instead(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_to_a_whole_segment(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


FOREIGN: list[Callable[[Path], None]] = [
    random_bytes,
    zeros,
    other_tensors,
    newer_version,
    other_namespace,
    other_geometry,
    folder_instead,
    pipe_instead,
    link_to_a_whole_segment,
    link_to_nothing,
]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
async def test_a_foreign_file_is_left_alone_named_and_counted(
    stored: Path,
    open_bench: OpenBench,
    make: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = segment_of(stored, 1)
    make(file)
    before = file.lstat()
    bench = open_bench()
    assert str(file) in caplog.text
    assert await served(bench) == SEGMENT_0
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT
    after = file.lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("slots", [1, SLOTS - 1, SLOTS + 1, 2 * SLOTS + 2, 3 * SLOTS])
async def test_a_segment_of_another_geometry_costs_its_own_chunks_only(
    stored: Path, open_bench: OpenBench, number: int, whole: bool, slots: int
) -> None:
    geometry = Geometry(slots, SLOT, CHUNK)
    with open(segment_of(stored, number), "r+b") as file:
        header = parse_header(file.read(ALIGN), "own")
        file.seek(0)
        file.write(encode_header(Header(header.namespace, header.segment_id, geometry)))
        file.truncate(geometry.file_bytes if whole else 2 * ALIGN)
    before = disk_bytes(stored)
    bench = open_bench()
    assert await served(bench) == (SEGMENT_1 if number == 0 else SEGMENT_0)
    await fill_up(bench)
    assert before <= disk_bytes(stored) <= 3 * SEGMENT


async def test_a_segment_that_was_cut_short_is_left_alone_where_the_capacity_is_used_up(
    stored: Path, open_bench: OpenBench, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(segment_of(stored), slot_offset(3))
    (lane_of(stored) / "core.4711").write_bytes(bytes(SEGMENT + 4096))
    before = disk_bytes(stored)
    bench = open_bench()
    assert f"{segment_of(stored)}: cut short" in caplog.text
    assert bench.opening.max_segments == 1
    assert await served(bench) == SEGMENT_1
    await fill_up(bench)
    assert disk_bytes(stored) == before
    assert segment_of(stored).stat().st_size == slot_offset(3)


async def test_room_of_segments_that_a_lower_capacity_removes_goes_to_one_that_was_cut_short(
    stored: Path, open_bench: OpenBench
) -> None:
    os.truncate(segment_of(stored, 1), slot_offset(3))
    bench = open_bench(segments=1)
    assert await served(bench) == {SLOTS, SLOTS + 1, SLOTS + 2}
    assert disk_bytes(stored) == SEGMENT


async def test_what_a_link_leads_to_is_neither_read_nor_written(
    stored: Path, open_bench: OpenBench
) -> None:
    link_to_a_whole_segment(segment_of(stored, 1))
    elsewhere = segment_of(stored, 1).resolve()
    content = elsewhere.read_bytes()
    bench = open_bench()
    await bench.tier.clear()
    await fill_up(bench)
    await bench.store(KEYS[:SLOTS], range(SLOTS))
    assert elsewhere.read_bytes() == content


async def test_foreign_files_that_fill_the_capacity_leave_no_room_for_a_segment(
    folder: Path, open_bench: OpenBench
) -> None:
    open_bench().abandon()
    segment_of(folder).unlink()
    segment_of(folder, 7).write_bytes(bytes(4 * SEGMENT))
    bench = open_bench()
    assert list(bench.opening.segments) == []
    assert bench.opening.max_segments == 0
    assert (await bench.tier.grow())[0] is None
    assert lane_bytes(folder) == 4 * SEGMENT, "the tier added to what is too much already"


async def test_any_other_file_in_the_lane_counts_against_the_capacity(
    stored: Path, open_bench: OpenBench
) -> None:
    (lane_of(stored) / "core.4711").write_bytes(b"x" * (SEGMENT - 10))
    bench = open_bench()
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT
    assert await served(bench) == ALL
    bench.abandon()
    (lane_of(stored) / "segment-02.safetensors.old").write_bytes(b"x" * 11)
    before = lane_bytes(stored)
    again = open_bench()
    await fill_up(again)
    assert lane_bytes(stored) == before, "neither more than there was, nor a segment less"
    assert await served(again) == ALL


async def test_a_probe_that_was_left_by_a_kill_costs_nothing(
    stored: Path, open_bench: OpenBench
) -> None:
    probe = lane_of(stored) / ".probe-4711-0123abcd"
    probe.write_bytes(bytes(4096))
    bench = open_bench()
    assert bench.opening.max_segments == 3
    assert await served(bench) == ALL
    assert not probe.exists()


async def test_two_spellings_of_one_number_are_not_two_segments(
    stored: Path, open_bench: OpenBench
) -> None:
    shutil.copy(segment_of(stored, 1), lane_of(stored) / "segment-01.safetensors")
    bench = open_bench()
    assert await served(bench) == ALL
    await fill_up(bench)
    assert lane_bytes(stored) <= 3 * SEGMENT


async def test_a_copy_of_a_segment_under_another_number_does_no_harm(
    stored: Path, open_bench: OpenBench
) -> None:
    shutil.copy(segment_of(stored, 1), segment_of(stored, 2))
    bench = open_bench()
    assert await served(bench) == ALL
    new = [key_of(100 + n) for n in range(SLOTS)]
    assert all((await bench.store(new, range(SLOTS, 2 * SLOTS))).ok)
    assert await bench.fetch(new, range(SLOTS, 2 * SLOTS)) == [True] * SLOTS
    bench.abandon()
    again = open_bench()
    entries = dict(again.opening.entries)
    ok = await again.fetch(new, [entries[key] for key in new])
    assert ok == [True] * SLOTS


# -- leftovers and limits ------------------------------------------------------------------


async def test_a_segment_that_was_never_finished_is_removed(
    stored: Path, open_bench: OpenBench
) -> None:
    leftover = lane_of(stored) / ".segment-2.0123abcd.tmp"
    leftover.write_bytes(bytes(SEGMENT))
    bench = open_bench()
    assert not leftover.exists()
    assert await served(bench) == ALL


async def test_a_lower_capacity_removes_the_coldest_segments(
    stored: Path, open_bench: OpenBench
) -> None:
    bench = open_bench(segments=3)
    # Segment 0 becomes the warmer one.
    order = [*range(SLOTS, 2 * SLOTS), *range(SLOTS)]
    await bench.close([(KEYS[n], n) for n in order])
    smaller = open_bench(segments=1)
    assert await served(smaller) == SEGMENT_0
    assert lane_bytes(stored) <= SEGMENT


@pytest.mark.usefixtures("as_root")
async def test_a_surplus_segment_that_cannot_be_removed_is_refused_by_name(
    stored: Path, open_bench: OpenBench
) -> None:
    file = segment_of(stored)
    done = subprocess.run(["mount", "--bind", file, file], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        with pytest.raises(PathUnusableError) as caught:
            open_bench(segments=1)
    finally:
        subprocess.run(["umount", file], check=True)
    assert str(file) in str(caught.value)
    assert "busy" in str(caught.value)


async def test_another_segment_size_goes_on_with_the_segments_that_are_there(
    stored: Path, open_bench: OpenBench
) -> None:
    bench = open_bench(segment_bytes=3 * SEGMENT)
    assert bench.opening.segment_slots == SLOTS
    assert await served(bench) == ALL


async def test_small_strange_files_do_not_decide_the_size_of_segments(
    stored: Path, open_bench: OpenBench
) -> None:
    other = Geometry(1, SLOT, CHUNK)
    for number in range(7, 12):
        header = Header(NAMESPACE.digest, f"{number:032x}", other)
        segment_of(stored, number).write_bytes(encode_header(header))
    again = open_bench(segments=6)
    assert disk_of(again).geometry.slots == SLOTS
    assert len(again.opening.entries) == len(KEYS)
