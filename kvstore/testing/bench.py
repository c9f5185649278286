"""Test bench: a tier under test with host memory, and payloads that follow from their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pytest

from kvstore.tiers.base import Tier, Transfer
from kvstore.tiers.pinned import PinnedRegion
from kvstore.types import RecoveredTier

__all__ = ["Benches", "TierBench", "key_of", "payload_of"]

_UNTOUCHED = 0xA5


def key_of(number: int) -> bytes:
    """Return a key as servers build it: a hash, then the index of a KV cache group."""
    return hashlib.sha256(b"block %d" % number).digest() + b"\0\0\0\0"


def payload_of(key: bytes, size: int) -> bytes:
    """Return the bytes that the tests store under `key`, so that the key suffices to check them."""
    return hashlib.shake_128(key).digest(size)


class TierBench:
    """A tier with host memory, driven by key and slot.

    Row i is used for the i-th key of each call.

    Args:
        tier: not opened yet.
        rows: rows of host memory, which limit the keys of one call.
        row_bytes: bytes of a row.
        chunk_bytes: bytes of a payload.
        tail_bytes: bytes behind each row.
    """

    def __init__(
        self, tier: Tier, rows: int, row_bytes: int, chunk_bytes: int, tail_bytes: int = 0
    ) -> None:
        self.tier = tier
        self.chunk_bytes = chunk_bytes
        self.region = PinnedRegion.private(rows, row_bytes, tail_bytes)
        try:
            self.opening: RecoveredTier = tier.open(self.region)
        except BaseException:
            self.region.close()
            raise
        self._open = True

    @property
    def slots(self) -> list[int]:
        """Slots of the segments that were ready when the tier was opened."""
        per_segment = self.opening.segment_slots
        return [
            segment * per_segment + slot
            for segment in self.opening.segments
            for slot in range(per_segment)
        ]

    def fill(self, keys: Sequence[bytes], first_row: int = 0) -> list[int]:
        """Put the payloads of `keys` into rows; return the rows."""
        rows = list(range(first_row, first_row + len(keys)))
        for key, row in zip(keys, rows, strict=True):
            self.region.array[row, : self.chunk_bytes] = memoryview(
                payload_of(key, self.chunk_bytes)
            )
        return rows

    def smear(self, rows: Sequence[int]) -> None:
        """Overwrite rows with bytes that are no payload."""
        self.region.array[rows] = _UNTOUCHED

    def is_smeared(self, row: int) -> bool:
        """Whether the row was not written to since `smear`."""
        return bool((self.region.array[row] == _UNTOUCHED).all())

    def holds(self, row: int, key: bytes) -> bool:
        """Whether the row holds exactly the payload of `key`."""
        expected = payload_of(key, self.chunk_bytes)
        return bytes(self.region.row(row)[: self.chunk_bytes]) == expected

    async def store(self, keys: Sequence[bytes], slots: Sequence[int]) -> Transfer:
        """Write the payloads of `keys` to `slots`."""
        return await self.tier.write(keys, slots, self.fill(keys))

    async def fetch(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[bool]:
        """Read `slots` under `keys`.

        Raises:
            AssertionError: if a chunk is reported as read but does not hold its payload.
        """
        rows = list(range(len(keys)))
        self.smear(rows)
        done = await self.tier.read(keys, slots, rows)
        assert len(done.ok) == len(keys)
        for key, row, ok in zip(keys, rows, done.ok, strict=True):
            assert not ok or self.holds(row, key), f"wrong bytes were served for {key.hex()}"
        return done.ok

    async def close(self, coldest_first: Sequence[tuple[bytes, int]] = ()) -> None:
        """Close the tier, reporting recency."""
        if self._open:
            self._open = False
            await self.tier.close(coldest_first)
            self.region.close()

    def abandon(self) -> None:
        """Abandon the tier without reporting recency, as a crash would."""
        if self._open:
            self._open = False
            self.tier.abandon()
            self.region.close()


class Benches:
    """Base of test classes that open benches."""

    @pytest.fixture
    def benches(self) -> Iterator[list[TierBench]]:
        """The benches of this test; those left open are abandoned."""
        benches: list[TierBench] = []
        yield benches
        for bench in benches:
            bench.abandon()
