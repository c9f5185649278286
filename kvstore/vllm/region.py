"""The host region of one vLLM engine, as its processes find it."""

from __future__ import annotations

import multiprocessing
import threading

from kvstore.errors import KVStoreError
from tiers.pinned import PinnedRegion

__all__ = ["manager_region", "release_region", "worker_region"]

_lock = threading.Lock()
_in_process: dict[str, tuple[PinnedRegion, int]] = {}


def worker_region(engine: str, workers: int, rows: int, row_bytes: int) -> PinnedRegion:
    """The region, for a worker.

    When the only worker lives in the scheduler's process, private memory does
    for both, and gets huge pages more easily. Otherwise the memory is shared.
    """
    if workers == 1 and "Worker" not in multiprocessing.current_process().name:
        with _lock:
            held = _in_process.get(engine)
            if held is None:
                held = (PinnedRegion.private(rows, row_bytes), 0)
            _in_process[engine] = (held[0], held[1] + 1)
            return held[0]
    return PinnedRegion.shared(engine, rows, row_bytes, workers + 1)


def manager_region(engine: str, workers: int, rows: int, row_bytes: int) -> PinnedRegion:
    """The region, for the scheduler: it comes last, when all workers have it.

    Raises:
        KVStoreError: if the workers do not share this machine's memory.
    """
    with _lock:
        held = _in_process.get(engine)
        if held is not None:
            _in_process[engine] = (held[0], held[1] + 1)
            return held[0]
    region = PinnedRegion.shared(engine, rows, row_bytes, workers + 1)
    if not region.complete:
        region.close()
        raise KVStoreError(
            f"not all {workers} workers share this process's memory; kvstore needs the "
            "scheduler and its workers on one machine, started before the scheduler"
        )
    return region


def release_region(engine: str, region: PinnedRegion) -> None:
    """The caller is done with the region; the last one frees it."""
    with _lock:
        held = _in_process.get(engine)
        if held is not None and held[0] is region:
            if held[1] > 1:
                _in_process[engine] = (region, held[1] - 1)
                return
            del _in_process[engine]
    region.close()
