"""How the pages of blocks and the rows of host memory belong together.

A row holds the blocks of one chunk of one KV cache group, table by table:

    | table 0: page of block 0, of block 1, ... | table 1: ... | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.device.pages import Pages
from kvstore.errors import ConfigError

__all__ = ["BlockPlaces", "Layout", "Part", "Places", "RowPlaces"]

Ids = npt.NDArray[np.int32]
Places = Sequence[Sequence[tuple[int, int]]]
"""For each table of each group: where in a row its first page begins, and how far apart its pages
are, in bytes."""


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


@dataclass(frozen=True, slots=True)
class Part:
    """What a transfer copies of one group.

    Block `blocks[i]` goes to or comes from place `within[i]` of row `rows[i]`.
    """

    group: int
    blocks: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]


class Layout:
    """See the module's text.

    Attributes:
        groups: for each KV cache group the tables of its blocks.
        places: see `Places`.
        blocks_per_chunk: blocks that a row holds.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Pages]],
        rows: int,
        row_bytes: int,
        blocks_per_chunk: int,
        places: Places | None = None,
    ) -> None:
        """
        Args:
            places: by default as in the picture.

        Raises:
            ConfigError: if a chunk is larger than a row.
        """
        self.groups = groups
        self.rows = rows
        self.blocks_per_chunk = blocks_per_chunk
        self.places = places or [_side_by_side(tables, blocks_per_chunk) for tables in groups]
        for tables, its in zip(groups, self.places, strict=True):
            for pages, (begin, step) in zip(tables, its, strict=True):
                end = begin + (blocks_per_chunk - 1) * step + pages.size
                if begin < 0 or step < pages.size or end > row_bytes:
                    raise ConfigError(
                        f"{blocks_per_chunk} pages of {pages.size} bytes, one every {step} bytes "
                        f"from {begin} on, do not fit a row of {row_bytes} bytes"
                    )

    def parts(self, blocks: BlockPlaces, rows: RowPlaces) -> Iterator[Part]:
        """What is copied, group by group.

        Raises:
            IndexError: for a block or a row that is not there; for groups before it parts may
                have been given.
            ValueError: if blocks or rows are not as many as they say; then nothing was given.
        """
        per_chunk = self.blocks_per_chunk
        sizes = [
            (group, size, first % per_chunk)
            for group, (size, first) in enumerate(
                zip(blocks.group_sizes, blocks.block_indices, strict=True)
            )
            if size
        ]
        chunks = [-(-(skip + size) // per_chunk) for _, size, skip in sizes]
        _check("block", blocks.block_ids, sum(size for _, size, _ in sizes))
        _check("row", rows.block_ids, sum(chunks))
        block_at = row_at = 0
        for (group, size, skip), count in zip(sizes, chunks, strict=True):
            position = np.arange(skip, skip + size)
            its_rows = rows.block_ids[row_at : row_at + count]
            yield Part(
                group,
                blocks.block_ids[block_at : block_at + size].astype(np.int64),
                its_rows[position // per_chunk].astype(np.int64),
                position % per_chunk,
            )
            block_at += size
            row_at += count


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
