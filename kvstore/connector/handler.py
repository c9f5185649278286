"""Handlers: copy the bytes of a transfer, in the worker's process."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.connector.mediums import DeviceLoadStoreSpec, HostLoadStoreSpec, LoadStoreSpec
from kvstore.types import about

if TYPE_CHECKING:
    from kvstore.device import CudaCopies, HostCopies, Ticket

__all__ = ["CudaHandler", "HostHandler", "OffloadingHandler", "TransferResult", "TransferSpec"]

logger = logging.getLogger("kvstore")

TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and target."""


def _refuse(job_id: int, source: LoadStoreSpec, target: LoadStoreSpec) -> bool:
    """Log that the handler does not take a transfer; return False."""
    logger.error(
        "job %d was refused: this handler does not copy from %r to %r",
        job_id,
        source,
        target,
        extra=about("job.refused", job=job_id),
    )
    return False


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer.

    Attributes:
        transfer_size: bytes copied.
        transfer_time: seconds taken.
    """

    job_id: int
    success: bool
    transfer_size: int = 0
    transfer_time: float = 0.0


class OffloadingHandler(ABC):
    """Copies blocks from one medium to another, for a worker.

    Guarantees that each job that was taken is reported once, in the order in which they were taken,
    and that a failed copy raises nothing: its job is reported without success.

    Args:
        release: called at shutdown, once host memory is no longer used here.
        joined: whether all processes of the server have this host memory. They do when the first
            transfer comes, unless this worker was started again alone: it has other memory.
    """

    def __init__(
        self,
        release: Callable[[], None] = lambda: None,
        joined: Callable[[], bool] = lambda: True,
    ) -> None:
        self._release = release
        self._joined = joined
        self._told = False

    def _shares(self) -> bool:
        """Whether the scheduler has this host memory; logs once that it does not."""
        if self._joined():
            return True
        if not self._told:
            logger.error(
                "this worker does not share the host memory of its scheduler, as it was started "
                "after it: all transfers fail until the whole server is started again",
                extra=about("worker.alone"),
            )
        self._told = True
        return False

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Begin a transfer; return whether it was taken."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call. Never waits."""

    def wait(self, job_ids: Collection[int]) -> None:  # noqa: B027
        """Wait until these transfers have ended; `get_finished` still reports them."""

    def shutdown(self) -> None:  # noqa: B027
        """Wait for transfers under way and release everything."""


class HostHandler(OffloadingHandler):
    """Handler for a KV cache in host memory: a transfer has ended when `transfer_async` returns.

    Serves both directions.
    """

    def __init__(
        self,
        copies: HostCopies,
        release: Callable[[], None] = lambda: None,
        joined: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(release, joined)
        self._copies: HostCopies | None = copies
        self._done: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        copies = self._copies
        if copies is None:
            return False
        if not self._shares():
            self._done.append(TransferResult(job_id, False))
            return True
        started = time.perf_counter()
        try:
            if isinstance(source, DeviceLoadStoreSpec) and isinstance(target, HostLoadStoreSpec):
                moved = copies.store(source, target)
            elif isinstance(source, HostLoadStoreSpec) and isinstance(target, DeviceLoadStoreSpec):
                moved = copies.load(source, target)
            else:
                return _refuse(job_id, source, target)
        except Exception:
            logger.exception("job %d failed", job_id, extra=about("job.failed", job=job_id))
            self._done.append(TransferResult(job_id, False))
            return True
        seconds = time.perf_counter() - started
        self._done.append(TransferResult(job_id, True, moved, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies = None
            self._release()


class CudaHandler(OffloadingHandler):
    """Handler for a KV cache on a CUDA device: queues the transfers of one direction on a stream.

    Only `wait` and `shutdown` wait.
    """

    def __init__(
        self,
        copies: CudaCopies,
        *,
        store: bool,
        release: Callable[[], None] = lambda: None,
        joined: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            store: True to copy from the device to rows, False for the other direction.
        """
        super().__init__(release, joined)
        self._copies: CudaCopies | None = copies
        self._store = store
        self._queue: deque[tuple[int, Ticket | None]] = deque()
        """Jobs in order; None for a job that could not begin."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, target = spec
        copies = self._copies
        if copies is None:
            return False
        ticket: Ticket | None = None
        if not self._shares():
            self._queue.append((job_id, ticket))
            return True
        try:
            host, device = (target, source) if self._store else (source, target)
            if not isinstance(host, HostLoadStoreSpec) or not isinstance(
                device, DeviceLoadStoreSpec
            ):
                return _refuse(job_id, source, target)
            ticket = copies.store(device, host) if self._store else copies.load(host, device)
        except Exception:
            logger.exception(
                "job %d could not begin", job_id, extra=about("job.failed", job=job_id)
            )
        if ticket is not None and ticket.error:
            logger.error(
                "job %d: the device refused some of its copies (error %d)",
                job_id,
                ticket.error,
                extra=about("job.failed", job=job_id),
            )
        self._queue.append((job_id, ticket))
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        while self._queue:
            job, ticket = self._queue[0]
            try:
                if ticket is not None and not ticket.done:
                    break
                seconds = ticket.seconds if ticket is not None and not ticket.error else 0.0
            except Exception:
                # A device that has failed raises in every call, and copies nothing more.
                logger.exception(
                    "job %d: the device has failed", job, extra=about("device.silent", job=job)
                )
                ticket = None
            self._queue.popleft()
            if ticket is None or ticket.error:
                results.append(TransferResult(job, False))
            else:
                results.append(TransferResult(job, True, ticket.size, seconds))
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        for job, ticket in self._queue:
            if job in job_ids and ticket is not None:
                # A device that has failed completes nothing more: `get_finished` reports that.
                with contextlib.suppress(RuntimeError):
                    ticket.wait()

    def shutdown(self) -> None:
        copies, self._copies = self._copies, None
        if copies is None:
            return
        try:
            copies.shutdown()
        except Exception:
            logger.exception(
                "the device has failed; its rows are released anyway",
                extra=about("device.silent"),
            )
        self._release()
