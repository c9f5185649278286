"""Records that are erased by their keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.disk.format import RECORD_BYTES
from kvstore.tiers.disk.index import IndexFile
from kvstore.tiers.disk.tier import DiskTier
from kvstore.tiers.pinned import PinnedRegion
from tests.tiers.support import disk_tier

KEYS = [b"k", b"key", b"key-long-1", b"key-long-2", b"key-long\0", b"x" * 56]


async def lane_of(folder: Path, region: PinnedRegion) -> DiskTier:
    """A tier with a chunk of every key, each in the slot of its number."""
    tier = disk_tier(folder)
    tier.open(region)
    rows = list(range(len(KEYS)))
    assert all((await tier.write(KEYS, rows, rows)).ok)
    return tier


@pytest.fixture
def region() -> Iterator[PinnedRegion]:
    region = PinnedRegion.private(8, 4096)
    yield region
    region.close()


@pytest.mark.parametrize("place", range(len(KEYS)))
async def test_keys_that_begin_alike_are_told_apart(
    tmp_path: Path, region: PinnedRegion, place: int
) -> None:
    tier = await lane_of(tmp_path, region)
    index = tier.volumes[0].segments[0].index
    assert index.erase_keys([KEYS[place], b"key-long-3"]) == 1
    assert sorted(index.live().keys()) == sorted({*KEYS} - {KEYS[place]})
    assert index.erase_keys(KEYS) == len(KEYS) - 1
    assert not index.live().slots
    assert not index.live().damaged
    tier.abandon()


async def test_a_record_that_was_written_since_it_was_read_is_not_erased(
    tmp_path: Path, region: PinnedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await lane_of(tmp_path, region)
    index = tier.volumes[0].segments[0].index
    pieces = IndexFile._pieces
    other = index.live(3, 1).records

    def overtaken(self: IndexFile, *args: int) -> Iterator[Any]:
        for piece in pieces(self, *args):
            # Slot 1 is given to another chunk just now.
            self.place(other, 1)
            yield piece

    monkeypatch.setattr(IndexFile, "_pieces", overtaken)
    assert index.erase_keys([KEYS[0], KEYS[1]]) == 1
    monkeypatch.undo()
    found = dict(zip(index.live().slots, index.live().keys(), strict=True))
    assert found[1] == KEYS[3]
    assert 0 not in found
    tier.abandon()


@pytest.mark.parametrize("kept", [0, 60, 128, 300])
async def test_of_records_that_were_cut_off_nothing_is_erased(
    tmp_path: Path, region: PinnedRegion, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger truncates a segment, before or while its records are looked through."""
    tier = await lane_of(tmp_path, region)
    segment = tier.volumes[0].segments[0]
    index, size = segment.index, tier.geometry.index_offset + kept
    whole = segment.path.read_bytes()
    os.truncate(segment.path, size)
    assert index.erase_keys(KEYS) == kept // RECORD_BYTES
    segment.path.write_bytes(whole)
    pieces = IndexFile._pieces

    def cut(self: IndexFile, *args: int) -> Iterator[Any]:
        for piece in pieces(self, *args):
            os.truncate(segment.path, size)
            yield piece

    monkeypatch.setattr(IndexFile, "_pieces", cut)
    assert index.erase_keys(KEYS) == kept // RECORD_BYTES
    tier.abandon()
