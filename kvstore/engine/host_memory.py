"""The host memory of one server, shared between its scheduler and its workers.

A scheduler and a worker in one process use private memory, which gets huge pages more easily. A
worker in a process of its own gets shared memory.
"""

from __future__ import annotations

import threading

from kvstore.errors import KVStoreError
from kvstore.tiers.pinned import PinnedRegion, RegionShape

__all__ = ["in_process", "join_region", "private_region", "release_region", "share_region"]

_lock = threading.Lock()
_in_process: dict[str, tuple[PinnedRegion, int]] = {}
"""For each server, its private memory and how many parts use it."""


def in_process(server: str) -> bool:
    """Whether a part of the server has private memory in this process."""
    with _lock:
        return server in _in_process


def private_region(server: str, shape: RegionShape) -> PinnedRegion:
    """Return private memory for a server whose parts are all in this process.

    Raises:
        ConfigError: if the machine does not have that much memory.
    """
    with _lock:
        region, users = _in_process.get(server) or (PinnedRegion.private(*shape), 0)
        _in_process[server] = (region, users + 1)
        return region


def share_region(server: str, workers: int, shape: RegionShape) -> PinnedRegion:
    """Return a worker's view of the memory shared by `workers` processes and the scheduler's.

    Raises:
        KVStoreError: as `PinnedRegion.shared`.
    """
    return PinnedRegion.shared(
        server, shape.rows, shape.row_bytes, workers + 1, tail_bytes=shape.tail_bytes
    )


def join_region(server: str, workers: int, shape: RegionShape) -> PinnedRegion:
    """Return the scheduler's view of the shared memory, which all workers must have by then.

    Raises:
        KVStoreError: as `share_region`; if workers are missing.
    """
    region = share_region(server, workers, shape)
    if not region.complete:
        region.close()
        raise KVStoreError(
            f"not all {workers} workers share this process's memory; kvstore needs the "
            "scheduler and its workers on one machine, started before the scheduler"
        )
    return region


def release_region(server: str, region: PinnedRegion) -> None:
    """Release one part's use of the memory; the last one in this process frees it."""
    with _lock:
        held = _in_process.get(server)
        if held is not None and held[0] is region:
            if held[1] > 1:
                _in_process[server] = (region, held[1] - 1)
                return
            del _in_process[server]
    region.close()
