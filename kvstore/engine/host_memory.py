"""The host memory of one server, shared between its scheduler and its workers.

A scheduler and a worker in one process use private memory, which gets huge pages more easily. A
worker in a process of its own gets shared memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.pinned import PinnedRegion, RegionShape

__all__ = ["in_process", "joined_region", "private_region", "release_region", "share_region"]

_lock = threading.Lock()


@dataclass
class _Private:
    """Private memory, how many parts use it, and whether one of them is a scheduler's."""

    region: PinnedRegion
    shape: RegionShape
    parts: int = 0
    scheduled: bool = False


_in_process: dict[str, _Private] = {}


def in_process(server: str) -> bool:
    """Whether a part of the server has private memory in this process."""
    with _lock:
        return server in _in_process


def private_region(server: str, shape: RegionShape, *, scheduler: bool = False) -> PinnedRegion:
    """Return private memory for a server whose parts are all in this process.

    Args:
        scheduler: it is for the part that decides what rows hold.

    Raises:
        ConfigError: if the machine does not have that much memory, or a second server in this
            process has the same name.
    """
    with _lock:
        held = _in_process.get(server) or _Private(PinnedRegion.private(*shape), shape)
        if held.shape != shape or (held.scheduled and scheduler):
            raise ConfigError(
                f"engine_id = {server!r}: another server in this process has this name, and would "
                "share its host memory: give each server a name of its own, or none"
            )
        _in_process[server] = held
        held.parts += 1
        held.scheduled |= scheduler
        return held.region


def share_region(
    server: str,
    workers: int,
    shape: RegionShape,
    rank: int | None = None,
    used_bytes: int | None = None,
) -> PinnedRegion:
    """Return this process's view of the memory shared by `workers` processes and the scheduler's.

    Args:
        rank: this process's among them; either all have one, or none. That of the scheduler is
            `workers`.
        used_bytes: bytes of a row that are used by all of them together.

    Raises:
        KVStoreError: as `PinnedRegion.shared`.
    """
    return PinnedRegion.shared(
        server,
        shape.rows,
        shape.row_bytes,
        workers + 1,
        tail_bytes=shape.tail_bytes,
        place=rank,
        used_bytes=used_bytes,
    )


def joined_region(region: PinnedRegion, server: str, workers: int) -> PinnedRegion:
    """Return the scheduler's view of the shared memory, which all workers must have by then.

    Raises:
        KVStoreError: if workers are missing; the region is closed.
    """
    if not region.complete:
        region.close()
        raise KVStoreError(
            f"not all {workers} workers share this process's memory; kvstore needs the "
            "scheduler and its workers on one machine, each worker with a rank of its own, the "
            "workers started before the scheduler, and no other server of that machine with the "
            f"name (engine_id) {server!r}"
        )
    return region


def release_region(server: str, region: PinnedRegion, *, scheduler: bool = False) -> None:
    """Release one part's use of the memory; the last one in this process frees it."""
    with _lock:
        held = _in_process.get(server)
        if held is not None and held.region is region:
            held.parts -= 1
            if scheduler:
                held.scheduled = False
            if held.parts:
                return
            del _in_process[server]
    region.close()
