"""The host memory of one vLLM engine, as its processes find it."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator

from kvstore.engine.host_memory import (
    in_process,
    join_region,
    private_region,
    release_region,
    share_region,
)
from kvstore.errors import ConfigError
from kvstore.tiers.pinned import PinnedRegion, RegionShape
from kvstore.tiers.rendezvous import OtherShapeError

__all__ = ["manager_region", "release_region", "worker_region"]


def worker_region(
    engine: str, workers: int, shape: RegionShape, *, apart: bool = False, stages: int = 1
) -> PinnedRegion:
    """The region, for a worker: private if it is the only one, in the scheduler's process.

    Args:
        apart: it has a process of its own, whatever that is called.
        stages: of the pipeline.

    Raises:
        KVStoreError: if the memory cannot be had, or stages need rows of different sizes.
    """
    if workers == 1 and not apart and "Worker" not in multiprocessing.current_process().name:
        return private_region(engine, shape)
    with _explained(stages):
        return share_region(engine, workers, shape)


def manager_region(
    engine: str, workers: int, shape: RegionShape, *, stages: int = 1
) -> PinnedRegion:
    """The region, for the scheduler: it comes last, when all workers have it.

    Raises:
        KVStoreError: if the workers do not share this machine's memory.
    """
    if in_process(engine):
        return private_region(engine, shape)
    with _explained(stages):
        return join_region(engine, workers, shape)


@contextlib.contextmanager
def _explained(stages: int) -> Iterator[None]:
    """A row has as many bytes for each worker, so all stages have to keep as many of a block."""
    try:
        yield
    except OtherShapeError as error:
        if stages == 1:
            raise
        raise ConfigError(
            f"pipeline_parallel_size = {stages}: stages keep different numbers of bytes of a block "
            f"({error}). Give all stages as many layers: take a size that divides their number, "
            "or set VLLM_PP_LAYER_PARTITION"
        ) from error
