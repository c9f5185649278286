"""Layout: the pages of a paged KV cache, and how a row of host memory holds them.

A row holds the blocks of one chunk of one KV cache group, table by table:

    | table 0: page of block 0, of block 1, ... | table 1: ... | ...

A *page* is a contiguous part of a block in one tensor. A tensor with contiguous blocks, such as
(blocks, 2, tokens, heads, size), has one page for each block. A tensor that separates keys from
values, such as (2, blocks, tokens, heads, size), has two, each in a table of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.errors import ConfigError

__all__ = [
    "BlockPlaces",
    "Layout",
    "Pages",
    "Part",
    "Places",
    "RowPlaces",
    "check_end",
    "pages_of",
    "whole_blocks",
]


@dataclass(frozen=True, slots=True)
class Pages:
    """A table of pages: page n begins `offset + n * stride` bytes into the storage of `tensor`.

    Attributes:
        tensor: keeps the memory alive, and names its device.
        count: number of pages.
        offset, stride: in bytes.
        size: bytes of a page.
    """

    tensor: torch.Tensor
    count: int
    offset: int
    stride: int
    size: int

    def __post_init__(self) -> None:
        storage = self.tensor.untyped_storage().nbytes()
        end = self.offset + (self.count - 1) * self.stride + self.size
        if self.count < 1 or self.size < 1 or self.offset < 0 or self.stride < self.size:
            raise ConfigError(
                f"{self.count} pages of {self.size} bytes, one every {self.stride} bytes from "
                f"{self.offset} on: there must be at least one, and none may overlap another"
            )
        if end > storage:
            raise ConfigError(
                f"{self.count} pages end at byte {end}, but the tensor has {storage} bytes"
            )

    @property
    def flat(self) -> torch.Tensor:
        """The whole storage as bytes: uint8, of shape (bytes,)."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        return empty.set_(self.tensor.untyped_storage())


def pages_of(tensor: torch.Tensor, block_dim: int = 0) -> list[Pages]:
    """Return the tables of a KV tensor, of any strides, whose dimension `block_dim` counts blocks.

    There are as few tables as possible: a contiguous part of a block is one page.

    Raises:
        ConfigError: if there is no such dimension, or blocks overlap.
    """
    if not -tensor.dim() <= block_dim < tensor.dim():
        raise ConfigError(
            f"block_dim = {block_dim}: the tensor has the shape {tuple(tensor.shape)}"
        )
    block_dim %= tensor.dim()
    item = tensor.element_size()
    dims = sorted(
        (stride * item, size)
        for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True))
        if dim != block_dim and size > 1
    )
    page = item
    while dims and dims[0][0] == page:
        page *= dims.pop(0)[1]
    count, stride = tensor.shape[block_dim], tensor.stride(block_dim) * item
    first = tensor.storage_offset() * item
    places = itertools.product(*(range(size) for _, size in reversed(dims)))
    steps = [step for step, _ in reversed(dims)]
    return [
        Pages(
            tensor,
            count,
            first + sum(index * step for index, step in zip(place, steps, strict=True)),
            # The stride of a single page has no meaning.
            stride if count > 1 else max(stride, page),
            page,
        )
        for place in places
    ]


def whole_blocks(tables: list[Pages], block_bytes: int, blocks: int | None = None) -> list[Pages]:
    """Return the tables of a tensor by the server's blocks of `block_bytes` bytes.

    A tensor may have smaller blocks, as some kernels use them. A block of the server then consists
    of a whole number of consecutive blocks of the tensor.

    Args:
        tables: tables of one tensor: see `pages_of`.
        block_bytes: bytes of the tensor in a block of the server, including padding.
        blocks: number of blocks of the server, if known. If not, strides tell a tensor with smaller
            blocks from a padded one.

    Raises:
        ConfigError: if the tensor does not hold blocks of that many bytes.
    """
    count, held = tables[0].count, sum(table.size for table in tables)
    if held == block_bytes and blocks in (None, count):
        return tables
    times, rest = divmod(block_bytes, held)
    padded = blocks == count if blocks is not None else tables[0].stride == block_bytes
    if padded and times:
        return tables
    dense = blocks is not None or all(table.stride == table.size for table in tables)
    if rest or not times or not dense or count % times or blocks not in (None, count // times):
        number = "" if blocks is None else f"{blocks} "
        raise ConfigError(
            f"the tensor of shape {tuple(tables[0].tensor.shape)} has {count} blocks of {held} "
            f"bytes, but the server has {number}blocks of {block_bytes} bytes: they must be equal, "
            "or each must consist of a whole number of smaller ones"
        )
    whole = []
    for table in tables:
        step = table.stride * times
        if table.stride == table.size:
            whole.append(Pages(table.tensor, count // times, table.offset, step, step))
            continue
        whole += [
            Pages(table.tensor, count // times, table.offset + n * table.stride, step, table.size)
            for n in range(times)
        ]
    return whole


Ids = npt.NDArray[np.int32]
Places = Sequence[Sequence[tuple[int, int]]]
"""For each table of each group: the offset of its first page in a row, and the distance between its
pages, in bytes."""


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
    """The part of a transfer that belongs to one group.

    Block `blocks[i]` corresponds to place `within[i]` of row `rows[i]`.
    """

    group: int
    blocks: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]


class Layout:
    """The tables of a KV cache, and where each lies in a row.

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
            places: by default as the module's text shows.

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
        """Yield the parts of a transfer, group by group.

        Raises:
            IndexError: for a block or a row that does not exist; parts of earlier groups may have
                been yielded.
            ValueError: if the numbers of blocks and rows do not match the sizes of the groups;
                then nothing is yielded.
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
        raise ValueError(f"{len(ids)} {what}s are named: must be {count}")
    if count and ids.min() < 0:
        raise IndexError(f"{what} {ids.min()}: must be at least 0")


def check_end(what: str, numbers: npt.NDArray[np.int64], count: int) -> None:
    """Raise IndexError if any of `numbers` is not below `count`."""
    if len(numbers) and numbers.max() >= count:
        raise IndexError(f"{what} {numbers.max()}: there are only {count}")


def _side_by_side(tables: Sequence[Pages], blocks_per_chunk: int) -> list[tuple[int, int]]:
    places, at = [], 0
    for pages in tables:
        places.append((at, pages.size))
        at += pages.size * blocks_per_chunk
    return places
