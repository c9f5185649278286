"""Space of a disk: no more than the capacity is taken, and what is removed is given back."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from tests.faults.conftest import Device
from tests.tiers.conftest import OpenBench
from tests.tiers.support import NAMESPACE, SEGMENT, SLOTS, disk_of, segment_of
from tests.tiers.test_peers import Follower

KEYS = [key_of(number) for number in range(SLOTS)]


# -- copy-on-write -------------------------------------------------------------------------

LARGE = Geometry(120, 64 * 1024, 64 * 1024)


@pytest.fixture
def btrfs(tmp_path: Path, mount: Callable[..., Path]) -> Path:
    return Device("btrfs", tmp_path / "image", mount).place


@pytest.fixture
def large(btrfs: Path) -> Iterator[TierBench]:
    """A tier of one large segment on btrfs."""
    size = LARGE.file_bytes
    tier = DiskTier(btrfs / "cache", NAMESPACE, LARGE.chunk_bytes, size, segment_bytes=size)
    bench = TierBench(tier, LARGE.slots, LARGE.slot_bytes, LARGE.chunk_bytes)
    yield bench
    bench.abandon()


def used_bytes(place: Path) -> int:
    os.sync()
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


async def test_rewriting_at_random_takes_no_more_space_on_a_copy_on_write_file_system(
    btrfs: Path, large: TierBench
) -> None:
    keys = [key_of(number) for number in range(LARGE.slots)]
    await large.store(keys, range(LARGE.slots))
    before = used_bytes(btrfs)
    for seed in range(3):
        slots = random.Random(seed).sample(range(LARGE.slots), LARGE.slots // 2)
        for slot in slots:
            await large.store([keys[slot]], [slot])
        os.sync()
    grown = used_bytes(btrfs) - before
    assert grown < LARGE.file_bytes // 10, f"{grown} bytes more than the files have"


# -- room that is known too little of ------------------------------------------------------


@pytest.mark.parametrize("known", ["too little", "not at all"])
async def test_a_segment_is_made_where_only_an_allocation_can_tell_whether_there_is_room(
    tmp_path: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """XFS counts as taken what it has set aside for files that grow."""
    place = tmp_path / "cache"
    if known == "too little":
        place = Device("xfs", tmp_path / "image", mount).place

    def statvfs(path: object) -> os.statvfs_result:
        if known == "not at all":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return os.statvfs_result((4096, 4096, 1000, 0, 0, 1000, 1000, 1000, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    tier = DiskTier(place, NAMESPACE, LARGE.chunk_bytes, 2 * SEGMENT, segment_bytes=SEGMENT)
    bench = TierBench(tier, LARGE.slots, LARGE.slot_bytes, LARGE.chunk_bytes)
    assert (await bench.store(KEYS[:1], [0])).ok == [True]
    bench.abandon()


# -- removed segments ----------------------------------------------------------------------


async def test_a_removed_segment_gives_its_space_back_while_a_neighbour_has_it_open(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    follower = Follower(open_bench())
    await follower.look()
    assert await follower.read(*KEYS) == [True] * SLOTS
    fd = os.open(segment_of(folder), os.O_RDONLY)
    try:
        with mmap.mmap(fd, SEGMENT, prot=mmap.PROT_READ) as mapped:
            assert await bench.tier.remove_segment(0) is None
            assert os.fstat(fd).st_blocks == 0
            assert not any(mapped[:])
    finally:
        os.close(fd)
    assert await follower.read(*KEYS) == [False] * SLOTS
    await follower.look()
    assert follower.entries == {}
    follower.tier.abandon()


async def test_a_capacity_that_was_lowered_gives_space_back_while_a_neighbour_reads(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    assert (await bench.tier.grow())[0] == 1
    await bench.store(KEYS, range(SLOTS, 2 * SLOTS))
    await bench.close()
    fd = os.open(segment_of(folder), os.O_RDONLY)
    try:
        open_bench(segments=1)
        assert not segment_of(folder).exists()
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)


async def test_a_removed_segment_with_another_name_keeps_what_is_in_it(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    backup = folder / "backup"
    os.link(segment_of(folder), backup)
    before = backup.read_bytes()
    assert await bench.tier.remove_segment(0) is None
    assert not segment_of(folder).exists()
    assert backup.read_bytes() == before


# -- which lane, and which size ------------------------------------------------------------------


async def test_each_process_finds_a_lane_of_its_size_again_in_whatever_order_they_start(
    open_bench: OpenBench,
) -> None:
    small, large = 1, 4
    keys = [key_of(n) for n in range(large * SLOTS)]
    for order in ([small, large], [large, small], [small, large]):
        benches = {size: open_bench(segments=size) for size in order}
        for size, bench in benches.items():
            while len(disk_of(bench).volumes[0].segments) < size:
                assert (await bench.tier.grow())[0] is not None
            its = dict(bench.opening.entries)
            if order != [small, large] or its:
                assert len(its) == size * SLOTS
            slots = list(range(size * SLOTS))
            for at in range(0, len(slots), SLOTS):
                some = slots[at : at + SLOTS]
                assert all((await bench.store([keys[slot] for slot in some], some)).ok)
        for bench in benches.values():
            bench.abandon()


async def test_a_lane_with_more_than_fits_is_taken_where_no_other_is_left(
    open_bench: OpenBench,
) -> None:
    bench = open_bench(segments=3)
    for _ in range(2):
        assert (await bench.tier.grow())[0] is not None
    bench.abandon()
    # As where an operator gives the only process less room.
    again = disk_of(open_bench(segments=1)).volumes[0]
    assert (again.lane.number, len(again.segments)) == (0, 1)


async def test_a_lane_that_cannot_be_used_is_not_taken_because_it_is_the_fullest(
    folder: Path, open_bench: OpenBench
) -> None:
    benches = [open_bench(), open_bench(segments=3)]
    for _ in range(2):
        assert (await benches[1].tier.grow())[0] is not None
    for bench in benches:
        bench.abandon()
    (folder / NAMESPACE.name / "lane-1").chmod(0o777)
    assert disk_of(open_bench()).volumes[0].lane.number == 0


async def test_on_all_paths_a_process_takes_the_lane_of_one_number(
    tmp_path: Path, open_bench: OpenBench
) -> None:
    paths = [tmp_path / name for name in "ab"]
    benches = [open_bench(paths, segments=6) for _ in range(2)]
    for count, bench in zip((2, 3), benches, strict=True):
        for _ in range(count):
            assert (await bench.tier.grow())[0] is not None
    for bench in benches:
        bench.abandon()
    for bench in [open_bench(paths, segments=6) for _ in range(2)]:
        first, second = disk_of(bench).volumes
        assert first.lane.number == second.lane.number


async def test_a_process_takes_no_size_of_segments_from_one_that_lives(
    tmp_path: Path, open_bench: OpenBench
) -> None:
    paths = [tmp_path / name for name in "ab"]
    open_bench(paths, segment_bytes=4 * SEGMENT, capacity_bytes=8 * SEGMENT)
    other = disk_of(open_bench(paths, capacity_bytes=4 * SEGMENT))
    assert other.geometry.slots == SLOTS


@pytest.mark.parametrize("first", ["new", "old"])
async def test_a_path_that_is_added_takes_the_size_of_segments_on_the_others(
    first: str, tmp_path: Path, open_bench: OpenBench
) -> None:
    paths = {name: tmp_path / name for name in ("old", "new")}
    bench = open_bench(paths["old"], segment_bytes=2 * SEGMENT, capacity_bytes=4 * SEGMENT)
    keys = [key_of(n) for n in range(SLOTS)]
    assert all((await bench.store(keys, range(SLOTS))).ok)
    bench.abandon()
    both = [paths[first], *(path for name, path in paths.items() if name != first)]
    bench = open_bench(both, capacity_bytes=8 * SEGMENT)
    entries = dict(bench.opening.entries)
    assert set(entries) == set(keys)
    assert await bench.fetch(keys, [entries[key] for key in keys]) == [True] * SLOTS
