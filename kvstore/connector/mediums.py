"""Where the blocks of a transfer lie: what a manager tells a worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BlockIDsLoadStoreSpec", "DeviceLoadStoreSpec", "HostLoadStoreSpec", "LoadStoreSpec"]


class LoadStoreSpec(ABC):
    """What a worker must know to load blocks from, or store them to, one medium.

    A spec can be pickled: it may travel to a worker in another process.
    """

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The medium's name."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks by number.

    Attributes:
        block_ids: int32, of shape (blocks,).
    """

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.block_ids: npt.NDArray[np.int32] = np.array(list(block_ids), np.int32)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class HostLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of host memory, one for each chunk."""

    @staticmethod
    def medium() -> str:
        return "host"


class DeviceLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the device's KV cache, those of one group after those of the one before.

    Attributes:
        group_sizes: blocks of each KV cache group.
        block_indices: for each group, the place of its first block in the prompt, in
            blocks: it may lie in the middle of a chunk.
    """

    def __init__(
        self,
        block_ids: Iterable[int],
        group_sizes: Sequence[int] | None = None,
        block_indices: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            group_sizes: by default all blocks are of one group.
            block_indices: by default each group begins at a chunk.

        Raises:
            ValueError: if the groups do not add up.
        """
        super().__init__(block_ids)
        self.group_sizes = list(group_sizes) if group_sizes is not None else [len(self)]
        self.block_indices = (
            list(block_indices) if block_indices is not None else [0] * len(self.group_sizes)
        )
        if sum(self.group_sizes) != len(self):
            raise ValueError(
                f"group_sizes = {self.group_sizes}: must add up to the {len(self)} blocks"
            )
        if len(self.block_indices) != len(self.group_sizes):
            raise ValueError(
                f"block_indices = {self.block_indices}: must name one block for each of the "
                f"{len(self.group_sizes)} groups"
            )

    @staticmethod
    def medium() -> str:
        return "device"
