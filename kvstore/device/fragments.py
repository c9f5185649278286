"""Fragments: a transfer as a list of plain copies between addresses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, RowPlaces

__all__ = ["Addresses", "Fragments", "Longs", "cut"]

Longs = npt.NDArray[np.int64]

WIDEST = 16
"""Bytes that a device moves with one instruction, at most."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """Copy i is of `sizes[i]` bytes between the addresses `device[i]` and `host[i]`.

    Attributes:
        rows: in which row `host[i]` lies. No copy may reach from one row into the next.
    """

    device: Longs
    host: Longs
    sizes: Longs
    rows: Longs

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return int(self.sizes.sum())

    def take(self, which: Longs | npt.NDArray[np.bool_] | slice) -> Fragments:
        """Some of them, as NumPy indexes."""
        return Fragments(self.device[which], self.host[which], self.sizes[which], self.rows[which])


def cut(fragments: Fragments, at: Longs, every: int) -> tuple[Fragments, Longs]:
    """Fragments that stand at positions `at` of a line, cut at the multiples of `every`.

    Returns:
        the pieces in the order of their fragments, and where each stands.
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

    Neighbours are one fragment where they are neighbours on both sides, within a row: host memory
    may be registered in pieces that end where rows end.

    Attributes:
        word: the widest power of two, up to 16 bytes, of which all addresses and sizes of all
            transfers are multiples.
    """

    def __init__(self, layout: Layout, host_address: int, row_stride: int) -> None:
        """
        Args:
            host_address: of row 0.
            row_stride: from one row to the next, in bytes.
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
        """All that addresses and sizes are sums of, but for those of rows."""
        for tables, bases, places in zip(
            self._layout.groups, self._bases, self._layout.places, strict=True
        ):
            for pages, base, (begin, step) in zip(tables, bases, places, strict=True):
                yield from (base, pages.stride, pages.size, begin, step)

    def fragments(self, blocks: BlockPlaces, rows: RowPlaces) -> Fragments:
        """
        Raises:
            IndexError: for a block or a row that is not there.
            ValueError: if blocks or rows are not as many as they say.
        """
        layout = self._layout
        found: list[tuple[Longs, Longs, Longs, Longs]] = []
        for part in layout.parts(blocks, rows):
            _check_end("row", part.rows, layout.rows)
            tables = layout.groups[part.group]
            its = zip(tables, self._bases[part.group], layout.places[part.group], strict=True)
            for pages, base, (begin, step) in its:
                _check_end("block", part.blocks, pages.count)
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


def _check_end(what: str, ids: Longs, count: int) -> None:
    if len(ids) and int(ids.max()) >= count:
        raise IndexError(f"{what} {ids.max()}: there are {count}")
