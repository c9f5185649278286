"""Blocks that are rows of one region of memory."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.connector.backend.base import Backend, BlockStatus
from kvstore.connector.mediums import HostLoadStoreSpec

__all__ = ["RowBackend", "RowStatus"]


class RowStatus(BlockStatus):
    """A block in a row.

    Attributes:
        block_id: the row.
    """

    _fields_: ClassVar[list[tuple[str, Any]]] = [("block_id", ctypes.c_int64)]

    def __init__(self, block_id: int) -> None:
        super().__init__()
        self.block_id = block_id


class RowBackend(Backend):
    """Hands out the rows of `array`, the lowest first: neighbours are copied together.

    Attributes:
        array: uint8, of shape (blocks, bytes of a block).
    """

    def __init__(self, block_size: int, medium: str, array: npt.NDArray[np.uint8]) -> None:
        super().__init__(block_size, medium)
        self.array = array
        self._free = list(range(len(array)))

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_blocks(self, keys: Sequence[bytes]) -> list[BlockStatus]:
        if len(keys) > len(self._free):
            raise ValueError(f"{len(keys)} blocks were asked for, {len(self._free)} are free")
        return [RowStatus(heapq.heappop(self._free)) for _ in keys]

    def free(self, block: BlockStatus) -> None:
        heapq.heappush(self._free, _row(block))

    def get_load_store_spec(
        self, keys: Iterable[bytes], blocks: Iterable[BlockStatus]
    ) -> HostLoadStoreSpec:
        return HostLoadStoreSpec([_row(block) for block in blocks])


def _row(block: BlockStatus) -> int:
    assert isinstance(block, RowStatus), "a block of another backend"
    return block.block_id
