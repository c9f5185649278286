"""Who moves the bytes of a transfer, in the worker's process."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec

if TYPE_CHECKING:
    from kvstore.device import HostCopies

__all__ = ["HostHandler", "OffloadingHandler", "TransferResult", "TransferSpec"]

logger = logging.getLogger("kvstore")

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""From where to where."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer.

    Attributes:
        transfer_size: bytes that were moved.
        transfer_time: seconds that it took.
    """

    job_id: int
    success: bool
    transfer_size: int = 0
    transfer_time: float = 0.0


class OffloadingHandler(ABC):
    """Moves blocks from one medium to one other, for a worker.

    Guarantees that each job that was taken is reported once, in the order of taking, and that
    nothing raises because a copy fails: its job has no success.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer; returns whether it was taken."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """What has ended since the last call. Never waits."""

    def wait(self, job_ids: Collection[int]) -> None:  # noqa: B027
        """Wait until these have ended; they are reported all the same."""

    def shutdown(self) -> None:  # noqa: B027
        """Wait for what is under way, and let go of everything."""


class HostHandler(OffloadingHandler):
    """For a KV cache in host memory: a transfer has ended when `transfer_async` returns.

    Serves both directions: which one, the specs of a transfer say.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies: HostCopies | None = copies
        self._done: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        copies = self._copies
        if copies is None:
            return False
        started = time.perf_counter()
        try:
            if isinstance(source, DeviceLoadStoreSpec) and isinstance(target, HostLoadStoreSpec):
                moved = copies.store(source, target)
            elif isinstance(source, HostLoadStoreSpec) and isinstance(target, DeviceLoadStoreSpec):
                moved = copies.load(source, target)
            else:
                logger.error("job %d: no way from %r to %r", job_id, source, target)
                return False
        except (IndexError, ValueError):
            logger.exception("job %d failed", job_id)
            self._done.append(TransferResult(job_id, False))
            return True
        seconds = time.perf_counter() - started
        self._done.append(TransferResult(job_id, True, moved, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        self._copies = None
