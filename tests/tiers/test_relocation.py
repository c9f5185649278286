"""Copying chunks within the disk tier: what travels with them, and what a failure leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.testing.bench import key_of
from kvstore.tiers.disk.format import Records
from kvstore.tiers.disk.index import IndexFile, read_index
from kvstore.tiers.disk.io import IOBackend, IORequest, Moved
from tests.patience import PATIENCE
from tests.tiers.conftest import OpenBench
from tests.tiers.support import GEOMETRY, SLOT, SLOTS, disk_of, flip, segment_of

KEYS = [key_of(number) for number in range(SLOTS)]
ELSEWHERE = [SLOTS + number for number in range(SLOTS)]


def records(path: Path) -> dict[bytes, tuple[int, int, int]]:
    """Sequence, time of storing and reads of each chunk of a segment."""
    _, live, _ = read_index(path)
    told = zip(
        live.records["sequence"].tolist(),
        live.records["stored_ms"].tolist(),
        live.records["reads"].tolist(),
        strict=True,
    )
    return dict(zip(live.keys(), told, strict=True))


async def test_a_segment_is_listed_in_the_order_of_storing(open_bench: OpenBench) -> None:
    bench = open_bench()
    slots = random.Random(5).sample(range(SLOTS), SLOTS)
    for key, slot in zip(KEYS, slots, strict=True):
        await bench.store([key], [slot])
    assert await bench.tier.list_segment(0) == list(zip(KEYS, slots, strict=True))


async def test_what_a_record_says_travels_with_its_chunk(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    await bench.fetch(KEYS[:3], range(3))
    await bench.tier.close(list(zip(KEYS, range(SLOTS), strict=True)))
    bench = open_bench()
    before = records(segment_of(folder))
    assert sum(reads for _, _, reads in before.values()) == 3
    assert (await bench.tier.grow())[0] == 1
    done = await bench.tier.relocate(KEYS, range(SLOTS), ELSEWHERE)
    assert done.ok == [True] * SLOTS
    assert records(segment_of(folder, 1)) == before
    assert await bench.fetch(KEYS, ELSEWHERE) == [True] * SLOTS
    assert await bench.fetch(KEYS, range(SLOTS)) == [True] * SLOTS, "the old copies stay"


async def test_reads_that_are_not_noted_yet_travel_with_their_chunk(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    one, other = KEYS[:2]
    await bench.store([one, other], [0, 1])
    for key, slot, reads in ((one, 0, 3), (other, 1, 7)):
        for _ in range(reads):
            await bench.fetch([key], [slot])
    # The other has left; its slot is free.
    assert (await bench.tier.relocate([one], [0], [1])).ok == [True]
    await bench.tier.close([(one, 1)])
    assert records(segment_of(folder))[one][2] == 3


async def test_a_closed_tier_can_be_named(open_bench: OpenBench) -> None:
    bench = open_bench()
    await bench.close()
    assert "closed" in bench.tier.description


async def test_a_segment_whose_file_is_gone_already_is_removed_all_the_same(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    segment_of(folder).unlink()
    assert await bench.tier.remove_segment(0) is None
    assert disk_of(bench).volumes[0].segments == {}


async def test_a_chunk_that_has_rotted_is_lost_alone_and_its_record_is_erased(
    folder: Path, open_bench: OpenBench
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    await bench.tier.grow()
    flip(segment_of(folder), GEOMETRY.blocks_offset + 3 * SLOT + 17)
    done = await bench.tier.relocate(KEYS, range(SLOTS), ELSEWHERE)
    assert [place for place, ok in enumerate(done.ok) if not ok] == [3]
    assert not done.unread
    assert "slots [3] do not hold" in (done.error or "")
    assert KEYS[3] not in records(segment_of(folder))
    assert KEYS[3] not in records(segment_of(folder, 1))


@pytest.mark.parametrize("fails", ["reading", "writing", "the record"])
async def test_a_chunk_that_cannot_be_copied_is_not_called_lost(
    folder: Path, open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    await bench.tier.grow()
    backend = type(disk_of(bench).backend)
    error = OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(
        self: IOBackend, runs: Sequence[IORequest], hashed: int = 0, *, load: bool
    ) -> list[Moved | OSError]:
        done = IOBackend.move_all(self, runs, hashed, load=load)
        if load != (fails == "reading"):
            return done
        bad = GEOMETRY.blocks_offset + 2 * SLOT
        return [error if run.offset == bad else one for run, one in zip(runs, done, strict=True)]

    place = IndexFile.place

    def fail_to_place(self: IndexFile, found: Records, slot: int) -> None:
        if slot == 2:
            raise error
        place(self, found, slot)

    if fails == "the record":
        monkeypatch.setattr(IndexFile, "place", fail_to_place)
    else:
        monkeypatch.setattr(backend, "move_all", fail)
        monkeypatch.setattr(backend, "begin", IOBackend.begin)
    done = await bench.tier.relocate(KEYS, range(SLOTS), ELSEWHERE)
    assert [place for place, ok in enumerate(done.ok) if not ok] == list(done.unread) == [2]
    assert "Input/output error" in (done.error or "")
    assert KEYS[2] in records(segment_of(folder)), "it is where it was"
    monkeypatch.undo()
    assert await bench.fetch(KEYS[2:3], [2]) == [True]


async def test_a_copy_that_does_not_return_is_given_up_as_not_lost(
    open_bench: OpenBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench()
    await bench.store(KEYS, range(SLOTS))
    await bench.tier.grow()
    began, hangs = threading.Event(), threading.Event()

    def hang(
        self: IOBackend, runs: Sequence[IORequest], hashed: int = 0, *, load: bool
    ) -> list[Moved | OSError]:
        began.set()
        hangs.wait(PATIENCE)
        return [OSError(errno.EIO, "gave up") for _ in runs]

    monkeypatch.setattr(type(disk_of(bench).backend), "move_all", hang)
    monkeypatch.setattr(type(disk_of(bench).backend), "begin", IOBackend.begin)
    copying = asyncio.ensure_future(bench.tier.relocate(KEYS[:2], [0, 1], ELSEWHERE[:2]))
    await asyncio.to_thread(began.wait, PATIENCE)
    bench.tier.detach()
    done = await copying
    hangs.set()
    assert done.ok == [False, False]
    assert list(done.unread) == [0, 1]
