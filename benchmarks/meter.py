"""What the disk benchmarks share: jobs, what running them cost, and sizes as text."""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvstore.sizes import parse_size
from kvstore.tiers.pinned import PinnedRegion

__all__ = [
    "Batch",
    "Job",
    "Sample",
    "filled_region",
    "median",
    "meter",
    "percentile",
    "size_text",
    "sizes",
]


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks that one request wants moved; `slots` and `rows` run in parallel."""

    load: bool
    slots: list[int]
    rows: list[int]


@dataclass(slots=True)
class Batch:
    """What it cost to run jobs that began at the same time.

    Attributes:
        seconds: for each job the time from the beginning until it was told to have ended.
        wall: seconds until the last of them.
        cpu: seconds of processor time of this process and its children, all threads.
        caller: seconds of processor time of the thread that asked: the event loop.
    """

    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    caller: float = 0.0


@dataclass(slots=True)
class Sample:
    """One round of one case: batches added up."""

    jobs: int = 0
    moved: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    caller: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Of each job; in a mixed case of each read, because that is what a request waits for."""

    def add(self, batch: Batch, jobs: Sequence[Job], chunk_bytes: int) -> None:
        self.jobs += len(jobs)
        self.moved += chunk_bytes * sum(len(job.slots) for job in jobs)
        self.wall += batch.wall
        self.cpu += batch.cpu
        self.caller += batch.caller
        mixed = len({job.load for job in jobs}) > 1
        self.seconds += [
            seconds
            for job, seconds in zip(jobs, batch.seconds, strict=True)
            if job.load or not mixed
        ]

    @property
    def gbps(self) -> float:
        """Gigabytes (10^9) per second."""
        return self.moved / self.wall / 1e9

    @property
    def cpu_per_gb(self) -> float:
        """Seconds of processor time per gigabyte moved."""
        return self.cpu / (self.moved / 1e9)

    @property
    def caller_us(self) -> float:
        """Microseconds of processor time of the calling thread per job."""
        return self.caller / self.jobs * 1e6


@contextmanager
def meter(batch: Batch) -> Iterator[None]:
    """Fill `wall`, `cpu` and `caller` with what the body takes."""
    cpu = _cpu()
    wall, caller = time.perf_counter(), time.thread_time()
    yield
    batch.caller = time.thread_time() - caller
    batch.wall = time.perf_counter() - wall
    batch.cpu = _cpu() - cpu


def filled_region(chunks: int, chunk_bytes: int) -> PinnedRegion:
    """A private region of rows with random bytes."""
    region = PinnedRegion.private(chunks, chunk_bytes)
    region.array[:] = np.random.default_rng(0).integers(0, 256, region.array.shape, np.uint8)
    return region


def _cpu() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def sizes(text: str) -> list[int]:
    """``"64KiB,2MiB"`` in bytes."""
    return [parse_size(part) for part in text.split(",")]


def size_text(size: int) -> str:
    """2097152 as ``2MiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"
