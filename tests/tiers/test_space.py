"""Space of a disk: no more than the capacity is taken, and what is removed is given back."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.testing.bench import TierBench, key_of
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.format import Geometry
from tests.tiers.conftest import OpenBench
from tests.tiers.support import NAMESPACE, SEGMENT, SLOTS, segment_of
from tests.tiers.test_peers import Follower

KEYS = [key_of(number) for number in range(SLOTS)]


# -- copy-on-write -------------------------------------------------------------------------

LARGE = Geometry(120, 64 * 1024, 64 * 1024)


@pytest.fixture
def btrfs(tmp_path: Path, mount: Callable[..., Path]) -> Path:
    """A btrfs of 256 MiB."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(256 * 2**20)
    try:
        subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a file system: {error}")
    return mount("-o", "loop", str(image))


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
