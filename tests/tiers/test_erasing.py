"""Records that are erased by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
