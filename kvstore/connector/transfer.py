"""What the two halves of a connector tell each other. All of it can be pickled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvstore.connector.mediums import LoadStoreSpec

__all__ = ["ConnectorMetadata", "ConnectorOutput", "Moved", "TransferJob"]


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
