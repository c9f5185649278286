"""Copies where the KV cache itself lies in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.device.pages import Pages
from kvstore.errors import ConfigError

__all__ = ["BlockPlaces", "HostCopies", "RowPlaces"]

Ids = npt.NDArray[np.int32]


class BlockPlaces(Protocol):
    """Blocks of the device, as `kvstore.connector.mediums.DeviceLoadStoreSpec` names them."""

    @property
    def block_ids(self) -> Ids: ...

    @property
    def group_sizes(self) -> Sequence[int]: ...

    @property
    def block_indices(self) -> Sequence[int]: ...


class RowPlaces(Protocol):
    """Rows of host memory, as `kvstore.connector.mediums.HostLoadStoreSpec` names them."""

    @property
    def block_ids(self) -> Ids: ...


class HostCopies:
    """Copies blocks of a KV cache in host memory to rows, and back; done when a call returns.

    A row holds the blocks of one chunk of one group, table by table:

        | table 0: page of block 0, of block 1, ... | table 1: ... | ...

    Nobody may write to what is copied meanwhile.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: npt.NDArray[np.uint8],
        blocks_per_chunk: int,
        places: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """
        Args:
            groups: for each KV cache group the tables of its blocks.
            rows: host memory, of shape (rows, bytes of a row).
            blocks_per_chunk: blocks that a row holds.
            places: for each table where in a row its first page begins, and how far apart its
                pages are, in bytes; by default as in the picture.

        Raises:
            ConfigError: if a chunk is larger than a row, or a table lies on another device.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._groups: list[list[tuple[npt.NDArray[np.void], npt.NDArray[np.void]]]] = []
        for number, tables in enumerate(groups):
            its = _side_by_side(tables, blocks_per_chunk) if places is None else places[number]
            self._groups.append(
                [self._table(pages, *place, rows) for pages, place in zip(tables, its, strict=True)]
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
        per_chunk = self._blocks_per_chunk
        end = begin + (per_chunk - 1) * step + pages.size
        if begin < 0 or step < pages.size or end > rows.shape[1]:
            raise ConfigError(
                f"{per_chunk} pages of {pages.size} bytes, one every {step} bytes from {begin} on, "
                f"do not fit a row of {rows.shape[1]} bytes"
            )
        device = pages.flat.numpy()[pages.offset :]
        shape, steps = (len(rows), per_chunk), (rows.strides[0], step)
        return (
            _as_pages(device, pages.size, (pages.count,), (pages.stride,)),
            _as_pages(rows[:, begin:], pages.size, shape, steps),
        )

    def _copy(self, blocks: BlockPlaces, rows: RowPlaces, *, store: bool) -> int:
        per_chunk = self._blocks_per_chunk
        parts = [
            (tables, size, first_block % per_chunk)
            for tables, size, first_block in zip(
                self._groups, blocks.group_sizes, blocks.block_indices, strict=True
            )
            if size
        ]
        chunks = [-(-(skip + size) // per_chunk) for _, size, skip in parts]
        _check("block", blocks.block_ids, sum(size for _, size, _ in parts))
        _check("row", rows.block_ids, sum(chunks))
        moved = block_at = row_at = 0
        for (tables, size, skip), count in zip(parts, chunks, strict=True):
            ids = blocks.block_ids[block_at : block_at + size]
            position = np.arange(skip, skip + size)
            its_rows = rows.block_ids[row_at : row_at + count][position // per_chunk]
            within = position % per_chunk
            for device, host in tables:
                if store:
                    host[its_rows, within] = device[ids]
                else:
                    device[ids] = host[its_rows, within]
                moved += device.itemsize * size
            block_at += size
            row_at += count
        return moved


def _check(what: str, ids: Ids, count: int) -> None:
    if len(ids) != count:
        raise ValueError(f"{len(ids)} {what}s are named where there are {count}")
    if count and ids.min() < 0:
        raise IndexError(f"{what} {ids.min()}: the first has the number 0")


def _side_by_side(tables: Sequence[Pages], blocks_per_chunk: int) -> list[tuple[int, int]]:
    places, at = [], 0
    for pages in tables:
        places.append((at, pages.size))
        at += pages.size * blocks_per_chunk
    return places


def _as_pages(
    array: npt.NDArray[np.uint8], size: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.void]:
    """Whole pages as items, so that indexing copies page by page."""
    pages = np.lib.stride_tricks.as_strided(array, (*shape, size), (*strides, 1))
    return pages.view(np.dtype(("V", size)))[..., 0]
