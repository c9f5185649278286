"""Copies where the KV cache itself lies in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.device.layout import BlockPlaces, Layout, Pages, Part, Places, RowPlaces
from kvstore.errors import ConfigError

__all__ = ["HostCopies"]

RUN_BYTES = 8192
"""A call for each run of neighbours pays where runs have so many bytes, on average."""

Which = slice | int | npt.NDArray[np.int64]

Run = tuple[Which, tuple[Which, Which]]
"""Blocks, and their places: rows, and blocks within them."""


class HostCopies:
    """Copies blocks of a KV cache in host memory to rows, and back; done when a call returns.

    Nobody may write to what is copied meanwhile. How they lie in a row: `kvstore.device.layout`.
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
            ConfigError: if a chunk is larger than a row, or a table lies on another device.
        """
        self._layout = Layout(groups, len(rows), rows.shape[1], blocks_per_chunk, places)
        self._groups: list[list[tuple[npt.NDArray[np.void], npt.NDArray[np.void]]]] = []
        for tables, its in zip(groups, self._layout.places, strict=True):
            self._groups.append(
                [
                    self._table(pages, begin, step, rows)
                    for pages, (begin, step) in zip(tables, its, strict=True)
                ]
            )

    def store(self, blocks: BlockPlaces, rows: RowPlaces) -> int:
        """Copy blocks to rows; returns the bytes that were copied.

        A chunk whose first or last blocks are not named keeps what its row has there.

        Raises:
            IndexError: for a block or a row that is not there. What was copied before it stays.
            ValueError: if blocks or rows are not as many as they say; then nothing is copied.
        """
        return self._copy(blocks, rows, store=True)

    def load(self, rows: RowPlaces, blocks: BlockPlaces) -> int:
        """Copy rows to blocks; returns the bytes that were copied.

        Raises:
            IndexError, ValueError: as `store`.
        """
        return self._copy(blocks, rows, store=False)

    def _table(
        self, pages: Pages, begin: int, step: int, rows: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        if pages.tensor.device.type != "cpu":
            raise ConfigError(
                f"a KV cache on {pages.tensor.device}: these copies are for one in host memory"
            )
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
                _check("block", part.blocks, len(device))
                _check("row", part.rows, len(host))
                # Many small pages here and there: to gather them costs less than as many calls.
                few = len(runs) <= len(part.blocks) * device.itemsize // RUN_BYTES
                for its, place in runs if few else gathered:
                    if store:
                        host[place] = device[its]
                    else:
                        device[its] = host[place]
                moved += device.itemsize * len(part.blocks)
        return moved


def _runs(part: Part, blocks_per_chunk: int) -> list[Run]:
    """Neighbouring blocks that lie side by side in a row, or in neighbouring rows of one block."""
    blocks, rows, within = part.blocks, part.rows, part.within
    if not len(blocks):
        return []
    if blocks_per_chunk == 1:
        ends = (np.diff(blocks) != 1) | (np.diff(rows) != 1)
    else:
        ends = (np.diff(blocks) != 1) | (np.diff(rows) != 0) | (np.diff(within) != 1)
    bounds = [0, *(np.flatnonzero(ends) + 1).tolist(), len(blocks)]
    runs: list[Run] = []
    for begin, end in itertools.pairwise(bounds):
        block, row, first = int(blocks[begin]), int(rows[begin]), int(within[begin])
        count = end - begin
        its = slice(block, block + count)
        if blocks_per_chunk == 1:
            runs.append((its, (slice(row, row + count), 0)))
        else:
            runs.append((its, (row, slice(first, first + count))))
    return runs


def _check(what: str, numbers: npt.NDArray[np.int64], count: int) -> None:
    if len(numbers) and numbers.max() >= count:
        raise IndexError(f"{what} {numbers.max()}: there are {count}")


def _as_pages(
    array: npt.NDArray[np.uint8], size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """Whole pages as items, so that indexing copies page by page."""
    pages = np.lib.stride_tricks.as_strided(array, (*shape, size), (*strides, 1))
    return pages.view(np.dtype(("V", size)))[..., 0]
