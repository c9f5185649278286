"""The contract of a backend: a fixed number of blocks of one size, on one medium.

A backend hands blocks out and takes them back. It decides nothing, and does not know
what a block holds.

The caller guarantees to allocate no more blocks than are free, and to free each once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kvstore.connector.mediums import LoadStoreSpec

__all__ = ["Backend", "BlockStatus"]


class BlockStatus:
    """An offloaded block.

    Attributes:
        ref_cnt: loads under way; -1 until the block has been stored.
    """

    __slots__ = ("ref_cnt",)

    def __init__(self) -> None:
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

    @abstractmethod
    def get_load_store_spec(
        self, keys: Iterable[bytes], blocks: Iterable[BlockStatus]
    ) -> LoadStoreSpec:
        """Where `blocks` lie, which hold `keys`, for a worker."""

    def close(self) -> None:  # noqa: B027
        """Let go of the medium."""
