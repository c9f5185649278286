"""Fragments: a transfer as a list of plain copies between addresses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, RowPlaces, check_end

__all__ = ["Addresses", "Fragments", "Longs", "cut"]

Longs = npt.NDArray[np.int64]

WIDEST = 16
"""Most bytes that a device moves with one instruction."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """Copies of `sizes[i]` bytes between the addresses `device[i]` and `host[i]`.

    Attributes:
        rows: the row in which `host[i]` lies. No copy may extend into another row.
    """

    device: Longs
    host: Longs
    sizes: Longs
    rows: Longs

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Total size."""
        return int(self.sizes.sum())

    def take(self, which: Longs | npt.NDArray[np.bool_] | slice) -> Fragments:
        """Return a selection, with an index as in NumPy."""
        return Fragments(self.device[which], self.host[which], self.sizes[which], self.rows[which])


def cut(fragments: Fragments, at: Longs, every: int) -> tuple[Fragments, Longs]:
    """Cut fragments at the multiples of `every`; fragment i has the offset `at[i]`.

    Returns:
        The pieces, in the order of their fragments, and the offset of each.
    """
    first, last = at // every, (at + fragments.sizes - 1) // every
    counts = last - first + 1
    of = np.repeat(np.arange(len(fragments)), counts)
    line = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum(at[of], line * every)
    end = np.minimum((at + fragments.sizes)[of], (line + 1) * every)
    skipped = begin - at[of]
    whole = fragments.take(of)
    return Fragments(whole.device + skipped, whole.host + skipped, end - begin, whole.rows), begin


class Addresses:
    """Turns the blocks and rows of a transfer into `Fragments`.

    Pages that are adjacent on both sides become one fragment, but not across rows, because host
    memory may be registered in pieces that end where rows end.

    Attributes:
        word: the largest power of two, up to 16, that divides all addresses and sizes of all
            transfers.
    """

    def __init__(self, layout: Layout, host_address: int, row_stride: int) -> None:
        """
        Args:
            host_address: address of row 0.
            row_stride: bytes from one row to the next.
        """
        self._layout = layout
        self._host = host_address
        self._row_stride = row_stride
        self._bases = [
            [pages.tensor.untyped_storage().data_ptr() + pages.offset for pages in tables]
            for tables in layout.groups
        ]
        self.word = _common_word([host_address, row_stride, *self._device_numbers()])

    def _device_numbers(self) -> Iterator[int]:
        """Yield the terms of all addresses and sizes, except those of rows."""
        for tables, bases, places in zip(
            self._layout.groups, self._bases, self._layout.places, strict=True
        ):
            for pages, base, (begin, step) in zip(tables, bases, places, strict=True):
                yield from (base, pages.stride, pages.size, begin, step)

    def fragments(self, blocks: BlockPlaces, rows: RowPlaces) -> Fragments:
        """Return the fragments of a transfer.

        Raises:
            IndexError: for a block or a row that does not exist.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups.
        """
        layout = self._layout
        found: list[tuple[Longs, Longs, Longs, Longs]] = []
        for part in layout.parts(blocks, rows):
            check_end("row", part.rows, layout.rows)
            tables = layout.groups[part.group]
            its = zip(tables, self._bases[part.group], layout.places[part.group], strict=True)
            for pages, base, (begin, step) in its:
                check_end("block", part.blocks, pages.count)
                device = base + part.blocks * pages.stride
                host = self._host + part.rows * self._row_stride + begin + part.within * step
                found.append(_merged(device, host, part.rows, pages.size))
        if not found:
            nothing = np.zeros(0, np.int64)
            return Fragments(nothing, nothing, nothing, nothing)
        return Fragments(*(np.concatenate(some) for some in zip(*found, strict=True)))


def _merged(
    device: Longs, host: Longs, rows: Longs, size: int
) -> tuple[Longs, Longs, Longs, Longs]:
    apart = (np.diff(device) != size) | (np.diff(host) != size) | (np.diff(rows) != 0)
    first = np.flatnonzero(np.concatenate(([True], apart)))
    counts = np.diff(np.append(first, len(device)))
    return device[first], host[first], counts * size, rows[first]


def _common_word(numbers: Iterable[int]) -> int:
    bits = functools.reduce(operator.or_, numbers, WIDEST)
    return bits & -bits
