"""Pages: populate memory ahead of use, with huge pages if the system has them.

With 4 KiB pages, direct I/O is 40 to 60 % slower than with huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

__all__ = [
    "HUGE_PAGE",
    "PAGE",
    "Scratch",
    "backed_by_huge_pages",
    "new_huge_memfd",
    "new_memfd",
    "populate",
]

PAGE = 4096
HUGE_PAGE = 2 * 1024 * 1024
STEP = 64 * HUGE_PAGE
THREADS = 4
_MADV_POPULATE_WRITE = 23
_MFD_HUGETLB = 0x0004

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def new_memfd(name: str, size: int, flags: int = 0) -> int:
    """Create a memfd of `size` bytes, whose pages are allocated when they are touched.

    Raises:
        OSError: if it cannot be created.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        # Mapping it once reserves its huge pages, and fails if it cannot be mapped.
        mmap.mmap(fd, size).close()
    except OSError:
        os.close(fd)
        raise
    return fd


def new_huge_memfd(name: str, size: int) -> int | None:
    """Create a memfd of reserved huge pages (``vm.nr_hugepages``), allocated at once.

    Returns:
        None if there are too few huge pages.
    """
    if _free_huge_bytes() >= size:
        with contextlib.suppress(OSError):
            return new_memfd(name, size, _MFD_HUGETLB)
    return None


def populate(memory: mmap.mmap, *, shared: bool, share: float = 0.0) -> None:
    """Touch all pages of `memory` without changing their contents.

    Several processes may do this to the same memory at once, without waiting for each other.

    Args:
        shared: whether other processes may write to the memory meanwhile.
        share: where to begin, as a fraction of the memory.

    Raises:
        OSError: if the system cannot allocate the pages.
    """
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    size = len(memory)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    first = int(share * size) // STEP * STEP
    starts = [*range(first, size, STEP), *range(0, first, STEP)]
    threads = min(THREADS, os.cpu_count() or 1, len(starts) // 8 or 1)

    def touch(start: int) -> None:
        _touch(address + start, min(STEP, size - start))

    try:
        if threads == 1:
            for start in starts:
                touch(start)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(touch, starts))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 5.14 does not support MADV_POPULATE_WRITE.
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        if shared:
            pages.max()
        else:
            pages[:] = 0


class Scratch:
    """Memory for payloads on their way, used again and again. Safe to use from several threads."""

    def __init__(self) -> None:
        self._memory: list[mmap.mmap] = []
        self._lending = threading.Lock()

    def lend(self, size: int) -> mmap.mmap:
        """Lend memory of `size` bytes at least, until `take_back`.

        Raises:
            OSError: if the system has none.
        """
        with self._lending:
            for place, memory in enumerate(self._memory):
                if len(memory) >= size:
                    return self._memory.pop(place)
            # It would be too small the next time, too.
            del self._memory[:1]
        whole = -(-size // HUGE_PAGE) * HUGE_PAGE
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        populate(memory, shared=False)
        return memory

    def take_back(self, memory: mmap.mmap) -> None:
        """Keep lent memory for the next that asks for it."""
        with self._lending:
            self._memory.append(memory)


def _touch(address: int, length: int) -> None:
    # Not mmap.madvise, which holds the GIL.
    while _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def backed_by_huge_pages(address: int) -> int:
    """Return how many bytes of the mapping at `address` are in huge pages."""
    huge = 0
    inside = False
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split(None, 1)[0]
            if "-" in first and not first.endswith(":"):
                if inside:
                    # The system counts the pages of each further mapping as it is read.
                    break
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low <= address < high
            elif inside and first in (
                "AnonHugePages:",
                "ShmemPmdMapped:",
                "Shared_Hugetlb:",
                "Private_Hugetlb:",
            ):
                huge += int(line.split()[1]) * 1024
    return huge


def _free_huge_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()
        return int(free) * HUGE_PAGE
    return 0
