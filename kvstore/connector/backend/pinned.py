"""Blocks in host memory that CUDA knows as pinned, where there is a GPU."""

from __future__ import annotations

import contextlib

from kvstore.connector.backend.rows import RowBackend
from kvstore.tiers.pinned import PinnedRegion, round_to_page

__all__ = ["PinnedBackend"]


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
            ConfigError: if the machine has not that much memory, or a number is below 1.
        """
        self.region = PinnedRegion.private(num_blocks, round_to_page(block_bytes))
        super().__init__(block_size, "host", self.region.array)

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            del self.array
        self.region.close()
