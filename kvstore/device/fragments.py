"""A transfer as a list of plain copies between addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, RowPlaces

__all__ = ["Addresses", "Fragments"]

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fragments:
    """Copy i is of `sizes[i]` bytes between the addresses `device[i]` and `host[i]`."""

    device: Longs
    host: Longs
    sizes: Longs

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return int(self.sizes.sum())


class Addresses:
    """Turns the blocks and rows of a transfer into `Fragments`.

    Neighbours are one fragment where they are neighbours on both sides, within a row: host memory
    may be registered in pieces that end where rows end.
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

    def fragments(self, blocks: BlockPlaces, rows: RowPlaces) -> Fragments:
        """
        Raises:
            IndexError: for a block or a row that is not there.
            ValueError: if blocks or rows are not as many as they say.
        """
        layout = self._layout
        found: list[tuple[Longs, Longs, Longs]] = []
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
            return Fragments(nothing, nothing, nothing)
        device, host, sizes = (np.concatenate(some) for some in zip(*found, strict=True))
        return Fragments(device, host, sizes)


def _merged(device: Longs, host: Longs, rows: Longs, size: int) -> tuple[Longs, Longs, Longs]:
    apart = (np.diff(device) != size) | (np.diff(host) != size) | (np.diff(rows) != 0)
    first = np.flatnonzero(np.concatenate(([True], apart)))
    counts = np.diff(np.append(first, len(device)))
    return device[first], host[first], counts * size


def _check_end(what: str, ids: Longs, count: int) -> None:
    if len(ids) and int(ids.max()) >= count:
        raise IndexError(f"{what} {ids.max()}: there are {count}")
