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
        """Return the name of the medium."""


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
    """Blocks of the device's KV cache, group by group.

    Attributes:
        group_sizes: number of blocks of each KV cache group.
        block_indices: for each group, the index of its first block in the prompt, which may lie
            in the middle of a chunk.
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
            block_indices: by default each group begins with a chunk.

        Raises:
            ValueError: if the sizes or indices do not match the blocks.
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
    """The jobs of one step, for the workers. Jobs are numbered in the order of creation.

    Attributes:
        load_jobs: loads, each to be done before its request goes on.
        store_jobs: copies of what this step computes, or earlier steps have computed.
        jobs_to_flush: jobs of this or an earlier step whose blocks are about to be written again;
            they must end before the step computes anything.
    """

    load_jobs: dict[int, TransferJob] = field(default_factory=dict)
    store_jobs: dict[int, TransferJob] = field(default_factory=dict)
    jobs_to_flush: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Moved:
    """Totals of the copies in one direction."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Add one copy."""
        self.copies += 1
        self.bytes += size
        self.seconds += seconds

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.copies + other.copies, self.bytes + other.bytes, self.seconds + other.seconds
        )


@dataclass(slots=True)
class ConnectorOutput:
    """The jobs that workers have ended since the last report.

    Attributes:
        completed_jobs: job -> how many workers have ended it, successfully or not.
        failed_jobs: jobs that failed at one worker or more.
    """

    completed_jobs: Counter[int] = field(default_factory=Counter)
    failed_jobs: set[int] = field(default_factory=set)
    loaded: Moved = field(default_factory=Moved)
    stored: Moved = field(default_factory=Moved)

    def __add__(self, other: ConnectorOutput) -> ConnectorOutput:
        """Merge the reports of several workers."""
        return ConnectorOutput(
            self.completed_jobs + other.completed_jobs,
            self.failed_jobs | other.failed_jobs,
            self.loaded + other.loaded,
            self.stored + other.stored,
        )
