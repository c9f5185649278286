"""Backends: a fixed number of blocks of one size, on one medium.

A backend allocates and frees blocks. It decides nothing, and does not know what a block holds. The
caller guarantees to allocate no more blocks than are free, and to free each once.

`PinnedBackend` keeps blocks in host memory that CUDA knows as pinned, where there is a GPU.
`MappedFileBackend` keeps them in a file that is mapped into memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.connector.mediums import HostLoadStoreSpec, LoadStoreSpec
from kvstore.errors import ConfigError, PathUnusableError
from kvstore.tiers.disk.io.base import check_room
from kvstore.tiers.pinned import PinnedRegion, round_to_page

__all__ = [
    "Backend",
    "BlockStatus",
    "MappedFileBackend",
    "PinnedBackend",
    "RowBackend",
    "RowStatus",
]


class BlockStatus(ctypes.Structure):
    """State of an offloaded block; backends add ``_fields_`` of their own.

    Attributes:
        ref_cnt: number of loads under way; -1 until the block has been stored.
    """

    _fields_: ClassVar[list[tuple[str, Any]]] = [("ref_cnt", ctypes.c_int32)]

    def __init__(self) -> None:
        super().__init__()
        self.ref_cnt = -1

    @property
    def is_ready(self) -> bool:
        """Whether the block can be loaded."""
        return self.ref_cnt >= 0


class Backend(ABC):
    """A fixed number of blocks on one medium.

    Attributes:
        block_size: tokens of an offloaded block.
        medium: name of the medium, as in events.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be allocated."""

    @abstractmethod
    def allocate_blocks(self, keys: Sequence[bytes]) -> list[BlockStatus]:
        """Allocate one block for each of `keys`, which are not stored yet.

        Raises:
            ValueError: if fewer are free; then none is allocated.
        """

    @abstractmethod
    def free(self, block: BlockStatus) -> None:
        """Free a block."""

    def get_load_store_spec(
        self, keys: Iterable[bytes], blocks: Iterable[BlockStatus]
    ) -> LoadStoreSpec:
        """Return where `blocks`, which hold `keys`, lie, for a worker.

        Raises:
            NotImplementedError: if the backend leaves this to its manager.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say where its blocks lie")

    def close(self) -> None:  # noqa: B027
        """Release the medium."""


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
    """The rows of `array`; allocates the lowest first, as neighbours are copied together.

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
            raise ValueError(f"{len(keys)} blocks were requested, {len(self._free)} are free")
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


class PinnedBackend(RowBackend):
    """Rows of a region of host memory.

    Attributes:
        region: the memory; workers register it with CUDA.
    """

    def __init__(self, block_size: int, num_blocks: int, block_bytes: int) -> None:
        """
        Args:
            block_bytes: bytes of a block; a row is as long, rounded up to a page.

        Raises:
            ConfigError: if the machine does not have enough memory, or a number is below 1.
        """
        self.region = PinnedRegion.private(num_blocks, round_to_page(block_bytes))
        super().__init__(block_size, "host", self.region.array)

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            del self.array
        self.region.close()


class MappedFileBackend(RowBackend):
    """Rows of a memory-mapped file.

    For a medium that is memory (tmpfs, DAX) or larger than memory. The file is useless without the
    manager that knows its contents, so it is created anew and removed at the end.
    """

    def __init__(
        self, block_size: int, num_blocks: int, block_bytes: int, path: str | os.PathLike[str]
    ) -> None:
        """
        Args:
            block_bytes: bytes of a block; a row is as long, rounded up to a page.
            path: the file, which must not exist. All of its space is allocated.

        Raises:
            ConfigError: if a number is below 1.
            PathUnusableError: if the file exists or cannot be created; none is left behind.
        """
        if num_blocks < 1 or block_bytes < 1:
            raise ConfigError(
                f"a file of {num_blocks} blocks of {block_bytes} bytes: both must be at least 1"
            )
        row_bytes = round_to_page(block_bytes)
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except (OSError, ValueError) as error:
            raise PathUnusableError(f"{self.path}: {_reason(error)}") from error
        size = num_blocks * row_bytes
        try:
            check_room(fd, size)
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        except (OSError, OverflowError, ValueError) as error:
            self.path.unlink()
            raise PathUnusableError(f"{self.path}: {_reason(error)}") from error
        finally:
            os.close(fd)
        array = np.frombuffer(self._memory, np.uint8).reshape(num_blocks, row_bytes)
        super().__init__(block_size, "mapped file", array)

    def close(self) -> None:
        """Remove the file. Its memory is kept while arrays over it exist."""
        with contextlib.suppress(AttributeError):
            del self.array
        with contextlib.suppress(BufferError):
            self._memory.close()
        self.path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
