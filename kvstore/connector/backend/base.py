"""The contract of a backend: a fixed number of blocks of one size, on one medium.

A backend hands blocks out and takes them back. It decides nothing, and does not know
what a block holds.

The caller guarantees to allocate no more blocks than are free, and to free each once.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvstore.connector.mediums import LoadStoreSpec

__all__ = ["Backend", "BlockStatus"]


class BlockStatus(ctypes.Structure):
    """An offloaded block, in a few bytes; backends extend it by ``_fields_`` of their own.

    Attributes:
        ref_cnt: loads under way; -1 until the block has been stored.
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
    """See the module's text.

    Attributes:
        block_size: tokens of an offloaded block.
        medium: the medium's name, as in events.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @abstractmethod
    def get_num_free_blocks(self) -> int:
        """How many blocks can be allocated."""

    @abstractmethod
    def allocate_blocks(self, keys: Sequence[bytes]) -> list[BlockStatus]:
        """One block for each of `keys`, which are not stored yet.

        Raises:
            ValueError: if fewer are free; then none was allocated.
        """

    @abstractmethod
    def free(self, block: BlockStatus) -> None:
        """Take a block back."""

    def get_load_store_spec(
        self, keys: Iterable[bytes], blocks: Iterable[BlockStatus]
    ) -> LoadStoreSpec:
        """Where `blocks` lie, which hold `keys`, for a worker.

        Raises:
            NotImplementedError: if the backend does not say; its manager then has to know.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say where its blocks lie")

    def close(self) -> None:  # noqa: B027
        """Let go of the medium."""
