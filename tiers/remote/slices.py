"""Slices: the memory of a value's payload and record, for Mooncake.

A transfer moves slices, and over TCP each slice takes a round trip. So the record is put right
behind the payload if host memory has room there (`Behind`): the value is then one slice. If not,
the record has a place of its own (`Beside`). The stored value is the same.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.tiers.pinned import PinnedRegion
from kvstore.tiers.remote.record import RECORD_BYTES

__all__ = ["Behind", "Beside", "Slices", "Values", "copy", "values_of"]


@dataclass(slots=True)
class Slices:
    """The memory of some values, in their order.

    Attributes:
        addresses: for each value the addresses of its slices.
        sizes: the sizes of the same slices, in bytes.
        records: for each value the memory of its record.
    """

    addresses: list[list[int]]
    sizes: list[list[int]]
    records: list[memoryview]


class Values(Protocol):
    """Memory for records, and the slices of values.

    Attributes:
        memory: addresses and sizes of memory to be registered in addition to the region.
    """

    memory: list[tuple[int, int]]

    def lent(self, payloads: Sequence[memoryview]) -> AbstractAsyncContextManager[Slices]:
        """Lend the slices of values with these payloads, which are rows, for a block."""

    def close(self) -> None:
        """Release the memory; no slices are in use any more."""


def values_of(region: PinnedRegion, chunk_bytes: int, most: int) -> Values:
    """Choose where to put records of chunks in `region`, of which `most` are under way at once."""
    if chunk_bytes == region.row_bytes and region.claim_tails():
        return Behind(region)
    return Beside(most)


class Behind:
    """Records in the tails of rows, which this object has claimed."""

    def __init__(self, region: PinnedRegion) -> None:
        self.memory: list[tuple[int, int]] = []
        self._region = region
        self._claimed = True

    @asynccontextmanager
    async def lent(self, payloads: Sequence[memoryview]) -> AsyncIterator[Slices]:
        view, base = self._region.view, self._region.address
        addresses = [_address(payload) for payload in payloads]
        ends = [
            address - base + len(payload)
            for address, payload in zip(addresses, payloads, strict=True)
        ]
        yield Slices(
            [[address] for address in addresses],
            [[len(payload) + RECORD_BYTES] for payload in payloads],
            [view[end : end + RECORD_BYTES] for end in ends],
        )

    def close(self) -> None:
        if self._claimed:
            self._claimed = False
            self._region.release_tails()


class Beside:
    """Records in memory of their own, with places for `count` of them."""

    def __init__(self, count: int) -> None:
        self._view = memoryview(mmap.mmap(-1, count * RECORD_BYTES))
        self._address = _address(self._view)
        self.memory = [(self._address, len(self._view))]
        self._free = list(range(count))
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def lent(self, payloads: Sequence[memoryview]) -> AsyncIterator[Slices]:
        async with self._turn:
            while len(self._free) < len(payloads):
                self._returned.clear()
                await self._returned.wait()
            places = [self._free.pop() for _ in payloads]
        try:
            begins = [place * RECORD_BYTES for place in places]
            yield Slices(
                [
                    [_address(payload), self._address + begin]
                    for payload, begin in zip(payloads, begins, strict=True)
                ],
                [[len(payload), RECORD_BYTES] for payload in payloads],
                [self._view[begin : begin + RECORD_BYTES] for begin in begins],
            )
        finally:
            self._free += places
            self._returned.set()

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy(part: bytes | memoryview, payload: memoryview, start: int = 0) -> None:
    """Copy `part` into `payload`, from `start` on, without holding the GIL.

    Assigning to a slice would hold it.
    """
    into = np.frombuffer(payload, np.uint8)[start : start + len(part)]
    np.copyto(into, np.frombuffer(part, np.uint8))
