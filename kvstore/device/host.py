"""Copies between a KV cache in host memory and rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, Pages, Part, Places, RowPlaces, check_end
from kvstore.errors import ConfigError

__all__ = ["HostCopies"]

RUN_BYTES = 8192
"""Average bytes of a run of adjacent pages from which one call for each run is faster."""

Which = slice | int | npt.NDArray[np.int64]

Run = tuple[Which, tuple[Which, Which]]
"""Blocks, and their places: rows, and positions within the rows."""


class HostCopies:
    """Copies blocks of a KV cache in host memory to rows, and back; done when a call returns.

    The memory must not be written meanwhile. `kvstore.device.layout` says how a row is laid out.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
        places: Places | None = None,
    ) -> None:
        """
        Args:
            groups: for each KV cache group the tables of its blocks.
            rows: host memory, of shape (rows, bytes of a row).
            blocks_per_chunk: blocks that a row holds.
            places: where in a row each table lies; by default one after the other.

        Raises:
            ConfigError: if a chunk is larger than a row, or a table is not in host memory.
        """
        self._layout = Layout(groups, len(rows), rows.shape[1], blocks_per_chunk, places)
        self._groups = [
            [self._table(*each, rows) for each in zip(tables, places, strict=True)]
            for tables, places in zip(groups, self._layout.places, strict=True)
        ]

    def store(self, blocks: BlockPlaces, rows: RowPlaces) -> int:
        """Copy blocks to rows; return the bytes copied.

        If the first or last blocks of a chunk are not named, that part of its row is not changed.

        Raises:
            IndexError: for a block or a row that does not exist. Earlier ones may be copied.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups;
                then nothing is copied.
        """
        return self._copy(blocks, rows, store=True)

    def load(self, rows: RowPlaces, blocks: BlockPlaces) -> int:
        """Copy rows to blocks; return the bytes copied.

        Raises:
            IndexError, ValueError: as `store`.
        """
        return self._copy(blocks, rows, store=False)

    def _table(
        self, pages: Pages, place: tuple[int, int], rows: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        begin, step = place
        if pages.tensor.device.type != "cpu":
            raise ConfigError(f"the KV cache is on {pages.tensor.device}: must be in host memory")
        device = pages.flat.numpy()[pages.offset :]
        shape, steps = (len(rows), self._layout.blocks_per_chunk), (rows.strides[0], step)
        return (
            _as_pages(device, pages.size, (pages.count,), (pages.stride,)),
            _as_pages(rows[:, begin:], pages.size, shape, steps),
        )

    def _copy(self, blocks: BlockPlaces, rows: RowPlaces, *, store: bool) -> int:
        moved = 0
        for part in self._layout.parts(blocks, rows):
            runs = _runs(part, self._layout.blocks_per_chunk)
            gathered: list[Run] = [(part.blocks, (part.rows, part.within))]
            for device, host in self._groups[part.group]:
                check_end("block", part.blocks, len(device))
                check_end("row", part.rows, len(host))
                # For many small runs, one gathering copy is faster than a call for each run.
                few = len(runs) <= len(part.blocks) * device.itemsize // RUN_BYTES
                for its, place in runs if few else gathered:
                    if store:
                        host[place] = device[its]
                    else:
                        device[its] = host[place]
                moved += device.itemsize * len(part.blocks)
        return moved


def _runs(part: Part, blocks_per_chunk: int) -> list[Run]:
    """Return runs of adjacent blocks that are adjacent in a row, or in rows of one block each."""
    blocks, rows, within = part.blocks, part.rows, part.within
    if not len(blocks):
        return []
    single = blocks_per_chunk == 1
    ends = (np.diff(blocks) != 1) | (np.diff(rows) != single) | (np.diff(within) != (not single))
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(blocks)]
    runs: list[Run] = []
    for begin, end in itertools.pairwise(bounds):
        block, row, first = int(blocks[begin]), int(rows[begin]), int(within[begin])
        count = end - begin
        place = (slice(row, row + count), 0) if single else (row, slice(first, first + count))
        runs.append((slice(block, block + count), place))
    return runs


def _as_pages(
    array: npt.NDArray[np.uint8], size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """View an array with whole pages as items, so that indexing copies page by page."""
    pages = np.lib.stride_tricks.as_strided(array, (*shape, size), (*strides, 1))
    return pages.view(np.dtype(("V", size)))[..., 0]
