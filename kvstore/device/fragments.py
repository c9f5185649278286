"""Fragments: a transfer as a list of plain copies between addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, RowPlaces, check_end

__all__ = ["Addresses", "Fragments", "Longs"]

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fragments:
    """Copies of `sizes[i]` bytes between the addresses `device[i]` and `host[i]`.

    None extends into another row of host memory.
    """

    device: Longs
    host: Longs
    sizes: Longs

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Total size."""
        return int(self.sizes.sum())


class Addresses:
    """Turns the blocks and rows of a transfer into `Fragments`.

    Pages that are adjacent on both sides become one fragment, but not across rows, because host
    memory may be registered in pieces that end where rows end.
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

    def fragments(self, blocks: BlockPlaces, rows: RowPlaces) -> Fragments:
        """Return the fragments of a transfer.

        Raises:
            IndexError: for a block or a row that does not exist.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups.
        """
        layout = self._layout
        found: list[tuple[Longs, Longs, Longs]] = []
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
            return Fragments(nothing, nothing, nothing)
        return Fragments(*(np.concatenate(some) for some in zip(*found, strict=True)))


def _merged(device: Longs, host: Longs, rows: Longs, size: int) -> tuple[Longs, Longs, Longs]:
    apart = (np.diff(device) != size) | (np.diff(host) != size) | (np.diff(rows) != 0)
    first = np.flatnonzero(np.concatenate(([True], apart)))
    counts = np.diff(np.append(first, len(device)))
    return device[first], host[first], counts * size
