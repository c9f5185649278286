"""Messages between the two halves of a connector: where the blocks of a transfer lie.

All of it can be pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = [
    "BlockIDsLoadStoreSpec",
    "ConnectorMetadata",
    "ConnectorOutput",
    "DeviceLoadStoreSpec",
    "HostLoadStoreSpec",
    "LoadStoreSpec",
    "Moved",
    "TransferJob",
]


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


@dataclass(slots=True)
class TransferJob:
    """Blocks to be copied for a request."""

    req_id: str
    src_spec: LoadStoreSpec
    dst_spec: LoadStoreSpec


@dataclass(slots=True)
class ConnectorMetadata:
    """What the workers shall do at one step. Jobs are numbered in the order of their making.

    Attributes:
        load_jobs: to be done before a request computes on.
        store_jobs: copies of what the step computes, and of what was computed before.
        jobs_to_flush: jobs of this step or of an earlier one whose blocks are about to be
            written again: to be ended before the step computes anything.
    """

    load_jobs: dict[int, TransferJob] = field(default_factory=dict)
    store_jobs: dict[int, TransferJob] = field(default_factory=dict)
    jobs_to_flush: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Moved:
    """Copies in one direction: how many, of how many bytes, in how many seconds."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """One more copy."""
        self.copies += 1
        self.bytes += size
        self.seconds += seconds

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.copies + other.copies, self.bytes + other.bytes, self.seconds + other.seconds
        )


@dataclass(slots=True)
class ConnectorOutput:
    """What workers have ended since they were asked last.

    Attributes:
        completed_jobs: job -> how many workers have ended it, whether well or not.
        failed_jobs: those that have not succeeded with one worker at least.
    """

    completed_jobs: Counter[int] = field(default_factory=Counter)
    failed_jobs: set[int] = field(default_factory=set)
    loaded: Moved = field(default_factory=Moved)
    stored: Moved = field(default_factory=Moved)

    def __add__(self, other: ConnectorOutput) -> ConnectorOutput:
        """What several workers have ended."""
        return ConnectorOutput(
            self.completed_jobs + other.completed_jobs,
            self.failed_jobs | other.failed_jobs,
            self.loaded + other.loaded,
            self.stored + other.stored,
        )
