"""Pinned memory: one region of rows, allocated once.

A private region is anonymous memory. A shared region is a memfd: it has no name
in any file system, so a killed process leaves nothing behind. For how processes
find it see `kvstore.tiers.rendezvous`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.tiers.headroom import claimed
from kvstore.tiers.pages import (
    HUGE_PAGE,
    PAGE,
    backed_by_huge_pages,
    new_huge_memfd,
    new_memfd,
    populate,
)
from kvstore.tiers.registration import Registration, cuda_runtime
from kvstore.tiers.rendezvous import Rendezvous, is_complete
from kvstore.types import about

__all__ = ["PAGE", "PinnedRegion", "RegionShape", "round_to_page"]

logger = logging.getLogger("kvstore.host")

LARGE = 2**30
"""Size in bytes from which it is logged how a region was allocated, and told how much of it is in
huge pages: to learn that, the system walks all memory of the process."""


def round_to_page(size: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-size // PAGE) * PAGE


class RegionShape(NamedTuple):
    """How a region is divided.

    Attributes:
        rows: number of rows.
        row_bytes: bytes in a row, a multiple of 4096.
        tail_bytes: bytes behind each row that belong to no row, a multiple of 4096.
    """

    rows: int
    row_bytes: int
    tail_bytes: int = 0

    @property
    def stride(self) -> int:
        """Bytes from the beginning of a row to that of the next."""
        return self.row_bytes + self.tail_bytes

    @property
    def size(self) -> int:
        """Bytes of all rows and tails."""
        return self.rows * self.stride


class PinnedRegion:
    """Host memory: `rows` page-aligned rows of `row_bytes` bytes each, at equal distances.

    Create one with `private` or `shared`. The memory is touched at creation, so
    that the hot path has no page faults.

    Attributes:
        rows: number of rows.
        row_bytes: bytes in a row, a multiple of 4096.
        tail_bytes: bytes between a row and the next: see `claim_tails`.
        stride: bytes from the beginning of a row to that of the next.
        size: bytes of all rows and tails.
        address: address of row 0.
        huge_bytes: bytes of a large region in huge pages; None for a smaller one.
        registered: whether CUDA knows the memory as pinned.
    """

    def __init__(self, memory: mmap.mmap, shape: RegionShape) -> None:
        self._take(shape, memoryview(memory)[: shape.size])
        self._memory: mmap.mmap | None = memory

    def _take(self, shape: RegionShape, view: memoryview) -> None:
        """Have rows of this shape in the bytes of `view`."""
        self.rows, self.row_bytes, self.tail_bytes = shape
        self.stride, self.size = shape.stride, shape.size
        self.address = int(np.frombuffer(view, np.uint8).ctypes.data)
        self.huge_bytes: int | None = None
        self._view: memoryview | None = view
        self._tails = threading.Lock()
        self._registration: Registration | None = None
        self._fd: int | None = None
        self._rendezvous: Rendezvous | None = None

    @classmethod
    def private(cls, rows: int, row_bytes: int, tail_bytes: int = 0) -> PinnedRegion:
        """Allocate memory for this process alone: see `RegionShape`.

        Raises:
            ConfigError: if the machine does not have enough memory.
        """
        shape = RegionShape(rows, row_bytes, tail_bytes)
        size = _mapped_size(shape)
        with claimed(size):
            try:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise ConfigError(f"host memory of {size} bytes: {error.strerror}") from error
            region = cls(memory, shape)
            region._populate()
        return region

    @classmethod
    def shared(
        cls,
        name: str,
        rows: int,
        row_bytes: int,
        mappers: int,
        timeout: float = 60.0,
        *,
        tail_bytes: int = 0,
        place: int | None = None,
        used_bytes: int | None = None,
    ) -> PinnedRegion:
        """Map memory that `mappers` processes of this user share under `name`.

        The first process creates it, and all touch its pages. There is never more than one
        region, even if processes start at the same time and some are killed.

        Args:
            place: this process's number among the `mappers`, which no other may have; by default
                any that is free.
            used_bytes: bytes of a row that all of them use; others are refused.

        Raises:
            ConfigError: if the machine does not have enough memory, or the region
                exists with another size.
            PathUnusableError: if the others were not found within `timeout` seconds.
        """
        shape = RegionShape(rows, row_bytes, tail_bytes)
        size = _mapped_size(shape)

        def make(memory_name: str) -> int:
            huge = new_huge_memfd(memory_name, size)
            if huge is not None:
                return huge
            claim.enter_context(claimed(size))
            try:
                return new_memfd(memory_name, size)
            except OSError as error:
                raise _not_mapped(name, size, error) from error

        # The claim lasts until the pages are allocated; later processes find them or help.
        with contextlib.ExitStack() as claim:
            used = () if used_bytes is None else (used_bytes,)
            rendezvous = Rendezvous(name, (rows, shape.stride, *used), mappers, place)
            fd = rendezvous.meet(make, timeout)
            try:
                memory = mmap.mmap(fd, size)
            except OSError as error:
                rendezvous.close()
                os.close(fd)
                raise _not_mapped(name, size, error) from error
            region = cls(memory, shape)
            region._fd, region._rendezvous = fd, rendezvous
            region._populate(rendezvous.place / mappers)
        return region

    @property
    def complete(self) -> bool:
        """Whether all expected processes have mapped the region."""
        return self._fd is None or is_complete(self._fd)

    @property
    def view(self) -> memoryview:
        """The whole region as writable bytes."""
        assert self._view is not None, "the region is closed"
        return self._view

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The region as an array of shape (rows, row_bytes)."""
        rows = np.frombuffer(self.view, np.uint8).reshape(self.rows, self.stride)
        return rows[:, : self.row_bytes]

    def row(self, row: int) -> memoryview:
        """One row as writable bytes."""
        start = row * self.stride
        return self.view[start : start + self.row_bytes]

    def claim_tails(self) -> bool:
        """Claim the tails behind rows; return whether the caller may use them from now on.

        So a row and its record are one contiguous piece of memory. Only one caller can claim them.
        """
        return self.tail_bytes > 0 and self._tails.acquire(blocking=False)

    def release_tails(self) -> None:
        """Release the tails. Only for the caller that claimed them."""
        self._tails.release()

    @property
    def description(self) -> str:
        """Size, pages and registration in a few words."""
        told = f"{self.rows} rows of {self.row_bytes} B"
        if self.huge_bytes is not None:
            told += f", {round(100 * min(self.huge_bytes, self.size) / self.size)} % huge pages"
        return f"{told}, registered with CUDA" if self.registered else told

    @property
    def registered(self) -> bool:
        """Whether CUDA knows the memory as pinned."""
        return self._registration is not None

    def register_with_cuda(self) -> bool:
        """Register the memory with CUDA as pinned, if possible.

        Returns:
            Whether kernels may read the rows. A device can copy them in any case.
        """
        assert self._memory is not None, "the region is closed"
        if self._registration is None:
            runtime = cuda_runtime()
            if runtime is None:
                logger.info(
                    "no CUDA device found: host memory is not pinned",
                    extra=about("host.no_device"),
                )
                return False
            registration = Registration.of(runtime, self.address, self.rows, self.stride)
            if registration is None:
                return False
            self._registration = registration
            # After a fork, the next write would move this process to another page than the
            # device's.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_DONTFORK)
        return self._registration.kernels_read

    def close(self) -> None:
        """Free the memory. Views that still exist keep it alive."""
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        if self._registration is not None:
            self._registration.end()
            self._registration = None
        if self._rendezvous is not None:
            self._rendezvous.close()
        # The view itself is not released: a tensor made from it refers to this object only.
        self._view = None
        with contextlib.suppress(BufferError):
            memory.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _populate(self, share: float = 0.0) -> None:
        """Touch the pages, beginning at the fraction `share`; close the region on failure."""
        assert self._memory is not None
        started = time.perf_counter()
        try:
            populate(self._memory, shared=self._fd is not None, share=share)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"host memory of {self.size} bytes cannot be allocated: {error.strerror}"
                ) from error
            raise
        seconds = time.perf_counter() - started
        if self.size >= LARGE:
            self.huge_bytes = backed_by_huge_pages(self.address)
            pace = self.size / 1e9 / max(seconds, 1e-9)
            logger.info(
                "%.2f GB of host memory ready in %.2f s (%.1f GB/s)",
                self.size / 1e9,
                seconds,
                pace,
                extra=about("host.ready", bytes=self.size, seconds=seconds),
            )


def _not_mapped(name: str, size: int, error: OSError) -> ConfigError:
    return ConfigError(f"shared memory {name!r} of {size} bytes: {error}")


def _mapped_size(shape: RegionShape) -> int:
    if shape.rows < 1 or shape.row_bytes < 1 or shape.row_bytes % PAGE or shape.tail_bytes % PAGE:
        tails = f" and tails of {shape.tail_bytes}" if shape.tail_bytes else ""
        raise ConfigError(
            f"host memory needs at least one row and rows that are multiples of {PAGE} bytes; "
            f"got {shape.rows} rows of {shape.row_bytes} bytes{tails}"
        )
    return -(-shape.size // HUGE_PAGE) * HUGE_PAGE
