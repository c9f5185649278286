"""The host memory of one vLLM engine, as its processes find it."""

from __future__ import annotations

import multiprocessing

from kvstore.region import in_process, join_region, private_region, release_region, share_region
from tiers.pinned import PinnedRegion, RegionShape

__all__ = ["manager_region", "release_region", "worker_region"]


def worker_region(engine: str, workers: int, shape: RegionShape) -> PinnedRegion:
    """The region, for a worker: private if it is the only one, in the scheduler's process."""
    if workers == 1 and "Worker" not in multiprocessing.current_process().name:
        return private_region(engine, shape)
    return share_region(engine, workers, shape)


def manager_region(engine: str, workers: int, shape: RegionShape) -> PinnedRegion:
    """The region, for the scheduler: it comes last, when all workers have it.

    Raises:
        KVStoreError: if the workers do not share this machine's memory.
    """
    if in_process(engine):
        return private_region(engine, shape)
    return join_region(engine, workers, shape)
